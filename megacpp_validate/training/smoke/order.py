"""What a smoke run is asked: one JSON object, the same for every rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, get_args

from ...bridge.errors import UnknownName, WrongTarget
from ...bridge.features import Features, read_features
from ...bridge.recipes import TARGETS, RecipeName
from ...evidence.whole_file import write_whole
from ..errors import WrongSize
from ..optimizer import Schedule
from ..parallel.plan import ParallelPlan, refuse_plan
from ..sizes import Forms, Size, read_size

Precision = Literal["fp64", "fp32", "bf16", "delayed", "current", "block", "mxfp8", "nvfp4"]
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
PLAIN: Final = ("fp64", "fp32", "bf16")
DEVICES: Final = ("cpu", "cuda")
LEAST: Final = {"steps": 1, "warm_up": 0, "schedule_steps": 0, "validate_every": 0, "checkpoint_every": 0}
# What a field's annotation is as JSON gives it.
_TYPES: Final[dict[str, Any]] = {
    "str": str, "int": int, "float": int | float, "bool": bool, "dict": dict, "Precision": str, "Literal": str,
}  # fmt: skip


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
        validate_every: steps between evaluations on a batch that is never trained on, the first before step 0, and one
            at the end; 0 for none.
        checkpoint_folder: where checkpoints go, on a file system that all hosts share; empty for none.
        checkpoint_every: steps between them, and one at the end; 0 saves at the end alone.
        resume: whether the run begins with the latest checkpoint there, which must be one, and not beyond `steps`; one
            at `steps` is left as it is.
        audit: whether conservation of tokens, replicas and gradients of experts are checked in each step.
        watch: whether each module is watched for values that are no number.
        profile: whether one step is profiled for the time that communication is waited for.
        deterministic: whether kernels whose sums have no fixed order are left out and none is chosen by its time, so
            that a GPU gives the same bits in every process (`same_bits`).
        rehearse: whether a forward and backward pass that leaves nothing behind, no scale and no history either, comes
            before the first step, in the account of compiling.
        fault: a fault that is planted, for a run that must find it; empty for none.

    Raises:
        WrongSize: values of other types or out of their range, all of them at once; the rest is judged by `refuse`.
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
    deterministic: bool = False
    rehearse: bool = False
    fault: str = ""

    def __post_init__(self) -> None:
        if faults := list(_faults(self)):
            raise WrongSize(f"a run cannot be ordered so: {'; '.join(faults)}. Next step: change those.")

    def read_size(self) -> Size:
        """The size with its changes."""
        return read_size(self.size, **self.changes)

    def read_plan(self) -> ParallelPlan:
        """The plan; numbers that it does not know are refused, and those that cannot be by `refuse`."""
        known = {one.name for one in fields(ParallelPlan)}
        if unknown := sorted(set(self.plan) - known):
            raise WrongSize(f"a plan has no {', '.join(unknown)}. Next step: it has {', '.join(sorted(known))}.")
        return ParallelPlan(**self.plan)

    def read_features(self) -> Features:
        """What may take Transformer Engine."""
        flags = dict(self.features)
        preset = flags.pop("preset", "production")
        if wrong := sorted(name for name, value in flags.items() if not isinstance(value, bool)):
            raise WrongSize(f"features {', '.join(wrong)} are neither true nor false. Next step: say one of both.")
        return read_features(preset, **flags)

    def read_forms(self) -> Forms:
        """The form of each part."""
        known = {one.name: one.default for one in fields(Forms)}
        if unknown := sorted(set(self.forms) - set(known)):
            raise WrongSize(
                f"there is no form of {', '.join(unknown)}. Next step: there is {', '.join(sorted(known))}."
            )
        switches = {name for name, default in known.items() if isinstance(default, bool)}
        if wrong := sorted(name for name in switches & set(self.forms) if not isinstance(self.forms[name], bool)):
            raise WrongSize(f"forms {', '.join(wrong)} are neither true nor false. Next step: say one of both.")
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in self.forms.items()
        }
        return Forms(**given)

    def read_schedule(self) -> Schedule:
        """Rates of the run."""
        return Schedule(self.schedule_steps or self.steps, self.learning_rate, warm_up=self.warm_up)

    @property
    def recipe(self) -> RecipeName | None:
        """The low precision, if any."""
        return None if self.precision in PLAIN else self.precision  # type: ignore[return-value]

    def refuse(self) -> None:
        """Refuse what cannot be, before any process is started; a planted fault is judged by `faults.refuse_fault`.

        Raises:
            WrongPlan: with all reasons.
            WrongSize, UnknownSize, WrongPattern, WrongZone: the size, the schedule, or forms that do not go together.
            UnknownName: features that there are not.
        """
        plan, forms = self.read_plan(), self.read_forms()
        self.read_features(), self.read_schedule()
        refuse_plan(plan, self.read_size(), recipe=self.recipe)
        if forms.graphs and plan.world > 1:
            raise WrongSize(
                "graphs hold the addresses of parameters, which FSDP2 and the exchange of rows make anew in each step. "
                "Next step: capture on one rank, or leave graphs out."
            )
        if forms.moe == "jagged" and plan.expert_parallel > 1 and self.read_size().capacity_factor:
            raise WrongSize(
                "rows over an expert's capacity are sent by the way 'jagged' with a weight of 0: not the rows that the "
                "router kept. Next step: take 'bridge' with a capacity and expert_parallel."
            )
        if forms.moe == "padded" and plan.expert_parallel > 1:
            raise WrongSize(
                f"the way {forms.moe!r} to the experts knows no other ranks. Next step: take 'bridge' or 'jagged' with "
                "expert_parallel."
            )

    def refuse_target(self) -> None:
        """Refuse a recipe that the target lacks.

        Raises:
            UnknownName, WrongTarget: there is no such target, or it has no such recipe.
        """
        row = next((row for row in TARGETS.values() if self.target in (row.id, row.arch) and self.target), None)
        if row is None:
            raise UnknownName(f"there is no target {self.target!r}. Next step: choose one of {', '.join(TARGETS)}.")
        if self.recipe is not None and self.recipe not in row.recipes:
            have = ", ".join((*PLAIN, *row.recipes))
            raise WrongTarget(
                f"the target {row.id} has no recipe {self.recipe}. Next step: name the target that is there, or train "
                f"in one of {have}."
            )


def write_order(order: SmokeOrder, path: Path) -> None:
    """Leave it where ranks read it."""
    write_whole(path, json.dumps(asdict(order)))


def read_order(text: str) -> SmokeOrder:
    """An order from its JSON text.

    Raises:
        WrongSize: it is no JSON object, has keys that are not known, or values that cannot be.
    """
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("no JSON object")
        if unknown := sorted(set(given) - {one.name for one in fields(SmokeOrder)}):
            raise ValueError(f"unknown keys: {', '.join(unknown)}")
    except ValueError as fault:
        raise WrongSize(
            f"the order of a run cannot be read: {fault}. Likely cause: two versions of megacpp-validate. Next step: "
            "use one on both sides."
        ) from fault
    return SmokeOrder(**given)


def _faults(order: SmokeOrder) -> Iterator[str]:
    """What is of another type than its field, or out of its range."""
    for one in fields(order):
        value, wanted = getattr(order, one.name), _TYPES[str(one.type).partition("[")[0]]
        if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
            yield f"{one.name} is {value!r}, and is of {one.type}"
            continue
        least = LEAST.get(one.name)
        if least is not None and value < least:
            yield f"{one.name} is {value!r}, and is {least} at the least"
    if order.precision not in PRECISIONS:
        yield f"precision is {order.precision!r}, and is one of {', '.join(PRECISIONS)}"
    if order.device not in DEVICES:
        yield f"device is {order.device!r}, and is one of {', '.join(DEVICES)}"
    if (order.resume or order.checkpoint_every) and not order.checkpoint_folder:
        yield "checkpoints are asked for, and no checkpoint_folder for them"
