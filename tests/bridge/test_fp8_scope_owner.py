"""Over which ranks amax is reduced: asked for, never taken for granted; real groups of torch's fake backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacpp_validate.bridge.fp8_scope import SINGLE_OWNER, AmaxGroupMissing, reduction_of


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    """A world of so many ranks, of which this process is rank 0; nothing is sent."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world", [2], indirect=True)
def test_none_is_refused_where_there_are_others(world: int) -> None:
    with pytest.raises(AmaxGroupMissing, match=r"all ranks.*Next step.*SINGLE_OWNER"):
        reduction_of(None)


@pytest.mark.parametrize("world", [8], indirect=True)
def test_a_single_owner_reduces_with_nobody(world: int) -> None:
    assert reduction_of(SINGLE_OWNER) == (None, False)


@pytest.mark.parametrize("world", [4], indirect=True)
def test_a_group_of_this_rank_is_taken(world: int) -> None:
    group = torch.distributed.new_group([0, 1])
    assert reduction_of(group) == (group, True)


@pytest.mark.parametrize("world", [4], indirect=True)
@pytest.mark.parametrize("owner", [lambda: torch.distributed.new_group([2, 3]), lambda: [0, 1], lambda: "world"])
def test_what_is_no_group_of_this_rank_is_refused(world: int, owner: Callable[[], object]) -> None:
    """Planted: the group of another shard, and two values that are no groups."""
    with pytest.raises(AmaxGroupMissing, match="Next step"):
        reduction_of(owner())
