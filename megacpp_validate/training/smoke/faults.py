"""Faults that are planted in a run which must find them, each a thing that goes wrong between ranks without a word.

A fault is written NAME, or NAME:STEP; the check that finds it is in matrix/smoke_faults.toml. A fault changes a trainer
before its first step, on the last rank alone where it is one rank's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule

from ...bridge.amax_owner import SINGLE_OWNER
from ...native.router import load_balancing_loss
from .. import expert_layer
from ..expert_layer import ExpertLayer
from ..optimizer import GradientSums
from ..parallel import exchange

if TYPE_CHECKING:
    from .trainer import SmokeTrainer

FAULTS: Final[dict[str, Callable[[Any, int], None]]] = {}
NORM: Final = "norm.weight"  # the last one of the model
LATE_S: Final = 60.0  # longer than a plan lets ranks be silent
_STEP: Final = 2  # where a fault of a single step is planted, where none is named


def plant(text: str, trainer: SmokeTrainer) -> None:
    """Plant a fault.

    Args:
        text: NAME or NAME:STEP.
        trainer: of this rank, before its first step.
    """
    name, _, step = text.partition(":")
    FAULTS[name](trainer, int(step or _STEP))


def _fault(name: str, *, everywhere: bool = False, after: bool = False) -> Callable[[Any], Any]:
    """Enter a fault into the table.

    Args:
        name: of the fault.
        everywhere: whether it is planted on all ranks, and not on the last one alone.
        after: whether it happens behind its step, once, and not before the first.
    """

    def enter(function: Any) -> Any:
        def plant_here(trainer: Any, step: int) -> None:
            if not everywhere and trainer.rank.rank != trainer.plan.world - 1:
                return
            if after:
                _then(trainer, "step", lambda: function(trainer) if trainer.done == step else None)
            else:
                function(trainer, step)

        FAULTS[name] = plant_here
        return function

    return enter


def _then(owner: Any, name: str, action: Callable[[], Any]) -> None:
    """Do something behind each call of a function of an object."""

    def around(real: Callable[..., Any]) -> Any:
        result = real()
        action()
        return result

    _wrap(owner, name, around)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around(real, ...)` in the place of a function of a module or an object."""
    setattr(owner, name, partial(around, getattr(owner, name)))


def _experts(trainer: Any) -> Any:
    """The first E-layer."""
    return next(layer for layer in trainer.model.layers if isinstance(layer, ExpertLayer))


def _names_of(trainer: Any, parameters: Iterable[Any]) -> list[str]:
    wanted = {id(parameter) for parameter in parameters}
    return [name for name, parameter in trainer.model.named_parameters() if id(parameter) in wanted]


# --- rows and experts


@_fault("token-dropped")
def drop_token(trainer: Any, _: int) -> None:
    """The first token of each pass does not reach its experts, though the router gave it to them."""

    def without_first(lay_out: Any, tokens: Any, routing_map: Any) -> Any:
        short = routing_map.clone()
        short[0] = False
        return lay_out(tokens, short)

    _wrap(_experts(trainer), "lay_out", without_first)


@_fault("rows-swapped")
def swap_rows(*_: Any) -> None:
    """Two rows change places on their way to the experts."""

    def swapped(move: Any, rows: Any, *rest: Any) -> Any:
        order = list(range(len(rows)))
        if order:
            order[0], order[-1] = order[-1], order[0]
        return move(rows[order], *rest)

    _wrap(exchange, "exchange_rows", swapped)


@_fault("experts-swapped")
def swap_experts(trainer: Any, _: int) -> None:
    """The first two experts of this rank's first E-layer have each other's weights."""
    for bank in (_experts(trainer).up, _experts(trainer).down):
        weight = bank.native_state_dict()["weight"]
        bank.load_native_state_dict({"weight": weight[[1, 0, *range(2, len(weight))]]})
    named = dict(trainer.model.named_parameters())
    for name in trainer.sharded.experts:
        trainer.optimizer.master(name).copy_(named[name])


@_fault("expert-without-gradient")
def stop_expert(trainer: Any, _: int) -> None:
    """The first expert of this rank's first E-layer is never moved."""

    def zeroed(gradient: Any, *, whole: bool) -> Any:
        gradient = gradient.clone()
        gradient[slice(None) if whole else 0] = 0
        return gradient

    for bank in (_experts(trainer).up, _experts(trainer).down):
        first = next(bank.parameters())
        first.register_hook(partial(zeroed, whole=first.dim() == 2))


