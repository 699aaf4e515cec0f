"""The model of the loss gate: the hybrid model, with a lane in front of its low-precision layers.

The residual stream carries gradients past every layer in BF16, so that a layer whose gradients are flushed costs little
loss. Hence the lane, which nothing goes around: the *neck*, one linear layer that all of the stream passes, and the
gauge, two linear layers that show a level to the stream. Both run in the scope of the low-precision layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from ..bridge.backends import Choice
from ..bridge.linear_walker import swap_linears
from .errors import WrongSize
from .gate_data import FIRST_LEVEL, LAST_LEVEL, LEVEL_UNIT, QUIET, Lesson
from .layers import Build
from .model import HybridModel, ScopeFactory
from .seeds import drawn_from
from .sizes import Size

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
