"""One run of the loss gate: a seed, a recipe, a thousand steps, and the curve that they leave behind.

    python -m megacpp_validate.training.gate_run < ORDER

ORDER is JSON with the fields of `GateRun` that are text or numbers, and `path`, where the curve goes. On standard
output comes one JSON object: backend of each part, seconds, and the peak of the device's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from ..bridge.amax_owner import SINGLE_OWNER
from ..bridge.backends import Choice
from ..bridge.features import PRODUCTION, Features
from ..bridge.fp8_scope import low_precision
from ..bridge.linear_walker import swap_linears
from ..bridge.recipes import RecipeName
from ..bridge.te_fp8 import te_amax_state
from ..evidence.loss_curve import HistorySeen, LossCurve, QuantizerSeen, write_curve
from ..jit.monitor import start_compiling
from .language import Language, drawn_from, generator_of
from .layers import Build
from .model import HybridModel, ScopeFactory, part_of
from .optimizer import MasterAdamW, Schedule
from .sizes import Size, read_size

REFERENCE: Final = "bf16"
LEARNING_RATE: Final = 1e-3
WARM_UP: Final = 0.1  # of the steps


@dataclass(frozen=True)
class GateRun:
    """A run.

    Attributes:
        recipe: "bf16", the same build without a scope; or an FP8 recipe.
        seed: of the weights; the data are the same for all.
        steps: of the run.
        target: whose recipes hold; the machine must be one.
        size: name of the size.
        device: where.
        dtype: of the parameters.
        features: parts that may use Transformer Engine.
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


