"""Mixture-of-experts router: token choice, the top k experts of each token.

Logits, probabilities and losses are computed in fp32 at least, whatever the dtype of the tokens. Sources: Shazeer et
al. 2017, arXiv:1701.06538 (top-k gating); Fedus et al. 2022, arXiv:2101.03961 (Switch Transformer: capacity and
load-balancing loss); Zoph et al. 2022, arXiv:2202.08906 (ST-MoE: router z-loss).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .norms import INIT_STD, without_autocast


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts each token goes to, and with what weight.

    Attributes:
        probs: [T, E] fp32 at least; 0 where the token is not routed.
        routing_map: [T, E] bool; a row without True is a token that was dropped everywhere.
        logits: [T, E] fp32 at least.
        aux_loss: [] the load-balancing loss times its coefficient: ready to be added to the loss.
        z_loss: [] the router z-loss times its coefficient: likewise.
    """

    probs: Any
    routing_map: Any
    logits: Any
    aux_loss: Any
    z_loss: Any


def load_balancing_loss(probs: Any, routing_map: Any) -> Any:
    """E * sum_e f_e * P_e, the loss of Switch Transformer (eq. 4) without its coefficient.

    f_e is the share of all assignments that went to expert e, before any is dropped, and P_e the mean probability of
    e. It is 1 where both are uniform. With k experts a token the assignments are T * k, so that k does not scale it.

    Args:
        probs: [T, E] softmax over all experts, not only the chosen ones.
        routing_map: [T, E] bool; no gradient flows through it.

    Returns:
        [] in the dtype of `probs`; 0 where there is no token.
    """
    num_tokens, num_experts = probs.shape
    assigned = routing_map.sum(dim=0).to(probs.dtype)
    share = assigned / assigned.sum().clamp(min=1)
    mean_prob = probs.sum(dim=0) / max(num_tokens, 1)
    return num_experts * (share * mean_prob).sum()


def router_z_loss(logits: Any) -> Any:
    """mean_t (log sum_e exp(logits_te))^2, the loss of ST-MoE (eq. 5) without its coefficient.

    Args:
        logits: [T, E].

    Returns:
        [] in the dtype of `logits`; 0 where there is no token.
    """
    return torch.logsumexp(logits, dim=-1).square().sum() / max(logits.shape[0], 1)


def choose_top_k(logits: Any, top_k: int) -> Any:
    """The `top_k` experts of each token by logit, [T, E] -> bool [T, E].

    Of equal logits the expert with the lower number wins, on every device: torch.topk promises no order there.
    """
    chosen = logits.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


def drop_over_capacity(routing_map: Any, capacity: int) -> Any:
    """Keep the first `capacity` tokens of each expert, by number of the token; bool [T, E] -> bool [T, E]."""
    return routing_map & (routing_map.cumsum(dim=0) <= capacity)


class TopKRouter(nn.Module):
    """Routes each token to the `top_k` experts of highest logit.

    Args:
        hidden: width of the tokens.
        num_experts: E.
        top_k: experts a token, 1 to E.
        aux_coefficient: of the load-balancing loss.
        z_coefficient: of the z-loss.
        normalize: whether the probabilities of the chosen experts are divided by their sum (Mixtral) or kept as the
            softmax over all gives them (Switch). With `top_k` 1 they would all become 1 and the router learn nothing
            from the loss of the model: use False there.
        dtype, device: of the weight.

    Attributes:
        weight: [E, hidden].
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        aux_coefficient: float = 0.0,
        z_coefficient: float = 0.0,
        normalize: bool = True,
        dtype: Any = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.aux_coefficient, self.z_coefficient = aux_coefficient, z_coefficient
        self.normalize = normalize
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, dtype=dtype, device=device))
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, tokens: Any) -> Routing:
        """Route.

        Args:
            tokens: [T, hidden].

        Returns:
            A `Routing`.
        """
        wide = torch.promote_types(torch.promote_types(tokens.dtype, self.weight.dtype), torch.float32)
        # Inside an autocast region a linear would run in the low precision all the same.
        with without_autocast(tokens):
            logits = functional.linear(tokens.to(wide), self.weight.to(wide))
        all_probs = logits.softmax(dim=-1)
        chosen = choose_top_k(logits, self.top_k)
        weights = all_probs * chosen
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)  # the highest is among them: at least 1 / E
        return Routing(
            probs=weights,
            routing_map=chosen,
            logits=logits,
            aux_loss=self.aux_coefficient * load_balancing_loss(all_probs, chosen),
            z_loss=self.z_coefficient * router_z_loss(logits),
        )
