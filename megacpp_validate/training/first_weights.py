"""Layers with their first weights, which no backend has a part in.

Whatever the bridge builds a layer of, it starts from the weights of the native layer of its kind, drawn from the seed
and the layer's name: builds by Transformer Engine, native and mixed ones start from the same numbers.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from ..bridge.features import PRESETS
from .errors import WrongSize
from .expert_layer import ExpertLayer
from .layers import AttentionLayer, Build, MambaLayer, RecurrentLayer
from .pattern import Letter
from .seeds import drawn_from
from .sizes import Size

Layer = AttentionLayer | MambaLayer | ExpertLayer | RecurrentLayer
LAYERS: Final[dict[Letter, type[Layer]]] = {
    "A": AttentionLayer,
    "M": MambaLayer,
    "E": ExpertLayer,
    "R": RecurrentLayer,
}


def build_layer(letter: Letter, size: Size, build: Build, *, seed: int, name: str) -> Layer:
    """A layer whose weights depend on the seed, its name and its kind, not on what it is made of.

    Raises:
        WrongSize: a recipe for layers whose parameters no low precision takes.
        BridgeError: what the bridge refuses to build.
    """
    if build.recipe is not None and build.dtype == torch.float64:
        raise WrongSize(
            f"layers of {build.dtype} in the recipe {build.recipe}. Likely cause: a reference model built with the "
            "options of the one it judges. Next step: build it without a recipe."
        )
    with torch.random.fork_rng(_devices(build.device)):  # what the bridge draws is overwritten below
        layer = LAYERS[letter](size, build)
    layer.load_native_state_dict(_first_weights(letter, size, build, seed, name))
    return layer


def _first_weights(letter: Letter, size: Size, build: Build, seed: int, name: str) -> dict[str, Any]:
    """Drawn natively, on the CPU and in fp32, then rounded once to the dtype of each parameter."""
    plain = Build(PRESETS["off"], torch.float32, "cpu")
    with drawn_from(seed, "weights", name):
        drawn = LAYERS[letter](size, plain).native_state_dict()
    kept = {"router.weight"} if letter == "E" else set()
    return {part: value.to(build.device, None if part in kept else build.dtype) for part, value in drawn.items()}


def _devices(device: Any) -> list[Any]:
    return [device] if torch.device(device).type == "cuda" else []
