"""One run of the loss gate: a seed, a recipe, a thousand steps, and the curve that they leave behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn import functional

from ..bridge.backends import Choice
from ..bridge.features import PRODUCTION, Features
from ..bridge.fp8_scope import SINGLE_OWNER, low_precision
from ..bridge.linear_walker import swap_linears
from ..bridge.recipes import RecipeName
from ..evidence.loss_curve import HistorySeen, LossCurve, QuantizerSeen, write_curve
from ..jit.monitor import start_compiling
from .errors import WrongSize
from .gate_audit import HistoryWatch, see_quantizers
from .language import Language, drawn_from, generator_of
from .layers import Build
from .loop import bytes_of
from .model import HybridModel, ScopeFactory
from .optimizer import MasterAdamW, Schedule
from .sizes import Size, read_size

REFERENCE: Final = "bf16"
Precision = Literal["bf16", "delayed", "current", "block"]
LEARNING_RATE: Final = 1e-3
WARM_UP: Final = 0.1  # of the steps


@dataclass(frozen=True)
class GateRun:
    """What is trained.

    Attributes:
        recipe: "bf16", the same build without a scope; or an FP8 recipe.
        seed: of the weights; the data are the same for all.
        steps: of the run.
        target: whose recipes hold; the machine must be one.
        size: name of the size.
        device: where.
        dtype: of the parameters.
        features: what may take Transformer Engine.
        data_seed: of the data.
    """

    recipe: str
    seed: int
    steps: int = 1000
    target: str = "h200"
    size: str = "gate"
    device: str = "cuda"
    dtype: Any = torch.bfloat16
    features: Features = PRODUCTION
    data_seed: int = 0


@dataclass
class _Kept:
    """What the curve will hold, a step at a time."""

    digest: Any = field(default_factory=hashlib.sha256)
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    part_losses: dict[str, list[float]] = field(default_factory=dict)
    part_norms: dict[str, list[float]] = field(default_factory=dict)
    histories: list[HistorySeen] = field(default_factory=list)
    quantizers: tuple[QuantizerSeen, ...] = ()


class GateTrainer:
    """Trains one run, and keeps its curve.

    Args:
        run: what is trained.

    Attributes:
        model: what is trained.
        run: as given.
    """

    def __init__(self, run: GateRun) -> None:
        self.run = run
        size: Size = read_size(run.size)
        recipe: RecipeName | None = None if run.recipe == REFERENCE else run.recipe  # type: ignore[assignment]
        # The reference is built as for a recipe: whatever the walker leaves native in FP8 is native there too.
        build = Build(run.features, run.dtype, run.device, recipe or "delayed")
        self.data = GateData(size, seed=run.data_seed)
        self.model = GateModel(size, build, seed=run.seed)
        schedule = Schedule(
            run.steps, LEARNING_RATE, warm_up=int(WARM_UP * run.steps), eps=1e-15
        )  # an eps that is small beside quiet gradients
        self.optimizer = MasterAdamW(self.model.named_parameters(), schedule)
        self._scope: ScopeFactory | None = None
        if recipe is not None:
            self._scope = partial(low_precision, target=run.target, amax_reduction_group=SINGLE_OWNER, recipe=recipe)
        self._watch = HistoryWatch(self.model)
        self._watched = {1, 24, run.steps // 2, run.steps - 2}
        self._kept = _Kept()

    def train(self, keep: Callable[[GateTrainer, int], None] | None = None) -> LossCurve:
        """All steps, or those up to the first that is not finite; the curve of them.

        Args:
            keep: called after each step with this trainer and the number of the step.
        """
        for step in range(self.run.steps):
            fine = self.step(step)
            if keep is not None:
                keep(self, step)
            if not fine:
                break
        return self.curve()

    def step(self, step: int) -> bool:
        """Read, move the weights once, and record; False where a number is not finite, and the weights stay."""
        lesson = self.data.lesson(step)
        self._kept.digest.update(bytes_of(lesson.tokens) + bytes_of(lesson.levels))
        losses = self.model.losses(_move(lesson, self.run.device), scope=self._scope)
        (losses.total * spike_of(step)).backward()  # outside of the scope, as the bridge wants it
        norm = self.optimizer.take_gradients()
        fine = self._record(step, losses, norm)
        if fine:
            self.optimizer.update(step, norm)
        self._look(step)
        return fine

    def curve(self) -> LossCurve:
        """What was recorded so far."""
        kept = self._kept
        return LossCurve(
            recipe=self.run.recipe,
            seed=self.run.seed,
            data=kept.digest.hexdigest(),
            planned=self.run.steps,
            steps=tuple(kept.steps),
            losses=tuple(kept.losses),
            gradient_norms=tuple(kept.norms),
            part_losses={name: tuple(values) for name, values in kept.part_losses.items()},
            part_norms={name: tuple(values) for name, values in kept.part_norms.items()},
            quantizers=kept.quantizers,
            histories=tuple(kept.histories),
        )

    def _record(self, step: int, losses: GateLosses, norm: Any) -> bool:
        parts = self.optimizer.norms_by(self.model.part_of)
        names = ("loud", "quiet", "gauge")
        said = [losses.reported, losses.loud, losses.quiet, losses.gauge, norm, *parts.values()]
        # Nine digits tell every fp32 number from its neighbours; what more a double has would only make a larger file.
        numbers = [float(f"{value:.9g}") for value in torch.stack([one.detach().float() for one in said]).tolist()]
        kept = self._kept
        kept.steps.append(step)
        kept.losses.append(numbers[0])
        kept.norms.append(numbers[4])
        for name, value in zip(names, numbers[1:4], strict=True):
            kept.part_losses.setdefault(name, []).append(value)
        for name, value in zip(parts, numbers[5:], strict=True):
            kept.part_norms.setdefault(name, []).append(float(f"{value:.6g}"))
        return all(map(math.isfinite, numbers))

    def _look(self, step: int) -> None:
        """At what the layers hold; twice in a row where histories are compared."""
        if self._scope is None:
            return
        if step - 1 in self._watched and (seen := self._watch.compare(step)) is not None:
            self._kept.histories.append(seen)
        if step in self._watched:
            self._watch.remember()
        if step in (1, self.run.steps - 1):
            self._kept.quantizers = see_quantizers(self.model)


def _move(lesson: Lesson, device: Any) -> Lesson:
    tensors = (lesson.tokens, lesson.levels, lesson.places, lesson.targets)
    return Lesson(*(tensor.to(device, non_blocking=True) for tensor in tensors))


# --- gate data
#
# What the loss gate trains on: the language of `language.py`, half of it quiet, with gauges in it.
#
# Each property of an FP8 format is made to matter to the loss (the arithmetic is below):
#
# - range: the second half of a batch is *quiet*. It is the same language in letters of its own, and its loss is
# weighted
#   by 2^-20. Adam does not care; a format whose range ends above that flushes the only gradients that those letters
#   have.
# - resolution: at fixed places a *gauge* shows one of seven levels of one binade, and the model is to name the level.
#   E4M3 holds all of them exactly, whatever power of two scales them; E5M2 holds every other one.
# - memory: the loss of one early step is a *spike*. What remembers that amax for longer than its 16 steps flushes what
#   is quiet.


QUIET: Final = 2.0**-20
SPIKE_STEP: Final = 4  # within warm-up: the 16 steps that the history remembers it for are worth two steps of learning
SPIKE: Final = 2.0**18
FIRST_LEVEL, LAST_LEVEL = 8, 14  # sixteenths: 8/16 .. 14/16, all of 3 mantissa bits
LEVEL_UNIT: Final = 16
GAUGE_EVERY: Final = 16
GAUGE_FIRST: Final = 5


@dataclass(frozen=True, eq=False)
class Lesson:
    """What one step reads; the first half of the sequences is loud, the second quiet.

    Attributes:
        tokens: [B, T] int64, letters from 0 to V - 1 whether loud or quiet.
        levels: [B, G] int64 from 8 to 14, of the gauges at `places`.
        places: [G] int64, positions of the gauges in a sequence.
        targets: [B, T] int64: the next letter, or the level less 8 where there is a gauge.
    """

    tokens: Any
    levels: Any
    places: Any
    targets: Any


class GateData:
    """The lessons of a size, a step at a time; they depend on nothing but the size and the seed.

    Args:
        size: its language, batch and length.
        seed: of the language and of what is said in it; not that of the weights.
    """

    def __init__(self, size: Size, *, seed: int = 0) -> None:
        self.size, self.seed = size, seed
        self.language = Language(size.grammar, seed=seed)
        self.places = torch.arange(GAUGE_FIRST, size.length, GAUGE_EVERY)

    def lesson(self, step: int) -> Lesson:
        """What is read at a step, on the CPU."""
        size = self.size
        read = self.language.batch(step, size.batch, size.length + 1)
        drawn = generator_of(self.seed, "gauges", step)
        levels = torch.randint(FIRST_LEVEL, LAST_LEVEL + 1, (size.batch, len(self.places)), generator=drawn)
        targets = read[:, 1:].clone()
        targets[:, self.places] = levels - FIRST_LEVEL
        return Lesson(read[:, :-1].contiguous(), levels, self.places, targets)


def spike_of(step: int) -> float:
    """What the loss of a step is multiplied by before backward."""
    return SPIKE if step == SPIKE_STEP else 1.0


# --- gate model
#
# The model of the loss gate: the hybrid model, with a lane in front of its low-precision layers.
#
# The residual stream carries gradients past every layer in BF16, so that a layer whose gradients are flushed costs
# little loss. Hence the lane, which nothing goes around: the *neck*, one linear layer that all of the stream passes,
# and the gauge, two linear layers that show a level to the stream. Both run in the scope of the low-precision layers.


LANE: Final = ("neck", "gauge_in", "gauge_out")
SHARPNESS: Final = 4.0  # of the gauge's kinks
# Channels that show a level. All get the same gradient, so that their weights move as one: in 256 channels Adam moved
# their sum a quarter a step, and runs fell over each other (seen on an H200, 2026-11-21).
SHOWN: Final = 16


@dataclass(frozen=True, eq=False)
class GateLosses:
    """The losses of a lesson, each [] in fp32.

    Attributes:
        total: what is trained on, before a spike: the mean of the loud half, and of the quiet half times 2^-20.
        reported: the mean over all positions, none weighted: what the curve records.
        loud, quiet, gauge: means over the positions of letters of each half, and over those of gauges.
    """

    total: Any
    reported: Any
    loud: Any
    quiet: Any
    gauge: Any


class Lane(nn.Module):
    """Neck and gauge; the linear layers are Transformer Engine's where the linear walker may swap them.

    Args:
        size: its width.
        build: of what, in which dtype, where.
        seed: of the weights.
    """

    def __init__(self, size: Size, build: Build, *, seed: int) -> None:
        super().__init__()
        wide = size.hidden
        with drawn_from(seed, "weights", "lane"):
            first = {name: torch.randn(wide, wide) / math.sqrt(wide) for name in LANE}
            first["gauge_in"] *= math.sqrt(wide / SHOWN)
            order = torch.randperm(wide)
        ends = (FIRST_LEVEL - 0.5) / LEVEL_UNIT, (LAST_LEVEL + 0.5) / LEVEL_UNIT
        kinks = -first["gauge_in"][:, :SHOWN].sum(1) * torch.linspace(*ends, wide)[order]
        for name, weight in first.items():
            layer = nn.Linear(wide, wide, bias=False, device="meta", dtype=build.dtype)
            layer.weight = nn.Parameter(weight.to(build.device, build.dtype))
            self.add_module(name, layer)
        self.kinks = nn.Parameter(kinks.to(build.device, build.dtype))
        swap = swap_linears(self, include=LANE, features=build.features, recipe=build.recipe)
        self.swapped: dict[str, Choice] = dict(swap.choices)

    def forward(self, rows: Any, lesson: Lesson) -> Any:
        """[B, T, hidden] -> [B, T, hidden], with the levels of the lesson shown at its places."""
        rows = self.neck(rows)
        level = (lesson.levels.to(rows.dtype) / LEVEL_UNIT).unsqueeze(-1)
        shown = functional.pad(level.expand(-1, -1, SHOWN), (0, rows.shape[-1] - SHOWN))
        kinked = functional.gelu(SHARPNESS * (self.gauge_in(shown) + self.kinks))
        return rows.index_add(1, lesson.places, self.gauge_out(kinked))


class GateModel(nn.Module):
    """The hybrid model, its lane, and letters of their own for the quiet half.

    Args:
        size, build, seed: as `HybridModel` takes them.

    Raises:
        WrongSize: no layer runs in low precision, an odd batch, or fewer letters than levels.
    """

    def __init__(self, size: Size, build: Build, *, seed: int) -> None:
        super().__init__()
        low = [place for place in range(len(size.letters)) if not size.zones.is_bf16(place)]
        levels = LAST_LEVEL - FIRST_LEVEL + 1
        if not low or size.batch % 2 or size.vocabulary < levels or size.hidden < SHOWN:
            raise WrongSize(
                f"the size {size.name!r} cannot be trained for the loss gate: it has {len(low)} layers in low "
                f"precision (1 or more), a batch of {size.batch} (even), {size.vocabulary} letters ({levels} or more) "
                f"and {size.hidden} channels ({SHOWN} or more). Next step: change those numbers."
            )
        self.size, self.seed, self.first_low = size, seed, low[0]
        self.hybrid = HybridModel(size, build, seed=seed)
        # They start as their loud twins do, and say the same language: what learns stays beside them, and what does not
        # is left behind. Letters drawn anew would have to be matched first, and seeds differ in how they end then.
        self.quiet = nn.Embedding(size.vocabulary, size.hidden, _weight=self.hybrid.embedding.weight.detach().clone())
        self.lane = Lane(size, build, seed=seed)

    def losses(self, lesson: Lesson, *, scope: ScopeFactory | None = None) -> GateLosses:
        """The losses of a lesson, which lies on the device of the model."""
        half = self.size.batch // 2
        tokens = lesson.tokens
        rows = torch.cat([self.hybrid.embedding(tokens[:half]), self.quiet(tokens[half:])])
        seen = self.hybrid.trunk(
            tokens, scope=scope, rows=rows, before={self.first_low: lambda stream: self.lane(stream, lesson)}
        )
        logits = self.hybrid.head(seen.rows).float()
        each = functional.cross_entropy(logits.flatten(0, 1), lesson.targets.flatten(), reduction="none")
        each = each.unflatten(0, lesson.targets.shape)
        gauges = each[:, lesson.places]
        letters = each.sum(1) - gauges.sum(1)  # [B]
        count = each.shape[1] - gauges.shape[1]
        total = each[:half].mean() + QUIET * each[half:].mean() + seen.aux_loss + seen.z_loss
        return GateLosses(
            total,
            each.detach().mean(),
            letters[:half].detach().mean() / count,
            letters[half:].detach().mean() / count,
            gauges.detach().mean(),
        )

    def choices(self) -> dict[str, Choice]:
        """Part -> what its last call took, and why."""
        lane = {f"lane.{name}": choice for name, choice in self.lane.swapped.items()}
        return {**self.hybrid.choices(), **lane}

    def part_of(self, parameter: str) -> str:
        """Which part of the model a parameter belongs to: "letters", "quiet", "lane", "layers.2", "norm" or "head"."""
        first, *rest = parameter.split(".")
        if first != "hybrid":
            return first
        if rest[0] == "layers":
            return ".".join(rest[:2])
        return "letters" if rest[0] == "embedding" else rest[0]


# --- gate process
#
# One run of the loss gate as a process: what to train as JSON on standard input, the curve as a file.
#
#     python -m megacpp_validate.training.gate_run < ORDER
#
# ORDER has the fields of `GateRun` that are text or numbers, and `path`, where the curve goes. On standard output comes
# one JSON object: what each part ran on, seconds, and the peak of the device's memory.


@dataclass(frozen=True)
class Trained:
    """What a run leaves besides its curve.

    Attributes:
        backends: part of the model -> what its last call took.
        seconds: from the first step to the last.
        peak_mib: largest memory on the device.
    """

    backends: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    peak_mib: float = 0.0


def train_to_file(run: GateRun, path: Path) -> tuple[LossCurve, Trained]:
    """Train a run, and write its curve with what trained it.

    Raises:
        OSError: the place cannot be written.
        BridgeError: what the bridge refuses.
    """
    trainer = GateTrainer(run)
    started = time.perf_counter()
    curve = trainer.train()
    seconds = round(time.perf_counter() - started, 2)
    curve.made_with.update(_made_with(run.device))
    write_curve(curve, path)
    backends = {part: choice.observed for part, choice in trainer.model.choices().items()}
    peak = torch.cuda.max_memory_allocated() / 2**20 if run.device == "cuda" else 0.0
    return curve, Trained(backends, seconds, round(peak, 1))


def main() -> None:
    """Read the order, train, and say what came of it."""
    order: dict[str, Any] = json.load(sys.stdin)
    path = Path(order.pop("path")).absolute()
    torch.set_num_threads(1)  # runs stand side by side, and their work is the device's
    start_compiling()
    _, trained = train_to_file(GateRun(**order), path)
    sys.stdout.write(json.dumps(vars(trained)) + "\n")


def _made_with(device: str) -> dict[str, str]:
    made = {"torch": torch.__version__}
    if device == "cuda":
        made["gpu"] = torch.cuda.get_device_name()
    with contextlib.suppress(PackageNotFoundError):
        made["transformer_engine"] = version("transformer_engine")
    return made


if __name__ == "__main__":
    main()
