"""What the jagged experts refuse; `probes.smoke.dispatch` holds them to the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge.errors import WrongDtype, WrongShape
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
        ("chosen", lambda one: one.int()),
        ("weights", lambda one: one.double()),
    ],
)
def test_tensors_that_do_not_belong_together_are_refused(name: str, change: Any) -> None:
    given = make(8, 5, 2)
    with pytest.raises((WrongShape, WrongDtype), match="Next step"):
        jagged({**given, name: change(given[name])})
