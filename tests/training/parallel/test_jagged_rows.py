"""The kernels of the jagged exchange against plain torch, and the exchange of one GPU with itself: it waits once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_validate.bridge.jagged_experts import jagged_moe, sort_by_expert
from megacpp_validate.training.parallel.jagged_exchange import FusedRows, JaggedExchange, PlainRows, rows_path

pytestmark = pytest.mark.thorough

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 300, 64, 48, 8, 2
# Both round to bf16 the same sum, which either took in fp32 in its own order: a rounding of 2^-8 each, relative.
ROUNDED = 2 * 2.0**-8
LEAVES = ("tokens", "weights", "up", "down")


def make_data(device: str, dtype: Any) -> SimpleNamespace:
    """Expert 3 is idle."""
    drawn = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=drawn, dtype=torch.float64)

    logits = draw(TOKENS, EXPERTS)
    logits[:, 3] = float("-inf")
    weights, chosen = logits.softmax(dim=-1).topk(TOP_K, dim=-1)
    narrow = {"tokens": draw(TOKENS, HIDDEN), "gradient": draw(TOKENS, HIDDEN)}
    narrow |= {
        "up": draw(EXPERTS, 2 * WIDTH, HIDDEN) * HIDDEN**-0.5,
        "down": draw(EXPERTS, HIDDEN, WIDTH) * WIDTH**-0.5,
    }
    wide = torch.promote_types(dtype, torch.float32)
    moved = {name: one.to(device, dtype) for name, one in narrow.items()}
    return SimpleNamespace(chosen=chosen.to(device), weights=weights.to(device, wide), **moved)


def passes(rows: Any, data: Any) -> dict[str, tuple[Any, float]]:
    """What each function gives, and how far two of it may be apart, relative to the norm."""
    order = sort_by_expert(data.chosen, EXPERTS)
    counts = torch.bincount(data.chosen.flatten(), minlength=EXPERTS).tolist()
    arrived = PlainRows.gather(data.tokens, order)
    up = PlainRows.product(arrived, data.up.transpose(1, 2), order, counts)
    inner = PlainRows.gate(up)
    of_rows, of_weights = rows.combine_backward(data.gradient, order, data.weights, arrived)
    of_up, again = rows.gate_backward(up, inner)
    return {
        "gather": (rows.gather(data.tokens, order), 0.0),
        "product": (rows.product(arrived, data.up.transpose(1, 2), order, counts), ROUNDED),
        "gate": (rows.gate(up), ROUNDED),
        "combine": (rows.combine(arrived, order), ROUNDED),
        "weighted": (rows.combine(arrived, order, data.weights), ROUNDED),
        "of rows": (of_rows, ROUNDED),
        # Sums of HIDDEN products in fp32, 2^-23 each and term; cancelled to about the root of their number.
        "of weights": (of_weights, 2 * HIDDEN**1.5 * 2.0**-23),
        "of up": (of_up, ROUNDED),
        "again": (again, ROUNDED),
        "of experts": (rows.weight_gradient(up, arrived, order, counts), ROUNDED),
    }


def differentiate(layer: Any, data: Any) -> dict[str, Any]:
    given = [getattr(data, name).clone().requires_grad_() for name in LEAVES]
    tokens, weights, up, down = given
    out = layer(tokens, data.chosen, weights, up, down)
    return dict(zip(("out", *LEAVES), (out.detach(), *torch.autograd.grad(out, given, data.gradient)), strict=True))


def far(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@contextmanager
def one_rank(backend: str) -> Iterator[None]:
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def test_an_exchange_with_itself_is_the_layer_of_one_rank() -> None:
    data = make_data("cpu", torch.float64)
    wanted = differentiate(jagged_moe, data)
    with one_rank("gloo"):
        found = differentiate(JaggedExchange(EXPERTS, audit=True).run, data)
    # Sums of 64 terms, three products deep and back, then of all rows of an expert, twice; see test_jagged_exchange.
    assert all(far(found[name], one) <= 4 * (6 * 64 + TOKENS) * 2.0**-53 for name, one in wanted.items())


def on_a_gpu() -> SimpleNamespace:
    if not torch.cuda.is_available():
        pytest.skip("not-run: there is no CUDA device")
    data = make_data("cuda", torch.bfloat16)
    if rows_path(data.tokens, data.up, data.down) is not FusedRows:
        pytest.skip("not-run: the fused path cannot be taken here")
    return data


def test_kernels_are_plain_torch() -> None:
    data = on_a_gpu()
    found, wanted = passes(FusedRows, data), passes(PlainRows, data)
    for name, (value, bound) in found.items():
        assert value.shape == wanted[name][0].shape, name
        assert value.dtype == wanted[name][0].dtype, name
        assert far(value, wanted[name][0]) <= bound, name
    assert not found["of experts"][0][3].any()


def test_a_gpu_exchanges_with_itself_and_waits_once() -> None:
    """Eight roundings to bf16 on the way of a gradient, 2^-8 each, as in test_jagged_exchange."""
    data = on_a_gpu()
    exact = SimpleNamespace(
        **{name: one.double() if one.is_floating_point() else one for name, one in vars(data).items()}
    )
    wanted = differentiate(jagged_moe, exact)
    torch.cuda.set_device(0)
    with one_rank("nccl"):
        exchange = JaggedExchange(EXPERTS)
        found = differentiate(exchange.run, data)
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                again = differentiate(exchange.run, data)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in told if "called a synchronizing" in str(one.message)]
    assert len(waits) == 1, waits
    for name, one in wanted.items():
        assert far(found[name], one) <= 8 * 2.0**-8, name
        assert torch.equal(found[name], again[name]), name
