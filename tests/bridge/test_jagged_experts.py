"""Jagged and padded experts, and the router beside them, against the layer written out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional

from megacpp_validate.bridge import jagged_experts
from megacpp_validate.bridge.errors import WrongShape
from megacpp_validate.bridge.features import read_features
from megacpp_validate.bridge.jagged_experts import (
    jagged_moe,
    sort_by_expert,
)
from megacpp_validate.bridge.permute import padded_moe

NAMES = ("out", "tokens", "weights", "up", "down")
OFF = read_features("off")
HIDDEN, WIDTH = 24, 16
# Relative, in the norm, of one path against exact arithmetic. fp64: sums of at most 24 terms, three products deep and
# back again, each term off by 2^-53, so below 6 x 24 x 2^-53 even if all add up, doubled for the division by norms
# that cancelled. bf16: a value passes at most six roundings of 2^-9 (up, gate, linear, weight, down, sum), a gradient
# two more: 8 x 2^-9.
BOUNDS = {torch.float64: 6 * 24 * 2.0**-53 * 2, torch.bfloat16: 8 * 2.0**-9}


def make(
    tokens: int, experts: int, top_k: int, *, dtype: Any = torch.float64, only: int | None = None
) -> dict[str, Any]:
    """Tensors of a layer; `only` leaves the experts from that one on without tokens."""
    drawn = torch.Generator().manual_seed(tokens * 100 + experts * 10 + top_k)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    logits = draw(tokens, experts)
    if only is not None:
        logits[:, only:] = float("-inf")
    weights, chosen = logits.softmax(dim=-1).topk(top_k, dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    return {
        "tokens": draw(tokens, HIDDEN).to(dtype).requires_grad_(),
        "chosen": chosen,
        "weights": weights.to(wide).requires_grad_(),
        "up": (draw(experts, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5).to(dtype).requires_grad_(),
        "down": (draw(experts, HIDDEN, WIDTH) * WIDTH**-0.5).to(dtype).requires_grad_(),
        "gradient": draw(tokens, HIDDEN).to(dtype),
    }


def with_gradients(layer: Any, given: dict[str, Any]) -> dict[str, Any]:
    leaves = [given[name] for name in NAMES[1:]]
    out = layer(given)
    found = torch.autograd.grad(out, leaves, given["gradient"].to(out.dtype), allow_unused=True)
    return dict(zip(NAMES, (out.detach(), *found), strict=True))


def jagged(given: dict[str, Any]) -> Any:
    return jagged_moe(given["tokens"], given["chosen"], given["weights"], given["up"], given["down"])


def padded(given: dict[str, Any], capacity: int | None = None) -> Any:
    nothing = torch.zeros(given["chosen"].shape[0], given["up"].shape[0], dtype=given["weights"].dtype)
    routing_map = nothing.bool().scatter(1, given["chosen"], True)
    probs = nothing.scatter(1, given["chosen"], given["weights"])
    return padded_moe(given["tokens"], routing_map, probs, given["up"], given["down"], capacity=capacity, features=OFF)


def written_out(given: dict[str, Any]) -> Any:
    """Token by token, slot by slot, in fp64."""
    tokens, weights, up, down = (given[name].double() for name in NAMES[1:])
    sums = []
    for token, (numbers, scales) in enumerate(zip(given["chosen"].tolist(), weights, strict=True)):
        parts = []
        for expert, scale in zip(numbers, scales, strict=True):
            gate, linear = (up[expert] @ tokens[token]).chunk(2)
            parts.append(scale * (down[expert] @ (functional.silu(gate) * linear)))
        sums.append(torch.stack(parts).sum(dim=0))
    return torch.stack(sums)


def compare(found: dict[str, Any], right: dict[str, Any], bound: float) -> None:
    for name in NAMES:
        norm = torch.linalg.vector_norm(right[name].double())
        error = torch.linalg.vector_norm(found[name].double() - right[name].double())
        assert found[name].shape == right[name].shape, name
        assert error <= bound * norm, f"{name}: {float(error / norm):.3g}"


SIZES = [(37, 5, 2, None), (1, 4, 1, None), (1, 4, 3, None), (12, 6, 1, 1), (12, 8, 2, 2), (9, 3, 3, None)]


@pytest.mark.parametrize(("tokens", "experts", "top_k", "only"), SIZES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_both_forms_are_the_layer_written_out(
    tokens: int, experts: int, top_k: int, only: int | None, dtype: Any
) -> None:
    """Also with experts without tokens, all tokens at one expert, one token, one expert a token."""
    given = make(tokens, experts, top_k, dtype=dtype, only=only)
    right = with_gradients(written_out, given)
    for form in (jagged, padded):
        found = with_gradients(form, given)
        compare(found, right, BOUNDS[dtype])
        if only is not None:
            assert not found["up"][only:].any()
            assert not found["down"][only:].any()


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (50, 7, 3), (300, 64, 2), (0, 3, 1)])
def test_rows_lie_by_expert_and_then_by_token(tokens: int, experts: int, top_k: int) -> None:
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).argsort(dim=1)[:, :top_k]
    order = sort_by_expert(chosen, experts)
    rows = sorted((int(expert), token) for token, line in enumerate(chosen) for expert in line)
    flat = chosen.flatten().tolist()
    assert [(flat[one], one // top_k) for one in order.order.tolist()] == rows
    assert order.place.flatten()[order.order.long()].tolist() == list(range(tokens * top_k))
    assert order.ends.tolist() == list(itertools.accumulate(flat.count(expert) for expert in range(experts)))


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
