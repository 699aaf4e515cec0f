"""What a planted fault changes in a trainer: rows, experts, gradients, updates, and what goes on around the steps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule

from ...bridge.amax_owner import SINGLE_OWNER
from .. import expert_layer
from ..expert_layer import ExpertLayer
from ..optimizer import GradientSums, local_part
from ..parallel import expert_parallel, jagged_exchange

if TYPE_CHECKING:
    from .trainer import SmokeTrainer

After = Callable[["SmokeTrainer"], None]


def on_last_rank(trainer: SmokeTrainer) -> bool:
    """Whether this rank is the one that faults of a single rank are planted on."""
    return bool(trainer.rank.rank == trainer.plan.world - 1)


def first_experts(trainer: SmokeTrainer) -> ExpertLayer:
    """The first E-layer, which there is (`faults.refuse_fault`)."""
    return next(layer for layer in trainer.model.layers if isinstance(layer, ExpertLayer))


def drop_token(trainer: SmokeTrainer, _: int) -> None:
    """The first token of each pass does not reach its experts, though the router gave it to them."""
    layer: Any = first_experts(trainer)
    permute = layer.dispatch.permute

    def without_first(tokens: Any, probs: Any, routing_map: Any, **options: Any) -> Any:
        short = routing_map.clone()
        short[0] = False
        return permute(tokens, probs, short, **options)

    if on_last_rank(trainer):
        layer.dispatch.permute = without_first


def swap_rows(trainer: SmokeTrainer, _: int) -> None:
    """Two rows change places on their way to the experts."""

    def swapping(exchange: Any) -> Any:
        def swapped(rows: Any, *rest: Any) -> Any:
            if rows.shape[0] > 1:
                order = torch.arange(rows.shape[0], device=rows.device)
                order[0], order[-1] = rows.shape[0] - 1, 0
                rows = rows.index_select(0, order)
            return exchange(rows, *rest)

        return swapped

    if on_last_rank(trainer):
        expert_parallel.exchange_rows = swapping(expert_parallel.exchange_rows)
        jagged_exchange.start_rows = swapping(jagged_exchange.start_rows)


def swap_experts(trainer: SmokeTrainer, _: int) -> None:
    """The first two experts of this rank's first E-layer have each other's weights."""
    layer = first_experts(trainer)
    if on_last_rank(trainer):
        for bank in (layer.up, layer.down):
            weight = bank.native_state_dict()["weight"]
            bank.load_native_state_dict({"weight": weight[[1, 0, *range(2, len(weight))]]})
        take_weights_again(trainer)


def exchange_weights(trainer: SmokeTrainer, _: int) -> None:
    """What the experts of a token made is combined with each other's weights."""
    layer: Any = first_experts(trainer)
    unpermute = layer.dispatch.unpermute

    def exchanged(rows: Any, row_map: Any, *, probs: Any) -> Any:
        others = probs.sum(dim=1, keepdim=True) - probs  # of top-2: the weight of the other expert
        return unpermute(rows, row_map, probs=torch.where(probs > 0, others, probs))

    if on_last_rank(trainer):
        layer.dispatch.unpermute = exchanged


def stop_expert(trainer: SmokeTrainer, _: int) -> None:
    """The first expert of this rank's first E-layer is never moved."""
    layer = first_experts(trainer)

    def zeroed(gradient: Any, *, whole: bool) -> Any:
        gradient = gradient.clone()
        gradient[slice(None) if whole else 0] = 0
        return gradient

    if on_last_rank(trainer):
        for bank in (layer.up, layer.down):
            first = next(bank.parameters())
            first.register_hook(partial(zeroed, whole=first.dim() == 2))


def keep_balance_apart(trainer: SmokeTrainer, _: int) -> None:
    """Each rank balances its experts over its own tokens: a mean of products is not a product of means."""
    del trainer
    module: Any = expert_layer
    share = module.share_of_balance_loss

    def own(probs: Any, routing_map: Any, group: Any = None) -> Any:
        share(probs, routing_map, group)  # a collective call, which the others make
        assigned = routing_map.sum(dim=0).to(probs.dtype)
        mine = probs.shape[1] * (assigned / assigned.sum().clamp(min=1) * probs.sum(dim=0)).sum()
        return mine / (probs.shape[0] * distributed.get_world_size(group))

    module.share_of_balance_loss = own


def reverse_rope(trainer: SmokeTrainer, _: int) -> None:
    """The rotary table of one rank has its positions the wrong way round."""
    if on_last_rank(trainer):
        for table in (trainer.model.cos, trainer.model.sin):
            table.copy_(table.flip(0))


def draw_router_apart(trainer: SmokeTrainer, _: int) -> None:
    """The router of one rank has other first weights."""
    layer = first_experts(trainer)
    if on_last_rank(trainer):
        for name, parameter in trainer.model.named_parameters():
            if parameter is layer.router.weight:
                trainer.optimizer.master(name).mul_(1.01)
        trainer.optimizer.round_weights()


def make_nan(trainer: SmokeTrainer, step: int) -> None:
    """One number of what a layer gives is no number, on one rank, in one step."""
    layer = trainer.model.layers[-2]

    def spoil(module: Any, given: Any, out: Any) -> Any:  # noqa: ARG001 - as torch calls it
        if trainer.done == step:
            out.rows.data[0, 0, 0] = float("nan")

    if on_last_rank(trainer):
        layer.register_forward_hook(spoil, prepend=True)


def make_infinite_gradient(trainer: SmokeTrainer, step: int) -> None:
    """The gradient of what the second layer gives is infinite in one place, on one rank, in one step."""
    layer = trainer.model.layers[1]

    def spoil(gradient: Any) -> Any:
        gradient = gradient.clone()
        gradient[0, 0, 0] = float("inf")
        return gradient

    def watch(module: Any, given: Any, out: Any) -> None:  # noqa: ARG001 - as torch calls it
        if trainer.done == step and out.rows.requires_grad:
            out.rows.register_hook(spoil)

    if on_last_rank(trainer):
        layer.register_forward_hook(watch, prepend=True)


def take_weights_again(trainer: SmokeTrainer) -> None:
    """The copies that the optimizer keeps are those of the weights as they are now."""
    named = dict(trainer.model.named_parameters())
    for name in trainer.sharded.experts:
        trainer.optimizer.master(name).copy_(named[name])


# --- faults of updates
#
# Faults of gradients, of their sums, and of how weights move; see `faults`.


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
    """FSDP2 divides by the number of ranks, as it does by default."""
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


# --- faults of runs
#
# Faults of what goes on around the steps: checkpoints, evaluations, the order of data, and the ranks; see `faults`.


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
