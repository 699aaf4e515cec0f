"""A wrapper that is called again gives the same bits, and decides nothing about a call by one before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.attention import Attention  # noqa: E402
from megacpp_validate.bridge.expert_gemm import ExpertGemm  # noqa: E402
from megacpp_validate.bridge.native_block import NativeBlock  # noqa: E402
from megacpp_validate.bridge.permute import Dispatch  # noqa: E402


def drawn(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).requires_grad_()


def attend(length: int, **options: Any) -> Callable[[Any], Any]:
    query, key = drawn(2, 4, length, 16), drawn(2, 2, length, 16)
    return lambda layer: layer(query, key, key * 2, **options)


def block(length: int, **options: Any) -> Callable[[Any], Any]:
    return lambda layer: layer(drawn(2, length, 32), **options)


def experts(*counts: int) -> Callable[[Any], Any]:
    return lambda layer: layer(drawn(sum(counts), 32), counts)


def dispatched(seed: int, *, counted: bool = False) -> Callable[[Any], Any]:
    table = torch.rand(11, 4, generator=torch.Generator().manual_seed(seed)) < 0.4
    numbers = {"rows_per_expert": table.sum(0).tolist()} if counted else {}

    def there_and_back(layer: Any) -> Any:
        sent = layer.permute(drawn(11, 6), drawn(11, 4).abs(), table, **numbers)
        return layer.unpermute(sent.rows, sent.row_map)

    return there_and_back


DOCUMENTS = torch.arange(24).reshape(2, 12) // 5
SIZES: dict[str, Any] = {"num_heads": 4, "num_gqa_groups": 2, "device": "cpu"}
ROUTED = [dispatched(1), dispatched(2, counted=True), dispatched(1), dispatched(3)]
CALLS: dict[str, tuple[Callable[[], Any], list[Callable[[Any], Any]]]] = {
    "attention": (
        lambda: Attention(**SIZES, head_dim=16, backends=("te", "sdpa")),
        [attend(12), attend(12, window=4), attend(12, doc_ids=DOCUMENTS), attend(12), attend(1), attend(15)],
    ),
    "block": (
        lambda: NativeBlock(**SIZES, hidden=32, ffn_hidden=48, head_dim=8),
        [block(12), block(12, window=4), block(12, doc_ids=DOCUMENTS), block(12), block(15)],
    ),
    "experts": (
        lambda: ExpertGemm(num_experts=4, in_features=32, out_features=48, device="cpu"),
        [experts(3, 5, 1, 7), experts(5, 0, 7, 3), experts(3, 5, 1, 7)],
    ),
    "jagged": (lambda: Dispatch(4), ROUTED),
    "aligned": (lambda: Dispatch(4, align=16), ROUTED),
    "padded": (lambda: Dispatch(4, capacity=3), ROUTED),
}


@pytest.mark.parametrize(("make", "calls"), CALLS.values(), ids=CALLS)
def test_nothing_of_a_call_is_kept_for_another(
    backend: str, make: Callable[[], Any], calls: list[Callable[[Any], Any]]
) -> None:
    layer = make()
    for number, call in enumerate(calls):
        fresh = make()
        if isinstance(layer, NativeBlock | ExpertGemm):
            torch.manual_seed(number)
            state = {name: torch.randn_like(weight) for name, weight in fresh.native_state_dict().items()}
            layer.load_native_state_dict(state)
            fresh.load_native_state_dict(state)
        first, again, alone = call(layer), call(layer), call(fresh)
        assert torch.equal(first, again)
        assert torch.equal(first, alone)
        assert layer.choice.observed == fresh.choice.observed
