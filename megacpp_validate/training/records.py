"""What one step of training leaves behind."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
