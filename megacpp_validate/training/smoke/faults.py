"""Faults that are planted in a run which must find them, each a thing that goes wrong between ranks without a word.

A fault is written NAME, or NAME:STEP; it is planted on the last rank where it is one rank's. What finds it is in
matrix/smoke_faults.toml.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from ...bridge.amax_owner import SINGLE_OWNER
from ..errors import TrainingError
from ..expert_layer import ExpertLayer
from ..parallel.gradient_sums import GradientSums

if TYPE_CHECKING:
    from .trainer import SmokeTrainer

After = Callable[["SmokeTrainer"], None]
_STEP: Final = 2  # where a fault of a single step is planted, where none is named


class UnknownFault(TrainingError, ValueError):
    """A fault that there is not, or that this run has no place for."""


def plant(text: str, trainer: SmokeTrainer) -> After | None:
    """Plant a fault; what is to be called after each step, if anything.

    Args:
        text: name, and a step if it is of one; empty for none.
        trainer: of this rank, before its first step.

    Raises:
        UnknownFault: there is none of that name, or nothing in this run that could have it.
    """
    if not text:
        return None
    name, _, step = text.partition(":")
    if name not in FAULTS:
        raise UnknownFault(f"there is no fault {name!r}. Next step: choose one of {', '.join(FAULTS)}.")
    return FAULTS[name](trainer, int(step or _STEP))


def _here(trainer: SmokeTrainer) -> bool:
    return trainer.rank.rank == trainer.plan.world - 1


def _experts_not_synchronised(trainer: SmokeTrainer, _: int) -> None:
    """The gradients of this rank's experts stay its own, though it takes part in their sum."""
    if trainer.groups.same_experts is None:
        raise UnknownFault("no other rank holds the same experts. Next step: plan with expert_data of 2 or more.")
    sums, experts = trainer.sharded.sums, trainer.sharded.experts

    def reduce(gradients: dict[str, Any]) -> None:
        kept = {name: gradient.clone() for name, gradient in gradients.items() if name in experts}
        sums.reduce(gradients)
        for name, gradient in kept.items():
            gradients[name].copy_(gradient)

    if _here(trainer):
        _replace_sums(trainer, reduce)


def _norm_gradient_not_summed(trainer: SmokeTrainer, _: int) -> None:
    """The gradient of one norm is left out of the sum over the tensor group."""
    name = "norm.weight"
    sums = trainer.sharded.sums
    if not any(name in names for names, _ in sums.sums):
        raise UnknownFault("no norm is summed over a tensor group. Next step: plan with sequence_parallel.")
    left = GradientSums(tuple((names - {name}, group) for names, group in sums.sums), sums.copies)
    _replace_sums(trainer, left.reduce)


def _token_dropped(trainer: SmokeTrainer, _: int) -> None:
    """The first token of each pass does not reach its experts, though the router gave it to them."""
    layer = _expert_layer(trainer)
    permute = layer.dispatch.permute

    def without_first(tokens: Any, probs: Any, routing_map: Any, **options: Any) -> Any:
        short = routing_map.clone()
        short[0] = False
        return permute(tokens, probs, short, **options)

    if _here(trainer):
        layer.dispatch.permute = without_first


def _rows_swapped(trainer: SmokeTrainer, _: int) -> None:
    """Two rows change places on their way to the experts."""
    from ..parallel import expert_parallel

    exchange = expert_parallel.exchange_rows

    def swapped(rows: Any, sent: Any, received: Any, group: Any = None) -> Any:
        if rows.shape[0] > 1:
            order = torch.arange(rows.shape[0], device=rows.device)
            order[0], order[-1] = rows.shape[0] - 1, 0
            rows = rows.index_select(0, order)
        return exchange(rows, sent, received, group)

    if trainer.groups.spread.expert_group is None:
        raise UnknownFault("no rows are exchanged. Next step: plan with expert_parallel.")
    if _here(trainer):
        expert_parallel.exchange_rows = swapped


def _experts_swapped(trainer: SmokeTrainer, _: int) -> None:
    """The first two experts of this rank's first E-layer have each other's weights."""
    layer = _expert_layer(trainer)
    if _here(trainer):
        for bank in (layer.up, layer.down):
            weight = bank.native_state_dict()["weight"]
            bank.load_native_state_dict({"weight": weight[[1, 0, *range(2, len(weight))]]})
        _take_weights_again(trainer)


def _expert_without_gradient(trainer: SmokeTrainer, _: int) -> None:
    """The first expert of this rank's first E-layer is never moved."""
    layer = _expert_layer(trainer)

    def zeroed(gradient: Any, *, whole: bool) -> Any:
        gradient = gradient.clone()
        gradient[slice(None) if whole else 0] = 0
        return gradient

    if _here(trainer):
        for bank in (layer.up, layer.down):
            first = next(bank.parameters())
            first.register_hook(partial(zeroed, whole=first.dim() == 2))


def _wrong_sequences(trainer: SmokeTrainer, _: int) -> None:
    """This rank reads what the first one reads."""
    if trainer.plan.data == 1:
        raise UnknownFault("one rank reads all. Next step: plan with data of 2 or more.")
    if _here(trainer):
        trainer.read_as = 0


