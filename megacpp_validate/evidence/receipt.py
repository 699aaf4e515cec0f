"""The receipt: what one probe observed in one environment, as one JSON file a cell.

Written inside the environment that is judged, where nothing but the standard library and torch can be counted on: so
these are plain dataclasses. `evidence.store` reads them back strictly, and publishes their schema.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Final

DEVICE_CLOCK: Final = "cuda-events"  # times on the host differ by 39 % between healthy releases
SCHEMA_ID: Final = "megacpp-validate/receipt/6"
_END: Final = '"\n}\n'  # of a file, behind the digits of its seal
CODE_ROOMS: Final = ("bridge", "native", "probes", "training")  # of the package: what produces a receipt


class Strict:
    """A dataclass that pydantic, on the host, reads without keys that it does not know."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


class Outcome(StrEnum):
    """How a cell ended. Only `PASS` and `EXPECTED_UNSUPPORTED` are good."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"  # a check out of bounds
    ERROR = "error"  # raised, or the process died
    IMPORT_ERROR = "import-error"
    BLOCKED = "blocked"  # by another cell
    EXPECTED_UNSUPPORTED = "expected-unsupported"
    TIMEOUT = "timeout"
    NOT_RUN = "not-run"

    @property
    def is_good(self) -> bool:
        """Whether this outcome counts as evidence that the cell holds."""
        return self in (Outcome.PASS, Outcome.EXPECTED_UNSUPPORTED)


def cell_id(stack: str, target: str, probe: str) -> str:
    """The one join key: `te2.20.2-h200-attention`."""
    return f"{stack}-{target}-{probe}"


@dataclass(frozen=True)
class Part(Strict):
    """One part of a check: what was seen, what was allowed, and where the bound comes from.

    Attributes:
        at_least: the bound is a floor; without it a ceiling.
    """

    name: str
    observed: float | None
    bound: float | None
    passed: bool
    derivation: str
    at_least: bool = False


@dataclass(frozen=True)
class Check(Strict):
    """One thing that was looked at; `parts` has every bound it was held to.

    Attributes:
        name: dotted: what, in which precision and shape, which tensor.
        passed: whether every part did.
        detail: what was seen where that is no number: a backend, a refusal, an exception.
    """

    name: str
    passed: bool
    parts: tuple[Part, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Backend(Strict):
    """What one path requested and what ran.

    Attributes:
        path: which path of the module: "attention.bf16.gqa4", "recipe.delayed".
        requested: the backend.
        claimed: what the wrapper says it took.
        observed: what was seen to run, from the autograd graph or the kernels; empty where nothing could be seen.
        reasons: of every backend that was passed over.
    """

    path: str
    requested: str
    claimed: str
    observed: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    @property
    def detail(self) -> str:
        """What the check of this path says of it."""
        return f"requested {self.requested}, claimed {self.claimed}, seen {', '.join(self.observed)}"


@dataclass(frozen=True)
class Package(Strict):
    """A vendor package as loaded, and every other copy of it on the path."""

    name: str
    version: str
    file: str
    other_copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Library(Strict):
    """A shared library as loaded: cuDNN, cuBLAS, NCCL, the CUDA runtime."""

    name: str
    version: str
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine(Strict):
    """Where it ran; empty strings where there is no GPU. `load` is that of the host and the GPU before the probe."""

    host: str = ""
    platform: str = ""
    python: str = ""
    torch: str = ""
    gpu: str = ""
    capability: str = ""
    driver: str = ""
    cuda: str = ""
    load: str = ""


# What ends a process and says nothing of it: the memory killer, an administrator, a batch system.
FROM_OUTSIDE: Final = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})


@dataclass(frozen=True)
class Failure(Strict):
    """What was raised.

    Attributes:
        type: qualified class name.
        message: its text.
        frame: innermost frame of vendor code, else the innermost of all: "file:line in function".
        traceback: whole.
    """

    type: str
    message: str
    frame: str = ""
    traceback: str = ""


@dataclass(frozen=True)
class JitCompile(Strict):
    """One kernel or graph that was compiled just in time: no cache on disk had it.

    Attributes:
        library: whose: "triton", "inductor", "cute", "fa4", "deep_gemm", "cuda" (the driver), "torch_extensions".
        kernel: its name.
        shape: what it was compiled for: shapes, or the signature and its constants.
        seconds: that it took; of a kernel of DeepGEMM the call that compiled it, 0 where it is unknown.
        when: "warm-up", or "after" it.
        rank: of a training run; -1 in the process of the probe.
    """

    library: str
    kernel: str
    shape: str
    seconds: float
    when: str
    rank: int = -1


@dataclass(frozen=True)
class JitCompiles(Strict):
    """What was compiled just in time, and where that is kept.

    Attributes:
        warm_up, after: library -> how much the probe's process compiled, up to its second use and in it.
        compiled: each of them, those of training ranks too.
        hits: library -> how much came from a cache on disk.
        unwatched: libraries of the process whose compiles nobody sees -> why.
        notes: what a person should know: another process that was waited for in vain, a cache that cannot be written.
        root: of the caches (MEGACPP_JIT_ROOT); empty where each library keeps its own.
        arch: folder of the root.
        mode: what compiles CUDA C++ there: "nvcc" or "nvrtc".
    """

    warm_up: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    compiled: tuple[JitCompile, ...] = ()
    hits: dict[str, int] = field(default_factory=dict)
    unwatched: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    root: str = ""
    arch: str = ""
    mode: str = ""


@dataclass(frozen=True)
class Quantizer(Strict):
    """What cast one operand of a path to low precision, as it was found on the object that ran.

    Attributes:
        path: which path of the probe: "fp8.delayed.linear".
        tensor: which operand: "input", "weight", "gradient".
        kind: class of the vendor's quantizer or tensor.
        format: of the values: "float8_e4m3", "float8_e5m2".
        block: values that share a scale: "tensor", "1x128", "128x128", "1x32".
    """

    path: str
    tensor: str
    kind: str
    format: str
    block: str


@dataclass(frozen=True)
class Compiler(Strict):
    """What compiles a library's kernels just in time.

    Attributes:
        library: whose kernels.
        mode: by what: "nvcc", "nvrtc".
        cache: folder that they are kept in.
    """

    library: str
    mode: str
    cache: str


@dataclass(frozen=True)
class Timing(Strict):
    """How long one use of a module took, alone on its device.

    Attributes:
        name: dotted: what, in which precision and shape, which direction.
        clock: "cuda-events" (device time) or "perf_counter" (wall-clock time, where there is no GPU).
        rounds_ms: median of every round, milliseconds a use; rounds lie apart in time.
        median_ms: of the rounds.
        spread: (largest - smallest round) / median.
        uses: calls that were timed in each round.
    """

    name: str
    clock: str
    rounds_ms: tuple[float, ...]
    median_ms: float
    spread: float
    uses: int


@dataclass(frozen=True)
class TrainingStep(Strict):
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


@dataclass(frozen=True)
class TrainingRecord(Strict):
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

    @property
    def goodput(self) -> float:
        """Share of the wall time that went into steps, 0 to 1."""
        return self.phases_ns.get("step", 0) / self.whole_ns if self.whole_ns else 0.0

    @property
    def step_median(self) -> float:
        """Seconds of a step, the first apart, which compiles and warms up; 0 without a step."""
        times = [step.seconds for step in self.steps]
        return statistics.median(times[1:] or times) if times else 0.0

    @property
    def goal(self) -> float:
        """Loss at which nine tenths are learned of what context can teach, nats a prediction."""
        return self.floor + (self.without_context - self.floor) / 10

    @property
    def tokens_to_goal(self) -> int | None:
        """Tokens until the mean loss of ten steps is below `goal`; None where it never is."""
        losses = [math.inf if step.loss is None else step.loss for step in self.steps]
        for end in range(10, len(losses) + 1):
            if statistics.fmean(losses[end - 10 : end]) < self.goal:
                return self.tokens * end // len(losses)
        return None

    @property
    def tokens_per_gpu_hour(self) -> float:
        """Of the steps."""
        return 3600 * self.tokens_per_second / self.ranks


@dataclass(frozen=True)
class Receipt(Strict):
    """What one probe observed.

    Attributes:
        cell: `cell_id(stack, target, probe)`.
        reason: why the outcome is what it is, in a sentence; of a good one empty or what was chosen.
        requested: "te" or "native", and why it is that.
        backends: a row a path.
        blocked_by: the cell that stands in the way.
        seconds: wall-clock time of the process, by phase.
        retries: of named infrastructure faults; a numeric failure is never retried.
        timings: a row a use that was timed.
        quantizers: a row an operand that was cast to low precision.
        compilers: of the libraries whose kernels were compiled just in time.
        training: a row a training run that ended well.
        environment: identity of the environment that it ran in; a receipt of another one is no answer to a later run.
        code: `hash_code()` of the checkout that produced it; empty where that is unknown.
        seal: SHA-256 of the file without these digits; `write_receipt` sets both.
    """

    cell: str
    stack: str
    target: str
    probe: str
    outcome: Outcome
    reason: str
    requested: str
    requested_because: str = ""
    checks: tuple[Check, ...] = ()
    backends: tuple[Backend, ...] = ()
    packages: tuple[Package, ...] = ()
    libraries: tuple[Library, ...] = ()
    machine: Machine = field(default_factory=Machine)
    jit: JitCompiles = field(default_factory=JitCompiles)
    failure: Failure | None = None
    blocked_by: str = ""
    seed: int = 0
    started: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_mib: float = 0.0
    retries: tuple[str, ...] = ()
    timings: tuple[Timing, ...] = ()
    quantizers: tuple[Quantizer, ...] = ()
    compilers: tuple[Compiler, ...] = ()
    training: tuple[TrainingRecord, ...] = ()
    environment: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    commit: str = ""
    tool: str = ""
    schema_id: str = SCHEMA_ID
    code: str = field(default="", compare=False)
    seal: str = field(default="", compare=False)


@cache
def hash_code() -> str:
    """SHA-256 over the name and content of every source file of `CODE_ROOMS`."""
    root, digest = Path(__file__).parents[1], sha256()
    for path in sorted(path for room in CODE_ROOMS for path in (root / room).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def seal(text: str) -> str:
    """A text that ends with an empty seal, with the SHA-256 of that text in it."""
    return text.removesuffix(_END) + sha256(text.encode()).hexdigest() + _END


def is_sealed(content: bytes) -> bool:
    """Whether no byte of a receipt changed since it was sealed."""
    at, end = len(content) - 64 - len(_END), len(content) - len(_END)
    return at > 0 and sha256(content[:at] + content[end:]).hexdigest().encode() == content[at:end]


def read_time(text: str) -> datetime | None:
    """A time in UTC, of ISO 8601 with its zone; None where it is none: one without a zone can be off by a day."""
    try:
        found = datetime.fromisoformat(text)
        return None if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def receipt_text(receipt: Receipt) -> str:
    """The receipt as JSON: two spaces, keys in the order of `Receipt`; the same text for the same receipt.

    JSON has no NaN and no Inf: such a number becomes null. What a vendor library says may hold half a character, which
    must not cost the receipt: it is written as its escape.
    """
    blank = replace(receipt, code=receipt.code or hash_code(), seal="")
    return seal(json.dumps(_plain(asdict(blank)), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_receipt(receipt: Receipt, path: Path) -> None:
    """Write a receipt, sealed, whatever dies half way.

    Raises:
        OSError: the place cannot be written.
    """
    write_whole(path, receipt_text(receipt))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def memory_limit(held_mib: float, ratio: float, rise_mib: float) -> float:
    """The highest peak in MiB that is no growth: by a ratio, or by a rise that a healthy release may make."""
    return max(held_mib * ratio, held_mib + rise_mib)


def write_whole(path: Path, text: str) -> None:
    """Write a text as UTF-8, whatever dies half way; folders on the way are made.

    Raises:
        OSError: the place cannot be written.
    """
    content = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())  # a name without its contents is what a power cut leaves
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