@_fault("balance-not-shared", everywhere=True)
def keep_balance_apart(*_: Any) -> None:
    """Each rank balances its experts over its own tokens: a mean of products is not a product of means."""

    def own(share: Any, probs: Any, routing_map: Any, group: Any) -> Any:
        share(probs, routing_map, group)  # a collective call, which the others make
        return load_balancing_loss(probs, routing_map) / distributed.get_world_size(group)

    _wrap(expert_layer, "share_of_balance_loss", own)


@_fault("rope-reversed")
def reverse_rope(trainer: Any, _: int) -> None:
    """The rotary table of one rank has its positions the wrong way round."""
    for table in (trainer.model.cos, trainer.model.sin):
        table.copy_(table.flip(0))


@_fault("router-drawn-apart")
def draw_router_apart(trainer: Any, _: int) -> None:
    """The router of one rank has other first weights."""
    for name in _names_of(trainer, [_experts(trainer).router.weight]):
        trainer.optimizer.master(name).mul_(1.01)
    trainer.optimizer.round_weights()


@_fault("nan")
def make_nan(trainer: Any, step: int) -> None:
    """One number of the output of a layer is NaN, on one rank, in one step."""

    def spoil(module: Any, given: Any, out: Any) -> Any:  # noqa: ARG001 - as torch calls it
        if trainer.done == step:
            out.rows.data[0, 0, 0] = float("nan")

    trainer.model.layers[-2].register_forward_hook(spoil, prepend=True)


@_fault("gradient-infinite")
def make_infinite_gradient(trainer: Any, step: int) -> None:
    """The gradient of the output of the second layer is infinite in one place, on one rank, in one step."""

    def spoil(gradient: Any) -> Any:
        gradient = gradient.clone()
        gradient[0, 0, 0] = float("inf")
        return gradient

    def watch(module: Any, given: Any, out: Any) -> None:  # noqa: ARG001 - as torch calls it
        if trainer.done == step and out.rows.requires_grad:
            out.rows.register_hook(spoil)

    trainer.model.layers[1].register_forward_hook(watch, prepend=True)


# --- gradients and updates


@_fault("experts-not-synchronised")
def keep_experts_apart(trainer: Any, _: int) -> None:
    """The gradients of this rank's experts stay its own, though it takes part in their sum."""

    def reduce(real: Any, gradients: dict[str, Any]) -> None:
        kept = {name: gradients[name].clone() for name in trainer.sharded.experts}
        real(gradients)
        for name, gradient in kept.items():
            gradients[name].copy_(gradient)

    sums = trainer.sharded.sums
    trainer.optimizer.sums = SimpleNamespace(reduce=partial(reduce, sums.reduce), copies=sums.copies)


@_fault("norm-gradient-not-summed", everywhere=True)
def leave_norm_out(trainer: Any, _: int) -> None:
    """The gradient of the last norm is left out of the sum over the tensor group."""
    sums = trainer.sharded.sums
    left = tuple((names - {NORM}, group) for names, group in sums.sums)
    trainer.optimizer.sums = GradientSums(left, sums.copies)


@_fault("wrong-sequences")
def read_as_first(trainer: Any, _: int) -> None:
    """This rank reads what the first one reads."""
    trainer.read_as = 0


@_fault("pass-lost", everywhere=True)
def lose_passes(trainer: Any, _: int) -> None:
    """The gradients of all passes of a step but the last are forgotten."""

    def forget_before(losses: Any, *given: Any, **named: Any) -> Any:
        trainer.model.zero_grad()
        return losses(*given, **named)

    _wrap(trainer.model, "losses", forget_before)


@_fault("gradients-averaged", everywhere=True)
def average_gradients(trainer: Any, _: int) -> None:
    """FSDP2 divides by the number of ranks, as it does by default."""
    for block in trainer.model.modules():
        if isinstance(block, FSDPModule):
            block.set_gradient_divide_factor(float(trainer.plan.data))


