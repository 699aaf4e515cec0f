"""The selftest: faults in what a wrapper or Transformer Engine returns, planted in the process of the probes."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ...catalog.bridge import Catalog
from ...diagnosis.blame import blame, is_red
from ...environments.interpreter import host_interpreter
from ...environments.plan import choose_rows
from ...environments.venv import find_torch_python
from ...errors import NoEnvironment
from ...evidence import selftest as score
from ...evidence.receipt import Outcome, Receipt
from ...evidence.selftest import Fate, Mutant, MutantResult, SelftestOrder, SelftestResult, SelftestRun
from ...process import Processes

_LIMIT_S: Final = 3600.0  # of the whole; each run has a limit of its own


def run_selftest(
    catalog: Catalog, mutants: Collection[str], *, clean: int, seed: int, jobs: int, limit_s: float
) -> SelftestResult:
    """Plant in the processes of the probes, run, judge.

    Args:
        mutants: ids; all where there is none.
        clean: at least so many probe runs without a fault.
        seed: of the first run.
        limit_s: seconds that one run may take.

    Raises:
        WrongArguments: there is no such mutant.
        NoEnvironment: there is no stand-in for Transformer Engine, or the process that plants ended early.
        InfrastructureFailed: what it wrote cannot be read.
    """
    order = plan_selftest(catalog, mutants, clean=clean, seed=seed)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="megacpp-selftest-") as scratch:
        folder = Path(scratch)
        given, runs, log = (folder / name for name in ("order.json", "runs.jsonl", "log"))
        given.write_text(score.order_text(order), encoding="utf-8")
        environment = host_interpreter(os.environ, find_torch_python())
        call = environment.call("megacpp_validate.selftest", str(runs), str(jobs), str(limit_s))
        ended = Processes().run(call, folder=folder, limit_s=_LIMIT_S, log=log, given=given)
        if ended.code != 0 or not runs.is_file():
            raise NoEnvironment(
                f"The process that plants the faults ended early ({ended.how}): {ended.last_words}. Likely cause: this "
                "environment has no torch, or this is no checkout. Next step: run `nox -s selftest` in a checkout."
            )
        found = score.read_runs(runs.read_text(encoding="utf-8"))
    result = judge_selftest(catalog, order, found)
    ended_at = datetime.now(UTC).isoformat(timespec="seconds")
    return replace(result, seconds=round(time.monotonic() - started, 1), finished_at=ended_at)


def plan_selftest(catalog: Catalog, wanted: Collection[str] = (), *, clean: int = 200, seed: int = 0) -> SelftestOrder:
    """The order for the environment; all mutants where none is named.

    Args:
        clean: at least so many probe runs without a fault.
        seed: of the first run.

    Raises:
        WrongArguments: there is no such mutant.
    """
    mutants = choose_rows("mutant", catalog.mutants, tuple(wanted))
    return SelftestOrder(tuple(module.id for module in catalog.modules), mutants, clean, seed)


def judge_selftest(catalog: Catalog, order: SelftestOrder, runs: Sequence[SelftestRun]) -> SelftestResult:
    """The score.

    A probe that is red without a fault, too, on the same path kills nothing: it is a false alarm, and no verdict.

    Args:
        catalog: the matrix, for the order of blame.
        order: what was ordered; a mutant without a run is `not-run`.
        runs: what came back, in any order.
    """
    clean = [(run, receipt) for run in runs if not run.mutant for receipt in run.receipts]
    red = [(run, receipt) for run, receipt in clean if is_red(receipt)]
    alarms = {(run.requested, receipt.probe) for run, receipt in red}
    of_mutant = {run.mutant: run for run in runs if run.mutant}
    lost = [f"clean run with seed {run.seed}: {run.trouble}" for run in runs if not run.mutant and run.trouble]
    not_run = [(run, receipt) for run, receipt in clean if receipt.outcome is Outcome.NOT_RUN]
    lost += [f"{receipt.cell} with seed {run.seed}: {receipt.reason or 'not run'}" for run, receipt in not_run]
    if len(clean) < order.clean:
        lost.append(f"{len(clean)} clean probe runs of {order.clean}")
    return SelftestResult(
        modules=tuple(module.id for module in catalog.modules),
        mutants=tuple(_judge_mutant(catalog, mutant, of_mutant.get(mutant.id), alarms) for mutant in order.mutants),
        clean_runs=len(clean) - len(not_run),
        false_alarms=tuple(f"{receipt.cell}, seed {run.seed}: {first_failure(receipt)}" for run, receipt in red),
        lost=tuple(lost),
    )


def first_failure(receipt: Receipt) -> str:
    """The first check that failed with the parts that did; or what was raised; empty for a good receipt."""
    for check in receipt.checks:
        if not check.passed:
            parts = ", ".join(part.name for part in check.parts if not part.passed)
            return f"{check.name} ({parts})" if parts else check.name
    return "" if receipt.outcome.is_good else receipt.reason


def _judge_mutant(
    catalog: Catalog, mutant: Mutant, run: SelftestRun | None, alarms: Collection[tuple[str, str]]
) -> MutantResult:
    if run is None:
        return MutantResult(mutant, Fate.NOT_RUN, reason="there is no run of it")
    if not run.planted:
        return MutantResult(mutant, Fate.NOT_PLANTED, reason=run.trouble, seconds=run.seconds)
    heard = [receipt for receipt in run.receipts if (run.requested, receipt.probe) not in alarms]
    found = blame(heard, catalog.modules)
    if found.culprits:
        culprit = next(receipt for receipt in heard if receipt.probe == found.culprits[0] and is_red(receipt))
        cascades = tuple(name for name, _ in found.cascades)
        check = first_failure(culprit)
        return MutantResult(mutant, Fate.KILLED, found.culprits, cascades, check, run.trouble, run.seconds)
    ran = {receipt.probe for receipt in heard if receipt.outcome is not Outcome.NOT_RUN}
    fate, reason = Fate.SURVIVED, "every probe was good"
    if run.trouble or mutant.module not in ran:
        fate = Fate.NOT_RUN
        reason = run.trouble or f"no verdict of the probe {mutant.module}, which should have caught it"
    elif not run.reached:
        fate, reason = Fate.NOT_REACHED, f"no probe runs {mutant.at}, or it changes nothing there"
    return MutantResult(mutant, fate, reason=reason, seconds=run.seconds)
