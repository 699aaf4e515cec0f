"""The layers A, M and R of the hybrid model: each a step of the residual stream, built by the bridge.

All layers are called alike, and give and take their weights under native names whatever they are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..bridge.attention import Attention, Masks
from ..bridge.backends import Choice, choose
from ..bridge.features import PRODUCTION, Features
from ..bridge.fused import add_rms_norm, choose_residual_norm, compiled_scan, turn_heads
from ..bridge.layer_spec import build_mamba_mixer, build_mlp, build_norm, native_layer_spec
from ..bridge.native_block import NativeBlock
from ..bridge.recipes import RecipeName
from ..native.attention import rope_tables
from ..native.block import ABlock, LatentIngress
from ..native.norms import INIT_STD
from ..native.router import Routing
from ..native.sparse_attention import IndexCache, SampledBlock, route_blocks
from .parallel.plan import ALONE, Spread
from .sizes import Forms, Size


@dataclass(frozen=True)
class Build:
    """How a model is built.

    Attributes:
        features: what may use Transformer Engine.
        dtype: of the parameters; the router's is fp32.
        device: where the parameters lie.
        recipe: low precision of the layers outside of the BF16 zones, if any; a layer whose widths do not fit the
            recipe stays native.
        forms: the form of each part.
        spread: place of this rank among others.
    """

    features: Features = PRODUCTION
    dtype: Any = torch.float32
    device: Any = "cpu"
    recipe: RecipeName | None = None
    forms: Forms = field(default_factory=Forms)
    spread: Spread = ALONE

    @property
    def made(self) -> dict[str, Any]:
        """Keyword arguments of a module: dtype and device."""
        return {"dtype": self.dtype, "device": self.device}

    @property
    def bridged(self) -> dict[str, Any]:
        """Keyword arguments of a norm or an MLP of the bridge."""
        return {"features": self.features, "liger": self.forms.liger, **self.made}


@dataclass(frozen=True, eq=False)
class Stepped:
    """Output of a layer.

    Attributes:
        rows: [B, T, hidden]: the stream after the layer, without `added`.
        loss: [] this rank's share of the layer's own loss, of its router or indexer; None where it has none.
        picked: tokens that a D-layer picked, for those behind it that reuse them.
        added: [B, T, hidden] that the next norm adds to the rows in its own kernel; None where the rows are complete.
    """

    rows: Any
    loss: Any = None
    added: Any = None
    picked: IndexCache | None = None

    def whole(self) -> Any:
        """The stream after the layer, [B, T, hidden]."""
        return self.rows if self.added is None else self.rows + self.added


# FSDP2 and the watch for values that are not finite find tensors in what is registered.
pytree.register_dataclass(Stepped)
pytree.register_dataclass(IndexCache)
pytree.register_dataclass(Routing)


class Layer(nn.Module):
    """A layer of the stream, called as layer(rows, rope): [B, T, hidden] -> `Stepped`.

    Attributes:
        inner: name of the submodule that holds the weights.
        parts: attributes that keep the choice of their last call; a path is named by its last word.
    """

    inner: ClassVar[str] = "block"
    parts: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self._choices: dict[str, Choice] = {}

    def choices(self) -> dict[str, Choice]:
        """Part -> backend that it uses, or that its last call used; without a part that was not called yet."""
        last = {path.rpartition(".")[2]: attrgetter(path)(self).choice for path in self.parts}
        return {**self._choices, **{name: one for name, one in last.items() if one is not None}}

    def named_weights(self) -> dict[str, Any]:
        """The weights themselves under native names, of a layer that Transformer Engine does not hold."""
        return dict(getattr(self, self.inner).named_parameters())

    def native_state_dict(self) -> dict[str, Any]:
        """A copy of the weights under native names."""
        inner: Any = getattr(self, self.inner, None)
        if hasattr(inner, "native_state_dict"):
            return inner.native_state_dict()
        return {name: weight.detach().clone() for name, weight in self.named_weights().items()}

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        inner: Any = getattr(self, self.inner, None)
        if hasattr(inner, "load_native_state_dict"):
            inner.load_native_state_dict(state)
        else:
            with torch.no_grad():  # so that parts of a fused weight are views of it that may be written to
                take_weights(self.named_weights(), state)


class AttentionLayer(Layer):
    """A: the whole A-block of `bridge.native_block`, both residual connections in it.

    Attributes:
        block: the A-block.
    """

    parts: tuple[str, ...] = ("block",)

    def __init__(self, size: Size, build: Build, **split: Any) -> None:
        super().__init__()
        made = {"activation": "swiglu", "features": build.features, **build.made}
        self.block: Any = NativeBlock(**size.block, **made, **split)

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:
        """[B, T, hidden] -> [B, T, hidden]; `rope` is (cos, sin), each [at least T, D/2]."""
        return Stepped(self.block(rows, rope=rope))


class RoutedLayer(Layer):
    """A of a size whose attention is "moba": the native A-block, over routed key blocks by `bridge.attention`."""

    parts = ("attention",)

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        self.routed, made = {"block_size": size.moba_block, "top_k": size.moba_top_k}, size.block
        self.block = ABlock(**made, **build.made)
        heads = {name: made[name] for name in ("num_heads", "head_dim", "num_gqa_groups")}
        self.attention = Attention(**heads, features=build.features, device=build.device)

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:
        """[B, T, hidden] -> [B, T, hidden]; `rope` is (cos, sin), each [at least T, D/2]."""
        query, key, value = self.block.heads(rows, rope)
        blocks = route_blocks(query, key, **self.routed)
        seen = self.attention(query, key, value, block_mask=blocks, block_size=self.routed["block_size"])
        return Stepped(self.block.leave(rows, seen))


class SampledLayer(Layer):
    """D: the A-block over the tokens that its indexer picks; native on every path.

    Args:
        size, build: as of every layer.
        picks: False for an S, which has no indexer and reuses the tokens of the last D before it.
    """

    def __init__(self, size: Size, build: Build, *, picks: bool = True) -> None:
        super().__init__()
        heads, numbers = size.index_heads if picks else 0, {**size.block, **build.made}
        self.block = SampledBlock(heads, index_top_k=size.index_top_k, index_window=size.index_window, **numbers)
        self.share = build.spread.share
        refused = partial(Masks(indices=()).refused_by, "te")
        self._choices = {"attention": choose("attention", [("te", refused), ("native", lambda: None)])}

    def forward(self, rows: Any, rope: tuple[Any, Any], picked: IndexCache | None = None) -> Stepped:
        """[B, T, hidden] -> [B, T, hidden]; `picked` are the tokens of the last D-layer."""
        rows, picked, loss = self.block(rows, rope=rope, cache=picked)
        return Stepped(rows, None if loss is None else loss * self.share, picked=picked)


class MambaLayer(Layer):
    """M: the Mamba-2 mixer behind its norm, and the residual connection around it."""

    inner = "mixer"

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        numbers = {**size.mixer, **build.made}
        self.mixer = build_mamba_mixer(size.hidden, features=build.features, recipe=build.recipe, **numbers)
        self._choices = {"in_projection": self.mixer.choice}
        if build.forms.compiled_scan:
            self.mixer.scan, self._choices["scan"] = compiled_scan(build.device)

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:  # noqa: ARG002 - every layer is called alike
        """[B, T, hidden] -> [B, T, hidden]."""
        return Stepped(rows + self.mixer(rows))


class RecurrentLayer(Layer):
    """R: the matrix-state block, residual connection in it; native on every path."""

    def __init__(self, size: Size, build: Build, *, heads: int = 0) -> None:
        super().__init__()
        self.block = native_layer_spec()["R"](
            size.hidden,
            num_heads=heads or size.recurrent_heads,
            key_dim=size.recurrent_key_dim,
            value_dim=size.recurrent_value_dim,
            chunk=size.chunk,
            eps=size.eps,
            **build.made,
        )

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:  # noqa: ARG002 - every layer is called alike
        """[B, T, hidden] -> [B, T, hidden]."""
        return Stepped(self.block(rows))


class MlaLayer(Layer):
    """A of a size whose attention is "mla" (`native.block`): norm, latent attention, residual connection, MLP.

    Projections are plain products on every path; attention is `bridge.attention` over whole heads with as many keys as
    queries; MLP and norms are the bridge's.

    Attributes:
        norm: before the attention.
        ingress: `native.block.LatentIngress`, one product or three over the normed rows (`Forms.fused_mla_ingress`).
        attention: `bridge.attention.Attention`.
        out: nn.Linear, [hidden, H * D].
        mlp: norm and MLP in one.
        cos, sin: [size.length, rope_dim / 2].
    """

    parts = ("norm", "ingress.latent_norm", "mlp", "attention")

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        bridged = {"eps": size.eps, **build.bridged}
        heads: dict[str, Any] = {"num_heads": size.num_heads, "head_dim": size.head_dim}
        self.eps = size.eps
        self.norm = build_norm(size.hidden, **bridged)
        self.ingress = LatentIngress(
            size.hidden,
            latent=size.kv_latent,
            rope_dim=size.rope_dim,
            fused=build.forms.fused_mla_ingress,
            latent_norm=build_norm(size.kv_latent, **bridged),
            **heads,
            **build.made,
        )
        made = {"features": build.features, "device": build.device}
        self.attention = Attention(num_gqa_groups=size.num_heads, **heads, **made)
        self.out = nn.Linear(size.num_heads * size.head_dim, size.hidden, bias=False, **build.made)
        nn.init.normal_(self.out.weight, std=INIT_STD)
        self.mlp = build_mlp(size.hidden, size.ffn_hidden, activation="swiglu", **bridged)
        cos, sin = rope_tables(size.length, size.rope_dim, device=build.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        form = "fused" if build.forms.fused_mla_ingress else "separate"
        self._choices = {"ingress": choose("mla_ingress", [(form, lambda: None)])}
        if build.forms.fused_residual_norm:
            self._choices["residual_norm"] = choose_residual_norm(size.hidden, **build.made)

    def forward(self, rows: Any, rope: tuple[Any, Any], added: Any = None) -> Stepped:  # noqa: ARG002 - as all layers
        """One step of the residual stream.

        Args:
            rows: [B, T, hidden], T up to the size's length.
            rope: not read; the tables of the slice that carries positions are the layer's own.
            added: [B, T, hidden], the part of the stream that the layer before left to this norm.

        Returns:
            The stream; with `Forms.fused_residual_norm` the MLP's part of it is left to the next norm.
        """
        rows, normed = norm_of_sum(self.norm, rows, added, self.eps)
        query, key, value = self.ingress(normed, self.cos, self.sin, turn=turn_heads)
        seen = self.attention(query, key, value)
        rows = rows + self.out(seen.transpose(1, 2).flatten(2))
        step = self.mlp(rows)
        return Stepped(rows, added=step) if "residual_norm" in self._choices else Stepped(rows + step)

    def named_weights(self) -> dict[str, Any]:
        """The weights under the names of the plain form, the same for both forms of the ingress.

        norm.weight, query.weight [H * D, hidden], latent.weight [kv_latent, hidden], rope_key.weight
        [rope_dim, hidden], latent_norm.weight, up.weight (`LatentIngress`), out.weight [hidden, H * D],
        mlp.layer_norm_weight, mlp.fc1_weight, mlp.fc2_weight.
        """
        return {
            "norm.weight": self.norm.weight,
            **self.ingress.named_weights(),
            "out.weight": self.out.weight,
            **{f"mlp.{name}": weight for name, weight in self.mlp.named_parameters()},
        }


def norm_of_sum(norm: Any, rows: Any, added: Any, eps: float) -> tuple[Any, Any]:
    """The stream and its norm, both [B, T, hidden]: of the rows plus `added`, if anything.

    Args:
        norm: as `bridge.layer_spec.build_norm` makes it, with that eps.
        rows, added: as `Stepped` has them. A sum and its norm are one kernel.
    """
    if added is None:
        return rows, norm(rows)
    summed, normed = add_rms_norm(rows, added, norm.weight, eps)
    return summed, normed


def take_weights(held: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Copy every weight into the parameter of its name."""
    with torch.no_grad():
        for name, weight in held.items():
            weight.copy_(state[name])
