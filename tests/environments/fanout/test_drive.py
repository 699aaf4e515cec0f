"""Every way a job can end, a tool killed at every step, and schedulers that are silent: nothing lost, nothing twice."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from megacpp_validate.environments.fanout.decide import find_ground
from megacpp_validate.environments.fanout.drive import Cancelled, Drive
from megacpp_validate.environments.fanout.launcher import JobHeld, JobRefused, SchedulerDown, Seen, Try, Work
from megacpp_validate.environments.fanout.state import STATE_FILE, State, StateDamaged, hash_order
from megacpp_validate.environments.restart import FolderTaken, own_folder
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.store import read_receipts
from tests.environments.fanout.scripted_scheduler import (
    H200,
    NOWHERE,
    QUICK,
    ScriptedScheduler,
    drive,
    order_of,
    works_of,
)


@pytest.mark.parametrize(
    ("ends", "outcome", "faults"),
    [
        (["pass"], "pass", []),
        (["fail", "pass"], "fail", []),  # a numeric failure is an answer
        (["error", "pass"], "error", []),
        (["timeout", "pass"], "timeout", []),
        (["not-run", "pass"], "not-run", []),
        (["NODE_FAIL", "pass"], "pass", ["node-fail"]),
        (["CANCELLED by 0", "PREEMPTED", "pass"], "pass", ["cancelled", "preempted"]),
        (["TIMEOUT", "fail"], "fail", ["job-time-limit"]),
        (["killed", "pass"], "pass", ["killed"]),
        (["no space", "OUT_OF_MEMORY", "pass"], "pass", ["disk-full", "out-of-memory"]),
        (["vanished", "torn", "pass"], "pass", ["gone", "no-receipt"]),
        (["FAILED"], "not-run", ["no-receipt"] * 3),
        (["NODE_FAIL"], "not-run", ["node-fail"] * 3),
    ],
)
def test_only_infrastructure_is_tried_again_and_counted(
    ends: list[str], outcome: str, faults: list[str], tmp_path: Path
) -> None:
    scheduler = ScriptedScheduler({"a": ends})
    done, _ = drive(tmp_path, works_of("a", "b"), scheduler)
    receipt = done["te1-cpu-a"].receipt
    assert (receipt.outcome.value, [fault.partition(":")[0] for fault in receipt.retries]) == (outcome, faults)
    assert scheduler.ran == {"a": len(faults) + (outcome != "not-run" or not faults), "b": 1}
    assert read_receipts(tmp_path).found == {cell: one.receipt for cell, one in done.items()}
    if outcome == "not-run" and faults:
        assert receipt.reason.startswith(f"given up after 3 infrastructure fault(s), the last: {faults[0]}: ")
    assert not (tmp_path / ".matrix.work").exists()
    assert (tmp_path / "te1-cpu-b.log").read_text() == "words\n"


def test_a_node_that_ends_every_job_at_once_is_avoided_and_one_that_was_lost_is_left_to_the_scheduler(
    tmp_path: Path,
) -> None:
    scheduler = ScriptedScheduler({"a": ["NODE_FAIL", "FAILED", "pass"]})
    drive(tmp_path, works_of("a"), scheduler)
    assert [job.attempt.avoid for job in scheduler.jobs.values()] == [(), (), ("n0",)]


class Died(BaseException):
    """As if killed: nothing is done any more."""


def test_killed_at_some_steps_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(range(2, 400, 11), tmp_path, monkeypatch)


def test_then_killed_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill_at(range(1, 400), tmp_path, monkeypatch)


def kill_at(steps_of_death: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after each write, submission and look; the state of then is what the next start has."""
    keep = State.keep
    ends = {"a": ["pass"], "b": ["NODE_FAIL", "pass"], "c": ["killed", "fail"]}
    for deadly in steps_of_death:
        folder, steps = tmp_path / str(deadly), 0

        def step(deadly: int = deadly) -> None:
            nonlocal steps
            steps += 1
            if steps >= deadly:
                raise Died

        def keep_or_die(state: State, step=step) -> None:  # type: ignore[no-untyped-def]
            step()
            keep(state)
            step()

        scheduler = ScriptedScheduler({probe: list(script) for probe, script in ends.items()}, step=step)
        monkeypatch.setattr(State, "keep", keep_or_die)
        died = False
        try:
            drive(folder, works_of(*ends), scheduler)
        except Died:
            died = True
        monkeypatch.setattr(State, "keep", keep)
        scheduler.step = lambda: None
        done, _ = drive(folder, works_of(*ends), scheduler)
        found = {cell[-1]: one.receipt for cell, one in done.items()}
        assert [found[probe].outcome.value for probe in "abc"] == ["pass", "pass", "fail"]
        # Each attempt that was begun is the answer, or stands among its retries.
        assert scheduler.ran == {probe: 1 + len(receipt.retries) for probe, receipt in found.items()}, deadly
        assert scheduler.ran == {"a": 1, "b": 2, "c": 2}, deadly
        if not died:
            break
    else:
        pytest.fail("it never ran to its end")
    assert deadly > 20


