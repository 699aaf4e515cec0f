"""The order of a selftest as tasks, each of which runs in a process of its own. Torch is imported in those alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from ..evidence.selftest import Fault, Mutant, Requested, SelftestOrder, SelftestRun
from ..probes.order import Order, Target

PATHS: Final[tuple[Requested, ...]] = ("te", "native")
STACKS: Final[dict[Requested, str]] = {"te": "te0.0.0+double", "native": "native"}
_WARM: Final = "megacpp_validate.selftest.child"  # what the server imports once, for every process that it forks


@dataclass(frozen=True)
class Task:
    """What one process does: plant `mutant`, or nothing, and run `probes` on one path."""

    probes: tuple[str, ...]
    requested: Requested
    seed: int
    mutant: Mutant | None = None
    recipes: tuple[str, ...] = ()

    def order(self, probe: str) -> Order:
        """The order of one probe."""
        target = Target("cpu", "", attention=("sdpa",))
        if self.requested == "te":
            target = Target("cpu", "", self.recipes, self.recipes[0] if self.recipes else "", ("te", "sdpa"))
        because = "the selftest plants faults on this path"
        return Order(probe, STACKS[self.requested], target, self.requested, because, self.seed, quick=True)


def read_selftest_order(text: str) -> SelftestOrder:
    """An order from its JSON text."""
    data: dict[str, Any] = json.loads(text)
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    values["mutants"] = tuple(Mutant(**{**row, "fault": Fault(row["fault"])}) for row in data["mutants"])
    return SelftestOrder(**values)


def run_line(run: SelftestRun) -> str:
    """The run as JSON, with a line end."""
    return json.dumps(asdict(run)) + "\n"


def plan_tasks(order: SelftestOrder) -> tuple[Task, ...]:
    """As many clean tasks as the order wants, on both paths in turn, then one task a mutant; a seed each."""
    clean = -(-order.clean // max(1, len(order.probes)))
    runs: list[tuple[Requested, Mutant | None]] = [(PATHS[index % len(PATHS)], None) for index in range(clean)]
    runs += [(mutant.requested, mutant) for mutant in order.mutants]
    return tuple(
        Task(order.probes, requested, order.seed + index, mutant, order.recipes)
        for index, (requested, mutant) in enumerate(runs)
    )


def run_tasks(tasks: Sequence[Task], jobs: int, limit_s: float) -> Iterator[SelftestRun]:
    """Run every task in a process that is forked from a warm server, `jobs` at a time; runs in the order of the tasks.

    Args:
        limit_s: seconds after which a process is killed.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the server imports torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_WARM])
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(partial(_run_task, context, limit_s), tasks)


def _run_task(context: Any, limit_s: float, task: Task) -> SelftestRun:
    begin = time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(task, theirs), daemon=True)
    process.start()
    theirs.close()
    run: SelftestRun | None = None
    trouble = ""
    try:
        if ours.poll(limit_s):
            run = ours.recv()
        else:
            process.kill()
            trouble = f"it did not end within {limit_s:g} s"
    except EOFError:  # the process died
        pass
    process.join()
    ours.close()
    if run is not None:
        return run
    trouble = trouble or f"exit status {process.exitcode}"
    mutant = task.mutant.id if task.mutant else ""
    seconds = round(time.monotonic() - begin, 3)
    return SelftestRun(mutant, task.requested, task.seed, (), trouble=trouble, seconds=seconds)


def _work(task: Task, pipe: Any) -> None:
    """Run a task in its process. What a task needs is imported in the server alone, which is forked."""
    from .child import run_task

    pipe.send(run_task(task))
