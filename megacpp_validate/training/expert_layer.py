"""The layer E of the hybrid model: a mixture of experts on the residual stream, built by the bridge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch
from torch import nn

from ..bridge.backends import Candidate, Choice, Refusal, choose
from ..bridge.expert_gemm import ExpertGemm, TeExpertBank
from ..bridge.jagged_experts import jagged_moe, why_not_fused
from ..bridge.jagged_router import choose_experts
from ..bridge.layer_spec import build_norm
from ..bridge.padded_experts import padded_moe
from ..bridge.permute import Dispatch
from ..bridge.residual_norm import choose_residual_norm
from ..native.mlp import MLP, gated_activation
from ..native.router import Routing, TopKRouter, choose_top_k, router_z_loss
from .errors import WrongSize
from .layers import Build, Stepped, copy_weights, norm_of_sum, take_weights
from .parallel.expert_parallel import ExpertExchange
from .parallel.jagged_exchange import JaggedExchange
from .parallel.token_counts import TokenCounts, share_of_balance_loss
from .sizes import Size

# What routes is a small product that decides a lot: its weight stays in fp32 (ST-MoE, arXiv:2202.08906, section 3).
ROUTER_DTYPE: Final = torch.float32


@dataclass(frozen=True, eq=False)
class LastDispatch:
    """What `parallel.token_counts.check_conservation` compares.

    Attributes:
        counts: rows that were sent and received.
        routing_map: [T, E] bool, what the router chose.
    """

    counts: TokenCounts
    routing_map: Any


@dataclass(frozen=True, eq=False)
class NumberedRouting(Routing):
    """A routing that has the numbers of the chosen experts too.

    Attributes:
        chosen: int64 [T, k].
        weights: [T, k] fp32 at least.
    """

    chosen: Any
    weights: Any


class NumberingRouter(TopKRouter):
    """The same router, which also says which experts it chose by number, where there is no capacity."""

    def forward(self, tokens: Any, *, capacity: int | None = None) -> Routing:
        """Route, as `TopKRouter` does."""
        if capacity is not None:
            return super().forward(tokens, capacity=capacity)
        found = choose_experts(
            tokens, self.weight, self.top_k, aux_coefficient=self.aux_coefficient, normalize=self.normalize
        )
        nothing = torch.zeros_like(found.logits)
        return NumberedRouting(
            probs=nothing.scatter(1, found.chosen, found.weights),
            routing_map=nothing.bool().scatter(1, found.chosen, True),
            logits=found.logits,
            aux_loss=found.aux_loss,
            z_loss=self.z_coefficient * router_z_loss(found.logits),
            chosen=found.chosen,
            weights=found.weights,
        )


class ExpertLayer(nn.Module):
    """E: norm, router, dispatch, gated experts, combination weighted by the router, residual connection.

    Experts that every token goes to are one MLP beside them, in the dtype of the rows; no low precision reaches it.
    Where experts are shared out over ranks, this layer holds those of its own rank, and its weights are theirs alone.

    Attributes:
        experts: numbers of the experts that lie here.
        exchange: of rows with the other ranks, for its way to the experts; None where all experts lie here.
        last: of the last pass, where the spread is audited and rows are exchanged; else None.

    Raises:
        WrongSize: a way to the experts that there is on one rank only, with experts on several.
    """

    def __init__(self, size: Size, build: Build) -> None:
        super().__init__()
        self.size, self.build, self.spread = size, build, build.spread
        _check_forms(build)
        made = {"dtype": build.dtype, "device": build.device, "features": build.features}
        self.norm = build_norm(size.hidden, eps=size.eps, **made)
        self.router = build_router(size, build.device, numbered=build.forms.moe == "jagged")
        self.shared = build_shared(size, build.dtype, build.device)
        self.dispatch = Dispatch(size.num_experts, features=build.features)
        self.experts = self.spread.experts(size.num_experts)
        backends = build.forms.expert_backends if build.forms.moe == "bridge" else ("native",)
        experts = {"num_experts": len(self.experts), "backends": backends, **made}
        self.up = ExpertGemm(in_features=size.hidden, out_features=2 * size.expert_width, **experts)
        self.down = ExpertGemm(in_features=size.expert_width, out_features=size.hidden, **experts)
        self.exchange = build_exchange(size, build)
        self.last: LastDispatch | None = None
        self.path: Choice | None = None
        self.joined: Choice | None = None
        if build.forms.fused_residual_norm:
            self.joined = choose_residual_norm(size.hidden, dtype=build.dtype, device=build.device)

    def forward(self, rows: Any, rope: tuple[Any, Any], added: Any = None) -> Stepped:  # noqa: ARG002
        """[B, T, hidden] -> [B, T, hidden], with the routing of its B * T tokens; `rope` is every layer's."""
        stream, normed = norm_of_sum(self.norm, rows, added, self.size.eps)
        tokens = normed.flatten(0, 1)
        routing = self.router(tokens, capacity=capacity_of(self.size, tokens.shape[0]))
        mixed = self._mix(tokens, routing)
        if self.shared is not None:
            mixed = mixed + self.shared(tokens)
        mixed, routing = mixed.unflatten(0, rows.shape[:2]), self._share(routing)
        if self.build.forms.fused_residual_norm:
            return Stepped(stream, routing, mixed)
        return Stepped(stream + mixed, routing)

    def choices(self) -> dict[str, Choice]:
        """Part -> what the last call took."""
        seen = {"norm": self.norm.choice}
        if self.build.forms.moe == "bridge":
            seen |= {"up": self.up.choice, "down": self.down.choice}
        seen |= {} if self.path is None else {"experts": self.path}
        seen |= {} if self.joined is None else {"residual_norm": self.joined}
        return seen if self.dispatch.choice is None else {**seen, "dispatch": self.dispatch.choice}

    def native_state_dict(self) -> dict[str, Any]:
        """norm.weight, router.weight, up.weight [E, 2F, hidden] (the gate first), down.weight [E, hidden, F].

        E are the experts that lie here. Shared experts add shared.fc1_weight and shared.fc2_weight.
        """
        parts = {
            "norm": copy_weights(self.norm),
            "router": copy_weights(self.router),
            "up": self.up.native_state_dict(),
            "down": self.down.native_state_dict(),
            "shared": {} if self.shared is None else copy_weights(self.shared),
        }
        return {f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()}

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take such weights, exactly."""
        self.load_rest(state)
        self.up.load_native_state_dict({"weight": state["up.weight"]})
        self.down.load_native_state_dict({"weight": state["down.weight"]})

    def load_rest(self, state: Mapping[str, Any]) -> None:
        """Take the weights of all but the experts of the router."""
        take_weights(self.norm, {"weight": state["norm.weight"]})
        take_weights(self.router, {"weight": state["router.weight"]})
        if self.shared is not None:
            start = "shared."
            shared = {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
            take_weights(self.shared, shared)

    def load_expert(self, place: int, up: Any, down: Any) -> None:
        """Take the weights of the expert at this place among those that lie here, rounded to their dtype.

        Args:
            place: from 0.
            up: [2F, hidden], the gate first.
            down: [hidden, F].
        """
        with torch.no_grad():
            for gemm, weight in ((self.up, up), (self.down, down)):
                bank = gemm.bank
                into = bank.weight_of(place) if isinstance(bank, TeExpertBank) else bank.weight[place]
                into.copy_(weight)

    def _mix(self, tokens: Any, routing: Routing) -> Any:
        """What the experts of the router make of the tokens [T, hidden]."""
        if self.build.forms.moe != "bridge":
            mixed = self._mix_at_once(tokens, routing)
        else:
            sent = self.dispatch.permute(tokens, None, routing.routing_map)
            if isinstance(self.exchange, ExpertExchange):
                out = self.exchange.run(sent.rows, sent.rows_per_expert, self._run_experts)
            else:
                out = self._run_experts(sent.rows, sent.rows_per_expert)
            mixed = self.dispatch.unpermute(out, sent.row_map, probs=routing.probs)
        if self.exchange is not None and self.spread.audit and self.exchange.counts is not None:
            self.last = LastDispatch(self.exchange.counts, routing.routing_map.detach())
        return mixed

    def _run_experts(self, rows: Any, rows_per_expert: Any) -> Any:
        inner = gated_activation(self.up(rows, rows_per_expert), "swiglu")
        return self.down(inner, rows_per_expert)

    def _mix_at_once(self, tokens: Any, routing: Routing) -> Any:
        """The paths that are one function from tokens to tokens."""
        up, down, features = self.up.bank.weight, self.down.bank.weight, self.build.features
        if self.path is None:
            self.path = choose("expert_path", _paths(self.build.forms.moe, tokens, up, down))
        if self.build.forms.moe == "padded":
            return padded_moe(tokens, routing.routing_map, routing.probs, up, down, features=features)
        chosen, weights = chosen_of(routing, self.size.top_k)
        if isinstance(self.exchange, JaggedExchange):
            return self.exchange.run(tokens, chosen, weights, up, down)
        return jagged_moe(tokens, chosen, weights, up, down)

    def _share(self, routing: Routing) -> Routing:
        """The routing with this rank's shares of its losses, which sum to those of the whole step.

        The z-loss is a mean over tokens. The load-balancing loss is not: it multiplies two means, and the one that has
        no gradient is counted over all ranks. Both are of one pass: plans agree that accumulate alike.
        """
        spread, size = self.spread, self.size
        routing = Routing(**{one.name: getattr(routing, one.name) for one in fields(Routing)})  # FSDP2 knows that one
        if spread.share == 1 and spread.token_group is None:
            return routing
        aux = routing.aux_loss
        if spread.token_group is not None:
            chosen = routing.routing_map if not size.capacity_factor else choose_top_k(routing.logits, size.top_k)
            probs = routing.logits.softmax(dim=-1)
            aux = size.aux_coefficient * share_of_balance_loss(probs, chosen, spread.token_group)
        return replace(routing, aux_loss=aux / spread.plan.accumulate, z_loss=routing.z_loss * spread.share)


def build_exchange(size: Size, build: Build) -> ExpertExchange | JaggedExchange | None:
    """What takes rows to the experts of other ranks; None where all lie here."""
    spread = build.spread
    if spread.plan.expert_parallel == 1:
        return None
    if build.forms.moe == "jagged":
        return JaggedExchange(size.num_experts, group=spread.expert_group, audit=spread.audit)
    return ExpertExchange(size.num_experts, group=spread.expert_group, features=build.features, audit=spread.audit)


def build_router(size: Size, device: Any, *, numbered: bool = False) -> TopKRouter:
    """The router of an E-layer, in fp32; `numbered` where the way to the experts takes their numbers."""
    return (NumberingRouter if numbered else TopKRouter)(
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
    """The experts that every token goes to: one gated MLP as wide as all of them, which computes the same.

    Source: Dai et al. 2024, DeepSeekMoE, arXiv:2401.06066, section 3.2.
    """
    if not size.shared_experts:
        return None
    return MLP(size.hidden, size.shared_experts * size.expert_width, activation="swiglu", dtype=dtype, device=device)


def capacity_of(size: Size, tokens: int) -> int | None:
    """How many tokens an expert takes at most; None drops nothing.

    Why it counts this rank's tokens alone: which token is the last that fits depends on all before it, and ranks would
    have to wait for each other's counts before they route. So an expert takes up to this many from each rank, and a
    plan with a capacity reproduces the run of one rank only where nothing is dropped.

    Args:
        size: with capacity_factor, top_k and num_experts.
        tokens: of this rank, T.
    """
    if not size.capacity_factor:
        return None
    return math.ceil(size.capacity_factor * tokens * size.top_k / size.num_experts)


def chosen_of(routing: Routing, top_k: int) -> tuple[Any, Any]:
    """The experts of each token by number, int64 [T, k], and their weights [T, k]; the host does not wait.

    A token that a capacity took an expert from has another one in its place, with weight 0.
    """
    if isinstance(routing, NumberedRouting):
        return routing.chosen, routing.weights
    routed, experts = routing.routing_map, routing.routing_map.shape[1]
    numbers = torch.arange(experts, device=routed.device)
    keys = torch.where(routed, experts, 0) - numbers  # no two are equal, so that topk has no choice
    chosen = keys.topk(top_k, dim=-1).indices
    return chosen, routing.probs.gather(1, chosen)


def _paths(moe: str, tokens: Any, up: Any, down: Any) -> list[Candidate]:
    """What a path that is one function is made of here: "jagged" is a loop over the experts where nothing is fused."""
    refused = why_not_fused(tokens, up, down) if moe == "jagged" else ""
    asked = [(moe, lambda: Refusal(moe, "not-fused", refused) if refused else None)]
    return [*asked, ("loop", lambda: None)]


def _check_forms(build: Build) -> None:
    if build.forms.moe == "padded" and build.spread.plan.expert_parallel > 1:
        raise WrongSize(
            f"the way {build.forms.moe!r} to the experts with experts shared out over "
            f"{build.spread.plan.expert_parallel} ranks: it is one function from tokens to tokens, and has no place "
            'for an exchange of rows. Next step: moe="bridge" or "jagged", or expert_parallel 1.'
        )