@_fault("expert-gradients-late")
def delay_expert_gradients(trainer: Any, _: int) -> None:
    """The experts of one rank get the gradients of the step before; in the first step, none."""
    named = dict(trainer.model.named_parameters())
    kept: dict[str, Any] = {}

    def delay(take: Any, **options: bool) -> Any:
        for name in trainer.sharded.experts:
            if (gradient := named[name].grad) is not None:
                late = kept.get(name, torch.zeros_like(gradient))
                kept[name] = gradient.clone()
                gradient.copy_(late)
        return take(**options)

    _wrap(trainer.optimizer, "take_gradients", delay)


@_fault("mtp-counted-twice", everywhere=True)
def count_mtp_twice(trainer: Any, _: int) -> None:
    """The loss of the token after the next one is in the sum twice."""
    size = trainer.model.size
    trainer.model.size = replace(size, mtp_coefficient=2 * size.mtp_coefficient)


@_fault("shard-not-updated")
def skip_update(trainer: Any, step: int) -> None:
    """One rank leaves the second layer as it is in one step, where it holds a part of it alone."""
    optimizer = trainer.optimizer

    def skipping(update: Any, number: int, norm: Any) -> None:
        names = _names_of(trainer, trainer.model.layers[1].parameters()) if number == step else []
        kept = {name: optimizer.master(name).clone() for name in names}
        update(number, norm)
        for name, value in kept.items():
            optimizer.master(name).copy_(value)
        optimizer.round_weights()

    _wrap(optimizer, "update", skipping)


@_fault("learning-rate-apart")
def raise_rate(trainer: Any, _: int) -> None:
    """One rank learns by a rate that is a tenth higher."""
    schedule = trainer.optimizer.schedule
    trainer.optimizer.schedule = replace(schedule, learning_rate=1.1 * schedule.learning_rate)


@_fault("weight-bit-flipped", after=True)
def flip_bit(trainer: Any) -> None:
    """One weight of the last layer doubles on one rank, as it does where a bit of its exponent flips."""
    names = _names_of(trainer, trainer.model.layers[-1].parameters())
    masters = [trainer.optimizer.master(name) for name in names]
    max(masters, key=lambda master: int(master.numel())).view(-1)[0] *= 2
    trainer.optimizer.round_weights()


@_fault("wrong-amax-group", everywhere=True)
def scale_alone(trainer: Any, _: int) -> None:
    """Each rank scales by its own amax alone."""
    dense = trainer.scope.dense
    alone = partial(dense.func, **{**dense.keywords, "amax_reduction_group": SINGLE_OWNER})
    trainer.scope = replace(trainer.scope, dense=alone)


# --- checkpoints, evaluations, the order of data, and the ranks


@_fault("stale-checkpoint", everywhere=True, after=True)
def save_old_weights(trainer: Any) -> None:
    """A checkpoint claims its own step, and holds the weights of an earlier one."""
    kept = {name: tensor.clone() for name, tensor in trainer.state().items()}
    trainer.state = lambda: kept


@_fault("moments-lost", everywhere=True)
def lose_moments(trainer: Any, _: int) -> None:
    """A run that is resumed has its weights again, and Adam's first moments are 0."""

    def forget() -> None:
        for parts in trainer.optimizer.state_tensors().values():
            parts["exp_avg"].zero_()

    _then(trainer, "resume", forget)


def _shift_batches(trainer: Any) -> list[int]:
    """From now on batches are those behind the ones asked for, by the number in this list."""
    shift = [0]
    _wrap(trainer.language, "batch", lambda batch, number, *rest: batch(number + shift[0], *rest))
    return shift


@_fault("data-from-the-start", everywhere=True)
def read_from_the_start(trainer: Any, _: int) -> None:
    """A run that is resumed reads the batches from the first one on."""
    shift = _shift_batches(trainer)

    def restart() -> None:
        shift[0] = -trainer.done

    _then(trainer, "resume", restart)


@_fault("evaluation-moves-data", everywhere=True)
def move_data_by_evaluation(trainer: Any, step: int) -> None:
    """An evaluation takes its batch out of those of training, which goes on with the one after it."""
    shift = _shift_batches(trainer)

    def move() -> None:
        shift[0] += trainer.done == step

    _then(trainer, "validate", move)


@_fault("dies", after=True)
def die(_: Any) -> None:
    """The rank is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


@_fault("hangs", after=True)
def hang(_: Any) -> None:
    """The rank does nothing any more."""
    time.sleep(1e9)


@_fault("late", after=True)
def come_late(_: Any) -> None:
    """The rank goes on after a minute, and the others wait for it."""
    time.sleep(LATE_S)
