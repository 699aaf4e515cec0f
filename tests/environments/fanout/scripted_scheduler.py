"""A scheduler whose jobs end as a test says, one step at each look; it outlives the tool, as a real one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megacpp_validate.environments.fanout.drive import Drive
from megacpp_validate.environments.fanout.events import Done, Rules, Told
from megacpp_validate.environments.fanout.faults import claim
from megacpp_validate.environments.fanout.launcher import Phase, SchedulerDown, Seen, Try, Work
from megacpp_validate.environments.interpreter import InterpreterEnvironment
from megacpp_validate.environments.plan import receipt_without_probe
from megacpp_validate.evidence.receipt import Check, Failure, Outcome
from megacpp_validate.evidence.receipt_file import write_receipt
from megacpp_validate.probes.order import Order, Target

NOWHERE = InterpreterEnvironment(("python3",), {})
CPU, H200 = Target("cpu", ""), Target("h200", "sm_90")
QUICK = Rules(poll_s=0.001, grace_s=0.0, patience_s=0.0)


def order_of(probe: str, *, target: Target = CPU, requested: str = "native", seed: int = 0) -> Order:
    """What a probe is told."""
    return Order(probe, "te1", target, requested, seed=seed, tool="tool 1", commit="c0", environment="of te1")


def works_of(*probes: str, ground: tuple[str, ...] = ()) -> tuple[Work, ...]:
    """A cell a probe."""
    return tuple(Work(order_of(probe), NOWHERE, 60.0, 0, ground=ground) for probe in probes)


@dataclass
class Job:
    """One job, as the scheduler knows it."""

    work: Work
    attempt: Try
    state: str = "PENDING"


@dataclass
class ScriptedScheduler:
    """A launcher.

    Attributes:
        ends: by probe, how its attempts end, one after the other; the last one for all that follow. A name of an
            outcome leaves a receipt of it; "killed" one of a process that got SIGKILL; another word is the scheduler's.
        step: called before and after each thing that it does, for a test that kills the tool there.
        down: it does not answer.
        room: jobs at a time.
    """

    ends: dict[str, list[str]] = field(default_factory=dict)
    step: Callable[[], None] = lambda: None
    down: bool = False
    room: int = 100
    jobs: dict[str, Job] = field(default_factory=dict)
    ran: Counter[str] = field(default_factory=Counter)
    cancelled: list[str] = field(default_factory=list)
    most: int = 0

    @property
    def survives(self) -> bool:
        return True

    def takes(self, work: Work, running: int) -> bool:
        return running < self.room

    def submit(self, work: Work, attempt: Try) -> str:
        self.step()
        if self.down:
            raise SchedulerDown("nobody answers")
        attempt.folder.mkdir(parents=True, exist_ok=True)
        self.jobs[attempt.name] = Job(work, attempt)
        self.most = max(self.most, sum(job.state in ("PENDING", "RUNNING") for job in self.jobs.values()))
        self.step()
        return str(len(self.jobs))

    def look(self, attempts: Sequence[Try]) -> dict[str, Seen]:
        self.step()
        if self.down:
            raise SchedulerDown("nobody answers")
        for job in self.jobs.values():
            self._go_on(job)
        self.step()
        return {attempt.name: self._see(attempt.name) for attempt in attempts}

    def cancel(self, attempts: Sequence[Try]) -> None:
        if self.down:
            raise SchedulerDown("nobody answers")
        for attempt in attempts:
            if attempt.name in self.jobs:
                self.jobs[attempt.name].state = "CANCELLED"
            self.cancelled.append(attempt.name)

    def close(self) -> None:
        pass

    def _go_on(self, job: Job) -> None:
        if job.state == "PENDING":
            job.state = "RUNNING"
        elif job.state == "RUNNING":
            job.state = "COMPLETED"
            if job.attempt.folder.is_dir() and claim(job.attempt.folder):
                self._run(job)

    def _run(self, job: Job) -> None:
        order = job.work.order
        script = self.ends.get(order.probe, ["pass"])
        end = script[min(self.ran[order.probe], len(script) - 1)]
        self.ran[order.probe] += 1
        if end == "killed":
            write_end(job, Outcome.ERROR, failure=Failure("SIGKILL", "nothing"))
        elif end == "no space":
            write_end(job, Outcome.NOT_RUN, reason="No space left on device: it ended")
        elif end == "torn":
            (job.attempt.folder / f"{order.cell}.json").write_text("{")
        elif end in list(Outcome):
            write_end(job, Outcome(end))
        else:
            job.state = end

    def _see(self, name: str) -> Seen:
        job = self.jobs.get(name)
        if job is None or job.state == "vanished":
            return Seen(Phase.GONE)
        number = str(list(self.jobs).index(name) + 1)
        phase = {"PENDING": Phase.QUEUED, "RUNNING": Phase.RUNS}.get(job.state, Phase.OVER)
        return Seen(phase, job.state, node="n0", id=number)


def write_end(job: Job, outcome: Outcome, *, reason: str = "so it was", failure: Failure | None = None) -> None:
    """The receipt of a job."""
    from dataclasses import replace

    order = job.work.order
    receipt = receipt_without_probe(order, outcome, "" if outcome is Outcome.PASS else reason)
    checks = (Check("one", outcome is Outcome.PASS),) if outcome in (Outcome.PASS, Outcome.FAIL) else ()
    write_receipt(replace(receipt, checks=checks, failure=failure), job.attempt.folder / f"{order.cell}.json")
    (job.attempt.folder / f"{order.cell}.log").write_text("words\n")


def drive(
    folder: Path, works: Sequence[Work], scheduler: ScriptedScheduler, rules: Rules = QUICK
) -> tuple[dict[str, Done], list[Told]]:
    """A run, and what it told."""
    told: list[Told] = []
    return Drive(works, scheduler, folder, rules, progress=told.append).run(), told
