"""Over which ranks amax is reduced: asked for, never taken for granted; real groups of torch's fake backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge.fp8_scope import SINGLE_OWNER, AmaxGroupMissing, reduction_of


def test_a_group_of_this_rank_is_taken_and_a_single_owner_reduces_with_nobody(world: Any) -> None:
    group = torch.distributed.new_group([0, 1])
    assert reduction_of(group) == (group, True)
    assert reduction_of(SINGLE_OWNER) == (None, False)


def test_what_is_no_group_of_this_rank_is_refused(world: Any) -> None:
    for owner in (None, torch.distributed.new_group([2, 3]), [0, 1], "world"):
        with pytest.raises(AmaxGroupMissing, match=r"Next step.*SINGLE_OWNER"):
            reduction_of(owner)
