"""Watched layers: the amax group that a layer began with is the one that it goes on with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.amax_owner import SINGLE_OWNER, AmaxGroupChanged
from megacpp_validate.bridge.fp8_scope import amax_shared_with, low_precision
from megacpp_validate.bridge.layer_watch import unwatched, watch_layers


def new_layer() -> Any:
    layer = te.linear.require()(16, 16, bias=False, device="cpu")
    watch_layers(layer)
    return layer


def run(layer: Any, group: Any, recipe: str = "delayed") -> None:
    with low_precision(target="cpu", amax_reduction_group=group, recipe=recipe):
        layer(torch.ones(16, 16))


@pytest.mark.parametrize(("first", "then", "said"), [
    ("alone", "world", r"this rank alone so far.*over ranks \[0, 1, 2, 3\] now"),
    ("world", "alone", r"ranks \[0, 1, 2, 3\] so far.*over this rank alone now"),
    ("world", "another", r"ranks \[0, 1, 2, 3\] so far.*over ranks \[0, 1, 2, 3\] now"),
])  # fmt: skip
def test_another_group_is_refused(world: Any, on_te: None, first: str, then: str, said: str) -> None:
    groups = {"alone": SINGLE_OWNER, "world": world, "another": torch.distributed.new_group([0, 1, 2, 3])}
    layer = new_layer()
    run(layer, groups[first])
    with pytest.raises(AmaxGroupChanged, match=said + r".*Next step"):
        run(layer, groups[then])


def test_a_layer_keeps_the_group_of_its_first_region(world: Any, on_te: None) -> None:
    layer = new_layer()
    with low_precision(target="cpu", amax_reduction_group=world, recipe="delayed"):
        for _ in range(2):
            with amax_shared_with(SINGLE_OWNER):
                layer(torch.ones(16, 16))
        with pytest.raises(AmaxGroupChanged, match=r"this rank alone so far.*over ranks \[0, 1, 2, 3\] now"):
            layer(torch.ones(16, 16))


def test_only_delayed_scaling_has_a_group_to_keep(world: Any, on_te: None) -> None:
    layer = new_layer()
    for group in (SINGLE_OWNER, world):
        run(layer, group, "current")


def test_the_look_is_taken_away_for_a_while(on_te: None) -> None:
    layer, other = new_layer(), torch.nn.Linear(16, 16)
    handle = other.register_forward_pre_hook(lambda *_: None)
    with unwatched((layer, other)):
        assert (len(layer._forward_pre_hooks), len(other._forward_pre_hooks)) == (0, 1)
    assert (len(layer._forward_pre_hooks), len(other._forward_pre_hooks)) == (1, 1)
    handle.remove()
