"""Watched layers: the amax group that a layer began with is the one that it goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.fp8_scope import SINGLE_OWNER, AmaxGroupChanged, low_precision
from megacpp_validate.bridge.layer_watch import unwatched, watch_layers
from tests.bridge.scope_paths import on_path


@pytest.fixture
def world(te_double: None) -> Iterator[Any]:
    """Two ranks of torch's fake backend, and the double of Transformer Engine."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with on_path("te"):
            yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


def new_layer() -> Any:
    layer = te.linear.require()(16, 16, bias=False, device="cpu")
    watch_layers(layer)
    return layer


def run(layer: Any, group: Any, recipe: str = "delayed") -> None:
    with low_precision(target="cpu", amax_reduction_group=group, recipe=recipe):
        layer(torch.ones(16, 16))


@pytest.mark.parametrize(("first", "then", "said"), [
    ("alone", "world", r"this rank alone so far.*over ranks \[0, 1\] now"),
    ("world", "alone", r"ranks \[0, 1\] so far.*over this rank alone now"),
    ("world", "another", r"ranks \[0, 1\] so far.*over ranks \[0, 1\] now"),
])  # fmt: skip
def test_another_group_is_refused(world: Any, first: str, then: str, said: str) -> None:
    groups = {"alone": SINGLE_OWNER, "world": world, "another": torch.distributed.new_group([0, 1])}
    layer = new_layer()
    run(layer, groups[first])
    with pytest.raises(AmaxGroupChanged, match=said + r".*Next step"):
        run(layer, groups[then])


def test_the_look_is_taken_away_for_a_while(world: Any) -> None:
    layer, other = new_layer(), torch.nn.Linear(16, 16)
    handle = other.register_forward_pre_hook(lambda *_: None)
    with unwatched((layer, other)):
        assert (len(layer._forward_pre_hooks), len(other._forward_pre_hooks)) == (0, 1)
    assert (len(layer._forward_pre_hooks), len(other._forward_pre_hooks)) == (1, 1)
    handle.remove()
