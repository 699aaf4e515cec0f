"""The host's half of the suite's own score: what is ordered, and what the runs are worth. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from ...catalog.bridge import Catalog
from ...diagnosis.blame import blame
from ...evidence.receipt import Outcome, Receipt
from ...evidence.selftest import FalseAlarm, Fate, Mutant, MutantResult, SelftestOrder, SelftestResult, SelftestRun

CLEAN: Final = 200


class UnknownMutant(ValueError):
    """A mutant that there is not; the text says which, and where they are listed."""


def plan_selftest(
    catalog: Catalog, wanted: Collection[str] = (), *, clean: int = CLEAN, seed: int = 0
) -> SelftestOrder:
    """What the environment is to do.

    Args:
        catalog: the matrix.
        wanted: ids of mutants; all where there is none.
        clean: at least so many probe runs without a fault.
        seed: of the first run.

    Raises:
        UnknownMutant: one that there is not.
    """
    known = {mutant.id for mutant in catalog.mutants}
    if unknown := sorted(set(wanted) - known):
        raise UnknownMutant(
            f"there is no mutant {', '.join(map(repr, unknown))}. Next step: choose from the ids in "
            "matrix/mutants.toml."
        )
    return SelftestOrder(
        probes=tuple(module.id for module in catalog.modules),
        mutants=tuple(mutant.planned for mutant in catalog.mutants if not wanted or mutant.id in wanted),
        clean=clean,
        seed=seed,
    )


def judge_selftest(
    catalog: Catalog, order: SelftestOrder, runs: Sequence[SelftestRun], *, seconds: float = 0.0
) -> SelftestResult:
    """The score.

    A probe that is red without a fault, too, on the same path kills nothing: it is a false alarm, and no verdict.

    Args:
        catalog: the matrix, for the order of blame.
        order: what was ordered; a mutant without a run is `not-run`.
        runs: what came back, in any order.
        seconds: wall-clock time of all.
    """
    clean = [run for run in runs if not run.mutant]
    alarms = {(run.requested, receipt.probe) for run in clean for receipt in run.receipts if _is_red(receipt)}
    of_mutant = {run.mutant: run for run in runs if run.mutant}
    return SelftestResult(
        modules=tuple(module.id for module in catalog.modules),
        mutants=tuple(_judge(catalog, mutant, of_mutant.get(mutant.id), alarms) for mutant in order.mutants),
        clean_runs=sum(receipt.outcome is not Outcome.NOT_RUN for run in clean for receipt in run.receipts),
        false_alarms=tuple(
            FalseAlarm(receipt.cell, run.seed, first_failure(receipt))
            for run in clean
            for receipt in run.receipts
            if _is_red(receipt)
        ),
        lost=_lost(order, clean),
        seconds=seconds,
    )


def first_failure(receipt: Receipt) -> str:
    """The first check that failed with the parts that did; or what was raised; empty for a good receipt."""
    for check in receipt.checks:
        if not check.passed:
            parts = ", ".join(part.name for part in check.parts if not part.passed)
            return f"{check.name} ({parts})" if parts else check.name
    return "" if receipt.outcome.is_good else receipt.reason


def _judge(
    catalog: Catalog, mutant: Mutant, run: SelftestRun | None, alarms: Collection[tuple[str, str]]
) -> MutantResult:
    if run is None:
        return MutantResult(mutant, Fate.NOT_RUN, reason="there is no run of it")
    if not run.planted:
        return MutantResult(mutant, Fate.NOT_PLANTED, reason=run.trouble, seconds=run.seconds)
    heard = [receipt for receipt in run.receipts if (run.requested, receipt.probe) not in alarms]
    found = blame(heard, catalog.modules)
    if found.culprits:
        culprit = next(receipt for receipt in heard if receipt.probe == found.culprits[0] and _is_red(receipt))
        return MutantResult(
            mutant,
            Fate.KILLED,
            blamed=found.culprits,
            cascades=tuple(name for name, _ in found.cascades),
            check=first_failure(culprit),
            reason=run.trouble,
            seconds=run.seconds,
        )
    missing = sorted({module.id for module in catalog.modules} - {receipt.probe for receipt in heard if _ran(receipt)})
    if run.trouble or mutant.module in missing:
        reason = run.trouble or f"no verdict of the probe {mutant.module}, which should have caught it"
        return MutantResult(mutant, Fate.NOT_RUN, reason=reason, seconds=run.seconds)
    fate = Fate.SURVIVED if run.reached else Fate.NOT_REACHED
    reason = "every probe was good" if run.reached else f"no probe runs {mutant.at}, or it changes nothing there"
    return MutantResult(mutant, fate, reason=reason, seconds=run.seconds)


def _is_red(receipt: Receipt) -> bool:
    return _ran(receipt) and not receipt.outcome.is_good


def _ran(receipt: Receipt) -> bool:
    return receipt.outcome is not Outcome.NOT_RUN


def _lost(order: SelftestOrder, clean: Sequence[SelftestRun]) -> tuple[str, ...]:
    """Why there are fewer clean probe runs than were ordered."""
    lost = [f"clean run with seed {run.seed}: {run.trouble}" for run in clean if run.trouble]
    lost += [
        f"{receipt.cell} with seed {run.seed}: {receipt.reason or 'not run'}"
        for run in clean
        for receipt in run.receipts
        if not _ran(receipt)
    ]
    came = sum(len(run.receipts) for run in clean)
    if came < order.clean:
        lost.append(f"{came} clean probe runs of {order.clean}")
    return tuple(lost)
