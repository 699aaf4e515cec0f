"""Token choice as numbers of experts [T, k], without host synchronization: the router beside the jagged experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megacpp_validate.native.norms import without_autocast


@dataclass(frozen=True, eq=False)
class Chosen:
    """The experts of each token.

    Attributes:
        chosen: int64 [T, k], by falling logit.
        weights: [T, k] fp32 at least.
        aux_loss: [] the load-balancing loss times its coefficient.
        logits: [T, E] fp32 at least.
    """

    chosen: Any
    weights: Any
    aux_loss: Any
    logits: Any


def choose_experts(
    tokens: Any, router_weight: Any, top_k: int, *, aux_coefficient: float = 0.0, normalize: bool = True
) -> Chosen:
    """Route.

    Args:
        tokens: [T, D].
        router_weight: [E, D]. Logits must be above minus infinity, which is not checked.
        top_k: k, 1 to E.
        aux_coefficient: of the load-balancing loss of Switch Transformer, arXiv:2101.03961, eq. 4.
        normalize: whether the weights of a token sum to 1.
    """
    wide = torch.promote_types(torch.promote_types(tokens.dtype, router_weight.dtype), torch.float32)
    with without_autocast(tokens):
        if tokens.device.type == "cuda" and tokens.dtype == torch.bfloat16 and wide == torch.float32:
            logits = _Logits.apply(tokens, router_weight.to(wide))
        else:
            logits = functional.linear(tokens.to(wide), router_weight.to(wide))
    chosen = _top_k(logits.detach(), top_k)
    probs = logits.softmax(dim=-1)
    weights = probs.gather(1, chosen)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    experts = router_weight.shape[0]
    ones = torch.ones(chosen.numel(), dtype=wide, device=chosen.device)
    assigned = torch.zeros(experts, dtype=wide, device=chosen.device).scatter_add_(0, chosen.reshape(-1), ones)
    share = assigned / max(chosen.numel(), 1)
    mean_prob = probs.sum(dim=0) / max(tokens.shape[0], 1)
    return Chosen(chosen, weights, aux_coefficient * experts * (share * mean_prob).sum(), logits)


class _Logits(torch.autograd.Function):
    """Tokens in bf16 times an fp32 weight^T, [T, D] x [E, D] -> fp32 [T, E]."""

    @staticmethod
    def forward(ctx: Any, tokens: Any, weight: Any) -> Any:
        terms = _terms(weight)
        ctx.save_for_backward(tokens, *terms[:2])
        return _sum_of_terms(_product(tokens, torch.cat(terms).t()), dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Any, Any]:
        tokens, high, middle = ctx.saved_tensors
        terms = _terms(grad)
        of_weight = _sum_of_terms(_product(torch.cat(terms, dim=1).t(), tokens), dim=0)
        # The omitted terms are 2^-16 of a gradient that is rounded to bf16.
        of_tokens = torch.cat([terms[0], terms[1], terms[0]], dim=1) @ torch.cat([high, high, middle])
        return of_tokens, of_weight


def _terms(value: Any) -> list[Any]:
    """Three terms in bf16 whose sum is `value` in fp32, unless a term underflows."""
    terms = [value.to(torch.bfloat16)]
    while len(terms) < 3:
        value = value - terms[-1]  # in fp32: the term is widened in the same kernel
        terms.append(value.to(torch.bfloat16))
    return terms


def _sum_of_terms(products: Any, dim: int) -> Any:
    """The sum of three terms, the smallest first to lose least."""
    first, second, third = products.chunk(3, dim=dim)
    return third + second + first


def _product(left: Any, right: Any) -> Any:
    """bf16 x bf16 -> fp32."""
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _top_k(logits: Any, top_k: int) -> Any:
    """The k largest; of equal values the first, which torch.topk does not guarantee. Faster than a sort for small k."""
    taken = []
    left = logits
    for slot in range(top_k):
        best = left.argmax(dim=-1, keepdim=True)
        taken.append(best)
        if slot + 1 < top_k:
            left = left.scatter(1, best, float("-inf"))
    return torch.cat(taken, dim=1)
