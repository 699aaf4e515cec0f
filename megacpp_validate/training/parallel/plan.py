"""How a run is spread over ranks, and why a plan cannot be: checked before any process starts.

Ranks form a mesh [expert_data, expert, tensor], the last index moving fastest, so that the ranks that talk most, those
of one tensor group, are neighbours:

- the data group (expert_data and expert together) shards parameters and reads different sequences (FSDP2);
- the expert group, a part of it, shares out the experts of each layer and exchanges tokens (all-to-all);
- the tensor group splits heads and columns of one model, and with sequence parallelism the positions of each sequence
  between them (Korthikanti et al. 2022, arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final

from ...bridge.native_block import FP8_TOKENS, MXFP8_TOKENS
from ...bridge.recipes import RecipeName
from ...bridge.walk_plan import ALIGNMENT
from ..errors import TrainingError
from ..sizes import Letter, Size

MESH_NAMES: Final = ("expert_data", "expert", "tensor")


class WrongPlan(TrainingError, ValueError):
    """A plan that cannot be.

    Attributes:
        faults: all of them.
    """

    def __init__(self, text: str, faults: tuple[str, ...]) -> None:
        super().__init__(text)
        self.faults = faults


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the mesh, each index from 0."""

    expert_data: int
    expert: int
    tensor: int


