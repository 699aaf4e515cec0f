"""The parallel plan of a run, refused before any process starts where it does not fit the model.

Ranks form a mesh [expert_data, expert, tensor], the last index moving fastest, so that the ranks that talk most, those
of one tensor group, are neighbours:

- the data group (expert_data and expert together) shards parameters and reads different sequences (FSDP2);
- the expert group, a part of it, distributes the experts of each layer and exchanges tokens (all-to-all);
- the tensor group splits heads and columns of one model, and between them the positions of each sequence (sequence
  parallelism, Korthikanti et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from .. import check_fields
from ..sizes import Size

MESH_NAMES: Final = ("expert_data", "expert", "tensor")


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the mesh, each index from 0."""

    expert_data: int
    expert: int
    tensor: int


@dataclass(frozen=True)
class ParallelPlan:
    """How many ranks there are, and what they distribute.

    Nothing is checked here: `refuse_plan` reports all faults of a plan at once.

    Attributes:
        data: ranks that read different sequences and shard parameters.
        expert_parallel: ranks of a data group that distribute the experts; divides data.
        tensor_parallel: ranks that split heads, columns and positions.
        accumulate: forward and backward passes a step.
    """

    data: int = 1
    expert_parallel: int = 1
    tensor_parallel: int = 1
    accumulate: int = 1

    @property
    def world(self) -> int:
        """Ranks."""
        return self.data * self.tensor_parallel

    @property
    def mesh_shape(self) -> tuple[int, int, int]:
        """Ranks along `MESH_NAMES`: the shape of the DeviceMesh."""
        return self.data // self.expert_parallel, self.expert_parallel, self.tensor_parallel

    def place(self, rank: int) -> RankPlace:
        """Where a rank stands."""
        data, tensor = divmod(rank, self.tensor_parallel)
        return RankPlace(*divmod(data, self.expert_parallel), tensor)

    def sequences(self, rank: int, batch: int, *, part: int = 0) -> range:
        """Sequences of the whole batch [batch, T] that a rank reads in pass `part` of a step.

        Those of a pass follow each other from rank to rank: the tokens of an expert then lie in the order of one rank.
        """
        each = batch // (self.data * self.accumulate)
        first = (part * self.data + rank // self.tensor_parallel) * each
        return range(first, first + each)


def refuse_plan(plan: ParallelPlan, size: Size) -> None:
    """Refuse a plan that does not fit a model and its batch. Raises WrongSize with all reasons."""
    check_fields(plan, _faults(plan, size))


def _faults(plan: ParallelPlan, size: Size) -> Iterator[str]:
    tensor, parts = plan.tensor_parallel, plan.data * plan.accumulate
    if plan.expert_parallel > 1 and "E" not in size.letters:
        yield f"expert_parallel is {plan.expert_parallel}, and the pattern {size.pattern} has no layer of experts"
    if tensor > 1 and size.attention == "mla" and "A" in size.letters:
        yield "multi-head latent attention is not split, and tensor_parallel is above 1"
    if tensor > 1 and size.trajectory_coefficient:
        yield "a trajectory loss needs neighbouring positions, which tensor_parallel distributes over ranks"
    divided = {
        f"data {plan.data}": (plan.data, plan.expert_parallel, "expert_parallel", ""),
        f"num_experts {size.num_experts}": (size.num_experts, plan.expert_parallel, "expert_parallel", "E"),
        f"num_heads {size.num_heads}": (size.num_heads, tensor, "tensor_parallel", "A"),
        f"num_gqa_groups {size.num_gqa_groups}": (size.num_gqa_groups, tensor, "tensor_parallel", "A"),
        f"ffn_hidden {size.ffn_hidden}": (size.ffn_hidden, tensor, "tensor_parallel", "A"),
        "heads of Mamba (2 * hidden / mamba_head_dim)": (
            2 * size.hidden // size.mamba_head_dim, tensor, "tensor_parallel", "M"
        ),
        f"recurrent_heads {size.recurrent_heads}": (size.recurrent_heads, tensor, "tensor_parallel", "R"),
        f"length {size.length}": (size.length, tensor, "tensor_parallel", ""),
        f"batch {size.batch}": (size.batch, parts, "data times accumulate,", ""),
    }  # fmt: skip
    for name, (number, by, by_name, letter) in divided.items():
        if number % by and (not letter or letter in size.letters):
            yield f"{name} is not divisible by {by_name} {by}"


# --- spread


@dataclass(frozen=True, eq=False)
class Spread:
    """One rank's place among the ranks: what a layer needs to know of the plan.

    Losses and gradients are shares: each rank takes its losses times `share`, and gradients are summed over ranks,
    never averaged. The sum over ranks and passes is the loss of one rank that reads the whole batch.

    Attributes:
        plan: of the run.
        rank: of the world.
        expert_group: process group that distributes the experts; None where expert_parallel is 1.
        tensor_group: process group that splits heads, columns and positions; None where tensor_parallel is 1.
        token_group: all ranks, which hold different tokens of one pass; None for a rank alone.
        same_experts: ranks that hold the same experts and see other tokens; None where that is this rank alone.
        data_mesh: DeviceMesh of one dimension that FSDP2 shards over; None where data is 1.
        audit: whether rows at experts are compared bit by bit with what was sent; the host then waits.
    """

    plan: ParallelPlan = field(default_factory=ParallelPlan)
    rank: int = 0
    expert_group: Any = None
    tensor_group: Any = None
    token_group: Any = None
    same_experts: Any = None
    data_mesh: Any = None
    audit: bool = False

    @property
    def share(self) -> float:
        """This rank's part of the tokens of a step, in one of its passes."""
        return 1 / (self.plan.data * self.plan.accumulate * self.plan.tensor_parallel)

    def experts(self, num_experts: int) -> range:
        """Numbers of the experts that lie here."""
        return _nth_part(num_experts, self.plan.expert_parallel, self.plan.place(self.rank).expert)

    def positions(self, length: int) -> range:
        """Positions of each sequence that lie here between the layers that split heads."""
        return _nth_part(length, self.plan.tensor_parallel, self.plan.place(self.rank).tensor)


def _nth_part(whole: int, parts: int, number: int) -> range:
    return range(whole // parts * number, whole // parts * (number + 1))


ALONE: Final = Spread()
