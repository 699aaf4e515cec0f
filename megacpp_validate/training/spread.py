"""How the layers of this rank lie among those of other ranks: what a layer needs to know of the plan, and no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from .parallel.plan import ParallelPlan


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
