"""The layer E of the hybrid model: a mixture of experts on the residual stream, built by the bridge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ..bridge.backends import Choice
from ..bridge.expert_gemm import ExpertGemm
from ..bridge.layer_spec import build_norm
from ..bridge.permute import Dispatch
from ..native.mlp import gated_activation
from ..native.router import TopKRouter
from .layers import Build, Stepped, copy_weights, take_weights
from .sizes import Size

# What routes is a small product that decides a lot: its weight stays in fp32 (ST-MoE, arXiv:2202.08906, section 3).
ROUTER_DTYPE: Final = torch.float32


class ExpertLayer(nn.Module):
    """E: norm, router, dispatch, gated experts, combination weighted by the router, residual connection.

    No token is dropped: the jagged layout has no capacity.
    """

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        made = {"dtype": build.dtype, "device": build.device, "features": build.features}
        self.norm = build_norm(size.hidden, eps=size.eps, **made)
        self.router = TopKRouter(
            size.hidden,
            size.num_experts,
            size.top_k,
            aux_coefficient=size.aux_coefficient,
            z_coefficient=size.z_coefficient,
            normalize=size.top_k > 1,
            dtype=ROUTER_DTYPE,
            device=build.device,
        )
        self.dispatch = Dispatch(size.num_experts, features=build.features)
        experts = {"num_experts": size.num_experts, **made}
        self.up = ExpertGemm(in_features=size.hidden, out_features=2 * size.expert_width, **experts)
        self.down = ExpertGemm(in_features=size.expert_width, out_features=size.hidden, **experts)

    def forward(self, rows: Any, rope: tuple[Any, Any]) -> Stepped:  # noqa: ARG002 - every layer is called alike
        """[B, T, hidden] -> [B, T, hidden], with the routing of its B * T tokens."""
        tokens = self.norm(rows).flatten(0, 1)
        routing = self.router(tokens)
        sent = self.dispatch.permute(tokens, None, routing.routing_map)
        inner = gated_activation(self.up(sent.rows, sent.rows_per_expert), "swiglu")
        out = self.down(inner, sent.rows_per_expert)
        mixed = self.dispatch.unpermute(out, sent.row_map, probs=routing.probs)
        return Stepped(rows + mixed.unflatten(0, rows.shape[:2]), routing)

    def choices(self) -> dict[str, Choice]:
        """Part -> what the last call took."""
        seen = {"norm": self.norm.choice, "up": self.up.choice, "down": self.down.choice}
        return seen if self.dispatch.choice is None else {**seen, "dispatch": self.dispatch.choice}

    def native_state_dict(self) -> dict[str, Any]:
        """norm.weight, router.weight, up.weight [E, 2F, hidden] (the gate first), down.weight [E, hidden, F]."""
        parts = {
            "norm": copy_weights(self.norm),
            "router": copy_weights(self.router),
            "up": self.up.native_state_dict(),
            "down": self.down.native_state_dict(),
        }
        return {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        take_weights(self.norm, {"weight": state["norm.weight"]})
        take_weights(self.router, {"weight": state["router.weight"]})
        self.up.load_native_state_dict({"weight": state["up.weight"]})
        self.down.load_native_state_dict({"weight": state["down.weight"]})
