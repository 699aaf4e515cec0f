"""A by layers that gather as Transformer Engine's do, beside the whole native layer: run by the ranks of a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_validate.bridge import native_block
from megacpp_validate.bridge.amax_owner import AmaxGroupMissing
from megacpp_validate.bridge.features import PRODUCTION
from megacpp_validate.bridge.fp8_scope import SINGLE_OWNER, low_precision
from megacpp_validate.training.parallel.replicas import split_parameters
from megacpp_validate.training.parallel.tensor_weights import share_parameters
from tests.training.parallel.te_tensor_double import use_split_double
from tests.training.parallel.te_tensor_ranks import compare_all
from tests.training.parallel.tensor_layer_run import LENGTH, SIZE, WholeAndSplit


class TeAndWhole(WholeAndSplit):
    """In fp32: errors are those of two fp32 runs, and the bound is theirs, by the same derivation."""

    dtype = torch.float32

    def __init__(self, *, sequence_parallel: bool) -> None:
        super().__init__("A", sequence_parallel=sequence_parallel)
        self.build = replace(self.build, features=PRODUCTION, dtype=self.dtype)
        self.bounds = {name: bound * 2.0**29 for name, bound in self.bounds.items()}


def te_form_on_a_rank() -> dict[str, Any]:
    pairs = {mode: TeAndWhole(sequence_parallel=mode) for mode in (True, False)}  # the whole layer is native
    use_split_double()
    seen: dict[str, Any] = {}
    for mode, pair in pairs.items():
        layer = pair.new()
        seen[f"off {mode}"] = pair.run(layer)
        seen[f"took {mode}"] = layer.choices()["block"].observed
        seen[f"marked {mode}"] = sorted(split_parameters(layer))
        seen[f"shares {mode}"] = sorted(name for name, _ in share_parameters(layer))
    layer = pairs[True].new()
    layer.block.te.sequence_parallel = False  # the planted fault: the stream goes in as it is
    layer.block.te.attention.qkv_format = "bshd"
    seen["batch first"] = pairs[True].run(layer)
    size = replace(SIZE, length=16, name="split")
    seen["on gpus"] = compare_all(size, "cpu", "cpu", ["bf16"])
    with pytest.MonkeyPatch.context() as patch:  # the planted fault again, in the layer itself
        patch.setattr(native_block.TeBlock, "forward", batch_first(native_block.TeBlock.forward))
        seen["on gpus, batch first"] = compare_all(size, "cpu", "cpu", ["bf16"])["faults"]
    seen["scales"] = scales(pairs[True].new())
    return seen


def batch_first(forward: Any) -> Any:
    def wrong(block: Any, *given: Any, **named: Any) -> Any:
        block.sequence_parallel = False
        block.attention.qkv_format = "bshd"
        return forward(block, *given, **named)

    return wrong


def scales(layer: Any) -> dict[str, bool]:
    """Scope -> whether the layer refuses it; what runs is no FP8, the double's split layers have none."""
    alone = [distributed.new_group([rank]) for rank in range(2)][distributed.get_rank()]
    owners = {"alone": SINGLE_OWNER, "of one": alone, "tensor": distributed.group.WORLD}
    told = {}
    rows = torch.randn(8, LENGTH // 2, SIZE.hidden)
    for recipe in ("delayed", "current"):
        for name, owner in owners.items():
            with low_precision(target="cpu", amax_reduction_group=owner, recipe=recipe):
                try:
                    layer.block(rows)
                    told[f"{recipe} {name}"] = False
                except AmaxGroupMissing:
                    told[f"{recipe} {name}"] = True
    return told
