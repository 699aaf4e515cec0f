"""Jobs given to a launcher, looked after, and brought home, until every cell has a receipt.

What is known is in receipts and in the state; each step is written down before the next one depends on it. So this
may be killed at any time, and the same command goes on: it finds the jobs that are on their way by their names.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Final

from ..restart import find_done, own_folder
from .collect import bring_home, forget_cell, keep_words
from .decide import (
    find_blocker,
    is_given_up,
    may_start,
    order_starts,
    receipt_of_blocked,
    receipt_of_given_up,
    receipt_of_never_come,
)
from .ends import Ends
from .events import Done, Progress, Rules
from .faults import claim, find_fault, name_fault, read_answer, read_node
from .giving import give
from .launcher import Launcher, Phase, SchedulerDown, Seen, Work
from .state import WORK_FOLDER, Attempt, Fault, JobState, State, hash_order, open_state

_AT_ONCE: Final = 50  # jobs that are named in the state before the first of them is given
_FIRST_PAUSE_S: Final = 0.2


class Cancelled(RuntimeError):
    """The run was told to stop: its jobs are cancelled, and its state is whole."""


@dataclass
class Drive:
    """One run.

    Attributes:
        works: cells with what they need.
        launcher: what runs them.
        folder: of the receipts.
        rules: how patient it is.
        stop: set from outside to end it.
        progress: told what becomes of each cell.
    """

    works: Sequence[Work]
    launcher: Launcher
    folder: Path
    rules: Rules
    stop: Event = field(default_factory=Event)
    progress: Progress = lambda _: None
    _ends: Ends = field(init=False)
    _over: dict[str, float] = field(default_factory=dict)  # when an attempt was first seen to be over, by name
    _silent_since: float | None = None

    def run(self) -> dict[str, Done]:
        """Every cell's end, by cell.

        Raises:
            FolderTaken: another run writes to the folder.
            StateDamaged: the state of an earlier start cannot be used.
            SchedulerDown: it was silent for longer than the rules allow; jobs that it has stay.
            JobRefused: the scheduler does not take a job.
            Cancelled: `stop` was set.
            OSError: the folder cannot be written.
        """
        self._ends = Ends(self.folder, len(self.works), self.progress)
        with own_folder(self.folder):
            state = open_state(self.folder, _name_launcher(self.launcher))
            try:
                self._take_up(state)
                self._loop(state)
            except KeyboardInterrupt:
                self._cancel(state)
                raise
            finally:
                self.launcher.close()
            if not any(job.attempt for job in state.jobs.values()):
                shutil.rmtree(self.folder / WORK_FOLDER, ignore_errors=True)
            return {work.order.cell: self._ends.done[work.order.cell] for work in self.works}

    def _loop(self, state: State) -> None:
        started, pause = time.monotonic(), _FIRST_PAUSE_S
        while True:
            self._look(state)
            self._start(state)
            state.keep()
            if len(self._ends.done) == len(self.works):
                return
            if self.stop.is_set():
                self._cancel(state)
                raise Cancelled("the run was stopped; its jobs are cancelled")
            if self.rules.wait_s and time.monotonic() - started > self.rules.wait_s:
                self._give_up_all(state)
                return
            self.stop.wait(min(pause, self.rules.poll_s))
            pause *= 2

    def _take_up(self, state: State) -> None:
        """Take what an earlier start has done or begun; what answers nothing any more is ended.

        Cells of an earlier start that are not asked for now are left as they are, jobs and all.
        """
        for work in self.works:
            cell, asked = work.order.cell, hash_order(work.order)
            job = state.jobs.get(cell, JobState(asked=asked))
            same = job.asked == asked and not self.rules.fresh
            if job.attempt is not None and not (same and self.launcher.survives):
                job = self._drop(state, cell, job, job.attempt)
            # What was given up before has a new chance at a new start.
            state.jobs[cell] = job if same and not is_given_up(job, self.rules.retries) else _blank(job, asked)
            receipt = None if self.rules.fresh else find_done(work.order, self.folder / f"{cell}.json")
            if receipt is not None:
                self._ends.end(state, cell, Done(receipt, kept=True))
            elif job.attempt is not None:
                self._ends.tell(cell, "found", job.attempt.id)
        state.keep()

    def _drop(self, state: State, cell: str, job: JobState, attempt: Attempt) -> JobState:
        """End an attempt that nobody waits for any more."""
        self.launcher.cancel([state.try_of(cell, attempt)])
        folder = state.work_of(cell, attempt.number)
        faults = job.faults
        if read_node(folder):
            ended = Fault(name="tool-ended", says="the tool that had started it was ended before it", counts=False)
            faults = (*faults, ended)
        keep_words(cell, attempt.number, folder, self.folder)
        return job.model_copy(update={"attempt": None, "faults": faults})

    def _look(self, state: State) -> None:
        """See what became of every attempt on its way."""
        active = list(self._active(state))
        if not active:
            return
        try:
            seen = self.launcher.look([state.try_of(work.order.cell, attempt) for work, attempt in active])
        except SchedulerDown as fault:
            self._bear(fault, state)
            seen = {}  # receipts may have come meanwhile
        else:
            self._silent_since = None
        for work, attempt in active:
            self._settle(state, work, attempt, seen.get(attempt.name))

    def _settle(self, state: State, work: Work, attempt: Attempt, seen: Seen | None) -> None:
        cell = work.order.cell
        folder = state.work_of(cell, attempt.number)
        node = (seen.node if seen else "") or read_node(folder)
        queued = seen is not None and seen.phase is Phase.QUEUED  # then there is nothing to read yet
        if not queued and (receipt := read_answer(work.order, folder)) is not None:
            if (fault := find_fault(receipt, node)) is not None:
                self._again(state, work, attempt, fault)
            else:
                kept = bring_home(receipt, state.jobs[cell].faults, folder, self.folder)
                self._ends.end(state, cell, Done(kept, node=node))
        elif seen is None:
            return
        elif seen.phase in (Phase.QUEUED, Phase.RUNS):
            self._over.pop(attempt.name, None)
            if seen.id and seen.id != attempt.id:
                state.put_attempt(cell, attempt.model_copy(update={"id": seen.id}))
            self._ends.tell_once(cell, attempt, seen, node)
        elif seen.phase is Phase.GONE and not attempt.id and self._claim(folder):
            # Nobody has taken the job, and from now on nobody will.
            state.put_attempt(cell, None)
        elif time.monotonic() - self._over.setdefault(attempt.name, time.monotonic()) >= self.rules.grace_s:
            self._again(state, work, attempt, name_fault(seen, folder))

    def _claim(self, folder: Path) -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        return claim(folder)

    def _again(self, state: State, work: Work, attempt: Attempt, fault: Fault) -> None:
        """An infrastructure fault: once more, or not any more."""
        cell = work.order.cell
        keep_words(cell, attempt.number, state.work_of(cell, attempt.number), self.folder)
        job = state.jobs[cell].model_copy(update={"attempt": None, "faults": (*state.jobs[cell].faults, fault)})
        state.jobs[cell] = job
        if is_given_up(job, self.rules.retries):
            self._ends.end_with(state, receipt_of_given_up(work.order, job.faults))
        else:
            self._ends.tell(cell, "again", str(fault))

    def _start(self, state: State) -> None:
        """Give the launcher what it takes; what is blocked needs no job."""
        ended = {cell: done.receipt for cell, done in self._ends.done.items()}
        for work in self.works:
            if work.order.cell not in ended and (blocker := find_blocker(work, ended)) is not None:
                forget_cell(work.order.cell, self.folder)
                self._ends.end_with(state, receipt_of_blocked(work.order, blocker))
        if self._silent_since is not None or self.stop.is_set():
            return
        chosen: list[Work] = []
        on_their_way = sum(1 for _ in self._active(state))
        for work in order_starts([work for work in self.works if self._waits(state, work)]):
            if len(chosen) == _AT_ONCE:
                break
            if not self.launcher.takes(work, on_their_way + len(chosen)):
                continue
            chosen.append(work)
            if not self.launcher.survives:
                self._give(state, [work])  # what it has is what the next may have
        if chosen and self.launcher.survives:
            self._give(state, chosen)

    def _waits(self, state: State, work: Work) -> bool:
        cell = work.order.cell
        return cell not in self._ends.done and state.jobs[cell].attempt is None and may_start(work, self._ends.done)

    def _give(self, state: State, chosen: Sequence[Work]) -> None:
        try:
            give(state, self.launcher, chosen, self._ends)
        except SchedulerDown as fault:
            self._bear(fault, state)

    def _bear(self, fault: SchedulerDown, state: State) -> None:
        """A scheduler that restarts is waited for, once it has taken anything."""
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self._ends.tell("", "silent", str(fault))
        has_jobs = any(attempt.id for _, attempt in self._active(state))
        if not has_jobs or now - self._silent_since >= self.rules.patience_s:
            raise fault

    def _cancel(self, state: State) -> None:
        """End every job; none of that counts as a fault. What cannot be ended is left to the next start."""
        active = list(self._active(state))
        try:
            self.launcher.cancel([state.try_of(work.order.cell, attempt) for work, attempt in active])
        except SchedulerDown as fault:
            self._ends.tell("", "silent", str(fault))
        else:
            for work, attempt in active:
                self._claim(state.work_of(work.order.cell, attempt.number))  # one that starts only now does nothing
                state.put_attempt(work.order.cell, None)
        state.keep()

    def _give_up_all(self, state: State) -> None:
        """The time for all cells is over."""
        self._cancel(state)
        reason = f"it did not come within the {self.rules.wait_s / 60:g} min that were given to the whole run"
        for work in self.works:
            if work.order.cell not in self._ends.done:
                faults = state.jobs[work.order.cell].faults
                forget_cell(work.order.cell, self.folder)
                self._ends.end_with(state, receipt_of_never_come(work.order, reason, faults))
        state.keep()

    def _active(self, state: State) -> Iterator[tuple[Work, Attempt]]:
        for work in self.works:
            job = state.jobs.get(work.order.cell)
            if work.order.cell not in self._ends.done and job is not None and job.attempt is not None:
                yield work, job.attempt


def _blank(job: JobState, asked: str) -> JobState:
    """A job without a past; its attempts are counted on, so that no two have one name."""
    return JobState(asked=asked, tries=job.tries)


def _name_launcher(launcher: Launcher) -> str:
    return "slurm" if launcher.survives else "local"
