"""Runs tasks in processes forked from a warm server, several at a time, and collects what they send as runs."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Final

from ..evidence.receipt import Outcome, Receipt
from ..evidence.selftest import SelftestRun
from .tasks import Ended, Started, Task, lost_receipt

LIMIT_S: Final = 120.0  # a hung kernel or a lock: a whole run takes seconds
_WARM: Final = "megacpp_validate.selftest.child"


@dataclass
class _Worker:
    """A process at work and what it has sent."""

    task: Task
    process: Any
    pipe: Connection
    begin: float
    receipts: list[Receipt] = field(default_factory=list)
    under_way: str = ""
    ended: Ended | None = None


def run_tasks(tasks: Sequence[Task], jobs: int, limit_s: float = LIMIT_S) -> Iterator[SelftestRun]:
    """Do every task, `jobs` at a time; each run as soon as it is over."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the server imports torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_WARM])
    waiting, working = list(tasks), list[_Worker]()
    while waiting or working:
        while waiting and len(working) < jobs:
            working.append(_start(context, waiting.pop(0)))
        slowest = min(worker.begin for worker in working) + limit_s
        wait([worker.pipe for worker in working], timeout=max(0.0, slowest - time.monotonic()))
        for worker in list(working):
            over = _listen(worker) or time.monotonic() - worker.begin > limit_s
            if over:
                working.remove(worker)
                yield _close(worker, limit_s)


def _start(context: Any, task: Task) -> _Worker:
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(task, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(task, process, ours, time.monotonic())


def _work(task: Task, pipe: Any) -> None:
    """A task in its process. The modules that it needs are imported in the server alone, which is forked."""
    from .child import run_task

    run_task(task, pipe)


def _listen(worker: _Worker) -> bool:
    """Take in what was sent; whether there is nothing more to come."""
    try:
        while worker.pipe.poll():
            message = worker.pipe.recv()
            if isinstance(message, Started):
                worker.under_way = message.probe
            elif isinstance(message, Receipt):
                worker.receipts.append(message)
                worker.under_way = ""
            elif isinstance(message, Ended):
                worker.ended = message
                return True
    except (EOFError, OSError):
        return True
    return False


def _close(worker: _Worker, limit_s: float) -> SelftestRun:
    """The run, whatever became of its process."""
    task, ended = worker.task, worker.ended
    late = ended is None and worker.process.is_alive() and time.monotonic() - worker.begin > limit_s
    if ended is None and late:
        worker.process.kill()
    worker.process.join()
    worker.pipe.close()
    trouble = ended.gone if ended is not None else ""
    if ended is None:
        trouble = f"it did not end within {limit_s:g} s" if late else f"exit status {worker.process.exitcode}"
        if worker.under_way:
            outcome = Outcome.TIMEOUT if late else Outcome.ERROR
            worker.receipts.append(lost_receipt(task.order(worker.under_way), outcome, f"the process died: {trouble}"))
    return SelftestRun(
        mutant=task.mutant.id if task.mutant is not None else "",
        requested=task.requested,
        seed=task.seed,
        receipts=tuple(worker.receipts),
        planted=ended is None or not ended.gone,
        reached=ended.reached if ended is not None else 0,
        trouble=trouble,
        seconds=round(ended.seconds if ended is not None else time.monotonic() - worker.begin, 3),
    )
