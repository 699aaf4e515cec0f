"""Over which ranks the amax of a shard is reduced: said by whoever owns the shard, never taken for granted.

Transformer Engine takes no group for the whole world. Ranks that hold other shards then pull the scales of this one,
and ranks that do not come along hang the reduction; neither raises. So the group is asked for, and None is only taken
where there is nobody to reduce with.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Final

import torch

from .errors import BridgeError


class Owner(Enum):
    """Who owns a shard, where that is no process group."""

    SINGLE = "this rank alone"


SINGLE_OWNER: Final = Owner.SINGLE
"""This rank alone owns its shard: its amax is reduced with no other rank, however large the world is."""


class AmaxGroupMissing(BridgeError, ValueError):
    """The reduction group of a shard's amax was not given by its owner, or is none of this rank's."""


class AmaxGroupChanged(BridgeError, RuntimeError):
    """The amax of a layer is to be reduced over another group than before, which Transformer Engine would not do."""


def reduction_of(owner: Any) -> tuple[Any, bool]:
    """The process group to reduce over, and whether to reduce at all.

    Args:
        owner: the process group of the ranks that hold the same shard; or `SINGLE_OWNER`; or None, only in a world of
            one rank.

    Raises:
        AmaxGroupMissing: None in a larger world, something that is no process group, or a group without this rank.
    """
    if owner is SINGLE_OWNER:
        return None, False
    world = _world_size()
    if owner is None:
        if world > 1:
            raise AmaxGroupMissing(
                f"amax_reduction_group is None in a world of {world} ranks, which Transformer Engine takes for all of "
                "them. Likely cause: the owner of the shard was not asked. Next step: pass the process group of the "
                "ranks that hold this shard, or SINGLE_OWNER where this rank alone does."
            )
        return None, True
    if not _is_group(owner):
        raise AmaxGroupMissing(
            f"amax_reduction_group is {owner!r}, which is no process group. Next step: pass what "
            "torch.distributed.new_group or a device mesh gave (mesh.get_group()), or SINGLE_OWNER."
        )
    if torch.distributed.get_rank(owner) < 0:  # new_group gives the ranks outside a member of no group
        raise AmaxGroupMissing(
            "this rank is not in its amax_reduction_group. Likely cause: the group of another shard was passed. Next "
            "step: pass the process group of the ranks that hold this rank's shard."
        )
    return owner, True


def _is_distributed() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _world_size() -> int:
    return int(torch.distributed.get_world_size()) if _is_distributed() else 1


def _is_group(owner: Any) -> bool:
    if not _is_distributed():
        return False
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    return isinstance(owner, torch.distributed.ProcessGroup) or (type(owner) is type(outside) and owner == outside)
