"""What is timed of every module: that it runs on both paths, sees a wrapper that sleeps, and loses no receipt."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.evidence.receipt import Outcome, Receipt
from megacpp_validate.probes import process, speeds
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import TIMED, Order, Target
from megacpp_validate.probes.process import run_probe
from megacpp_validate.probes.speeds import Stopwatch, Use

pytestmark = pytest.mark.usefixtures("what_is_old_rests")
CPU = Target("cpu", "")
ORDER = Order("fake", "native", CPU, "native", times=True, environment="e1")


class Clock:
    """Time as the stopwatch sees it: a millisecond a look, and no load of the machine."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(speeds, "time", made)
    monkeypatch.setattr(speeds, "USES", 4)
    monkeypatch.setattr(speeds, "ROUNDS", 3)
    return made


def timed(module: str, **changes: Any) -> Receipt:
    return run_probe(replace(ORDER, probe=module, times=False, only_times=True, **changes))


def failed(receipt: Receipt) -> dict[str, str]:
    return {check.name: check.detail for check in receipt.checks if not check.passed}


@pytest.mark.parametrize("module", sorted(TIMED))
def test_a_module_is_timed_without_being_judged(module: str) -> None:
    receipt = timed(module)
    assert (receipt.outcome, receipt.reason, receipt.environment) == (Outcome.PASS, "", "e1")
    assert receipt.timings
    for row in receipt.timings:
        assert (row.clock, len(row.rounds_ms)) == ("perf_counter", 3)
        assert row.median_ms == pytest.approx(1.0)
        assert f"speed.{row.name}.ran" in {check.name for check in receipt.checks}
    assert all(check.name.startswith("speed.") for check in receipt.checks)
    assert set(receipt.seconds) == {"speed", "total"}


# --- the phase in a probe's process -----------------------------------------------------------------------------------

Speed = Callable[[Stopwatch], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a probe `fake` with a speed, whose bridge module is there."""

    def put(speed: Speed | None, probe: Callable[[Bench], None] | None = None, **more: Any) -> None:
        made = types.ModuleType("fake")
        vars(made).update(probe=probe or (lambda bench: bench.check("one", True)), **more)
        monkeypatch.setitem(sys.modules, f"{process.PROBES}.fake", made)
        monkeypatch.setitem(sys.modules, f"{process.BRIDGE}.fake", types.ModuleType("fake"))
        if speed is not None:
            monkeypatch.setattr(speeds, "add_uses", speed)
            monkeypatch.setattr(process, "TIMED", frozenset({"fake"}))

    return put


def good(watch: Stopwatch) -> None:
    watch.add("good", lambda: Use(lambda: None))


def test_a_module_is_judged_first_and_then_timed_and_what_spoils_the_process_comes_last(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    order, held, path = [], list[str](), "gpu0"

    @contextmanager
    def hold(how: str, where: str) -> Iterator[bool]:
        held.append(f"{how} {where}")
        yield True
        held.pop()

    for how in ("computing", "alone"):
        monkeypatch.setattr(process, how, partial(hold, how))

    def at(name: str) -> Callable[..., None]:
        def look(given: Any) -> None:
            order.append((name, *held))
            if isinstance(given, Bench):
                given.check(name, True)

        return look

    def speed(watch: Stopwatch) -> None:
        at("warm-up")(None)
        watch.add("good", lambda: Use(lambda: at("use")(None)))

    plant(speed, at("probe"), probe_last=at("last"))
    receipt = run_probe(replace(ORDER, turnstile=path))
    assert receipt.outcome is Outcome.PASS
    turns = [one for index, one in enumerate(order) if not index or order[index - 1] != one]
    assert turns == [
        ("probe", "computing gpu0"), ("warm-up", "computing gpu0"), ("use", "computing gpu0"), ("use", "alone gpu0"),
        ("last", "computing gpu0"),
    ]  # fmt: skip
    assert [check.name for check in receipt.checks] == ["probe", "speed.good.ran", "last"]
    assert {"waiting", "probe", "speed"} <= set(receipt.seconds)


def test_a_use_that_raises_fails_the_cell_and_keeps_what_was_earned(plant: Callable[..., None]) -> None:
    def bad() -> Any:
        raise RuntimeError("cuDNN error")

    def speed(watch: Stopwatch) -> None:
        watch.add("bad", lambda: Use(bad))
        good(watch)

    plant(speed)
    receipt = run_probe(ORDER)
    assert (receipt.outcome, receipt.failure) == (Outcome.FAIL, None)
    assert receipt.reason == "1 of 3 checks failed: speed.bad.ran"
    assert [row.name for row in receipt.timings] == ["good"]
    assert receipt.checks[0].name == "one"


def test_a_module_that_is_wrong_is_not_timed(plant: Callable[..., None]) -> None:
    plant(good, lambda bench: bench.check("one", False))
    receipt = run_probe(ORDER)
    assert (receipt.outcome, receipt.timings) == (Outcome.FAIL, ())
    assert "speed" not in receipt.seconds


def test_who_cannot_be_alone_is_not_timed_and_says_so(
    plant: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "gpu0")
    monkeypatch.setattr(process, "alone", lambda where: nullcontext(False))
    plant(good, probe_last=lambda bench: bench.check("last", True))
    receipt = run_probe(replace(ORDER, turnstile=path))
    again = run_probe(replace(ORDER, turnstile=path, only_times=True))
    assert (receipt.outcome, receipt.timings, failed(receipt)) == (Outcome.PASS, (), {})
    assert receipt.reason.startswith("not timed: others still computed on the device")
    assert "waiting" in receipt.seconds
    assert (again.outcome, again.timings) == (Outcome.NOT_RUN, ())
    assert again.reason.startswith("not timed")
