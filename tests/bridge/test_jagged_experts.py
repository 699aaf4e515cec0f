"""What the jagged experts refuse; `probes.smoke.dispatch` holds them to the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge import jagged_experts
from megacpp_validate.bridge.errors import WrongDtype, WrongShape
from megacpp_validate.bridge.expert_gemm import FP8_FROM
from megacpp_validate.bridge.jagged_experts import jagged_moe

HIDDEN, WIDTH = 24, 16


def make(tokens: int, experts: int, top_k: int) -> dict[str, Any]:
    weights, chosen = torch.rand(tokens, experts).topk(top_k, dim=-1)
    up, down = torch.randn(experts, 2 * WIDTH, HIDDEN), torch.randn(experts, HIDDEN, WIDTH)
    return {"tokens": torch.randn(tokens, HIDDEN), "chosen": chosen, "weights": weights, "up": up, "down": down}


def jagged(given: dict[str, Any]) -> Any:
    return jagged_moe(given["tokens"], given["chosen"], given["weights"], given["up"], given["down"])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokens", lambda one: one[:-1]),
        ("weights", lambda one: one[:, :1]),
        ("up", lambda one: one[:, 1:]),
        ("down", lambda one: one[1:]),
        ("chosen", lambda one: one + 5),
        ("chosen", lambda one: one - 5),
        ("chosen", lambda one: one.int()),
        ("weights", lambda one: one.double()),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(name: str, change: Any) -> None:
    given = make(8, 5, 2)
    with pytest.raises((WrongShape, WrongDtype), match="Next step"):
        jagged({**given, name: change(given[name])})


@pytest.mark.parametrize(
    ("least", "when", "code"), [(1e9, "faster", "few-rows"), (8, "faster", ""), (1e9, "always", "")]
)
def test_fp8_is_taken_only_from_the_measured_number_of_rows_on(
    least: float, when: Any, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in {"why_not_deep_gemm": None, "why_not_fused": "", "_sorts_by_counting": True}.items():
        monkeypatch.setattr(jagged_experts, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setitem(FP8_FROM, "jagged", (least, "measured"))
    given = make(32, 4, 2)
    refusal = jagged_experts.why_not_fp8(given["tokens"], 2, given["up"], given["down"], when=when)
    assert (refusal.code if refusal else "") == code
