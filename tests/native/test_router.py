"""The router against formulas written by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megacpp_validate.native.router import TopKRouter, choose_top_k, load_balancing_loss, router_z_loss


def make(hidden: int = 6, experts: int = 5, top_k: int = 2, **options: Any) -> tuple[TopKRouter, Any]:
    """A router with weights of order one, in fp64, and seven tokens."""
    torch.manual_seed(3)
    router = TopKRouter(hidden, experts, top_k, dtype=options.pop("dtype", torch.float64), **options)
    with torch.no_grad():
        router.weight.copy_(torch.randn(experts, hidden))
    return router, torch.randn(7, hidden, dtype=router.weight.dtype)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_probabilities_are_those_of_the_top_k(top_k: int, normalize: bool) -> None:
    router, tokens = make(top_k=top_k, normalize=normalize)
    routing = router(tokens)
    for token, logits in enumerate((tokens @ router.weight.t()).tolist()):
        best = sorted(range(5), key=lambda expert: -logits[expert])[:top_k]
        total = sum(math.exp(logits[expert]) for expert in (best if normalize else range(5)))
        for expert in range(5):
            wanted = math.exp(logits[expert]) / total if expert in best else 0.0
            assert routing.probs[token, expert].item() == pytest.approx(wanted, rel=1e-12)
            assert routing.routing_map[token, expert].item() is (expert in best)


def test_of_equal_logits_the_lower_expert_wins() -> None:
    chosen = choose_top_k(torch.zeros(3, 40), 2)
    assert chosen.nonzero().tolist() == [[token, expert] for token in range(3) for expert in (0, 1)]
    assert choose_top_k(torch.tensor([[0.0, 1.0, 1.0, 2.0, 1.0]]), 2).nonzero()[:, 1].tolist() == [1, 3]


def test_the_load_balancing_loss_is_that_of_the_switch_transformer() -> None:
    # Two of three tokens choose expert 0, one expert 2: f = (2/3, 0, 1/3).
    probs = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]], dtype=torch.float64)
    routing_map = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.bool)
    wanted = 3 * (2 / 3 * (0.7 + 0.5 + 0.2) / 3 + 1 / 3 * (0.1 + 0.2 + 0.6) / 3)
    assert load_balancing_loss(probs, routing_map).item() == pytest.approx(wanted, rel=1e-14)


def test_the_z_loss_is_that_of_st_moe() -> None:
    logits = torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=torch.float64)
    logs = [math.log(math.exp(1.0) + math.exp(2.0)), math.log(math.exp(-3.0) + math.exp(0.5))]
    assert router_z_loss(logits).item() == pytest.approx(sum(log * log for log in logs) / 2, rel=1e-14)
    assert router_z_loss(torch.full((1, 4), 1e4)).isfinite()


def test_losses_come_with_their_coefficients() -> None:
    router, tokens = make(aux_coefficient=0.25, z_coefficient=0.5)
    routing = router(tokens)
    all_probs = (tokens @ router.weight.t()).softmax(-1)
    assert routing.aux_loss.item() == pytest.approx(0.25 * load_balancing_loss(all_probs, routing.routing_map).item())
    assert routing.z_loss.item() == pytest.approx(0.5 * router_z_loss(routing.logits).item())


@pytest.mark.parametrize("normalize", [True, False])
def test_gradients_are_right(normalize: bool) -> None:
    router, tokens = make(aux_coefficient=0.3, z_coefficient=0.2, normalize=normalize)

    def outputs(tokens: Any, weight: Any) -> tuple[Any, ...]:
        routing = torch.func.functional_call(router, {"weight": weight}, (tokens,))
        return routing.probs, routing.logits, routing.aux_loss, routing.z_loss

    weight = router.weight.detach().clone().requires_grad_()
    assert all(one.requires_grad for one in outputs(tokens, weight))  # gradcheck leaves out those that do not
    assert torch.autograd.gradcheck(outputs, (tokens.requires_grad_(), weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("autocast", [True, False])
def test_low_precision_tokens_are_routed_in_fp32(dtype: Any, autocast: bool) -> None:
    router, tokens = make(hidden=64, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        routing = router(tokens)
    assert routing.logits.dtype == routing.probs.dtype == torch.float32
    wanted = tokens.double() @ router.weight.double().t()
    # 64 products in fp32: below sqrt(64) * 2^-24 of the norm; bf16 would be off by 2^-9.
    assert (routing.logits.double() - wanted).norm() < 8 * 2.0**-24 * wanted.norm()
