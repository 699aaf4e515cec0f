"""Faults of what goes on around the steps: checkpoints, evaluations, the order of data, and the ranks; see `faults`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .faults_of_rows import on_last_rank

if TYPE_CHECKING:
    from .trainer import SmokeTrainer

After = Callable[["SmokeTrainer"], None]


class _OtherOrder:
    """A language whose batches come in another order."""

    def __init__(self, language: Any) -> None:
        self.language, self.shift = language, 0

    def batch(self, number: int, sequences: int, length: int) -> Any:
        return self.language.batch(number + self.shift, sequences, length)

    def surprise(self, tokens: Any) -> Any:
        return self.language.surprise(tokens)


def save_old_weights(trainer: SmokeTrainer, step: int) -> After:
    """A checkpoint says that it is of its step, and holds the weights of an earlier one."""
    kept: dict[str, Any] = {}

    def remember(one: SmokeTrainer) -> None:
        if one.done == step:
            kept.update(_copy(one.optimizer.state_tensors()))

    save = trainer.save

    def save_old() -> Any:
        now = trainer.optimizer.state_tensors()
        fresh = _copy(now)
        _put_back(now, kept)
        path = save()
        _put_back(now, fresh)
        return path

    trainer.save = save_old  # type: ignore[method-assign]
    return remember


def lose_moments(trainer: SmokeTrainer, _: int) -> None:
    """A run that is resumed has its weights again, and Adam's first moments are 0."""
    resume = trainer.resume

    def forgetful() -> Any:
        resumed = resume()
        for parts in trainer.optimizer.state_tensors().values():
            parts["exp_avg"].zero_()
        return resumed

    trainer.resume = forgetful  # type: ignore[method-assign]


def read_from_the_start(trainer: SmokeTrainer, _: int) -> None:
    """A run that is resumed reads the batches from the first one on."""
    resume, order = trainer.resume, _OtherOrder(trainer.language)
    trainer.language = order  # type: ignore[assignment]

    def restarting() -> Any:
        resumed = resume()
        order.shift = -resumed.step
        return resumed

    trainer.resume = restarting  # type: ignore[method-assign]


def move_data_by_evaluation(trainer: SmokeTrainer, step: int) -> None:
    """An evaluation takes its batch out of those of training, which goes on with the one after it."""
    validate, order = trainer.validate, _OtherOrder(trainer.language)
    trainer.language = order  # type: ignore[assignment]

    def moving() -> float:
        loss = validate()
        order.shift += trainer.done == step
        return loss

    trainer.validate = moving  # type: ignore[method-assign]


def die(trainer: SmokeTrainer, step: int) -> After:
    """The rank is killed."""

    def kill(one: SmokeTrainer) -> None:
        if one.done == step and on_last_rank(one):
            os.kill(os.getpid(), signal.SIGKILL)

    del trainer
    return kill


def hang(trainer: SmokeTrainer, step: int) -> After:
    """The rank does nothing any more."""

    def sleep(one: SmokeTrainer) -> None:
        while one.done == step and on_last_rank(one):
            time.sleep(1)

    del trainer
    return sleep


def _copy(state: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {part: value.clone() for part, value in parts.items()} for name, parts in state.items()}


def _put_back(state: dict[str, dict[str, Any]], kept: dict[str, dict[str, Any]]) -> None:
    for name, parts in kept.items():
        for part, value in parts.items():
            state[name][part].copy_(value)
