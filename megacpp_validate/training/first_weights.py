"""Layers with their first weights, which no backend has a part in.

Whatever the bridge builds a layer of, it starts from the weights of the native layer of its kind, drawn from the seed
and the layer's name: builds by Transformer Engine, native and mixed ones start from the same numbers. Each expert is
drawn for itself, by its number: a rank draws those that it holds, one at a time, and has the numbers of every plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import nn

from ..bridge.attention import Attention
from ..bridge.backends import Choice, choose
from ..bridge.features import PRESETS
from ..bridge.layer_spec import build_mlp, build_norm
from ..bridge.residual_norm import choose_residual_norm
from ..bridge.rotation import turn_heads
from ..native.mla import LatentIngress
from ..native.norms import INIT_STD
from ..native.rope import rope_tables
from .errors import WrongSize
from .expert_layer import ExpertLayer, build_router, build_shared
from .language import drawn_from, generator_of
from .layers import AttentionLayer, Build, MambaLayer, RecurrentLayer, Stepped, copy_weights, norm_of_sum, take_weights
from .sizes import Letter, Size

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


# --- mla
#
# The layer A as multi-head latent attention: pre-norm, latent attention, residual connection, MLP with its own.


class MlaLayer(nn.Module):
    """A of a size whose attention is "mla" (`native.mla`), called as the other layers are.

    Projections are plain products on every path; attention is that of `bridge.attention`, over whole heads with as many
    keys as queries; MLP and norms are the bridge's. It works on whole sequences from position 0: where positions are
    split between layers, they are gathered before it.

    Attributes:
        norm: in front of the attention.
        ingress: `native.mla.LatentIngress`, one product or three over the normed rows (`Forms.fused_mla_ingress`).
        attention: `bridge.attention.Attention`.
        out: nn.Linear, [hidden, H * D].
        mlp: norm and MLP in one.
        cos, sin: [size.length, rope_dim / 2].
    """

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        made = {"dtype": build.dtype, "device": build.device}
        bridged = {"eps": size.eps, "features": build.features, **made}
        self.eps = size.eps
        self.norm = build_norm(size.hidden, **bridged)
        self.ingress = LatentIngress(
            size.hidden,
            num_heads=size.num_heads,
            head_dim=size.head_dim,
            latent=size.kv_latent,
            rope_dim=size.rope_dim,
            fused=build.forms.fused_mla_ingress,
            latent_norm=build_norm(size.kv_latent, **bridged),
            **made,
        )
        self.attention = Attention(
            num_heads=size.num_heads,
            head_dim=size.head_dim,
            num_gqa_groups=size.num_heads,
            features=build.features,
            device=build.device,
        )
        self.out = nn.Linear(size.num_heads * size.head_dim, size.hidden, bias=False, **made)
        nn.init.normal_(self.out.weight, std=INIT_STD)
        self.mlp = build_mlp(size.hidden, size.ffn_hidden, activation="swiglu", **bridged)
        cos, sin = rope_tables(size.length, size.rope_dim, device=build.device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.form = choose("mla_ingress", [("fused" if build.forms.fused_mla_ingress else "separate", lambda: None)])
        self.joined: Choice | None = None
        if build.forms.fused_residual_norm:
            self.joined = choose_residual_norm(size.hidden, **made)

    def forward(self, rows: Any, rope: tuple[Any, Any], added: Any = None) -> Stepped:  # noqa: ARG002 - as all layers
        """One step of the residual stream.

        Args:
            rows: [B, T, hidden], T up to the size's length.
            rope: not read; the tables of the slice that carries positions are the layer's own.
            added: [B, T, hidden], what the layer before adds to the stream and has not added yet.

        Returns:
            The stream; with `Forms.fused_residual_norm` the MLP's part of it is left to the norm behind the layer.
        """
        rows, normed = norm_of_sum(self.norm, rows, added, self.eps)
        query, key, value = self.ingress(normed, self.cos, self.sin, turn=turn_heads)
        seen = self.attention(query, key, value)
        rows = rows + self.out(seen.transpose(1, 2).flatten(2))
        step = self.mlp(rows)
        return Stepped(rows + step) if self.joined is None else Stepped(rows, added=step)

    def choices(self) -> dict[str, Choice]:
        """Part -> what it is made of, or what its last call took."""
        seen = {
            "norm": self.norm.choice,
            "ingress": self.form,
            "latent_norm": self.ingress.latent_norm.choice,
            "mlp": self.mlp.choice,
        }
        seen |= {} if self.joined is None else {"residual_norm": self.joined}
        return seen if self.attention.choice is None else {**seen, "attention": self.attention.choice}

    def native_state_dict(self) -> dict[str, Any]:
        """A copy of the weights under the names of the plain form, the same for both forms of the ingress.

        norm.weight, query.weight [H * D, hidden], latent.weight [kv_latent, hidden], rope_key.weight
        [rope_dim, hidden], latent_norm.weight, up.weight (`LatentIngress`), out.weight [hidden, H * D],
        mlp.layer_norm_weight, mlp.fc1_weight, mlp.fc2_weight.
        """
        return {name: weight.detach().clone() for name, weight in self.named_weights().items()}

    def named_weights(self) -> dict[str, Any]:
        """The weights themselves under those names, with their graph."""
        return {
            "norm.weight": self.norm.weight,
            **self.ingress.named_weights(),
            "out.weight": self.out.weight,
            **{f"mlp.{name}": weight for name, weight in self.mlp.named_parameters()},
        }

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly.

        Raises:
            WeightMismatch: a name is missing or unknown, or a weight has another shape or dtype.
        """
        with torch.no_grad():  # so that parts of a fused weight are views of it that may be written to
            take_weights(MlaWeights(self.named_weights()), state)


class MlaWeights:
    """Weights of an `MlaLayer` by name, as `take_weights` fills them."""

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """Name and weight, or part of a weight."""
        return self._named.items()
