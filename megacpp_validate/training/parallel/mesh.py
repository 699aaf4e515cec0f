"""The ranks of a run as a DeviceMesh [expert_data, expert, tensor], and what each layer is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import distributed

from ..spread import Spread
from .plan import MESH_NAMES, ParallelPlan, WrongPlan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class RankGroups:
    """The groups of one rank.

    Attributes:
        spread: what layers are told.
        data_mesh: of one dimension, "data": what FSDP2 shards over; None where data is 1.
        same_experts: ranks that hold the same experts and see other tokens; None where that is this rank alone.
    """

    spread: Spread
    data_mesh: DeviceMesh | None
    same_experts: Any


def make_groups(plan: ParallelPlan, device: str, *, audit: bool = False) -> RankGroups:
    """Make all groups of a plan: a collective call of the whole world.

    Args:
        plan: one that `refuse_plan` has nothing against.
        device: "cpu" or "cuda".
        audit: as `Spread` has it.

    Raises:
        WrongPlan: the world has another number of ranks than the plan.
    """
    if (ranks := distributed.get_world_size()) != plan.world:
        fault = f"the plan is of {plan.world} rank(s), and {ranks} were started"
        raise WrongPlan(f"{fault}. Next step: start as many as the plan says.", (fault,))
    if plan.world == 1:
        return RankGroups(Spread(plan=plan, audit=audit), None, None)
    from torch.distributed.device_mesh import init_device_mesh

    rank = distributed.get_rank()
    mesh = init_device_mesh(device, plan.mesh_shape, mesh_dim_names=MESH_NAMES)
    world = distributed.group.WORLD
    splits_tokens = plan.sequence_parallel or plan.tensor_parallel == 1
    data_mesh = mesh["expert_data", "expert"]._flatten("data") if plan.data > 1 else None
    data_group = None if data_mesh is None else data_mesh.get_group()
    alike = [
        [
            place
            for place in range(plan.world)
            if _holds_as(plan, place, first) and (splits_tokens or _beside(plan, place, first))
        ]
        for first in range(plan.world)
    ]
    same_experts = _group_of(alike, rank)
    spread = Spread(
        plan=plan,
        rank=rank,
        expert_group=mesh.get_group("expert") if plan.expert_parallel > 1 else None,
        tensor_group=mesh.get_group("tensor") if plan.tensor_parallel > 1 else None,
        data_group=data_group,
        token_group=world if splits_tokens else data_group,
        audit=audit,
    )
    return RankGroups(spread, data_mesh, same_experts)


def _holds_as(plan: ParallelPlan, one: int, other: int) -> bool:
    return plan.place(one).expert == plan.place(other).expert


def _beside(plan: ParallelPlan, one: int, other: int) -> bool:
    return plan.place(one).tensor == plan.place(other).tensor


def _group_of(ranks_of: list[list[int]], rank: int) -> Any:
    """The group of this rank, where every rank makes all of them in one order; None for a rank alone."""
    mine = None
    for ranks in sorted({tuple(ranks) for ranks in ranks_of}):
        if len(ranks) > 1:
            group = distributed.new_group(list(ranks))
            mine = group if rank in ranks else mine
    return mine
