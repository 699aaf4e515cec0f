"""The verb of the suite's own score: the order goes to the environment, its runs come back and are judged."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import typer
from rich.status import Status

from ...canary.dynamic.selftest_score import UnknownMutant, judge_selftest, plan_selftest
from ...catalog.bridge import Catalog
from ...environments.interpreter import own_interpreter
from ...evidence.selftest_file import RunInvalid, order_text, read_runs
from ...process import Processes
from ...report.words.selftest import find_unsettled
from ..app import Exit, Format, errors, foreseen, refuse
from ..telling import tell

_LIMIT_S = 3600.0  # of the whole; each run has a limit of its own


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    mutants: tuple[str, ...]
    clean: int
    seed: int
    jobs: int
    limit_s: float


@foreseen({UnknownMutant: Exit.WRONG_ARGUMENTS, RunInvalid: Exit.INFRASTRUCTURE})
def run_selftest(catalog: Catalog, asked: Asked, fmt: Format, output: Path | None, *, verbose: bool) -> None:
    """Plant, run, judge; closed where a mutant lives, is blamed wrongly, or a clean run is red."""
    order = plan_selftest(catalog, asked.mutants, clean=asked.clean, seed=asked.seed)
    started = time.monotonic()
    environment = own_interpreter(os.environ)
    processes = Processes()
    with tempfile.TemporaryDirectory(prefix="megacpp-selftest-") as scratch:
        folder = Path(scratch)
        given, runs, log = (folder / name for name in ("order.json", "runs.jsonl", "log"))
        given.write_text(order_text(order), encoding="utf-8")
        options = ["--jobs", str(asked.jobs), "--limit", str(asked.limit_s)]
        call = environment.call("megacpp_validate.selftest", str(runs), *options, shares=(folder,))
        with _progress(runs, len(order.mutants)):
            ended = processes.run(call, folder=folder, limit_s=_LIMIT_S, log=log, given=given)
        if ended.code != 0 or not runs.is_file():
            words = "\n".join(ended.words.strip().splitlines()[-5:]) or "it wrote nothing"
            refuse(
                f"the process that plants the faults ended early ({ended.how}): {words}. Likely cause: there is no "
                "torch in this environment. Next step: run it through `nox -s selftest`.",
                Exit.NO_ENVIRONMENT,
            )
        found = read_runs(runs.read_text(encoding="utf-8"))
    result = replace(
        judge_selftest(catalog, order, found, seconds=round(time.monotonic() - started, 1)),
        finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    tell(result, fmt, output, verbose=verbose)
    if result.lost:
        raise typer.Exit(Exit.EVIDENCE_MISSING)
    raise typer.Exit(Exit.CLOSED if find_unsettled(result) or result.false_alarms else Exit.OPEN)


@contextmanager
def _progress(runs: Path, mutants: int) -> Iterator[None]:
    """Says how many runs are over, where a person looks on."""
    if not errors.is_terminal:
        yield
        return
    over = threading.Event()

    def watch(status: Status) -> None:
        while not over.wait(1.0):
            done = runs.read_text(encoding="utf-8").count("\n") if runs.is_file() else 0
            status.update(f"{done} runs are over ({mutants} mutants, and clean ones)")

    with errors.status("starting") as status:
        watcher = threading.Thread(target=watch, args=(status,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