class GateTrainer:
    """Trains one run, and keeps its curve.

    Args:
        run: to train.

    Attributes:
        model: in training.
        run: as given.
    """

    def __init__(self, run: GateRun) -> None:
        self.run = run
        size = read_size(run.size)
        recipe: RecipeName | None = None if run.recipe == REFERENCE else run.recipe  # type: ignore[assignment]
        # The reference is built as for a recipe: whatever the walker leaves native in FP8 is native there too.
        build = Build(run.features, run.dtype, run.device, recipe or "delayed")
        self.data = GateData(size, seed=run.data_seed)
        self.model = GateModel(size, build, seed=run.seed)
        # An eps that is small beside quiet gradients.
        schedule = Schedule(run.steps, LEARNING_RATE, warm_up=int(WARM_UP * run.steps), eps=1e-15)
        self.optimizer = MasterAdamW(self.model.named_parameters(), schedule)
        self._scope: ScopeFactory | None = None
        if recipe is not None:
            self._scope = partial(low_precision, target=run.target, amax_reduction_group=SINGLE_OWNER, recipe=recipe)
        self._watch = HistoryWatch(self.model, before={1, 24, run.steps // 2, run.steps - 2})
        self._digest = hashlib.sha256()
        self._losses: dict[str, list[float]] = {}
        self._norms: dict[str, list[float]] = {}

    def train(self) -> LossCurve:
        """All steps, or those up to the first that is not finite; their curve."""
        for step in range(self.run.steps):
            if not self.step(step):
                break
        losses, norms = ({name: tuple(row) for name, row in of.items()} for of in (self._losses, self._norms))
        reported = losses.pop("reported")
        return LossCurve(
            recipe=self.run.recipe,
            seed=self.run.seed,
            data=self._digest.hexdigest(),
            planned=self.run.steps,
            steps=tuple(range(len(reported))),
            losses=reported,
            gradient_norms=norms.pop("all"),
            part_losses=losses,
            part_norms=norms,
            quantizers=() if self._scope is None else see_quantizers(self.model),
            histories=tuple(self._watch.seen),
        )

    def step(self, step: int) -> bool:
        """Read, move the weights once, and record; False where a number is not finite, and the weights stay."""
        lesson = self.data.lesson(step)
        self._digest.update(_bytes_of(lesson.tokens) + _bytes_of(lesson.levels))
        losses = self.model.losses(lesson.to(self.run.device), scope=self._scope)
        spike = SPIKE if step == SPIKE_STEP else 1.0
        (losses.pop("total") * spike).backward()  # outside of the scope, as the bridge wants it
        norm = self.optimizer.take_gradients()
        norms = {"all": norm, **self.optimizer.norms_by(self.model.part_of)}
        numbers = torch.stack([one.detach().float() for one in (*losses.values(), *norms.values())]).tolist()
        # Nine digits tell every fp32 number from its neighbours; what more a double has would only make a larger file.
        for name, value in zip(losses, numbers, strict=False):
            self._losses.setdefault(name, []).append(float(f"{value:.9g}"))
        for name, value in zip(norms, numbers[len(losses) :], strict=True):
            self._norms.setdefault(name, []).append(float(f"{value:.{9 if name == 'all' else 6}g}"))
        fine = all(map(math.isfinite, numbers))
        if fine:
            self.optimizer.update(step, norm)
        if self._scope is not None:
            self._watch.look(step)
        return fine


def _bytes_of(tokens: Any) -> bytes:
    """The bytes of a tensor on the CPU; a GPU host need not have numpy."""
    whole = tokens.contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())


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

    def to(self, device: Any) -> Lesson:
        """The same on a device."""
        return Lesson(*(one.to(device, non_blocking=True) for one in vars(self).values()))


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
        self.swapped = swap_linears(self, include=LANE, features=build.features, recipe=build.recipe).choices

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
        size: with a layer in low precision, an even batch, and no fewer letters than levels.
        build, seed: as `HybridModel` takes them.
    """

    def __init__(self, size: Size, build: Build, *, seed: int) -> None:
        super().__init__()
        self.size, self.seed = size, seed
        self.first_low = next(place for place in range(len(size.letters)) if not size.zones.is_bf16(place))
        self.hybrid = HybridModel(size, build, seed=seed)
        # They start as their loud twins do, and say the same language: what learns stays beside them, and what does not
        # is left behind. Letters drawn anew would have to be matched first, and seeds differ in how they end then.
        letters = self.hybrid.embedding.weight.detach().clone()
        self.quiet = nn.Embedding(*letters.shape, _weight=letters)
        self.lane = Lane(size, build, seed=seed)

    def losses(self, lesson: Lesson, *, scope: ScopeFactory | None = None) -> dict[str, Any]:
        """The losses of a lesson on the device of the model, each [] in fp32.

        Returns:
            total: to train on, before a spike: the mean of the loud half, and of the quiet half times 2^-20; reported:
            the mean over all positions, none weighted; loud, quiet, gauge: means over the positions of letters of each
            half, and over those of gauges.
        """
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
        return {
            "total": total,
            "reported": each.detach().mean(),
            "loud": letters[:half].detach().mean() / count,
            "quiet": letters[half:].detach().mean() / count,
            "gauge": gauges.detach().mean(),
        }

    def choices(self) -> dict[str, Choice]:
        """Part -> what its last call took, and why."""
        return {**self.hybrid.choices(), **{f"lane.{name}": one for name, one in self.lane.swapped.items()}}

    def part_of(self, parameter: str) -> str:
        """Which part of the model a parameter belongs to: "letters", "quiet", "lane", "layers.2", "norm" or "head"."""
        first, _, rest = parameter.partition(".")
        part = part_of(rest) if first == "hybrid" else first
        return "letters" if part == "embedding" else part


# --- audit
#
# The state of layers of Transformer Engine while they train: quantizers, and how delayed scaling moves. Nothing here is
# configured: quantizers and states are read off the very layers that the steps ran through.


# Names of the tensors that the quantizers of one product are for, in Transformer Engine's order (`FP8FwdTensors`,
# `FP8BwdTensors` of `pytorch/constants.py`, 2.12 to 2.20); a layer with more products has them one after the other.
FORWARD: Final = ("input", "weight", "output")
BACKWARD: Final = ("gradient", "input gradient")
USED: Final = {"input", "weight", "gradient"}  # the others stay in high precision
_LARGEST: Final = {"e4m3": 448.0, "e5m2": 57344.0}


def low_layers(model: Any) -> dict[str, Any]:
    """Name -> layer of Transformer Engine whose products ran in low precision."""
    return {
        name: module
        for name, module in model.named_modules()
        # Attention has quantizers and no weights: its products are in low precision in other recipes than these.
        if next(iter(module.parameters(recurse=False)), None) is not None
        and _quantizers(module, forward=True)
        and _quantizers(module, forward=False)
    }


def delayed_scaling(model: Any) -> Iterator[tuple[str, bool, Any, Any]]:
    """Layer, whether forward, amax history [L, n] and scales [n] of each direction of delayed scaling."""
    for name, layer in low_layers(model).items():
        for forward in (True, False):
            state = layer.fp8_meta.get("scaling_fwd" if forward else "scaling_bwd")
            if getattr(state, "amax_history", None) is not None:
                yield name, forward, *te_amax_state(layer, forward=forward)


def see_quantizers(model: Any) -> tuple[QuantizerSeen, ...]:
    """Every quantizer of a tensor that is cast, layer by layer; equal ones of the experts of a bank are one row."""
    rows: dict[QuantizerSeen, None] = {}
    for name, layer in low_layers(model).items():
        for forward, names in ((True, FORWARD), (False, BACKWARD)):
            for index, quantizer in enumerate(_quantizers(layer, forward=forward)):
                tensor = names[index % len(names)]
                if tensor in USED and quantizer is not None:
                    rows[QuantizerSeen(name, tensor, type(quantizer).__name__, format_of(quantizer))] = None
    return tuple(rows)


def format_of(quantizer: Any) -> str:
    """The format that a quantizer casts to: "e4m3", "e5m2", or what it says otherwise."""
    dtype = getattr(quantizer, "dtype", "")
    dtype_name = str(getattr(dtype, "name", dtype)).lower()
    return next((name for name in _LARGEST if name in dtype_name), dtype_name or "unknown")


class HistoryWatch:
    """Compares the state of delayed scaling after some steps with that after the next one.

    Args:
        model: whose layers are watched.
        before: numbers of the steps after which the state is kept.

    Attributes:
        seen: how the state moved in the step after each of them; empty where no layer has any.
    """

    def __init__(self, model: Any, *, before: Collection[int]) -> None:
        self._model, self._steps = model, before
        self._before: dict[tuple[str, bool], tuple[Any, Any]] = {}
        self.seen: list[HistorySeen] = []

    def look(self, step: int) -> None:
        """At the state after a step."""
        if step - 1 not in self._steps and step not in self._steps:
            return
        now = dict(self._read())
        if step - 1 in self._steps:
            self._compare(step, now)
        self._before = now

    def _compare(self, step: int, now: Mapping[tuple[str, bool], tuple[Any, Any]]) -> None:
        tensors = not_rolled = not_collected = 0
        worst = 0.0
        for key, (history, scale) in now.items():
            before_history, before_scale = self._before.get(key, (None, None))
            if before_history is None or before_history.shape != history.shape:
                continue
            names = FORWARD if key[1] else BACKWARD
            quantizers = _quantizers(self._model.get_submodule(key[0]), forward=key[1])
            for index in range(history.shape[1]):
                if names[index % len(names)] not in USED:
                    continue
                tensors += 1
                old, new = before_history[:, index], history[:, index]
                not_rolled += not (torch.equal(new[1:-1], old[2:]) and float(new[0]) == 0)
                not_collected += not float(new[-1]) > 0
                largest = _LARGEST.get(format_of(quantizers[index]), math.nan)
                # The maximum is taken before the oldest row, old[1], leaves.
                amax = max(float(new[1:].max()), float(old[1]))
                worst = max(worst, _error(float(scale[index]), float(before_scale[index]), amax, largest))
        if tensors:
            self.seen.append(HistorySeen(step, tensors, not_rolled, not_collected, worst))

    def _read(self) -> Iterator[tuple[tuple[str, bool], tuple[Any, Any]]]:
        """Layer and direction -> history [L, n] and scales [n], on the CPU."""
        for name, forward, *state in delayed_scaling(self._model):
            history, scale = (one.detach().cpu().clone() for one in state)
            yield (name, forward), (history, scale)


def _error(scale: float, before: float, amax: float, largest: float) -> float:
    """Relative error of a scale against that of the recipe, margin 0; an amax of 0 leaves the scale as it was."""
    wanted = largest / amax if amax > 0 else before
    error = abs(scale / wanted - 1) if wanted else math.inf
    return error if math.isfinite(error) else 1e9  # JSON has no Inf; no bound is that wide


def _quantizers(module: Any, *, forward: bool) -> list[Any]:
    found = getattr(module, "quantizers", None)
    if not isinstance(found, dict) or not hasattr(module, "fp8_meta"):
        return []
    return list(found.get("scaling_fwd" if forward else "scaling_bwd") or [])


# --- process


def train_to_file(run: GateRun, path: Path) -> dict[str, Any]:
    """Train a run, and write its curve with the versions that trained it.

    Returns:
        backends (part of the model -> backend of its last call), seconds from the first step to the last, peak_mib of
        the device.

    Raises:
        OSError: the place cannot be written.
        BridgeError: what the bridge refuses.
    """
    trainer = GateTrainer(run)
    started = time.perf_counter()
    curve = trainer.train()
    seconds, peak = round(time.perf_counter() - started, 2), 0.0
    curve.made_with["torch"] = torch.__version__
    with contextlib.suppress(PackageNotFoundError):
        curve.made_with["transformer_engine"] = version("transformer_engine")
    if run.device == "cuda":
        curve.made_with["gpu"] = torch.cuda.get_device_name()
        peak = torch.cuda.max_memory_allocated() / 2**20
    write_curve(curve, path)
    backends = {part: choice.observed for part, choice in trainer.model.choices().items()}
    return {"backends": backends, "seconds": seconds, "peak_mib": round(peak, 1)}


def main() -> None:
    """Read the order, train, and report."""
    order: dict[str, Any] = json.load(sys.stdin)
    path = Path(order.pop("path")).absolute()
    torch.set_num_threads(1)  # runs stand side by side, and their work is the device's
    start_compiling()
    sys.stdout.write(json.dumps(train_to_file(GateRun(**order), path)) + "\n")


if __name__ == "__main__":
    main()
