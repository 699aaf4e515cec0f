"""How stacks are compared: a tensor that is missing, of another shape or dtype, or no number, is another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.probes.fp8.stacks import (
    delayed_states,
    different,
    evaluate,
    new_stack,
    same,
    scope_of,
    te_layers,
    train_step,
)
from tests.probes.fp8.planting import new_bench

ONE = torch.ones(2, 3)


@pytest.mark.parametrize(("other", "wanted"), [
    (ONE.clone(), True),
    (None, False),
    (torch.ones(3, 2), False),
    (torch.ones(2, 3, dtype=torch.bfloat16), False),
    (torch.ones(2, 3) * (1 + 2.0**-20), False),
    (torch.full((2, 3), float("nan")), False),
])  # fmt: skip
def test_what_is_the_same(other: Any, wanted: bool) -> None:
    assert same(ONE, other) is wanted
    assert different({"x": ONE, "y": ONE}, {"x": other, "y": ONE}) == ([] if wanted else ["x"])


def test_names_of_both_sides_count() -> None:
    assert different({"x": ONE}, {"y": ONE}) == ["x", "y"]
    assert different({}, {}) == []
    assert not same(torch.tensor(float("nan")), torch.tensor(float("nan")))


@pytest.mark.parametrize("kind", ["plain", "attention"])
def test_a_stack_trains(te_double: None, kind: Any) -> None:
    bench = new_bench("graphs")
    stack = new_stack(bench, 2, kind=kind)
    copied = new_stack(bench, 2, like=stack, kind=kind)
    assert not different(dict(stack.named_parameters()), dict(copied.named_parameters()))
    enter, rows = scope_of(bench, "delayed"), bench.randn(128, 128, dtype=torch.bfloat16)
    before = {name: weight.detach().clone() for name, weight in stack.named_parameters()}
    seen = train_step(stack, enter, [(rows, rows), (rows * 3, rows)])
    assert set(seen.grads) == {"rows0", "rows1", *before}
    assert different(before, {name: weight.detach() for name, weight in stack.named_parameters()}) == list(before)
    assert len(te_layers(stack)) == 6
    assert len(delayed_states(bench, stack)) == 6 * 4
    assert evaluate(stack, enter, rows).shape == (128, 128)
    assert stack.training


def test_micro_batches_in_turn_and_late_give_the_same_in_bf16(te_double: None) -> None:
    from contextlib import nullcontext

    bench = new_bench("graphs")
    stack = new_stack(bench, 1)
    copied = new_stack(bench, 1, like=stack)
    rows = [bench.randn(128, 128, dtype=torch.bfloat16) for _ in range(2)]
    seen = [train_step(one, nullcontext, [(row, row) for row in rows], late=late)
            for one, late in ((stack, False), (copied, True))]  # fmt: skip
    assert not different(seen[0].grads, seen[1].grads)
