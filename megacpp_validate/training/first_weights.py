"""Layers with their first weights, which no backend has a part in.

Whatever the bridge builds a layer of, it starts from the weights of the native layer of its kind, drawn from the seed
and the layer's name: builds by Transformer Engine, native and mixed ones start from the same numbers. Each expert is
drawn for itself, by its number: a rank draws those that it holds, one at a time, and has the numbers of every plan.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..bridge.features import PRESETS
from ..native.norms import INIT_STD
from .errors import WrongSize
from .expert_layer import ExpertLayer, build_router, build_shared
from .layers import AttentionLayer, Build, MambaLayer, RecurrentLayer, copy_weights
from .mla import MlaLayer
from .pattern import Letter
from .seeds import drawn_from, generator_of
from .sizes import Size

Layer = Any  # one of LAYERS, an MlaLayer, or one that is split over a tensor group
LAYERS: Final[dict[Letter, type[Any]]] = {
    "A": AttentionLayer,
    "M": MambaLayer,
    "E": ExpertLayer,
    "R": RecurrentLayer,
}


def layer_class(letter: Letter, size: Size) -> type[Any]:
    """What a letter stands for in a size."""
    return MlaLayer if letter == "A" and size.attention == "mla" else LAYERS[letter]


def build_layer(letter: Letter, size: Size, build: Build, *, seed: int, name: str) -> Layer:
    """A layer whose weights depend on the seed, its name and its kind, not on what it is made of or where it lies.

    Raises:
        WrongSize: a recipe for layers whose parameters no low precision takes.
        BridgeError: what the bridge refuses to build.
    """
    if build.recipe is not None and build.dtype == torch.float64:
        raise WrongSize(
            f"layers of {build.dtype} in the recipe {build.recipe}. Likely cause: a reference model built with the "
            "options of the one it judges. Next step: build it without a recipe."
        )
    if build.spread.plan.tensor_parallel > 1 and letter != "E":
        if layer_class(letter, size) is MlaLayer:
            raise WrongSize(
                "multi-head latent attention with tensor_parallel "
                f"{build.spread.plan.tensor_parallel}: all of its heads share one latent, and it is not split. Next "
                'step: tensor_parallel 1, or attention "gqa".'
            )
        from .parallel.tensor_layers import build_split_layer  # which takes its share of `first_weights`

        return build_split_layer(letter, size, build, seed=seed, name=name)
    with torch.random.fork_rng(_devices(build.device)):  # what the bridge draws is overwritten below
        layer = layer_class(letter, size)(size, build)
    if letter == "E":
        _give_first_weights(layer, size, build, seed, name)
    else:
        layer.load_native_state_dict(first_weights(letter, size, build, seed=seed, name=name))
    return layer


def first_weights(letter: Letter, size: Size, build: Build, *, seed: int, name: str) -> dict[str, Any]:
    """Of a whole layer A, M or R: drawn natively, on the CPU and in fp32, then rounded once to the build's dtype."""
    plain = Build(PRESETS["off"], torch.float32, "cpu")
    with drawn_from(seed, "weights", name):
        drawn = layer_class(letter, size)(size, plain).native_state_dict()
    return {part: value.to(build.device, build.dtype) for part, value in drawn.items()}


def draw_expert(size: Size, *, seed: int, name: str, number: int) -> tuple[Any, Any]:
    """One expert of a layer in fp32 on the CPU: up [2F, hidden], the gate first, and down [hidden, F].

    Args:
        size: with hidden and expert_width.
        seed: of the weights.
        name: of the layer.
        number: of the expert in the whole layer.
    """
    drawn = generator_of(seed, "weights", name, "expert", number)
    up = torch.randn(2 * size.expert_width, size.hidden, generator=drawn).mul_(INIT_STD)
    return up, torch.randn(size.hidden, size.expert_width, generator=drawn).mul_(INIT_STD)


def _give_first_weights(layer: ExpertLayer, size: Size, build: Build, seed: int, name: str) -> None:
    with drawn_from(seed, "weights", name):
        drawn = {"router": build_router(size, "cpu"), "shared": build_shared(size, torch.float32, "cpu")}
    rest = {"norm.weight": torch.ones(size.hidden, dtype=build.dtype, device=build.device)}
    for part, module in drawn.items():
        dtype = None if part == "router" else build.dtype
        weights = {} if module is None else copy_weights(module)
        rest |= {f"{part}.{weight}": value.to(build.device, dtype) for weight, value in weights.items()}
    layer.load_rest(rest)
    for place, number in enumerate(layer.experts):
        layer.load_expert(place, *draw_expert(size, seed=seed, name=name, number=number))


def _devices(device: Any) -> list[Any]:
    return [device] if torch.device(device).type == "cuda" else []