def test_a_second_start_runs_nothing_that_is_done(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler()
    drive(tmp_path, works_of("a", "b"), scheduler)
    done, told = drive(tmp_path, works_of("a", "b"), scheduler)
    assert all(one.kept for one in done.values())
    assert [one.what for one in told] == ["kept", "kept"]
    drive(tmp_path, works_of("a", "b"), scheduler, replace(QUICK, fresh=True))
    assert scheduler.ran == {"a": 2, "b": 2}


def test_a_job_of_another_order_is_cancelled_and_its_receipt_not_taken(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler()
    stop = Event()
    scheduler.step = lambda: (_ for _ in ()).throw(Died) if scheduler.jobs else None  # type: ignore[assignment]
    with pytest.raises(Died):
        Drive(works_of("a"), scheduler, tmp_path, QUICK, stop).run()
    scheduler.step = lambda: None
    other = [replace(work, order=replace(work.order, seed=7)) for work in works_of("a")]
    done, _ = drive(tmp_path, other, scheduler)
    assert scheduler.cancelled
    assert done["te1-cpu-a"].receipt.seed == 7


def test_what_was_given_up_has_a_new_chance_at_a_new_start(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler({"a": ["NODE_FAIL", "NODE_FAIL", "NODE_FAIL", "pass"]})
    assert drive(tmp_path, works_of("a"), scheduler)[0]["te1-cpu-a"].receipt.outcome is Outcome.NOT_RUN
    receipt = drive(tmp_path, works_of("a"), scheduler)[0]["te1-cpu-a"].receipt
    assert (receipt.outcome, receipt.retries) == (Outcome.PASS, ())


def te_works(*probes: str) -> list[Work]:
    orders = {order.cell: order for order in (order_of(probe, target=H200, requested="te") for probe in probes)}
    return [Work(order, NOWHERE, 60.0, 1, ground=find_ground(order, orders)) for order in orders.values()]


def test_what_cannot_import_blocks_the_others_without_a_job(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler({"imports": ["import-error"]})
    done, _ = drive(tmp_path, te_works("attention", "imports", "permute"), scheduler)
    outcomes = {cell: one.receipt.outcome.value for cell, one in done.items()}
    assert outcomes == {
        "te1-h200-attention": "blocked", "te1-h200-imports": "import-error", "te1-h200-permute": "blocked",
    }  # fmt: skip
    assert done["te1-h200-permute"].receipt.blocked_by == "te1-h200-imports"
    assert scheduler.ran == {"imports": 1}


@pytest.mark.parametrize("end", ["fail", "error", "NODE_FAIL"])
def test_nothing_else_blocks(end: str, tmp_path: Path) -> None:
    done, told = drive(tmp_path, te_works("attention", "imports"), ScriptedScheduler({"imports": [end]}))
    assert done["te1-h200-attention"].receipt.outcome is Outcome.PASS
    ended = [one.cell for one in told if one.what == "ended"]
    assert ended == ["te1-h200-imports", "te1-h200-attention"]


def test_no_more_jobs_than_there_may_be(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler(room=2)
    drive(tmp_path, works_of(*"abcde"), scheduler)
    assert scheduler.most == 2


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with own_folder(tmp_path), pytest.raises(FolderTaken, match="another run writes its receipts"):
        drive(tmp_path, works_of("a"), ScriptedScheduler())


def test_a_stop_leaves_jobs_cancelled_and_the_state_whole(tmp_path: Path) -> None:
    scheduler, stop = ScriptedScheduler(), Event()
    scheduler.step = lambda: stop.set() if len(scheduler.jobs) == 2 else None
    with pytest.raises(Cancelled):
        Drive(works_of("a", "b"), scheduler, tmp_path, QUICK, stop).run()
    assert len(scheduler.cancelled) == 2
    assert all(job["attempt"] is None for job in json.loads((tmp_path / STATE_FILE).read_text())["jobs"].values())
    scheduler.step = lambda: None
    done, _ = drive(tmp_path, works_of("a", "b"), scheduler)
    assert [one.receipt.retries for one in done.values()] == [(), ()]
    assert scheduler.ran == {"a": 1, "b": 1}


def test_a_scheduler_that_is_down_from_the_start_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SchedulerDown):
        drive(tmp_path, works_of("a"), ScriptedScheduler(down=True), replace(QUICK, patience_s=600))
    done, _ = drive(tmp_path, works_of("a"), ScriptedScheduler())
    assert done["te1-cpu-a"].receipt.outcome is Outcome.PASS


def test_a_silence_on_the_way_is_waited_out_and_jobs_that_are_there_are_found(tmp_path: Path) -> None:
    scheduler, silent = ScriptedScheduler(), [0]

    def step() -> None:
        silent[0] += bool(scheduler.jobs)
        scheduler.down = 3 <= silent[0] <= 8

    scheduler.step = step
    done, told = drive(tmp_path, works_of("a", "b"), scheduler, replace(QUICK, patience_s=60))
    assert [one.receipt.retries for one in done.values()] == [(), ()]
    assert "silent" in {one.what for one in told}
    assert scheduler.ran == {"a": 1, "b": 1}


def test_a_silence_for_too_long_ends_the_run_and_leaves_the_jobs(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler()
    scheduler.step = lambda: setattr(scheduler, "down", bool(scheduler.jobs))
    with pytest.raises(SchedulerDown):
        drive(tmp_path, works_of("a"), scheduler)
    scheduler.step, scheduler.down = (lambda: None), False
    done, told = drive(tmp_path, works_of("a"), scheduler)
    assert told[0].what == "found"
    assert (scheduler.ran, done["te1-cpu-a"].receipt.retries) == ({"a": 1}, ())


def test_a_job_that_arrives_after_it_was_given_up_does_nothing(tmp_path: Path) -> None:
    """`sbatch` did not answer in time; the controller took the job all the same, when nobody looked for it any more."""

    class Late(ScriptedScheduler):
        held: list[tuple[Work, Try]] = []  # noqa: RUF012
        looks = 0

        def submit(self, work: Work, attempt: Try) -> str:
            if work.order.probe == "b" and not self.held:
                self.held.append((work, attempt))
                attempt.folder.mkdir(parents=True)
                raise SchedulerDown("nothing within 60 s")
            return super().submit(work, attempt)

        def look(self, attempts: Sequence[Try]) -> dict[str, Seen]:
            self.looks += 1
            if self.looks == 3:
                for work, attempt in self.held:
                    super().submit(work, attempt)
            return super().look(attempts)

    scheduler = Late({"a": ["NODE_FAIL", "NODE_FAIL", "pass"]})
    done, _ = drive(tmp_path, works_of("a", "b"), scheduler, replace(QUICK, patience_s=60))
    assert len(scheduler.jobs) == 5  # three of a, two of b
    assert scheduler.ran == {"a": 3, "b": 1}
    assert done["te1-cpu-b"].receipt.retries == ()


def test_what_does_not_come_in_time_is_not_run(tmp_path: Path) -> None:
    class Never(ScriptedScheduler):
        def _go_on(self, job: object) -> None:
            pass

    done, _ = drive(tmp_path, works_of("a"), Never(), replace(QUICK, wait_s=0.05))
    receipt = done["te1-cpu-a"].receipt
    assert receipt.outcome is Outcome.NOT_RUN
    assert "did not come within" in receipt.reason
    assert read_receipts(tmp_path).found == {"te1-cpu-a": receipt}


def test_a_job_that_is_held_off_comes_later_and_one_that_is_refused_ends_the_run(tmp_path: Path) -> None:
    class Full(ScriptedScheduler):
        def submit(self, work: Work, attempt: Try) -> str:
            if sum(job.state in ("PENDING", "RUNNING") for job in self.jobs.values()):
                raise JobHeld("QOSMaxSubmitJobPerUserLimit")
            return super().submit(work, attempt)

    class Strict(ScriptedScheduler):
        def submit(self, work: Work, attempt: Try) -> str:
            if work.order.probe == "b":
                return super().submit(work, attempt)
            raise JobRefused("invalid partition.")

    done, told = drive(tmp_path / "full", works_of(*"abc"), scheduler := Full())
    assert (len(done), scheduler.ran) == (3, {"a": 1, "b": 1, "c": 1})
    assert "held" in {one.what for one in told}
    with pytest.raises(JobRefused, match=r"^invalid partition\.$"):
        drive(tmp_path / "strict", works_of("a"), Strict())
    with pytest.raises(JobRefused, match=r"invalid partition\. 1 job that was given before goes on: the same command"):
        drive(tmp_path / "strict", works_of("b", "a"), Strict())
    jobs = json.loads((tmp_path / "strict" / STATE_FILE).read_text())["jobs"]
    assert (jobs["te1-cpu-a"]["attempt"], jobs["te1-cpu-b"]["attempt"]["id"]) == (None, "1")


def test_a_damaged_state_is_refused_and_names_the_next_step(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text('{"run": "x"')
    with pytest.raises(StateDamaged, match="Next step: see that no job of the run is left"):
        drive(tmp_path, works_of("a"), ScriptedScheduler())


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"tries": -5}, r"jobs\.te1-cpu-a\.tries: Input should be greater than or equal to 0"),
        ({"tries": 1, "attempt": {"number": 1, "name": "te1-cpu-b.0123abcd.1"}}, "is not try 1 of te1-cpu-a"),
        ({"tries": 0, "attempt": {"number": 1, "name": "te1-cpu-a.0123abcd.1"}}, "is not try 0 of te1-cpu-a"),
        ({"tries": 1, "attempt": {"number": 1, "name": "te1-cpu-a.0123abcd.1", "id": "--full"}}, r"attempt\.id"),
    ],
)
def test_a_state_that_was_edited_is_refused(tmp_path: Path, job: dict[str, object], said: str) -> None:
    asked = hash_order(works_of("a")[0].order)
    whole = {"run": "0123abcd", "launcher": "slurm", "jobs": {"te1-cpu-a": {"asked": asked, **job}}}
    (tmp_path / STATE_FILE).write_text(json.dumps(whole))
    with pytest.raises(StateDamaged, match=said):
        drive(tmp_path, works_of("a"), ScriptedScheduler())


def test_a_selection_leaves_jobs_of_other_cells_alone(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler()
    scheduler.step = lambda: (_ for _ in ()).throw(Died) if len(scheduler.jobs) == 2 else None  # type: ignore[assignment]
    with pytest.raises(Died):
        drive(tmp_path, works_of("a", "b"), scheduler)
    scheduler.step = lambda: None
    drive(tmp_path, works_of("a"), scheduler)
    done, _ = drive(tmp_path, works_of("a", "b"), scheduler)
    assert scheduler.ran == {"a": 1, "b": 1}
    assert len(done) == 2
