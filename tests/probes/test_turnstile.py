"""The turnstile between real processes: many compute, one times alone, nobody is starved, the killed hold nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacpp_validate.probes.turnstile import NoTurnstile, alone, computing

# Says on its standard output when it holds the room and when it lets go, by the clock that all processes share.
CHILD = """
import sys, time
from megacpp_validate.probes.turnstile import alone, computing
how, path, seconds, times = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
for _ in range(times):
    with (alone if how == "alone" else computing)(path, 30.0) as held:
        print("in", held, time.monotonic(), flush=True)
        time.sleep(seconds)
        print("out", held, time.monotonic(), flush=True)
"""
Child = subprocess.Popen[str]


class Crew:
    """Processes that are ended with the test."""

    def __init__(self, path: Path) -> None:
        self.path, self.started = path, list[Child]()

    def start(self, how: str, seconds: float, times: int = 1) -> Child:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, how, str(self.path), str(seconds), str(times)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(child)
        return child

    def end(self) -> None:
        for child in self.started:
            child.kill()
            child.communicate()


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path / "gpu0")
    yield made
    made.end()


def read(child: Child) -> tuple[str, float]:
    """The next thing that a child says."""
    assert child.stdout is not None
    words = child.stdout.readline().split()
    assert words[1] == "True"
    return words[0], float(words[2])


def spans(child: Child) -> list[tuple[float, float]]:
    """When a child that has ended held the room."""
    text, _ = child.communicate(timeout=40)
    times = [float(line.split()[2]) for line in text.splitlines()]
    assert child.returncode == 0
    return list(zip(times[::2], times[1::2], strict=True))


def test_those_that_compute_hold_the_room_together(crew: Crew) -> None:
    children = [crew.start("computing", 60.0) for _ in range(2)]
    assert [read(child)[0] for child in children] == ["in", "in"]


def test_who_times_is_alone(crew: Crew) -> None:
    started = [crew.start("computing", 0.05, 6), crew.start("computing", 0.07, 5)]
    started += [crew.start("alone", 0.05, 4), crew.start("alone", 0.04, 4)]
    held = [(index >= 2, *span) for index, child in enumerate(started) for span in spans(child)]
    assert len(held) == 6 + 5 + 4 + 4
    for exclusive, start, end in held:
        others = [one for one in held if one != (exclusive, start, end)]
        for other_exclusive, other_start, other_end in others:
            overlaps = other_start < end and start < other_end
            assert not (overlaps and (exclusive or other_exclusive))


def until_somebody_waits_at_the_door(path: Path) -> None:
    for _ in range(2000):
        with computing(str(path), 0.0) as held:
            if not held:
                return
        time.sleep(0.01)
    pytest.fail("nobody came to the door")


def test_newcomers_wait_behind_who_waits_to_time(crew: Crew) -> None:
    """With those that compute never all gone, a lock without a door would never be had."""
    with computing(str(crew.path)):
        timer = crew.start("alone", 0.2)
        until_somebody_waits_at_the_door(crew.path)
        late = crew.start("computing", 0.0)
        time.sleep(0.5)
        left = time.monotonic()
    (start, end), (late_start, _) = spans(timer)[0], spans(late)[0]
    assert left <= start
    assert end <= late_start


def test_a_stream_of_newcomers_starves_nobody_who_times(crew: Crew) -> None:
    stream = [crew.start("computing", 0.15, 1000) for _ in range(3)]
    for child in stream:
        read(child)
    timer = crew.start("alone", 0.01, 3)
    assert len(spans(timer)) == 3
    assert all(child.poll() is None for child in stream)


@pytest.mark.parametrize("how", ["computing", "alone"])
def test_a_holder_that_is_killed_outright_holds_nothing(crew: Crew, how: str) -> None:
    holder = crew.start(how, 60.0)
    assert read(holder)[0] == "in"
    with alone(str(crew.path), 0.0) as held:
        assert not held
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(timeout=10)
    with alone(str(crew.path), 5.0) as held:
        assert held


def test_a_waiting_timer_that_is_killed_lets_newcomers_in(crew: Crew) -> None:
    holder = crew.start("computing", 60.0)
    assert read(holder)[0] == "in"
    timer = crew.start("alone", 1.0)
    until_somebody_waits_at_the_door(crew.path)
    os.kill(timer.pid, signal.SIGKILL)
    timer.wait(timeout=10)
    with computing(str(crew.path), 5.0) as held:
        assert held


FORKS = """
import os, sys, time
from megacpp_validate.probes.turnstile import alone
with alone(sys.argv[1]) as held:
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    print("in", held, time.monotonic(), flush=True)
    time.sleep(60)
"""


def test_a_forked_child_that_outlives_its_killed_parent_keeps_no_lock(crew: Crew) -> None:
    """Compile workers are forked while the room is held."""
    words = [sys.executable, "-c", FORKS, str(crew.path)]
    holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert read(holder)[0] == "in"
        holder.kill()
        holder.wait(timeout=10)
        with alone(str(crew.path), 5.0) as held:
            assert held
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        assert holder.stdout is not None
        holder.stdout.close()


def test_patience_ends(tmp_path: Path) -> None:
    """Who times gives up, who computes goes on without; and both leave the door open behind them."""
    path = str(tmp_path / "gpu0")
    with computing(path):
        start = time.monotonic()
        with alone(path, 0.3) as held:
            assert not held
        assert time.monotonic() - start >= 0.25  # it did wait; how long it takes to come back is the machine's
        with computing(path, 0.3) as held:
            assert held
    with alone(path, 0.3) as held:
        assert held
        with computing(path, 0.3) as also:
            assert not also
        with alone(path, 0.3) as also:
            assert not also
    with alone(path, 0.0) as held:
        assert held


def test_what_is_raised_inside_lets_go(tmp_path: Path) -> None:
    path = str(tmp_path / "gpu0")
    for hold in (alone, computing):
        with pytest.raises(KeyError), hold(path):
            raise KeyError
    with alone(path, 0.0) as held:
        assert held


def test_threads_of_one_process_wait_for_each_other(tmp_path: Path) -> None:
    path, seen = str(tmp_path / "gpu0"), list[bool]()

    def time_it() -> None:
        with alone(path, 0.2) as held:
            seen.append(held)

    with computing(path):
        thread = threading.Thread(target=time_it)
        thread.start()
        thread.join()
    assert seen == [False]


def test_without_a_path_nothing_is_locked_and_no_file_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with alone("") as one, alone("") as other, computing("") as third:
        assert one
        assert other
        assert third
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("hold", [alone, computing])
def test_a_file_that_cannot_be_locked_is_told_with_the_next_step(hold: object, tmp_path: Path) -> None:
    with pytest.raises(NoTurnstile, match="Next step"), hold(str(tmp_path / "none" / "gpu0")):  # type: ignore[operator]
        pass
