"""What one training run left in a receipt: the model, how it was spread, its steps, and where its time went.

Plain dataclasses, as all of a receipt: they are written inside the environment that is judged.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainingStep:
    """One step; a number that is not finite is None.

    Attributes:
        step: from 0.
        loss: of the language, nats a prediction.
        perfect: what a perfect model scores on the same batch, nats a prediction.
        grad_norm: of all gradients, before they are clipped.
        seconds: wall time.
    """

    step: int
    loss: float | None
    perfect: float | None
    grad_norm: float | None
    seconds: float

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - pydantic's name and type


@dataclass(frozen=True)
class TrainingRecord:
    """One run of several ranks.

    Attributes:
        name: of the run in its cell: "plan", "one-rank".
        model: exact name of its size, and what was changed in it: "tiny", "scaled num_experts=32".
        pattern: its layers.
        parameters: how many, experts included.
        ranks: processes.
        topology: number of the plan -> value, as in "expert_parallel" -> 2; and the devices' name.
        precision: "fp64", "bf16", or the recipe.
        features, forms: state of each feature, form of each part.
        floor, without_context: nats a prediction of a perfect model, and of the best one that uses no context.
        steps: of rank 0.
        whole_ns, phases_ns: wall time of rank 0, and of each phase; they sum to it.
        tokens: of all steps on all ranks.
        tokens_per_second: of the steps.
        flop_utilisation: what the model needs over what the devices could do; None where their peak is not known.
        peak_bytes: phase -> most memory that any rank had in use in it.
    """

    name: str
    model: str
    pattern: str
    parameters: int
    ranks: int
    topology: dict[str, str]
    precision: str
    features: dict[str, str]
    forms: dict[str, str]
    floor: float
    without_context: float
    steps: tuple[TrainingStep, ...]
    whole_ns: int
    phases_ns: dict[str, int]
    tokens: int
    tokens_per_second: float
    flop_utilisation: float | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    @property
    def goodput(self) -> float:
        """Share of the wall time that went into steps, 0 to 1."""
        return self.phases_ns.get("step", 0) / self.whole_ns if self.whole_ns else 0.0

    @property
    def step_median(self) -> float:
        """Seconds of a step, the first apart, which compiles and warms up; 0 without a step."""
        times = [step.seconds for step in self.steps]
        return statistics.median(times[1:] or times) if times else 0.0


def find_record_faults(record: TrainingRecord) -> tuple[str, ...]:
    """What no run writes: phases that do not sum to the whole, steps that are missing or twice."""
    faults = []
    summed = sum(record.phases_ns.values())
    if summed != record.whole_ns or min(record.phases_ns.values(), default=0) < 0:
        faults.append(f"training {record.name}: phases sum to {summed} ns of {record.whole_ns}")
    numbers = [step.step for step in record.steps]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers)) if numbers else []):
        faults.append(f"training {record.name}: its steps do not follow each other")
    return tuple(faults)
