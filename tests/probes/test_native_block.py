"""The probe of the layer of kind A as a whole passes, and each planted fault of the vendor's layer fails its check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge import layer_spec as spec
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.native_block import check_whole_layer
from megacpp_validate.probes.observe import marking_vendor_layers
from tests.probes.planting import RECIPES, Patch, Plant, check_caught, new_bench


def whole(bench: Bench) -> None:
    torch.manual_seed(bench.order.seed)
    with marking_vendor_layers():
        check_whole_layer(bench, spec)


def layer_like(change: Callable[[Any], type]) -> Plant:
    def plant(patch: Patch) -> None:
        kind = change(te.transformer_layer.require())
        kind.__module__ = te.transformer_layer.require().__module__
        patch.setattr(te.transformer_layer, "_found", (kind, ""))

    return plant


def made_with(**other: Any) -> Plant:
    """The vendor's layer, made with something else than was asked for."""

    def change(real: Any) -> type:
        class TransformerLayer(real):  # type: ignore[misc]
            def __init__(self, *given: Any, **named: Any) -> None:
                super().__init__(*given, **{**named, **other})

        return TransformerLayer

    return layer_like(change)


def giving(fault: Callable[[Any, Any], Any]) -> Plant:
    """The vendor's layer, whose output is `fault(forward, rows)`."""

    def change(real: Any) -> type:
        class TransformerLayer(real):  # type: ignore[misc]
            def forward(self, rows: Any) -> Any:
                return fault(super().forward, rows)

        return TransformerLayer

    return layer_like(change)


def outside_of_the_scope(forward: Any, rows: Any) -> Any:
    with te.autocast.require()(enabled=False):
        return forward(rows)


WHOLE: dict[str, tuple[Plant, set[str]]] = {
    "other parameters": (made_with(fuse_qkv_params=False), {f"{x}.whole.gqa4.parameters" for x in ("bf16", "delayed")}),
    "outside of the scope": (giving(outside_of_the_scope), {f"{r}.whole.gqa4.grad.applied" for r in RECIPES}),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "wanted"), WHOLE.values(), ids=WHOLE)
def test_a_fault_of_the_vendors_layer_is_caught(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("layer_spec", "te", RECIPES, quick=False), whole, plant, wanted)
