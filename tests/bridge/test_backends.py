"""What was asked for and what was taken: recorded, told, refused; and not in the way of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megacpp_validate.bridge.attention import Attention
from megacpp_validate.bridge.backends import NoBackend, Refusal, choose, forget_choices
from megacpp_validate.bridge.errors import BridgeError
from megacpp_validate.bridge.expert_gemm import ExpertGemm
from tests.bridge.small_blocks import make


def refuse() -> Refusal:
    return Refusal("te", "odd", "it is odd")


def test_a_choice_is_recorded_and_a_fallback_told_once(caplog: pytest.LogCaptureFixture) -> None:
    forget_choices()
    for _ in range(3):
        choice = choose("walk", [("te", refuse), ("native", lambda: None)])
    assert (choice.requested, choice.observed) == ("te", "native")
    assert [record.getMessage() for record in caplog.records] == ["walk takes native instead of te. te: it is odd"]


@pytest.mark.parametrize("candidates", [[], [("te", refuse)]])
def test_nobody_left_is_an_error_of_the_bridge(candidates: Any) -> None:
    with pytest.raises(BridgeError) as raised:
        choose("walk", candidates)
    assert isinstance(raised.value, NoBackend)
    assert isinstance(raised.value, RuntimeError)


def attention() -> tuple[Any, tuple[Any, ...]]:
    key = torch.randn(2, 2, 12, 16)
    return Attention(num_heads=8, head_dim=16, num_gqa_groups=2), (torch.randn(2, 8, 12, 16), key, key)


def experts() -> tuple[Any, tuple[Any, ...]]:
    return ExpertGemm(num_experts=4, in_features=8, out_features=6), (torch.randn(10, 8), [3, 0, 7, 0])


def block() -> tuple[Any, tuple[Any, ...]]:
    return make(), (torch.randn(2, 12, 32),)


@pytest.mark.parametrize("sample", [attention, experts, block])
def test_a_wrapper_compiles_as_one_graph(sample: Callable[[], tuple[Any, tuple[Any, ...]]]) -> None:
    """A lock or a log in the choice would end the graph."""
    layer, given = sample()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*given), layer(*given), rtol=0.0, atol=0.0)
