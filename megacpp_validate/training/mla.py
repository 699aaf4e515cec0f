"""The layer A as multi-head latent attention: pre-norm, latent attention, residual connection, MLP with its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..bridge.attention import Attention
from ..bridge.backends import Choice, choose
from ..bridge.layer_spec import build_mlp, build_norm
from ..bridge.residual_norm import choose_residual_norm
from ..bridge.rotation import turn_heads
from ..native.mla import LatentIngress
from ..native.norms import INIT_STD
from ..native.rope import rope_tables
from .layers import Build, Stepped, norm_of_sum, take_weights
from .sizes import Size


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
