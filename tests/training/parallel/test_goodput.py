"""The account sums to the whole whatever happens in it; FLOPs are those of the layers' own weights."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacpp_validate.bridge.features import PRESETS
from megacpp_validate.training.first_weights import LAYERS
from megacpp_validate.training.layers import Build
from megacpp_validate.training.parallel.goodput import (
    NS,
    PEAK,
    PHASES,
    Goodput,
    Ledger,
    StepTimes,
    WrongAccount,
    block_flops,
    forward_flops,
    process_began_ns,
    training_flops,
)
from megacpp_validate.training.sizes import LETTERS, SIZES, read_size

pytestmark = pytest.mark.thorough


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += round(seconds * NS)


def seconds(account: Goodput) -> dict[str, float]:
    return {phase: spent / NS for phase, spent in account.phases_ns.items() if spent}


def test_each_second_is_in_one_phase() -> None:
    clock = Clock()
    clock.pass_(7)
    ledger = Ledger(began_ns=2 * NS, clock=clock)  # 5 s of start-up
    clock.pass_(1)  # idle
    with ledger.phase("data"):
        clock.pass_(2)
    for step in range(3):
        with ledger.step(100):
            clock.pass_(4 + step)
            with ledger.phase("compile"):
                clock.pass_(10 if step == 0 else 0)
    with ledger.phase("evaluation"):
        clock.pass_(3)
    with ledger.phase("checkpoint"):
        clock.pass_(6)
    ledger.move("step", "communication wait", 2.5)
    account = ledger.close()
    assert seconds(account) == {
        "start-up": 5, "compile": 10, "data": 2, "step": 12.5, "checkpoint": 6, "evaluation": 3,
        "communication wait": 2.5, "idle": 1,
    }  # fmt: skip
    assert account.whole_ns == 42 * NS == sum(account.phases_ns.values())
    assert account.goodput == 12.5 / 42
    assert account.step_seconds == (14.0, 5.0, 6.0)
    assert account.step_times() == StepTimes(median=5.5, p95=6.0, slowest=6.0, slowest_step=2, first=14.0)
    assert account.tokens_per_second == 300 / 25
    assert account.flop_utilisation(1e3, peak=4e3, devices=2) == pytest.approx(12 * 1e3 / 8e3)
    assert account.as_json()["phases_ns"] == dict(account.phases_ns)


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 3), st.integers(0, 10**12)), max_size=12))
def test_any_nesting_sums_to_the_whole(entries: list[tuple[Any, int, int]]) -> None:
    clock = Clock()
    ledger = Ledger(began_ns=0, clock=clock)

    def enter(rest: list[tuple[Any, int, int]]) -> None:
        while rest:
            phase, depth, spent = rest.pop()
            with ledger.phase(phase):
                clock.now += spent
                enter([rest.pop() for _ in range(min(depth, len(rest)))])
            clock.now += spent % 7

    enter(list(entries))
    account = ledger.close()
    assert account.whole_ns == clock.now == sum(account.phases_ns.values())


def test_a_step_that_raises_is_paid_for_and_is_no_step() -> None:
    clock = Clock()
    ledger = Ledger(began_ns=0, clock=clock)
    with suppress(ArithmeticError), ledger.step(100):
        clock.pass_(3)
        _ = 1 // 0
    account = ledger.close()
    assert seconds(account) == {"step": 3}
    assert account.step_seconds == ()
    assert account.tokens == 0
    assert account.tokens_per_second == 0
    assert account.step_times() is None


def test_peak_memory_is_that_of_its_phase() -> None:
    clock, peaks = Clock(), iter([10, 5, 70, 20, 30, 8, 1, 4])
    ledger = Ledger(began_ns=0, clock=clock, memory=lambda: next(peaks))  # start-up 10
    with ledger.step(1), ledger.phase("compile"):  # idle 5, the step 70 before and 30 after the 20 of the compile
        pass
    with ledger.phase("data"):  # idle 8, and 1
        pass
    assert ledger.close().peak_bytes == {"start-up": 10, "idle": 8, "step": 70, "compile": 20, "data": 1}


def test_accounts_that_do_not_add_up_are_refused() -> None:
    clock = Clock()
    ledger = Ledger(began_ns=0, clock=clock)
    with ledger.step(1):
        clock.pass_(2)
        with pytest.raises(WrongAccount, match="step is not over"):
            ledger.close()
    for amount in (2.5, -1):
        with pytest.raises(WrongAccount, match="cannot be communication wait"):
            ledger.move("step", "communication wait", amount)
    with pytest.raises(WrongAccount, match="no phase 'lunch'"), ledger.phase("lunch"):  # type: ignore[arg-type]
        pass
    with pytest.raises(WrongAccount, match="one clock"):
        Ledger(began_ns=10 * NS, clock=clock)
    fine = ledger.close()
    with pytest.raises(WrongAccount, match="sum to 2000000000 of 5"):
        Goodput(5, fine.phases_ns, {}, (), 0)
    with pytest.raises(WrongAccount):
        Goodput(fine.whole_ns, {"step": fine.whole_ns}, {}, (), 0)
    with pytest.raises(WrongAccount):
        fine.flop_utilisation(1, peak=0, devices=1)


def test_a_series_of_one_step_is_its_own_summary() -> None:
    clock = Clock()
    ledger = Ledger(began_ns=0, clock=clock)
    with ledger.step(1):
        clock.pass_(2)
    assert ledger.close().step_times() == StepTimes(2.0, 2.0, 2.0, 0, 2.0)


def test_start_up_begins_with_the_process() -> None:
    began = process_began_ns()
    assert 0 < time.monotonic_ns() - began < 3600 * NS
    assert abs(process_began_ns() - began) < NS // 10
    account = Ledger(began_ns=began).close()
    assert account.phases_ns["start-up"] > 0


@pytest.mark.parametrize("name", ["tiny", "small"])
@pytest.mark.parametrize("letter", LETTERS)
def test_each_weight_of_a_layer_costs_two_a_token(letter: Any, name: str) -> None:
    """Matrices of the layer as it is built, on no device; of a bank of experts the share that a token meets."""
    size = SIZES[name]
    layer = LAYERS[letter](size, Build(PRESETS["off"], torch.float32, "meta"))
    weights = [
        weight.numel() * (size.top_k / size.num_experts if weight.dim() == 3 else 1)
        for part, weight in layer.named_parameters()
        if weight.dim() > 1 and "conv" not in part
    ]
    parts = block_flops(letter, size)
    counted = sum(
        spent for part, spent in parts.items() if part not in ("attention", "convolution", "scan", "recurrence")
    )
    assert counted == 2 * sum(weights)


def test_attention_and_recurrences_are_those_of_their_definitions() -> None:
    size = read_size("tiny", length=4, lag=2)  # 2 heads of 16, 16 states, inner width 64; K = V = 16
    pairs = sum(query + 1 for query in range(4))
    assert block_flops("A", size)["attention"] * 4 == pairs * 2 * 16 * 2 * 2
    assert block_flops("M", size)["scan"] == 64 * 16 * (3 + 2)
    assert block_flops("M", size)["convolution"] == (64 + 32) * 4 * 2
    assert block_flops("R", size)["recurrence"] == 2 * (16 * 16 * 5 + 16 * 5)


def test_a_model_is_its_blocks_and_its_head() -> None:
    size = SIZES["small"]
    kinds = forward_flops(size)
    assert list(kinds) == ["A", "E", "M", "R", "head"]
    assert kinds["E"] == 5 * sum(block_flops("E", size).values())
    assert kinds["head"] == 2 * 512 * 128
    assert math.isclose(training_flops(size), 3 * sum(kinds.values()))
    assert PEAK["h200"]["fp8"] == 2 * PEAK["h200"]["bf16"]
