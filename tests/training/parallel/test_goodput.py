"""The account of time sums to the whole exactly, and FLOPs are those of the matrices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest
import torch

from megacpp_validate.training.layers import Build
from megacpp_validate.training.model import HybridModel
from megacpp_validate.training.parallel.goodput import (
    NS,
    PHASES,
    Ledger,
    block_flops,
    training_flops,
)
from megacpp_validate.training.sizes import read_size


def ticking() -> Iterator[int]:
    return (NS * second for second in count())


def test_phases_sum_to_the_whole_and_a_nested_phase_interrupts() -> None:
    clock = ticking()
    ledger = Ledger(began_ns=-3 * NS, clock=clock.__next__, memory=iter(range(1, 100)).__next__)
    with ledger.phase("data"), ledger.phase("checkpoint"):
        pass
    with ledger.step(tokens=64):
        pass
    with pytest.raises(ValueError, match="planted"), ledger.step(tokens=64):
        raise ValueError("planted")
    assert ledger.steps == [2.0]
    seen = ledger.close()
    phases = seen["phases_ns"]
    assert tuple(phases) == PHASES
    assert sum(phases.values()) == seen["whole_s"] * NS
    spent = {phase: spent // NS for phase, spent in phases.items() if spent}
    assert spent == {"start-up": 3, "data": 2, "checkpoint": 1, "step": 2, "idle": 6}
    assert (seen["tokens"], seen["tokens_per_second"]) == (64, 32.0)
    assert seen["peak_bytes"]["checkpoint"] > seen["peak_bytes"]["start-up"]


def test_time_is_moved_and_never_more_than_there_is() -> None:
    clock = ticking()
    ledger = Ledger(began_ns=0, clock=clock.__next__)
    with ledger.phase("step"):
        pass
    ledger.move("step", "communication wait", 0.25)
    ledger.move("step", "compile", 9.0)
    ledger.move("step", "idle", -1.0)
    phases = ledger.close()["phases_ns"]
    assert (phases["step"], phases["communication wait"], phases["compile"]) == (0, NS // 4, 3 * NS // 4)


@pytest.mark.parametrize(
    "changes", [{}, {"attention": "mla", "rope_dim": 8}, {"shared_experts": 2, "mtp": True}], ids=str
)
def test_flops_are_two_a_weight_that_a_token_meets(changes: dict[str, int]) -> None:
    size = read_size("tiny", **changes)
    model = HybridModel(size, Build(dtype=torch.float32), seed=0)
    weights: dict[str, float] = {"head": model.head.weight.numel()}
    for letter, layer in zip(size.letters, model.layers, strict=True):
        for weight_name, weight in layer.named_parameters():
            if weight.dim() > 1 and "conv" not in weight_name:
                part = size.top_k / size.num_experts if weight_name.startswith(("up", "down")) else 1.0
                weights[letter] = weights.get(letter, 0.0) + part * weight.numel()
    kinds = {letter: block_flops(letter, size) * size.letters.count(letter) for letter in set(size.letters)}
    kinds["head"] = 2.0 * size.hidden * size.grammar.vocabulary
    of_blocks_and_head = 3 * sum(kinds.values())
    if size.mtp:
        assert training_flops(size) > of_blocks_and_head
    else:
        assert training_flops(size) == pytest.approx(of_blocks_and_head, rel=1e-12)
    attention = 2 * 2.0 * size.num_heads * size.head_dim * (size.length + 1) / 2
    kinds["A"] -= attention * size.letters.count("A")
    kinds["M"] -= 2.0 * 4 * (2 * size.hidden + 2 * size.mamba_state) + 5.0 * 2 * size.hidden * size.mamba_state
    kinds["R"] -= 5.0 * size.recurrent_heads * size.recurrent_key_dim * (size.recurrent_value_dim + 1)
    for kind, number in weights.items():
        assert kinds[kind] == pytest.approx(2 * number, rel=1e-12), kind
