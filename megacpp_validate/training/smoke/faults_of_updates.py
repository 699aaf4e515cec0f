"""Faults of gradients, of their sums, and of how weights move; see `faults`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from ...bridge.amax_owner import SINGLE_OWNER
from ..parallel.gradient_sums import GradientSums, local_part
from .faults_of_rows import on_last_rank

if TYPE_CHECKING:
    from .trainer import SmokeTrainer

After = Callable[["SmokeTrainer"], None]
NORM = "norm.weight"  # the last one of the model


def keep_experts_apart(trainer: SmokeTrainer, _: int) -> None:
    """The gradients of this rank's experts stay its own, though it takes part in their sum."""
    sums, experts = trainer.sharded.sums, trainer.sharded.experts

    def reduce(gradients: dict[str, Any]) -> None:
        kept = {name: gradient.clone() for name, gradient in gradients.items() if name in experts}
        sums.reduce(gradients)
        for name, gradient in kept.items():
            gradients[name].copy_(gradient)

    if on_last_rank(trainer):
        _replace_sums(trainer, reduce)


def leave_norm_out(trainer: SmokeTrainer, _: int) -> None:
    """The gradient of the last norm is left out of the sum over the tensor group."""
    sums = trainer.sharded.sums
    left = GradientSums(tuple((names - {NORM}, group) for names, group in sums.sums), sums.copies)
    _replace_sums(trainer, left.reduce)


def read_as_first(trainer: SmokeTrainer, _: int) -> None:
    """This rank reads what the first one reads."""
    if on_last_rank(trainer):
        trainer.read_as = 0


def lose_passes(trainer: SmokeTrainer, _: int) -> None:
    """What all passes of a step but the last gave is forgotten."""
    parameters, optimizer = list(trainer.model.parameters()), trainer.optimizer
    take, add = optimizer.take_gradients, optimizer.add_gradients

    def forget(*, first: bool) -> None:  # noqa: ARG001 - as it is called
        for parameter in parameters:
            parameter.grad = None

    def take_last(**_: bool) -> Any:
        optimizer.add_gradients = add  # type: ignore[method-assign]
        norm = take(first=True)
        optimizer.add_gradients = forget  # type: ignore[method-assign]
        return norm

    optimizer.add_gradients, optimizer.take_gradients = forget, take_last  # type: ignore[method-assign]


def average_gradients(trainer: SmokeTrainer, _: int) -> None:
    """FSDP2 divides by the number of ranks, as it does unless it is told otherwise."""
    for block in trainer.model.modules():
        if isinstance(block, FSDPModule):
            block.set_gradient_divide_factor(float(trainer.plan.data))


def lose_block(trainer: SmokeTrainer, _: int) -> None:
    """One rank loses its part of the gradients of the last but one block."""
    block = list(trainer.model.layers[-2].parameters())

    def lose() -> None:
        for parameter in block:
            if parameter.grad is not None:
                local_part(parameter.grad).zero_()

    _before_taking(trainer, lose)


def delay_expert_gradients(trainer: SmokeTrainer, _: int) -> None:
    """The experts of one rank get the gradients of the step before; in the first step, none."""
    named = dict(trainer.model.named_parameters())
    kept: dict[str, Any] = {}

    def delay() -> None:
        for name in trainer.sharded.experts:
            gradient = named[name].grad
            if gradient is not None:
                late = kept.get(name, torch.zeros_like(gradient))
                kept[name] = gradient.clone()
                gradient.copy_(late)

    _before_taking(trainer, delay)


def count_mtp_twice(trainer: SmokeTrainer, _: int) -> None:
    """The loss of the token after the next one is in the sum twice."""
    size = trainer.model.size
    trainer.model.size = replace(size, mtp_coefficient=2 * size.mtp_coefficient)


def skip_update(trainer: SmokeTrainer, step: int) -> None:
    """One rank leaves the second layer as it is in one step, where it holds a part of it alone."""
    optimizer: Any = trainer.optimizer
    update = optimizer.update

    def skipping(number: int, norm: Any) -> float:
        names = _names_of(trainer, trainer.model.layers[1].parameters()) if number == step else []
        kept = {name: optimizer.master(name).clone() for name in names}
        rate = update(number, norm)
        for name, value in kept.items():
            optimizer.master(name).copy_(value)
        optimizer.round_weights()
        return rate

    if on_last_rank(trainer):
        optimizer.update = skipping


def raise_rate(trainer: SmokeTrainer, _: int) -> None:
    """One rank learns by a rate that is a tenth higher."""
    schedule = trainer.optimizer.schedule
    if on_last_rank(trainer):
        trainer.optimizer.schedule = replace(schedule, learning_rate=1.1 * schedule.learning_rate)


def flip_bit(trainer: SmokeTrainer, step: int) -> After:
    """One weight of the last layer doubles on one rank, as it does where a bit of its exponent flips."""

    def flip(one: SmokeTrainer) -> None:
        if one.done == step and on_last_rank(one):
            masters = [one.optimizer.master(name) for name in _names_of(one, one.model.layers[-1].parameters())]
            largest = max(masters, key=lambda master: int(master.numel()))
            largest.view(-1)[0] *= 2
            one.optimizer.round_weights()

    del trainer
    return flip


def scale_alone(trainer: SmokeTrainer, _: int) -> None:
    """Each rank scales by its own amax alone."""
    scope = trainer.scope
    if scope is not None:
        dense: Any = scope.dense
        alone = partial(dense.func, **{**dense.keywords, "amax_reduction_group": SINGLE_OWNER})
        trainer.scope = type(scope)(dense=alone, experts=scope.experts)


def _names_of(trainer: SmokeTrainer, parameters: Iterable[Any]) -> list[str]:
    wanted = {id(parameter) for parameter in parameters}
    return [name for name, parameter in trainer.model.named_parameters() if id(parameter) in wanted]


def _before_taking(trainer: SmokeTrainer, change: Callable[[], None]) -> None:
    """On one rank, change gradients before the optimizer takes those of the last pass."""
    take = trainer.optimizer.take_gradients

    def changed(*, first: bool = True) -> Any:
        change()
        return take(first=first)

    if on_last_rank(trainer):
        trainer.optimizer.take_gradients = changed  # type: ignore[method-assign]


def _replace_sums(trainer: SmokeTrainer, reduce: Callable[[Any], None]) -> None:
    sums = trainer.sharded.sums
    other = GradientSums(sums.sums, sums.copies)
    object.__setattr__(other, "reduce", reduce)
    trainer.optimizer.sums = other
