"""The training loop: steps in a fixed order, a record each, and an end where a number is not finite."""

from __future__ import annotations

import ctypes
import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..bridge.amax_health import Fp8Guard
from ..bridge.amax_health import NotFinite as WrongRows
from ..evidence.loss_curve import LossCurve
from .errors import TrainingError, WrongSize
from .language import Language
from .model import HybridModel, ScopeFactory
from .optimizer import MasterAdamW, Schedule


class NotFinite(TrainingError, ArithmeticError):
    """A loss or gradient that is no number; the weights are those from before the step.

    Attributes:
        records: of every step of the run, the one at fault last.
        tensors: what is not finite: "loss", "aux_loss", or names of parameters, whose gradient it is.
    """

    def __init__(self, text: str, records: tuple[StepRecord, ...], tensors: tuple[str, ...]) -> None:
        super().__init__(text)
        self.records, self.tensors = records, tensors


class Trainer:
    """A model, what it reads and how it is moved, step by step.

    Args:
        model: to train; it stays where it is.
        language: what it reads; its vocabulary is the model's.
        schedule: of the run.
        scope: makes the low-precision scope of one forward pass; it is called anew in each. None trains in the dtype
            of the parameters.
        keep: is given each record as soon as it is known, the one of a step at fault too.

    Attributes:
        records: of the steps so far.

    Raises:
        WrongSize: a language of another vocabulary.
    """

    def __init__(
        self,
        model: HybridModel,
        language: Language,
        schedule: Schedule,
        *,
        scope: ScopeFactory | None = None,
        keep: Callable[[StepRecord], None] | None = None,
    ) -> None:
        if language.grammar != model.size.grammar:
            raise WrongSize(
                f"the language has {language.grammar}, the model {model.size.grammar}. Likely cause: they were made "
                "from two sizes. Next step: make both from one."
            )
        self.model, self.language, self.schedule = model, language, schedule
        self.optimizer = MasterAdamW(model.named_parameters(), schedule)
        self.records: list[StepRecord] = []
        self._scope, self._keep = scope, keep
        self._guard = None if scope is None else Fp8Guard(model)
        self._data = hashlib.sha256()

    def step(self) -> StepRecord:
        """Read one batch, move the weights once, and record it.

        Raises:
            NotFinite: a loss or gradient is no number; step and tensors are named, and the weights stay.
            WrongSize: the schedule has no such step.
        """
        number, started = len(self.records), time.perf_counter()
        if number >= self.schedule.steps:
            raise WrongSize(
                f"step {number} of a run of {self.schedule.steps}, counted from 0. Next step: give a longer schedule."
            )
        size = self.model.size
        device = self.model.embedding.weight.device
        read = self.language.batch(number, size.batch, size.length + 1)
        self._data.update(bytes_of(read))
        tokens = read.to(device, non_blocking=True)
        losses = self.model.losses(tokens, scope=self._scope)
        losses.total.backward()  # outside of the scope, as the bridge wants it
        norm = self.optimizer.take_gradients()
        perfect = float(self.language.surprise(read).mean())  # on the host, while the device computes
        numbers = torch.stack([losses.language.detach(), (losses.aux + losses.z).detach(), norm]).tolist()
        loss, aux, gradient = numbers
        given = self._ask_what_layers_were_given(number)
        fine = all(map(math.isfinite, numbers)) and not given
        rate = self.optimizer.update(number, norm) if fine else self.schedule.rate(number)
        record = StepRecord(number, loss, perfect, aux, gradient, rate, time.perf_counter() - started)
        self.records.append(record)
        if self._keep is not None:
            self._keep(record)
        if not fine:
            raise self._not_finite(record, given)
        return record

    def run(self) -> tuple[StepRecord, ...]:
        """The steps that are left of the schedule; the records of all. Raises as `step`."""
        while len(self.records) < self.schedule.steps:
            self.step()
        return tuple(self.records)

    def curve(self, recipe: str) -> LossCurve:
        """What the loss gate reads of the steps so far, also of a run that ended early.

        Args:
            recipe: "bf16", or the FP8 recipe that was asked for.
        """
        return LossCurve(
            recipe=recipe,
            seed=self.model.seed,
            data=self._data.hexdigest(),
            planned=self.schedule.steps,
            steps=tuple(record.step for record in self.records),
            losses=tuple(record.loss for record in self.records),
            gradient_norms=tuple(record.grad_norm for record in self.records),
        )

    def _ask_what_layers_were_given(self, step: int) -> str:
        """What was not finite in front of a cast to low precision; it need not show in the loss."""
        try:
            if self._guard is not None:
                self._guard.end_step(step)
        except WrongRows as fault:
            return str(fault)
        return ""

    def _not_finite(self, record: StepRecord, given: str) -> NotFinite:
        values = {"loss": record.loss, "aux_loss": record.aux_loss}
        tensors = tuple(name for name, value in values.items() if not math.isfinite(value))
        tensors += self.optimizer.not_finite()
        self.optimizer.drop_gradients()
        shown = ", ".join(tensors[:4]) + (f" and {len(tensors) - 4} more" if len(tensors) > 4 else "")
        return NotFinite(
            f"step {record.step}: loss {record.loss}, gradient norm {record.grad_norm}; not finite: "
            f"{shown or ('what a layer was given' if given else 'the norm alone, which overflowed')}. Likely cause: a "
            "layer that overflowed, a scale that did not follow, or a learning rate too high. Next step: the weights "
            f"are those from before this step; run its batch again layer by layer.{given and f' {given}'}",
            tuple(self.records),
            tensors,
        )


def train(
    model: HybridModel,
    language: Language,
    schedule: Schedule,
    *,
    scope: ScopeFactory | None = None,
    keep: Callable[[StepRecord], None] | None = None,
) -> tuple[StepRecord, ...]:
    """Train a model over a whole schedule: one record a step, from step 0.

    Args and errors are those of `Trainer`.
    """
    return Trainer(model, language, schedule, scope=scope, keep=keep).run()


def bytes_of(tokens: Any) -> bytes:
    """The bytes of a tensor on the CPU; a GPU host need not have numpy."""
    whole = tokens.contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.numel() * whole.element_size())


# --- records
#
# What one step of training leaves behind.


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        step: from 0.
        loss: cross-entropy of the language, nats a prediction, before the step's update.
        perfect: what a model that knows the language exactly would have scored on the same batch.
        aux_loss: what the routers add to the loss (load balance and z).
        grad_norm: L2, of all gradients, before clipping.
        learning_rate: of the update.
        seconds: wall time from reading its batch until its loss is known and its update is launched.
    """

    step: int
    loss: float
    perfect: float
    aux_loss: float
    grad_norm: float
    learning_rate: float
    seconds: float

    def is_finite(self) -> bool:
        """Whether loss, auxiliary loss and gradient norm are numbers."""
        return all(map(math.isfinite, (self.loss, self.aux_loss, self.grad_norm)))
