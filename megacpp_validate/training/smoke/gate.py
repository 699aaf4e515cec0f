"""What the loss gate trains: one rank of a smoke run on lessons and with a model that make FP8 formats matter."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from ...bridge.backends import Choice
from ...bridge.linear_walker import swap_linears
from ...evidence.loss_curve import LossCurve
from ..language import Language, drawn_from, generator_of
from ..layers import Build
from ..model import HybridModel, Losses, Scopes, part_of
from ..parallel.goodput import Ledger
from ..parallel.ranks import Rank
from ..quantizers import HistoryWatch, see_experts, see_quantizers
from ..sizes import Size
from .order import SmokeOrder
from .trainer import SmokeTrainer, StepRecord


class GateTrainer(SmokeTrainer):
    """Trains one run of the loss gate on one rank, and keeps its curve.

    The precision "bf16" is the reference of every recipe: the same build without a scope.

    Args:
        order: with the task "gate", and one pass a step.
        rank, ledger: as `SmokeTrainer` takes them.
    """

    model: GateModel

    def __init__(self, order: SmokeOrder, rank: Rank, ledger: Ledger) -> None:
        super().__init__(order, rank, ledger)
        self.language = Language(self.size.grammar, seed=order.data_seed)
        self._watch = HistoryWatch(self.model, before={1, 24, order.steps // 2, order.steps - 2})
        self._digest = hashlib.sha256()
        self._losses: dict[str, list[float]] = {}
        self._norms: dict[str, list[float]] = {}

    def make_model(self, build: Build) -> HybridModel:
        """The gate's model; what the walker leaves native under a recipe is native in the reference too."""
        return GateModel(self.size, replace(build, recipe=build.recipe or "delayed"), seed=self.order.seed)

    def step(self) -> StepRecord:
        """As that of every run; then see how delayed scaling moved."""
        record = super().step()
        if self.scope is not None:
            self._watch.look(record.step)
        return record

    def look(self, *, fine: bool) -> None:  # noqa: ARG002 - the curve keeps a step that is not finite, too
        """Keep the losses of parts of the data, and the norms of parts of the model."""
        norms = self.optimizer.norms_by(gate_part_of)
        for table, found in ((self._losses, self.model.part_losses), (self._norms, norms)):
            for name, value in zip(found, torch.stack(list(found.values())).tolist(), strict=True):
                table.setdefault(name, []).append(value)

    def curve(self) -> LossCurve:
        """The steps up to now; what trained it is for the probe to add."""
        order, records = self.order, self.records
        # Nine digits tell every fp32 number from its neighbours; what more a double has would only make a larger file.
        return LossCurve(
            recipe=order.precision,
            seed=order.seed,
            data=self._digest.hexdigest(),
            planned=order.steps,
            steps=tuple(record.step for record in records),
            losses=_round([record.loss for record in records], 9),
            gradient_norms=_round([record.grad_norm for record in records], 9),
            part_losses={name: _round(row, 9) for name, row in self._losses.items()},
            part_norms={name: _round(row, 6) for name, row in self._norms.items()},
            quantizers=see_experts(self.model.choices()) if self.scope is None else see_quantizers(self.model),
            histories=tuple(self._watch.seen),
        )

    def _read(self, number: int) -> tuple[Any, list[Any]]:
        """A whole batch [B, T + 1] on the CPU, and its lesson on the device."""
        read = self.language.batch(number, self.size.batch, self.size.length + 1)
        lesson = make_lesson(read, number, seed=self.order.data_seed)
        self._digest.update(_bytes_of(lesson.tokens) + _bytes_of(lesson.levels))
        return read, [lesson.to(self.rank.device)]


def gate_part_of(parameter: str) -> str:
    """Which part of the model a parameter belongs to: "letters", "quiet", "lane", "layers.2", "norm" or "head"."""
    part = part_of(parameter)
    return "letters" if part == "embedding" else part


def _round(values: list[float], digits: int) -> tuple[float, ...]:
    return tuple(float(f"{value:.{digits}g}") for value in values)


