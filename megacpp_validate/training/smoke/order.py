"""What a smoke run is asked: one JSON object, the same for every rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from ...bridge.features import Features, read_features
from ...bridge.recipes import RecipeName
from ...evidence.whole_file import write_whole
from ..errors import WrongSize
from ..forms import Forms
from ..optimizer import Schedule
from ..parallel.plan import ParallelPlan, refuse_plan
from ..sizes import Size, read_size

Precision = Literal["fp64", "fp32", "bf16", "delayed", "current", "block", "mxfp8", "nvfp4"]
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
PLAIN: Final = ("fp64", "fp32", "bf16")


@dataclass(frozen=True)
class SmokeOrder:
    """A run.

    Attributes:
        size: name of a size.
        changes: numbers of the size that are others.
        plan: fields of `ParallelPlan`.
        steps: where the run ends, counted from step 0 also by one that is resumed.
        seed: of weights and data.
        precision: dtype of the parameters; or an FP8 recipe, over parameters in bf16.
        device: "cpu" (gloo) or "cuda" (NCCL).
        target: whose recipes hold.
        features: "preset" and flags of `bridge.features`.
        forms: fields of `Forms`.
        learning_rate, warm_up: of the schedule.
        schedule_steps: its length; `steps` where it is 0.
        validate_every: steps between evaluations on batches that are never trained on; 0 for none.
        checkpoint_folder: where checkpoints go; empty for none.
        checkpoint_every: steps between them; 0 saves at the end alone.
        resume: whether the run begins with the latest checkpoint there, which must be one.
        audit: whether conservation of tokens, replicas and gradients of experts are checked in each step.
        watch: whether each module is watched for values that are no number.
        profile: whether one step is profiled for the time that communication is waited for.
        fault: a fault that is planted, for a run that must find it; empty for none.

    Raises:
        WrongSize, UnknownSize, WrongPattern, WrongZone, UnknownName: what cannot be.
    """

    size: str = "tiny"
    changes: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    seed: int = 0
    precision: Precision = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    target: str = "cpu"
    features: dict[str, Any] = field(default_factory=dict)
    forms: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 3e-3
    warm_up: int = 0
    schedule_steps: int = 0
    validate_every: int = 0
    checkpoint_folder: str = ""
    checkpoint_every: int = 0
    resume: bool = False
    audit: bool = False
    watch: bool = False
    profile: bool = False
    fault: str = ""

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS or self.device not in ("cpu", "cuda"):
            raise WrongSize(
                f"a run in {self.precision!r} on {self.device!r}. Next step: choose of {', '.join(PRECISIONS)}, and of "
                "cpu, cuda."
            )
        if self.steps < 1 or self.validate_every < 0 or self.checkpoint_every < 0:
            raise WrongSize(
                f"a run of {self.steps} steps, validated every {self.validate_every} and saved every "
                f"{self.checkpoint_every}. Next step: train 1 or more; 0 leaves out the others."
            )
        if (self.resume or self.checkpoint_every) and not self.checkpoint_folder:
            raise WrongSize("checkpoints are asked for, and no folder for them. Next step: name one.")

    def read_size(self) -> Size:
        """The size with its changes."""
        return read_size(self.size, **self.changes)

    def read_plan(self) -> ParallelPlan:
        """The plan; numbers that it does not know are refused."""
        known = {one.name for one in fields(ParallelPlan)}
        if unknown := sorted(set(self.plan) - known):
            raise WrongSize(f"a plan has no {', '.join(unknown)}. Next step: it has {', '.join(sorted(known))}.")
        return ParallelPlan(**self.plan)

    def read_features(self) -> Features:
        """What may take Transformer Engine."""
        flags = dict(self.features)
        return read_features(flags.pop("preset", "production"), **flags)

    def read_forms(self) -> Forms:
        """The form of each part."""
        known = {one.name for one in fields(Forms)}
        if unknown := sorted(set(self.forms) - known):
            raise WrongSize(
                f"there is no form of {', '.join(unknown)}. Next step: there is {', '.join(sorted(known))}."
            )
        return Forms(**{name: tuple(value) if isinstance(value, list) else value for name, value in self.forms.items()})

    def read_schedule(self) -> Schedule:
        """Rates of the run."""
        return Schedule(self.schedule_steps or self.steps, self.learning_rate, warm_up=self.warm_up)

    @property
    def recipe(self) -> RecipeName | None:
        """The low precision, if any."""
        return None if self.precision in PLAIN else self.precision  # type: ignore[return-value]

    def refuse(self) -> None:
        """Refuse what cannot be, before any process is started.

        Raises:
            WrongPlan: with all reasons.
            WrongSize, WrongPattern: the size.
        """
        plan, forms = self.read_plan(), self.read_forms()
        self.read_features(), self.read_schedule()
        refuse_plan(plan, self.read_size(), recipe=self.recipe)
        if forms.graphs and plan.world > 1:
            raise WrongSize(
                "graphs hold the addresses of parameters, which FSDP2 and the exchange of rows make anew in each step. "
                "Next step: capture on one rank, or leave graphs out."
            )
        if forms.moe != "bridge" and plan.expert_parallel > 1:
            raise WrongSize(
                f"the way {forms.moe!r} to the experts knows no other ranks. Next step: take 'bridge' with "
                "expert_parallel."
            )


def write_order(order: SmokeOrder, path: Path) -> None:
    """Leave it where ranks read it."""
    write_whole(path, json.dumps(asdict(order)))


def read_order(text: str) -> SmokeOrder:
    """An order from its JSON text.

    Raises:
        WrongSize: it is no JSON object, or has keys that are not known.
    """
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("no JSON object")
        if unknown := sorted(set(given) - {one.name for one in fields(SmokeOrder)}):
            raise ValueError(f"unknown keys: {', '.join(unknown)}")
    except ValueError as fault:
        raise WrongSize(
            f"the order of a run cannot be read: {fault}. Likely cause: two versions of megacpp-validate. Next step: use "
            "one on both sides."
        ) from fault
    return SmokeOrder(**given)
