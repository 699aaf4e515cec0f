"""Jagged and padded experts, and the router beside them, against the layer written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge import jagged_experts
from megacpp_validate.bridge.errors import WrongShape
from megacpp_validate.bridge.features import read_features
from megacpp_validate.bridge.jagged_experts import (
    jagged_moe,
)

NAMES = ("out", "tokens", "weights", "up", "down")
OFF = read_features("off")
HIDDEN, WIDTH = 24, 16


def make(tokens: int, experts: int, top_k: int) -> dict[str, Any]:
    weights, chosen = torch.rand(tokens, experts).topk(top_k, dim=-1)
    up, down = torch.randn(experts, 2 * WIDTH, HIDDEN), torch.randn(experts, HIDDEN, WIDTH)
    return {"tokens": torch.randn(tokens, HIDDEN), "chosen": chosen, "weights": weights, "up": up, "down": down}


def jagged(given: dict[str, Any]) -> Any:
    return jagged_moe(given["tokens"], given["chosen"], given["weights"], given["up"], given["down"])


def test_logits_of_three_terms_are_those_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of 64 (of the weight's gradient, 40) terms in fp32, and a little for the last term: against the norms of the
    factors, which bound every entry. The gradient of the tokens is rounded to bf16.
    """
    drawn = torch.Generator().manual_seed(0)
    tokens = torch.randn(40, 64, generator=drawn).bfloat16().requires_grad_()
    weight = torch.randn(6, 64, generator=drawn).requires_grad_()
    gradient = torch.randn(40, 6, generator=drawn)

    def errors() -> list[float]:
        found = jagged_experts._Logits.apply(tokens, weight)
        grads = torch.autograd.grad(found, (tokens, weight), gradient)
        x, w, g = tokens.detach().double(), weight.detach().double(), gradient.double()
        right = (x @ w.t(), g @ w, g.t() @ x)
        factors = ((x, w), (g, w), (g, x))
        pairs = zip((found.detach(), *grads), right, factors, strict=True)
        return [float((one - exact).norm() / (a.norm() * b.norm())) for one, exact, (a, b) in pairs]

    bounds = (2 * 64 * 2.0**-24, 2.0**-9 + 3 * 2.0**-16, 2 * 40 * 2.0**-24)
    assert all(error <= bound for error, bound in zip(errors(), bounds, strict=True))
    plain = jagged_experts._terms
    monkeypatch.setattr(
        jagged_experts, "_terms", lambda value: [*plain(value)[:1], *(0 * one for one in plain(value)[1:])]
    )
    assert errors()[0] > bounds[0]  # bf16 alone is seen


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokens", lambda one: one[:-1]),
        ("weights", lambda one: one[:, :1]),
        ("up", lambda one: one[:, 1:]),
        ("down", lambda one: one[1:]),
        ("chosen", lambda one: one + 5),
        ("chosen", lambda one: one - 5),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(name: str, change: Any) -> None:
    given = make(8, 5, 2)
    with pytest.raises(WrongShape, match="Next step"):
        jagged({**given, name: change(given[name])})
