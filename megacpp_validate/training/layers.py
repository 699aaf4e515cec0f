"""The layers A, M and R of the hybrid model: each a step of the residual stream, built by the bridge.

All layers are called alike, and give and take their weights under native names whatever they are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..bridge.backends import Choice
from ..bridge.compiled_scan import compiled_scan
from ..bridge.errors import WeightMismatch
from ..bridge.features import PRODUCTION, Features
from ..bridge.layer_spec import build_mamba_mixer, native_layer_spec
from ..bridge.native_block import NativeBlock
from ..bridge.recipes import RecipeName
from ..bridge.residual_norm import add_rms_norm
from ..native.router import Routing
from .parallel.plan import ALONE, Spread
from .sizes import Forms, Size


@dataclass(frozen=True)
class Build:
    """How a model is built.

    Attributes:
        features: what may take Transformer Engine.
        dtype: of the parameters; the router's is fp32.
        device: where they lie.
        recipe: the low precision that layers outside of the BF16 zones are to run in, if any; a layer whose widths do
            not fit it stays native.
        forms: the form of each part.
        spread: where this rank stands among others.
    """

    features: Features = PRODUCTION
    dtype: Any = torch.float32
    device: Any = "cpu"
    recipe: RecipeName | None = None
    forms: Forms = field(default_factory=Forms)
    spread: Spread = ALONE


@dataclass(frozen=True, eq=False)
class Stepped:
    """What a layer gives.

    Attributes:
        rows: [B, T, hidden]: the stream behind the layer, but for what is still to be added.
        routing: of an E-layer; else None. Its two losses are this rank's shares.
        added: [B, T, hidden] that the next norm adds to the rows in its own kernel; None where the rows are whole.
    """

    rows: Any
    routing: Routing | None = None
    added: Any = None


class AttentionLayer(nn.Module):
    """A: the whole A-block of `bridge.native_block`, both residual connections in it.

    Attributes:
        block: the A-block.
        graph: what replays its training pass (`smoke.trainer.capture_attention`); None where nothing was captured.
    """

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        self.graph: Any = None
        self.block = NativeBlock(
            hidden=size.hidden,
            ffn_hidden=size.ffn_hidden,
            num_heads=size.num_heads,
            head_dim=size.head_dim,
            num_gqa_groups=size.num_gqa_groups,
            activation="swiglu",
            eps=size.eps,
            dtype=build.dtype,
            device=build.device,
            features=build.features,
        )

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:
        """[B, T, hidden] -> [B, T, hidden]; `rope` is (cos, sin), each [at least T, D/2]."""
        if self.graph is not None and torch.is_grad_enabled():
            return Stepped(self.graph(rows))
        return Stepped(self.block(rows, rope=rope))

    def choices(self) -> dict[str, Choice]:
        """Part -> what the last call took; none before it."""
        return {} if self.block.choice is None else {"block": self.block.choice}

    def native_state_dict(self) -> dict[str, Any]:
        """The weights under the names of `native.block.ABlock`."""
        return self.block.native_state_dict()

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        self.block.load_native_state_dict(state)


class MambaLayer(nn.Module):
    """M: the Mamba-2 mixer behind its norm, and the residual connection around it."""

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        self.mixer = build_mamba_mixer(
            size.hidden,
            state=size.mamba_state,
            head_dim=size.mamba_head_dim,
            chunk=size.chunk,
            eps=size.eps,
            dtype=build.dtype,
            device=build.device,
            features=build.features,
            recipe=build.recipe,
        )
        self.scanned: Choice | None = None
        if build.forms.compiled_scan:
            self.mixer.scan, self.scanned = compiled_scan(build.device)

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:  # noqa: ARG002 - every layer is called alike
        """[B, T, hidden] -> [B, T, hidden]."""
        return Stepped(rows + self.mixer(rows))

    def choices(self) -> dict[str, Choice]:
        """Part -> what it is made of."""
        seen = {"in_projection": self.mixer.choice}
        return seen if self.scanned is None else {**seen, "scan": self.scanned}

    def native_state_dict(self) -> dict[str, Any]:
        """The weights under the names of `native.mamba.Mamba2Mixer`."""
        return copy_weights(self.mixer)

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        take_weights(self.mixer, state)


class RecurrentLayer(nn.Module):
    """R: the matrix-state block, residual connection in it; native on every path."""

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        self.block = native_layer_spec()["R"](
            size.hidden,
            num_heads=size.recurrent_heads,
            key_dim=size.recurrent_key_dim,
            value_dim=size.recurrent_value_dim,
            chunk=size.chunk,
            eps=size.eps,
            dtype=build.dtype,
            device=build.device,
        )

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:  # noqa: ARG002 - every layer is called alike
        """[B, T, hidden] -> [B, T, hidden]."""
        return Stepped(self.block(rows))

    def choices(self) -> dict[str, Choice]:
        """It has nothing to choose."""
        return {}

    def native_state_dict(self) -> dict[str, Any]:
        """The weights under their own names."""
        return copy_weights(self.block)

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        take_weights(self.block, state)


def norm_of_sum(norm: Any, rows: Any, added: Any, eps: float) -> tuple[Any, Any]:
    """The stream and its norm, both [B, T, hidden]: of the rows, and of what is still to be added to them, if anything.

    Args:
        norm: as `bridge.layer_spec.build_norm` makes it, with that eps.
        rows, added: as `Stepped` has them. A sum and its norm are one kernel.
    """
    if added is None:
        return rows, norm(rows)
    summed, normed = add_rms_norm(rows, added, norm.weight, eps)
    return summed, normed


def copy_weights(module: Any) -> dict[str, Any]:
    """The parameters, copied, without extra state of Transformer Engine."""
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def take_weights(module: Any, state: Mapping[str, Any]) -> None:
    """Copy every weight into the parameter of its name; what else a checkpoint of Transformer Engine has stays.

    Raises:
        WeightMismatch: other names, or another shape or dtype; all are named at once.
    """
    held = dict(module.named_parameters())
    shown = {name: (tuple(weight.shape), weight.dtype) for name, weight in held.items()}
    given = {name: (tuple(weight.shape), weight.dtype) for name, weight in state.items()}
    if faults := sorted(name for name in shown.keys() | given.keys() if shown.get(name) != given.get(name)):
        raise WeightMismatch(
            f"weights that do not fit a {type(module).__name__}: "
            f"{'; '.join(f'{name} is {given.get(name)}, wanted {shown.get(name)}' for name in faults)}. Likely cause: "
            "a model of other sizes or another dtype. Next step: build it with the size and dtype of the weights."
        )
    with torch.no_grad():
        for name, weight in held.items():
            weight.copy_(state[name])
