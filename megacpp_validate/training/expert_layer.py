"""The layer E of the hybrid model: a mixture of experts on the residual stream, built by the bridge."""

from __future__ import annotations

import re
from typing import Any, Final

import torch
from torch import nn

from ..bridge.backends import Candidate, Refusal, choose
from ..bridge.expert_gemm import ExpertGemm, TeExpertBank, why_bf16_is_faster
from ..bridge.fused import choose_residual_norm
from ..bridge.jagged_experts import jagged_moe, jagged_rows, why_not_fp8, why_not_fused
from ..bridge.layer_spec import build_norm
from ..bridge.permute import Dispatch, padded_moe
from ..native.mlp import MLP, activation
from ..native.router import Routing, TopKRouter
from .layers import Build, Layer, Stepped, norm_of_sum, take_weights
from .parallel.checks import share_of_balance_loss
from .parallel.exchange import ExpertExchange
from .sizes import Size

# Routing is a small product that decides a lot: its weight stays in fp32 (ST-MoE, arXiv:2202.08906, section 3).
ROUTER_DTYPE: Final = torch.float32
# Names of parameters of experts: the layer and, of a bank of Transformer Engine, the number of the expert on its rank.
EXPERT: Final = re.compile(r"^(layers\.\d+\.(?:up|down))\..*?weight(\d*)$")


