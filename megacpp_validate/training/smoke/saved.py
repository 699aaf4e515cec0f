"""The state of a run as tensors with names that hold on every world and every build, and back.

A parameter that FSDP2 shares out is a DTensor; experts are named by their number in the layer, whoever holds them and
however; what a tensor group holds in parts is named by the part, and fits a tensor group of that size alone. Scales and
amax histories of low precision are of one rank and its build: they are taken up again on the same world, and made anew
on another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch

from ..model import HybridModel
from ..optimizer import MasterAdamW
from ..parallel.checkpoint import OF_RANK, stored_tensors
from ..parallel.plan import Spread
from ..parallel.sharding import Sharded
from .order import SmokeOrder

EXPERT: Final = re.compile(r"^(layers\.\d+\.(?:up|down))\..*?weight(\d*)$")


def identity_of(order: SmokeOrder) -> dict[str, Any]:
    """What tells the model of a run from another: its size, seed and dtype; not how it is spread."""
    dtype = order.precision if order.precision in ("fp64", "fp32") else "bf16"
    size = {name: value for name, value in asdict(order.read_size()).items() if name != "batch"}
    return {**size, "seed": order.seed, "dtype": dtype}


def state_of(optimizer: MasterAdamW, sharded: Sharded, spread: Spread, num_experts: int) -> dict[str, Any]:
    """Name -> the tensor itself (or a view, or a DTensor of it): loading into it changes the run.

    Args:
        optimizer: with moments.
        sharded: how the model lies on ranks.
        spread: of this rank.
        num_experts: of a layer, on all ranks.
    """
    named = optimizer.parameters()
    state: dict[str, Any] = {}
    for name, parts in optimizer.state_tensors().items():
        for part, tensor in parts.items():
            for key, value in _named(name, tensor, named[name], sharded, spread, num_experts):
                state[f"{part}/{key}"] = value
    return state


def extra_state_of(model: HybridModel, spread: Spread) -> dict[str, Any]:
    """What layers of Transformer Engine keep of their scales: name -> uint8 on the CPU."""
    place = f"{spread.rank}of{spread.plan.world}"
    found = {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}
    return {
        f"{OF_RANK}{place}/{name}": value.detach().cpu().contiguous()
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.numel()
    }


def room_for_extra_state(folder: Path, model: HybridModel, spread: Spread) -> dict[str, Any]:
    """Tensors to load such state into, as far as the latest checkpoint has it of this rank of a world like this.

    Nothing where there is no checkpoint, which `load_checkpoint` then says on all ranks.
    """
    start = f"{OF_RANK}{spread.rank}of{spread.plan.world}/"
    stored = stored_tensors(folder)
    here = {key: kind for key, kind in stored.items() if key.startswith(start) and _layer_of(key, model) is not None}
    return {key: torch.empty(int(kind[kind.index("[") + 1 : -1]), dtype=torch.uint8) for key, kind in here.items()}


def take_extra_state(model: HybridModel, state: Mapping[str, Any]) -> None:
    """Give it back to the layers."""
    for key, value in state.items():
        layer = _layer_of(key, model)
        if layer is not None:
            layer.set_extra_state(value)


def _layer_of(key: str, model: HybridModel) -> Any:
    """The layer whose extra state has that name; None in a build where it is another one, without such state."""
    layer = dict(model.named_modules()).get(key.split("/", 2)[2].removesuffix("._extra_state"))
    keeps = layer is not None and type(layer).set_extra_state is not torch.nn.Module.set_extra_state
    return layer if keeps else None


def _named(
    name: str, tensor: Any, parameter: Any, sharded: Sharded, spread: Spread, num_experts: int
) -> Iterator[tuple[str, Any]]:
    if match := EXPERT.match(name):
        first = spread.experts(num_experts).start
        if match[2]:  # Transformer Engine has a parameter an expert
            yield f"{match[1]}.expert.{first + int(match[2])}", tensor
        else:
            yield from ((f"{match[1]}.expert.{first + place}", one) for place, one in enumerate(tensor.unbind(0)))
        return
    split = name in sharded.in_parts
    part = f"@tensor{spread.plan.place(spread.rank).tensor}of{spread.plan.tensor_parallel}" if split else ""
    if not hasattr(parameter, "to_local"):
        yield name + part, tensor
        return
    from torch.distributed.tensor import DTensor

    yield (
        name + part,
        DTensor.from_local(
            tensor,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        ),
    )
