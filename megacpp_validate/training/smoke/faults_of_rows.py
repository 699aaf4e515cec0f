"""Faults of what goes to the experts and comes back, and of what a layer gives; see `faults`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from .. import expert_layer
from ..expert_layer import ExpertLayer
from ..parallel import expert_parallel, jagged_exchange

if TYPE_CHECKING:
    from .trainer import SmokeTrainer


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