def _pass_lost(trainer: SmokeTrainer, _: int) -> None:
    """What all passes of a step but the last gave is forgotten."""
    if trainer.plan.accumulate == 1:
        raise UnknownFault("a step is one pass. Next step: plan with accumulate of 2 or more.")
    parameters, optimizer = list(trainer.model.parameters()), trainer.optimizer
    take = optimizer.take_gradients

    def forget(*, first: bool) -> None:  # noqa: ARG001 - as it is called
        for parameter in parameters:
            parameter.grad = None

    def take_last(**_: bool) -> Any:
        optimizer.add_gradients = add  # type: ignore[method-assign]
        norm = take(first=True)
        optimizer.add_gradients = forget  # type: ignore[method-assign]
        return norm

    add = optimizer.add_gradients
    optimizer.add_gradients, optimizer.take_gradients = forget, take_last  # type: ignore[method-assign]


def _gradients_averaged(trainer: SmokeTrainer, _: int) -> None:
    """FSDP2 divides by the number of ranks, as it does unless it is told otherwise."""
    from torch.distributed.fsdp import FSDPModule

    blocks = [module for module in trainer.model.modules() if isinstance(module, FSDPModule)]
    if not blocks:
        raise UnknownFault("nothing is shared out. Next step: plan with data of 2 or more.")
    for block in blocks:
        block.set_gradient_divide_factor(float(trainer.plan.data))


def _wrong_amax_group(trainer: SmokeTrainer, _: int) -> None:
    """Each rank scales by its own amax alone."""
    if trainer.scope is None or trainer.plan.world == 1:
        raise UnknownFault("no amax is shared. Next step: run several ranks under delayed scaling.")
    dense = trainer.scope.dense
    trainer.scope = type(trainer.scope)(
        dense=partial(dense.func, **{**dense.keywords, "amax_reduction_group": SINGLE_OWNER}),
        experts=trainer.scope.experts,
    )


def _stale_checkpoint(trainer: SmokeTrainer, step: int) -> After:
    """A checkpoint says that it is of this step, and holds the weights of an earlier one."""
    kept: dict[str, Any] = {}

    def remember(one: SmokeTrainer) -> None:
        if one.done == step:
            parts = one.optimizer.state_tensors()
            kept.update({name: {part: value.clone() for part, value in some.items()} for name, some in parts.items()})

    save = trainer.save

    def save_old() -> Any:
        now = trainer.optimizer.state_tensors()
        fresh = {name: {part: value.clone() for part, value in some.items()} for name, some in now.items()}
        for source in (kept, fresh):
            for name, some in source.items():
                for part, value in some.items():
                    now[name][part].copy_(value)
            if source is kept:
                path = save()
        return path

    trainer.save = save_old  # type: ignore[method-assign]
    return remember


def _nan(trainer: SmokeTrainer, step: int) -> None:
    """One number of what a layer gives is no number, on one rank, in one step."""
    layer = trainer.model.layers[-2]

    def spoil(module: Any, given: Any, out: Any) -> Any:  # noqa: ARG001 - as torch calls it
        if trainer.done == step:
            out.rows.data[0, 0, 0] = float("nan")

    if _here(trainer):
        layer.register_forward_hook(spoil, prepend=True)


def _dies(trainer: SmokeTrainer, step: int) -> After:
    """The rank is killed."""

    def kill(one: SmokeTrainer) -> None:
        if one.done == step and _here(one):
            os.kill(os.getpid(), signal.SIGKILL)

    del trainer
    return kill


def _hangs(trainer: SmokeTrainer, step: int) -> After:
    """The rank does nothing any more."""

    def sleep(one: SmokeTrainer) -> None:
        while one.done == step and _here(one):
            time.sleep(1)

    del trainer
    return sleep


FAULTS: Final[dict[str, Callable[[Any, int], After | None]]] = {
    "experts-not-synchronised": _experts_not_synchronised,
    "norm-gradient-not-summed": _norm_gradient_not_summed,
    "token-dropped": _token_dropped,
    "rows-swapped": _rows_swapped,
    "experts-swapped": _experts_swapped,
    "expert-without-gradient": _expert_without_gradient,
    "wrong-sequences": _wrong_sequences,
    "pass-lost": _pass_lost,
    "gradients-averaged": _gradients_averaged,
    "wrong-amax-group": _wrong_amax_group,
    "stale-checkpoint": _stale_checkpoint,
    "nan": _nan,
    "dies": _dies,
    "hangs": _hangs,
}


def _expert_layer(trainer: SmokeTrainer) -> ExpertLayer:
    found = next((layer for layer in trainer.model.layers if isinstance(layer, ExpertLayer)), None)
    if found is None:
        raise UnknownFault(f"the pattern {trainer.size.pattern} has no experts. Next step: train one with an E.")
    return found


def _replace_sums(trainer: SmokeTrainer, reduce: Callable[[Any], None]) -> None:
    sums = trainer.sharded.sums
    other = GradientSums(sums.sums, sums.copies)
    object.__setattr__(other, "reduce", reduce)
    trainer.optimizer.sums = other


def _take_weights_again(trainer: SmokeTrainer) -> None:
    """The copies that the optimizer keeps are those of the weights as they are now."""
    named = dict(trainer.model.named_parameters())
    for name in trainer.sharded.experts:
        trainer.optimizer.master(name).copy_(named[name])