@dataclass(frozen=True)
class ParallelPlan:
    """How many ranks there are, and what they share out.

    Nothing is checked here: `why_not` says all faults of a plan at once.

    Attributes:
        world: ranks.
        data: ranks that read different sequences and shard parameters; world = data * tensor_parallel.
        expert_parallel: ranks of a data group that share out the experts; divides data.
        tensor_parallel: ranks that split heads and columns.
        sequence_parallel: whether a tensor group also splits the positions of a sequence.
        accumulate: forward and backward passes a step.
    """

    world: int = 1
    data: int = 1
    expert_parallel: int = 1
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    accumulate: int = 1

    @property
    def mesh_shape(self) -> tuple[int, int, int]:
        """Ranks along `MESH_NAMES`: what a DeviceMesh is made of."""
        return self.data // self.expert_parallel, self.expert_parallel, self.tensor_parallel

    def place(self, rank: int) -> RankPlace:
        """Where a rank stands."""
        data, tensor = divmod(rank, self.tensor_parallel)
        return RankPlace(*divmod(data, self.expert_parallel), tensor)

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """The tensor group of a rank: the ranks that hold the other parts of its heads and columns."""
        first = rank - rank % self.tensor_parallel
        return tuple(range(first, first + self.tensor_parallel))

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """The data group of a rank: those that hold the same part of each layer."""
        return tuple(range(rank % self.tensor_parallel, self.world, self.tensor_parallel))

    def expert_ranks(self, rank: int) -> tuple[int, ...]:
        """The expert group of a rank: with whom it exchanges tokens, by the number of their experts."""
        first = self.place(rank).expert_data * self.expert_parallel
        return self.data_ranks(rank)[first : first + self.expert_parallel]

    def local_experts(self, rank: int, num_experts: int) -> range:
        """Numbers of the experts that a rank holds."""
        each = num_experts // self.expert_parallel
        first = self.place(rank).expert * each
        return range(first, first + each)

    def sequences(self, rank: int, batch: int, *, part: int = 0) -> range:
        """Which sequences of the whole batch [batch, T] a rank reads in pass `part` of a step.

        Those of a pass follow each other from rank to rank: the tokens of an expert then lie in the order of one rank.
        """
        each = batch // (self.data * self.accumulate)
        first = (part * self.data + rank // self.tensor_parallel) * each
        return range(first, first + each)

    def positions(self, rank: int, length: int) -> range:
        """Which positions of a sequence of `length` lie with a rank between tensor-parallel layers."""
        if not self.sequence_parallel:
            return range(length)
        each = length // self.tensor_parallel
        return range(self.place(rank).tensor * each, (self.place(rank).tensor + 1) * each)


def why_not(plan: ParallelPlan, size: Size, *, recipe: RecipeName | None = None) -> tuple[str, ...]:
    """Every reason why a model cannot be trained so; empty where it can.

    Args:
        plan: to judge.
        size: of the model and its batch.
        recipe: the low precision of the layers outside of the BF16 zones, if any.
    """
    if faults := tuple(_number_faults(plan)):
        return faults  # nothing can be divided by them
    faults = (*_world_faults(plan), *_expert_faults(plan, size), *_tensor_faults(plan, size))
    return (*faults, *_token_faults(plan, size), *_low_precision_faults(plan, size, recipe))


def refuse_plan(plan: ParallelPlan, size: Size, *, recipe: RecipeName | None = None) -> None:
    """Refuse what `why_not` has a reason against.

    Raises:
        WrongPlan: with all reasons.
    """
    if faults := why_not(plan, size, recipe=recipe):
        raise WrongPlan(
            f"the size {size.name!r} cannot be trained by {plan}: {'; '.join(faults)}. Next step: change those "
            "numbers; no process was started.",
            faults,
        )


def _number_faults(plan: ParallelPlan) -> Iterator[str]:
    for one in fields(plan):
        value = getattr(plan, one.name)
        if one.name == "sequence_parallel":
            if not isinstance(value, bool):
                yield f"sequence_parallel is {value!r}, and is True or False"
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{one.name} is {value!r}, which is no whole number from 1 up"


def _world_faults(plan: ParallelPlan) -> Iterator[str]:
    filled = plan.data * plan.tensor_parallel
    if filled != plan.world:
        yield (
            f"data {plan.data} times tensor_parallel {plan.tensor_parallel} makes {filled} rank(s), and the world has "
            f"{plan.world}: {'ranks would be idle' if filled < plan.world else 'ranks are missing'}"
        )
    if plan.data % plan.expert_parallel:
        yield (
            f"expert_parallel {plan.expert_parallel} does not divide data {plan.data}: experts are shared out among "
            "ranks that read different sequences"
        )
    if plan.sequence_parallel and plan.tensor_parallel == 1:
        yield "sequence_parallel splits positions over a tensor group, and tensor_parallel is 1"


def _expert_faults(plan: ParallelPlan, size: Size) -> Iterator[str]:
    ranks = plan.expert_parallel
    if ranks > 1 and "E" not in size.letters:
        yield f"expert_parallel is {ranks}, and the pattern {size.pattern} has no layer of experts"
    elif size.num_experts % ranks:
        yield f"num_experts {size.num_experts} is not divisible by expert_parallel {ranks}"


def _tensor_faults(plan: ParallelPlan, size: Size) -> Iterator[str]:
    if plan.tensor_parallel > 1 and size.attention == "mla" and "A" in size.letters:
        yield "multi-head latent attention is not split, and tensor_parallel is above 1"
    if plan.sequence_parallel and size.trajectory_coefficient:
        yield "a trajectory loss wants neighbouring positions, which sequence_parallel lays on several ranks"
    split = {
        "A": {"num_heads": size.num_heads, "num_gqa_groups": size.num_gqa_groups, "ffn_hidden": size.ffn_hidden},
        "M": {"heads of Mamba (2 * hidden / mamba_head_dim)": 2 * size.hidden // size.mamba_head_dim},
        "R": {"recurrent_heads": size.recurrent_heads},
    }
    for letter, numbers in split.items():
        for name, number in numbers.items():
            if letter in size.letters and number % plan.tensor_parallel:
                yield f"{name} {number} is not divisible by tensor_parallel {plan.tensor_parallel} (layer {letter})"
    if plan.sequence_parallel and size.length % plan.tensor_parallel:
        yield f"length {size.length} is not divisible by tensor_parallel {plan.tensor_parallel}, as positions are split"


def _token_faults(plan: ParallelPlan, size: Size) -> Iterator[str]:
    parts = plan.data * plan.accumulate
    if size.batch < parts:
        yield (
            f"batch {size.batch} over data {plan.data} and accumulate {plan.accumulate} leaves a rank 0 tokens: "
            f"{parts} sequences are the least"
        )
    elif size.batch % parts:
        yield f"batch {size.batch} is not divisible by data {plan.data} times accumulate {plan.accumulate}"
    if plan.sequence_parallel and size.length < plan.tensor_parallel:
        yield f"length {size.length} over tensor_parallel {plan.tensor_parallel} leaves a rank 0 tokens"


def _low_precision_faults(plan: ParallelPlan, size: Size, recipe: RecipeName | None) -> Iterator[str]:
    """Products that the recipe takes whole and not any more once they are split."""
    letters = {letter for place, letter in enumerate(size.letters) if not size.zones.is_bf16(place)}
    if recipe is None or not letters:
        return
    ranks, align = plan.tensor_parallel, ALIGNMENT[recipe]
    for name, (whole, local) in _split_widths(size, ranks, letters).items():
        if not whole % align and local % align:
            each = f"{local:g} on each of {ranks} tensor ranks"
            yield f"{name} is {whole} wide and {each}: {recipe} takes multiples of {align}"
    tokens = size.batch * size.length / (plan.data * plan.accumulate)
    tokens /= ranks if plan.sequence_parallel else 1
    multiple = MXFP8_TOKENS if recipe == "mxfp8" else FP8_TOKENS
    if tokens % multiple:
        yield f"a rank has {tokens:g} tokens a pass, and {recipe} takes multiples of {multiple}"


def _split_widths(size: Size, ranks: int, letters: set[Letter]) -> dict[str, tuple[int, float]]:
    """Product -> its width whole and on one tensor rank; experts are not split, and M and R are native where split."""
    heads, groups = size.num_heads, size.num_gqa_groups
    attention = {
        "the QKV projection of A": (heads + 2 * groups) * size.head_dim,
        "the output projection of A": heads * size.head_dim,
        "the MLP of A": size.ffn_hidden,
    }
    return {name: (whole, whole / ranks) for name, whole in attention.items() if "A" in letters}


# --- spread
#
# How the layers of this rank lie among those of other ranks: what a layer needs to know of the plan, and no more.


@dataclass(frozen=True, eq=False)
class Spread:
    """One rank's place.

    Losses and gradients are shares: each rank takes its losses times `share`, and gradients are summed over ranks,
    never averaged. The sum over ranks and passes is the loss of one rank that reads the whole batch.

    Attributes:
        plan: of the run.
        rank: of the world.
        expert_group: process group that shares out the experts; None where expert_parallel is 1.
        tensor_group: process group that splits heads and columns; None where tensor_parallel is 1.
        data_group: process group that reads different sequences; None where data is 1.
        token_group: ranks that hold different tokens of one pass: data, and with sequence parallelism tensor too; None
            where that is this rank alone.
        audit: whether what experts are sent is compared bit by bit with what arrives; the host then waits.
    """

    plan: ParallelPlan = field(default_factory=ParallelPlan)
    rank: int = 0
    expert_group: Any = None
    tensor_group: Any = None
    data_group: Any = None
    token_group: Any = None
    audit: bool = False

    @property
    def share(self) -> float:
        """This rank's part of the tokens of a step, in one of its passes."""
        plan = self.plan
        return 1 / (plan.data * plan.accumulate * (plan.tensor_parallel if plan.sequence_parallel else 1))

    def experts(self, num_experts: int) -> range:
        """Numbers of the experts that lie here."""
        return self.plan.local_experts(self.rank, num_experts)

    def positions(self, length: int) -> range:
        """Positions of each sequence that lie here between the layers that split heads."""
        return self.plan.positions(self.rank, length)


ALONE: Final = Spread()
