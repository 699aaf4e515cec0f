"""The selftest: faults in what a wrapper or Transformer Engine returns, planted in the process of the probes."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ...catalog.bridge import Catalog
from ...diagnosis.blame import blame, is_red
from ...environments.interpreter import host_interpreter
from ...environments.plan import choose_rows
from ...environments.venv import find_torch_python
from ...errors import NoEnvironment
from ...evidence import selftest as score
from ...evidence.receipt import Outcome, Receipt
from ...evidence.selftest import Mutant, SelftestOrder, SelftestRun
from ...process import Processes
from .scores import FaultScore, ScoreRow, Sighting, Verdict, plan_mutant

_LIMIT_S: Final = 3600.0  # of the whole; each run has a limit of its own


def run_selftest(
    catalog: Catalog, mutants: Collection[str], *, clean: int, seed: int, jobs: int, limit_s: float
) -> FaultScore:
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
        given.write_text(json.dumps(asdict(order)), encoding="utf-8")
        environment = host_interpreter(os.environ, find_torch_python())
        call = environment.call("megacpp_validate.selftest", str(runs), str(jobs), str(limit_s))
        ended = Processes().run(call, folder=folder, limit_s=_LIMIT_S, log=log, given=given)
        if ended.code != 0 or not runs.is_file():
            raise NoEnvironment(
                f"The process that plants the faults ended early ({ended.how}): {ended.last_words}. Likely cause: this "
                "environment has no torch, or no checkout lies here. Next step: run `nox -s selftest` in a checkout."
            )
        found = score.read_runs(runs.read_text(encoding="utf-8"))
    result = judge_selftest(catalog, order, found)
    ended_at = datetime.now(UTC).isoformat(timespec="seconds")
    return result.model_copy(update={"seconds": round(time.monotonic() - started, 1), "finished_at": ended_at})


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


def judge_selftest(catalog: Catalog, order: SelftestOrder, runs: Sequence[SelftestRun]) -> FaultScore:
    """The score.

    A probe that is red without a fault, too, on the same path kills nothing: it is a false alarm, and no verdict.

    Args:
        catalog: the matrix, for the order of blame.
        order: what was ordered; a mutant without a run is `not-run`.
        runs: what came back, in any order.
    """
    clean = [run for run in runs if not run.mutant]
    alarms = {(run.requested, receipt.probe) for run in clean for receipt in run.receipts if is_red(receipt)}
    of_mutant = {run.mutant: run for run in runs if run.mutant}
    return FaultScore(
        suite="selftest", target="cpu", environment="the wrappers on a double of Transformer Engine",
        faults=tuple(_judge_mutant(catalog, mutant, of_mutant.get(mutant.id), alarms) for mutant in order.mutants),
        clean=tuple(row for run in clean for row in _judge_clean(run)),
    )  # fmt: skip


def first_failure(receipt: Receipt) -> str:
    """The first check that failed with the parts that did; or what was raised; empty for a good receipt."""
    for check in receipt.checks:
        if not check.passed:
            parts = ", ".join(part.name for part in check.parts if not part.passed)
            return f"{check.name} ({parts})" if parts else check.name
    return "" if receipt.outcome.is_good else receipt.reason


def _judge_clean(run: SelftestRun) -> Iterator[ScoreRow]:
    """A row for each probe of a run without a fault, and one for what ended the run early."""
    where = f"path {run.requested}, seed {run.seed}"
    if run.trouble:
        yield ScoreRow(id=f"clean run, {where}", where=where, verdict=Verdict.NOT_RUN, reason=run.trouble)
    for receipt in run.receipts:
        row = ScoreRow(id=f"{receipt.cell}, seed {run.seed}", where=where, verdict=Verdict.QUIET)
        found: dict[str, Any] = {}
        if receipt.outcome is Outcome.NOT_RUN:
            found = {"verdict": Verdict.NOT_RUN, "reason": receipt.reason}
        elif is_red(receipt):
            seen = (Sighting(by=receipt.probe, names=(first_failure(receipt),)),)
            found = {"verdict": Verdict.FALSE_ALARM, "reason": receipt.reason, "seen": seen}
        yield row.model_copy(update=found)


def _judge_mutant(
    catalog: Catalog, mutant: Mutant, run: SelftestRun | None, alarms: Collection[tuple[str, str]]
) -> ScoreRow:
    row = plan_mutant(mutant)
    if run is None:
        return row
    heard = [receipt for receipt in run.receipts if (run.requested, receipt.probe) not in alarms]
    culprits = [case.first.module for case in blame(heard, catalog.modules)]
    ran = {receipt.probe for receipt in heard if receipt.outcome is not Outcome.NOT_RUN}
    verdict, reason = Verdict.MISSED, "every probe was good"
    if not run.planted:
        verdict, reason = Verdict.NOT_PLANTED, run.trouble
    elif culprits:
        right = culprits[0] == mutant.module
        verdict, reason = Verdict.RIGHT if right else Verdict.WRONG_MODULE, run.trouble
    elif run.trouble or mutant.module not in ran:
        verdict = Verdict.NOT_RUN
        reason = run.trouble or f"no verdict of the probe {mutant.module}, which should have caught it"
    elif not run.reached:
        reason = f"no probe runs {mutant.at}, or it changes nothing there"
    failed = {receipt.probe: first_failure(receipt) for receipt in heard if is_red(receipt)}
    seen = tuple(Sighting(by=name, names=(failed[name],)) for name in culprits)
    return row.model_copy(update={"verdict": verdict, "reason": reason, "seen": seen, "seconds": run.seconds})
