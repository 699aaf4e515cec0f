"""What a region of another amax group takes for granted, on the real state of each release of Transformer Engine.

`quantization.py` and the recipes are the release's own; of what they import, the kernels alone are not there. Layers
are their entries in that state: what a layer of the release does with it at a forward and at a backward pass.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacpp_validate.bridge import fp8_scope
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.backends import Choice
from megacpp_validate.bridge.fp8_scope import SINGLE_OWNER, Plan, PrecisionScope, _te_turned_on, amax_shared_with
from megacpp_validate.bridge.vendor import Verdict
from megacpp_validate.selftest.double import entries

# Releases up to 2.17 script a function with torch's own compiler of old.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

RELEASES = ("2.12.0", "2.17.1", "2.20.2")
STEPS = 3
FILES = ("transformer_engine/common/recipe/__init__.py", "transformer_engine/pytorch/quantization.py")


@pytest.fixture(params=RELEASES)
def world(
    request: pytest.FixtureRequest,
    wheel_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Any]:
    """Four ranks of torch's fake backend, and a release's state of low precision behind the bridge's accessors."""
    with zipfile.ZipFile(wheel_of(request.param)) as archive:
        archive.extractall(tmp_path, FILES)
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("transformer_engine", "transformer_engine.common", "transformer_engine.pytorch"):
        package = ModuleType(name)
        package.__path__ = [str(tmp_path.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)
    kernels = SimpleNamespace(DType=SimpleNamespace(kFloat8E4M3=0, kFloat8E5M2=1))
    for name, held in (
        ("transformer_engine_torch", vars(kernels)),
        ("transformer_engine.pytorch.constants", {"dist_group_type": Any, "DType": Any}),
        ("transformer_engine.pytorch.utils", {"get_device_compute_capability": lambda: (9, 0)}),
        ("transformer_engine.pytorch.jit", {"jit_fuser": lambda function: function}),
    ):
        module = ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")  # the update that needs no kernel
    monkeypatch.setattr(te.TE, "_verdict", Verdict(True, ""))
    for entry in entries().values():
        monkeypatch.setattr(entry, "_found", None)
    from transformer_engine.pytorch import quantization

    monkeypatch.setattr(quantization, "check_fp8_support", lambda: (True, ""))
    sys.modules["transformer_engine.pytorch"].autocast = quantization.autocast
    assert str(quantization.__file__).startswith(f"{tmp_path}{os.sep}")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()
        for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
            sys.modules.pop(name)


class Layer:
    """What the state knows of a layer: one tensor each way."""

    def __init__(self) -> None:
        self.meta: dict[str, Any] = {}
        self.ends_backward = False

    def forward(self, amax: float) -> None:
        """As `prepare_forward` has it, and the note of a quantizer."""
        state = te.fp8_state_manager.require()
        if "recipe" not in self.meta:
            self.meta |= {"recipe": state.get_fp8_recipe(), "fp8_group": state.get_fp8_group()}
            for direction in ("scaling_fwd", "scaling_bwd"):
                self.meta[direction] = SimpleNamespace(amax_history=torch.zeros(16, 1), scale=torch.ones(1))
        state.add_fp8_tensors_to_global_buffer(self.meta)
        self.meta["scaling_fwd"].amax_history[0] = amax
        self.ends_backward = state.is_first_fp8_module()

    def backward(self, amax: float) -> None:
        """As the layer that was the first of its scope, or another one, ends its backward pass."""
        self.meta["scaling_bwd"].amax_history[0] = amax
        if self.ends_backward:
            te.fp8_state_manager.require().reduce_and_update_fp8_tensors(forward=False)


def low(world: Any) -> PrecisionScope:
    """The bridge's scope of delayed scaling, without the question for a target."""

    def turn(place: str) -> Any:
        return _te_turned_on("delayed", world, True, place)

    return PrecisionScope(Plan("delayed", Choice("fp8_scope", "te", "te", ()), "", True, turn))


def steps(world: Any, owner: Any, pattern: str) -> tuple[list[str], list[tuple[int, Any]]]:
    """Wrong histories of three steps, and how many amaxes were reduced over which group, in order."""
    layers, reduced = [Layer() for _ in pattern], []

    def noted(tensor: Any, op: Any, group: Any, async_op: bool) -> None:
        del op, async_op
        reduced.append((tensor.numel(), group))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", noted)
        for step in range(STEPS):
            with low(world):
                for place, layer in enumerate(layers):
                    if pattern[place] == "A":
                        layer.forward(amax_of(step, place))
                        continue
                    with amax_shared_with(owner):
                        layer.forward(amax_of(step, place))
            for place in reversed(range(len(layers))):
                layers[place].backward(amax_of(step, place) / 4)
    wrong = []
    for place, layer in enumerate(layers):
        for direction, factor in (("fwd", 1.0), ("bwd", 0.25)):
            found = layer.meta[f"scaling_{direction}"].amax_history[-STEPS:, 0].tolist()
            if found != [factor * amax_of(step, place) for step in range(STEPS)]:
                wrong.append(f"{direction} of {pattern[place]}{place}: {found}")
    return wrong, reduced


def amax_of(step: int, place: int) -> float:
    return float(2 + place + 7 * step)


@pytest.mark.parametrize("pattern", ["EAEA", "AEA"])
def test_histories_move_once_a_pass_and_each_group_is_reduced_once(world: Any, pattern: str) -> None:
    owner = torch.distributed.new_group([0, 2])
    wrong, reduced = steps(world, owner, pattern)
    assert wrong == []
    counts = [(pattern.count(letter), group) for letter, group in (("E", owner), ("A", world))]
    once = counts if pattern.startswith("E") else counts[::-1]
    assert reduced == once * 2 * STEPS  # a reduction for each group, forward and backward, not for each scope


def test_a_single_owner_in_a_region_reduces_with_nobody(world: Any) -> None:
    wrong, reduced = steps(world, SINGLE_OWNER, "EAEA")
    assert (wrong, reduced) == ([], [(2, world)] * 2 * STEPS)


def test_the_first_layer_has_to_be_kept(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the end of a region brings back that no layer has run."""
    monkeypatch.setattr(fp8_scope, "_take_first", lambda: False)
    wrong, _ = steps(world, SINGLE_OWNER, "EAEA")
    assert any(one.startswith("bwd of A1") for one in wrong)


def test_a_second_pass_outside_of_every_scope_keeps_the_group(world: Any) -> None:
    """As a checkpoint of Transformer Engine enters its scope again: by the recipe, without a group."""
    owner, layer, reduced = torch.distributed.new_group([0, 2]), Layer(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda *_, group, **__: reduced.append(group))
        with low(world), amax_shared_with(owner):
            layer.forward(3.0)
            recipe = te.fp8_state_manager.require().get_fp8_recipe()
        with te.autocast.require()(enabled=True, recipe=recipe):
            layer.forward(3.0)
    assert reduced == [owner, owner]
