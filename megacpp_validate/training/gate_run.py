"""One run of the loss gate: a seed, a recipe, a thousand steps, and the curve that they leave behind."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch

from ..bridge.features import PRODUCTION, Features
from ..bridge.fp8_scope import SINGLE_OWNER, low_precision
from ..bridge.recipes import RecipeName
from ..evidence.loss_curve import HistorySeen, LossCurve, QuantizerSeen
from .gate_audit import HistoryWatch, see_quantizers
from .gate_data import GateData, Lesson, spike_of
from .gate_model import GateLosses, GateModel
from .layers import Build
from .loop import bytes_of
from .model import ScopeFactory
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