class ExpertLayer(Layer):
    """E: norm, router, dispatch, gated experts, combination weighted by the router, residual connection.

    Shared experts, which take every token, are one MLP in the dtype of the rows, outside of any low precision. Where
    experts are distributed over ranks, this layer holds those of its own rank.

    Attributes:
        experts: numbers of the experts that lie here.
        exchange: of rows with the other ranks; None where all experts lie here.
        last: rows of each expert as they were permuted, and the routing map [T, E] bool, of the last pass with an
            audit; None where rows are not permuted on their own.
    """

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        self.size, self.build, self.spread = size, build, build.spread
        made = {"features": build.features, **build.made}
        self.norm = build_norm(size.hidden, eps=size.eps, **build.bridged)
        self.router = build_router(size, build.device)
        self.shared = build_shared(size, build.dtype, build.device)
        self.dispatch = Dispatch(size.num_experts, features=build.features)
        self.experts = self.spread.experts(size.num_experts)
        backends = build.forms.expert_backends if build.forms.moe == "bridge" else ("native",)
        experts = {"num_experts": len(self.experts), "backends": backends, **made}
        self.up = ExpertGemm(in_features=size.hidden, out_features=2 * size.expert_width, **experts)
        self.down = ExpertGemm(in_features=size.expert_width, out_features=size.hidden, **experts)
        self.exchange: Any = None
        if self.spread.plan.expert_parallel > 1:
            self.exchange = ExpertExchange(
                size.num_experts, group=self.spread.expert_group, features=build.features, audit=self.spread.audit
            )
        self.last: tuple[Any, Any] | None = None
        self.parts = ("norm", "up", "down", "dispatch") if build.forms.moe == "bridge" else ("norm", "dispatch")
        if build.forms.fused_residual_norm:
            self._choices["residual_norm"] = choose_residual_norm(size.hidden, **build.made)

    def forward(self, rows: Any, rope: tuple[Any, Any], added: Any = None) -> Stepped:  # noqa: ARG002
        """[B, T, hidden] -> [B, T, hidden], with the losses of its router; `rope` is every layer's."""
        stream, normed = norm_of_sum(self.norm, rows, added, self.size.eps)
        tokens = normed.flatten(0, 1)
        routing = self.router(tokens)
        mixed = self._mix(tokens, routing)
        if self.shared is not None:
            mixed = mixed + self.shared(tokens)
        mixed, loss = mixed.unflatten(0, rows.shape[:2]), self._share(routing)
        if self.build.forms.fused_residual_norm:
            return Stepped(stream, loss, mixed)
        return Stepped(stream + mixed, loss)

    def load_drawn(self, router: Any, shared: Any, experts: Any) -> None:
        """Take first weights, rounded to the dtypes here.

        Args:
            router, shared: modules of a whole layer, in fp32.
            experts: up [2F, hidden], the gate first, and down [hidden, F] of each expert of this rank, one at a time.
        """
        nn.init.ones_(self.norm.weight)
        for own, drawn in ((self.router, router), (self.shared, shared)):
            if own is not None:
                take_weights(dict(own.named_parameters()), dict(drawn.named_parameters()))
        with torch.no_grad():
            for place, both in enumerate(experts):
                for gemm, weight in zip((self.up, self.down), both, strict=True):
                    bank = gemm.bank
                    into = bank.weight_of(place) if isinstance(bank, TeExpertBank) else bank.weight[place]
                    into.copy_(weight)

    def named_weights(self) -> dict[str, Any]:
        """The weights of everything but the experts: norm, router, and shared experts if any."""
        return {name: one for name, one in self.named_parameters() if not name.startswith(("up.", "down."))}

    def _mix(self, tokens: Any, routing: Any) -> Any:
        """Tokens [T, hidden] through the experts of the router."""
        if self.build.forms.moe != "bridge":
            self._note_path(tokens)
            if self.exchange is None:
                return self._mix_at_once(tokens, routing)
        sent, received = self.lay_out(tokens, routing.routing_map)
        if self.spread.audit:
            self.last = sent.rows_per_expert, routing.routing_map.detach()
        if self.exchange is None:
            rows = self._run_experts(sent.rows, sent.rows_per_expert)
        else:
            rows = self.exchange.run(sent.rows, list(sent.rows_per_expert), received, self._run_experts)
        return self.dispatch.unpermute(rows, sent.row_map, probs=routing.probs)

    def lay_out(self, tokens: Any, routing_map: Any) -> tuple[Any, list[int]]:
        """Rows by expert, and with experts on other ranks the numbers of rows that arrive here."""
        if self.exchange is None:
            return self.dispatch.permute(tokens, None, routing_map), []
        counts, received = self.exchange.exchange_counts(routing_map.sum(0))
        return self.dispatch.permute(tokens, None, routing_map, rows_per_expert=counts), received

    def _run_experts(self, rows: Any, rows_per_expert: Any) -> Any:
        """Rows by expert through the experts that lie here."""
        if self.build.forms.moe == "jagged":
            return jagged_rows(rows, rows_per_expert, self.up.bank.weight, self.down.bank.weight)
        return self.down(activation(self.up(rows, rows_per_expert), "swiglu"), rows_per_expert)

    def _mix_at_once(self, tokens: Any, routing: Any) -> Any:
        """The paths that are one function from tokens to tokens, on one rank."""
        up, down = self.up.bank.weight, self.down.bank.weight
        if self.build.forms.moe == "padded":
            return padded_moe(tokens, routing.routing_map, routing.probs, up, down, features=self.build.features)
        weights, chosen = routing.probs.topk(self.size.top_k, dim=-1)  # of one that is 0 any number will do
        low = self._choices["experts"].observed == "deep_gemm"
        fp8 = (self.up.quantized_weight(), self.down.quantized_weight()) if low else None
        return jagged_moe(tokens, chosen, weights, up, down, fp8=fp8)

    def _note_path(self, tokens: Any) -> None:
        """Choose between products in FP8, in the dtype of the rows, and a loop over the experts."""
        forms, up, down = self.build.forms, self.up.bank.weight, self.down.bank.weight
        why = why_not_fused(tokens, up, down) if forms.moe == "jagged" else ""
        refusal = Refusal(forms.moe, "not-fused", why) if why else None
        candidates: list[Candidate] = [(forms.moe, lambda: refusal), ("loop", lambda: None)]
        if forms.moe == "jagged" and self.exchange is None and "deep_gemm" in forms.expert_backends:
            rows = len(tokens) * self.size.top_k / self.size.num_experts
            path = "jagged" if self.spread.plan.accumulate == 1 else "jagged-kept"
            low = why_not_fp8(tokens, self.size.top_k, up, down) or why_bf16_is_faster([rows], path)
            candidates.insert(0, ("deep_gemm", lambda: low))
        self._choices["experts"] = choose("expert_path", candidates)

    def _share(self, routing: Routing) -> Any:
        """[] this rank's share of the router's two losses; shares sum to those of the whole step.

        The z-loss is a mean over tokens. The load-balancing loss multiplies two means; the one without a gradient is
        counted over all ranks. Both are of one pass: plans agree that accumulate alike.
        """
        spread = self.spread
        aux = routing.aux_loss
        if spread.token_group is not None:
            probs = routing.logits.softmax(dim=-1)
            aux = self.size.aux_coefficient * share_of_balance_loss(probs, routing.routing_map, spread.token_group)
        return aux / spread.plan.accumulate + routing.z_loss * spread.share


def build_router(size: Size, device: Any) -> TopKRouter:
    """The router of an E-layer, in fp32."""
    return TopKRouter(
        size.hidden,
        size.num_experts,
        size.top_k,
        aux_coefficient=size.aux_coefficient,
        z_coefficient=size.z_coefficient,
        normalize=size.top_k > 1,
        dtype=ROUTER_DTYPE,
        device=device,
    )


def build_shared(size: Size, dtype: Any, device: Any) -> MLP | None:
    """The experts that take every token: one gated MLP as wide as all of them, which computes the same.

    Source: Dai et al. 2024, DeepSeekMoE, arXiv:2401.06066, section 3.2.
    """
    if not size.shared_experts:
        return None
    return MLP(size.hidden, size.shared_experts * size.expert_width, activation="swiglu", dtype=dtype, device=device)