def _bytes_of(tokens: Any) -> bytes:
    """The bytes of a tensor on the CPU; a GPU host need not have numpy."""
    return bytes(tokens.contiguous().view(torch.uint8).flatten().tolist())


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
        spike: [] fp32, what the loss is multiplied by for the backward pass.
    """

    tokens: Any
    levels: Any
    places: Any
    targets: Any
    spike: Any

    def to(self, device: Any) -> Lesson:
        """The same on a device."""
        return Lesson(*(one.to(device, non_blocking=True) for one in vars(self).values()))


def make_lesson(read: Any, step: int, *, seed: int) -> Lesson:
    """What a step reads, on the CPU.

    Args:
        read: [B, T + 1] int64, the batch of the step in its language.
        step: its number.
        seed: of the data, not that of the weights.
    """
    places = torch.arange(GAUGE_FIRST, read.shape[1] - 1, GAUGE_EVERY)
    drawn = generator_of(seed, "gauges", step)
    levels = torch.randint(FIRST_LEVEL, LAST_LEVEL + 1, (len(read), len(places)), generator=drawn)
    targets = read[:, 1:].clone()
    targets[:, places] = levels - FIRST_LEVEL
    spike = torch.tensor(SPIKE if step == SPIKE_STEP else 1.0)
    return Lesson(read[:, :-1].contiguous(), levels, places, targets, spike)


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


class GateModel(HybridModel):
    """The hybrid model, its lane, and letters of their own for the quiet half.

    Args:
        size: with a layer in low precision, an even batch, and no fewer letters than levels.
        build, seed: as `HybridModel` takes them.

    Attributes:
        part_losses: of the last lesson, [] each in fp32: loud, quiet, gauge: means over the positions of letters of
            each half, and over those of gauges.
    """

    def __init__(self, size: Size, build: Build, *, seed: int) -> None:
        super().__init__(size, build, seed=seed)
        self.first_low = next(place for place in range(len(size.letters)) if not size.zones.is_bf16(place))
        # They start as their loud twins do, and say the same language: what learns stays beside them, and what does not
        # is left behind. Letters drawn anew would have to be matched first, and seeds differ in how they end then.
        letters = self.embedding.weight.detach().clone()
        self.quiet = nn.Embedding(*letters.shape, _weight=letters)
        self.lane = Lane(size, build, seed=seed)
        self.part_losses: dict[str, Any] = {}

    def losses(self, lesson: Lesson, *, scope: Scopes | None = None) -> Losses:
        """The losses of a lesson on the device of the model, each [] in fp32.

        Returns:
            language: the mean over all positions, none weighted; total: to train on, the mean of the loud half, and of
            the quiet half times 2^-20, times the spike.
        """
        half, tokens = self.size.batch // 2, lesson.tokens
        rows = torch.cat([self.embedding(tokens[:half]), self.quiet(tokens[half:])])
        seen = self.trunk(
            tokens, scope=scope, rows=rows, before={self.first_low: lambda stream: self.lane(stream, lesson)}
        )
        logits = self.head(seen.rows).float()
        each = functional.cross_entropy(logits.flatten(0, 1), lesson.targets.flatten(), reduction="none")
        each = each.unflatten(0, lesson.targets.shape)
        gauges = each[:, lesson.places].detach()
        letters = each.detach().sum(1) - gauges.sum(1)  # [B]
        count = each.shape[1] - gauges.shape[1]
        self.part_losses = {
            "loud": letters[:half].mean() / count,
            "quiet": letters[half:].mean() / count,
            "gauge": gauges.mean(),
        }
        total = each[:half].mean() + QUIET * each[half:].mean() + seen.loss
        return Losses(each.detach().mean(), total * lesson.spike)

    def choices(self) -> dict[str, Choice]:
        """Part -> what its last call took, and why."""
        return {**super().choices(), **{f"lane.{name}": one for name, one in self.lane.swapped.items()}}
