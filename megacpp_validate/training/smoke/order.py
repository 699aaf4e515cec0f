"""The order of a smoke run: one JSON object, the same for every rank; and the run of an order on ranks of this host."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ...bridge.features import Features, read_features
from ...bridge.recipes import RecipeName
from ...evidence.receipt import write_whole
from .. import WrongSize, check_fields
from ..optimizer import Schedule
from ..parallel.launch import Limits, RunEnd, launch
from ..parallel.plan import ParallelPlan, refuse_plan
from ..sizes import Forms, Size, read_size

Precision = Literal["fp64", "fp32", "bf16", "deep_gemm", "delayed", "current", "block", "mxfp8", "nvfp4"]
PLAIN: Final = ("fp64", "fp32", "bf16", "deep_gemm")  # without a recipe of Transformer Engine
RANK: Final = "megacpp_validate.training.smoke.rank"
ORDER: Final = "order.json"
SILENT_S: Final = 120.0  # without a sign of life on any rank; longer than the longest compile
# For the same bits in every process: a workspace of cuBLAS for each stream (its documentation, "Results
# Reproducibility"), attention kernels of Transformer Engine that add in a fixed order, and no choice of an autotuner
# that another process left on disk.
SAME_BITS: Final = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "TRITON_CACHE_AUTOTUNING": "0",
}


@dataclass(frozen=True)
class SmokeOrder:
    """A run.

    Attributes:
        size: name of a size.
        changes: numbers of the size that differ.
        plan: fields of `ParallelPlan`.
        steps: where the run ends, counted from step 0 also by one that is resumed.
        task: "language"; or "gate", the lessons and the model of the loss gate, on one rank.
        seed: of weights and data.
        data_seed: of the data of the task "gate", whose weights alone have `seed`.
        precision: dtype of the parameters; an FP8 recipe, over parameters in bf16; or "deep_gemm", which is bf16 with
            jagged experts in DeepGEMM's FP8.
        device: "cpu" (gloo) or "cuda" (NCCL).
        target: whose recipes hold.
        features: "preset" and flags of `bridge.features`.
        forms: fields of `Forms`.
        learning_rate, warm_up, eps: of the schedule.
        schedule_steps: its length; `steps` where it is 0.
        validate_every: steps between evaluations on a batch that is never trained on, the first before step 0, and one
            at the end; 0 for none.
        checkpoint_folder: of checkpoints, on a file system that all hosts share; empty for none.
        checkpoint_every: steps between checkpoints, and one at the end; 0 saves at the end alone.
        resume: whether the run begins with the latest checkpoint there, which must exist, and not be beyond `steps`.
        audit: whether conservation of tokens, replicas and gradients of experts are checked in each step.
        watch: whether each module is watched for values that are not finite.
        profile: whether one step is profiled for the time that communication is waited for.
        deterministic: whether kernels whose sums have no fixed order are left out and none is chosen by its time, so
            that a GPU gives the same bits in every process.
        rehearse: whether a forward and backward pass that leaves nothing behind, no scale and no history either, comes
            before the first step, in the account of compiling.
        fault: a planted fault, for a run that must find it; empty for none.

    Raises:
        WrongSize: values of other types or out of their range, all of them at once; the rest is judged by `refuse`.
    """

    size: str = "tiny"
    changes: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    steps: int = 20
    task: Literal["language", "gate"] = "language"
    seed: int = 0
    data_seed: int = 0
    precision: Precision = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    target: str = "cpu"
    features: dict[str, Any] = field(default_factory=dict)
    forms: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 3e-3
    warm_up: int = 0
    eps: float = 1e-8
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
        lacks_folder = (self.resume or self.checkpoint_every) and not self.checkpoint_folder
        more = ["checkpoints need a checkpoint_folder"] if lacks_folder else []
        check_fields(self, more, least=0, others={"steps": 1})

    def read_size(self) -> Size:
        """The size with its changes."""
        return read_size(self.size, **self.changes)

    def read_plan(self) -> ParallelPlan:
        """The plan; wrong numbers are refused by `refuse`."""
        return ParallelPlan(**self.plan)

    def read_features(self) -> Features:
        """Parts that may use Transformer Engine."""
        flags = dict(self.features)
        return read_features(flags.pop("preset", "production"), **flags)

    def read_forms(self) -> Forms:
        """The form of each part."""
        given: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in self.forms.items()}
        if self.precision == "deep_gemm":
            given |= {"moe": "jagged", "expert_backends": ("deep_gemm", "native")}
        return Forms(**given)

    def read_schedule(self) -> Schedule:
        """Rates of the run."""
        return Schedule(self.schedule_steps or self.steps, self.learning_rate, warm_up=self.warm_up, eps=self.eps)

    @property
    def recipe(self) -> RecipeName | None:
        """The low precision, if any."""
        return None if self.precision in PLAIN else self.precision  # type: ignore[return-value]

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its ranks."""
        return dict(SAME_BITS) if self.deterministic else {}

    def refuse(self) -> None:
        """Refuse an impossible order, before any process is started.

        Raises:
            WrongSize: the plan with all reasons, the size, or forms that do not go together.
            WrongZone: zones that overlap.
            UnknownName: unknown features.
            TypeError: an unknown field.
        """
        plan = self.read_plan()
        self.read_features()
        size = self.read_size()
        refuse_plan(plan, size)
        if plan.tensor_parallel > 1 and (size.streams > 1 or "D" in size.letters or size.attention == "moba"):
            raise WrongSize("DSA, MoBA and residual streams are not split. Next step: tensor_parallel 1.")
        alone = self.read_forms().moe == "padded" or self.precision == "deep_gemm"
        if alone and plan.expert_parallel > 1:
            raise WrongSize(
                "experts on the path 'padded' or in the precision 'deep_gemm' have no exchange with other ranks. Next "
                "step: 'bridge' or 'jagged', in another precision."
            )

    def write(self, folder: Path) -> str:
        """Leave the order where ranks read it: the path of its file."""
        write_whole(folder / ORDER, json.dumps(asdict(self)))
        return str((folder / ORDER).absolute())


def run_smoke(
    order: SmokeOrder,
    folder: Path,
    *,
    limit_s: float = 600.0,
    silent_s: float = SILENT_S,
    environment: Mapping[str, str] | None = None,
) -> RunEnd:
    """Run an order on ranks of this host.

    Args:
        order: to train.
        folder: of logs, receipts and the order; made, and cleared of ranks of an earlier run.
        limit_s: of the whole run.
        silent_s: without a sign of life on any rank.
        environment: added to that of the ranks.

    Raises:
        TrainingError, BridgeError: an impossible order; no process was started.
        OSError: the folder cannot be written.
    """
    order.refuse()
    folder.mkdir(parents=True, exist_ok=True)
    return launch(
        RANK,
        [order.write(folder)],
        ranks=order.read_plan().world,
        folder=folder,
        limits=Limits(whole=limit_s, silent=min(silent_s, limit_s)),
        environment={**order.environment, **(environment or {})},
    )
