"""Checks while a run trains: tokens are conserved, experts and all other parameters learn, replicas stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import distributed

from ...bridge.parallel_hooks import local_part
from ..expert_layer import EXPERT, ExpertLayer
from ..model import HybridModel, part_of
from ..optimizer import MasterAdamW
from ..parallel.checks import check_replicas, check_routed, digest_tensor
from ..parallel.sharding import Sharded
from ..quantizers import delayed_scaling


def split_experts(name: str, first: int, *tensors: Any) -> Iterator[tuple[Any, ...]]:
    """Layer, number of the expert, and its part of each tensor, of a parameter that experts hold.

    A native bank has one parameter with all experts; Transformer Engine has a parameter an expert.

    Args:
        name: of the parameter.
        first: number of the first expert on this rank.
        tensors: of the parameter's shape.
    """
    layer, place = EXPERT.match(name).groups()  # type: ignore[union-attr]
    parts = [tensors] if place else zip(*tensors, strict=True)
    for number, own in enumerate(parts, first + int(place or 0)):
        yield layer, number, *own


class Audit:
    """Looks at each step, before the weights move.

    Attributes:
        part: number of the pass that runs now.
        dispatches: how many conserved their tokens; those of the path "bridge", which has counts.
        replicas: how many tensors were compared bit by bit, the last time.
        scales: how many of them are scales of low precision.
        alike: groups of more than one rank, this one in each, that hold parameters alike.
        part_norms: part of the model -> the norm of its gradients in each step, before clipping.
        stream_norms: layer -> the norm of what it gave, over the tokens of all ranks and passes, in each step.
    """

    def __init__(self, model: HybridModel, sharded: Sharded) -> None:
        self._model, self._sharded, self._spread = model, sharded, model.build.spread
        self._moved: dict[str, Any] = {}
        self._optimizer: MasterAdamW | None = None
        self._first: Any = None
        self.dispatches = self.replicas = self.scales = 0
        self.alike = sum(distributed.get_world_size(group) > 1 for _, _, group in sharded.alike)
        self.part_norms: dict[str, list[float]] = {}
        self.stream_norms: dict[str, list[float]] = {}
        self.part, self._given = 0, dict[tuple[int, int], Any]()
        for place, layer in enumerate(model.layers):
            layer.register_forward_hook(partial(self._see, place))

    def look(self, optimizer: MasterAdamW) -> None:
        """A collective call, once a step. Raises ReplicaDiverged: ranks hold other bits where they should be alike."""
        if self._optimizer is None:
            self._optimizer = optimizer
            self._first = torch.stack([digest_tensor(master) for _, master, _ in self._held(optimizer)])
        self._note_experts(optimizer.gradients())
        self._sum_streams()
        for part, norm in optimizer.norms_by(part_of).items():
            self.part_norms.setdefault(part, []).append(float(norm))
        self.scales = self._compare_scales()
        named = {name: local_part(one) for name, one in self._model.named_parameters()}
        self.replicas = self.scales + sum(
            check_replicas(((name, named[name]) for name in sorted(names)), what=kind, group=group)
            for kind, names, group in self._sharded.alike
        )

    def experts_without_gradient(self) -> list[str]:
        """Experts of this rank that no step gave a gradient, as in "layers.1 expert 17"."""
        first = self._spread.experts(self._model.size.num_experts).start
        return [
            f"{layer} expert {first + place}"
            for layer, seen in sorted(self._moved.items())
            for place in (~seen).nonzero().flatten().tolist()
        ]

    def unmoved(self) -> list[str] | None:
        """What lies here of parameters and has the bits of before the first step; experts as in "layers.1.up expert 3".

        What the optimizer does not have is unmoved, and so is a parameter that is not the rounding of its master: a
        layer that keeps its weight while the master moves trains nothing. None before the first step.
        """
        if self._optimizer is None:
            return None
        held = list(self._held(self._optimizer))
        same = torch.stack([digest_tensor(master) for _, master, _ in held]) == self._first
        stays = [not torch.equal(one, master.to(one.dtype)) for _, master, one in held]
        known = self._optimizer.parameters()
        left = [name for name, _ in self._model.named_parameters() if name not in known]
        return left + [
            name for (name, _, _), one, other in zip(held, same.tolist(), stays, strict=True) if one or other
        ]

    def _held(self, optimizer: MasterAdamW) -> Iterator[tuple[str, Any, Any]]:
        """Name, master and parameter of all that lies here; of a bank one expert after the other."""
        first = self._spread.experts(self._model.size.num_experts).start
        for name, parameter in optimizer.parameters().items():
            master, here = optimizer.master(name), local_part(parameter).detach()
            if not master.numel():  # FSDP2 leaves a rank without rows where there are fewer than ranks
                continue
            if name not in self._sharded.experts:
                yield name, master, here
                continue
            for layer, number, own, one in split_experts(name, first, master, here):
                yield f"{layer} expert {number}", own, one

    def _compare_scales(self) -> int:
        """Scales of layers that share their amax, bit by bit; how many tensors. Raises ReplicaDiverged."""
        dense, experts = dict[str, Any](), dict[str, Any]()
        for name, forward, _, scale in delayed_scaling(self._model):
            of = experts if EXPERT.match(f"{name}.weight") else dense
            of[f"{name} {'forward' if forward else 'backward'}"] = scale
        world = distributed.group.WORLD if self._spread.plan.world > 1 else None
        found = ((dense, world), (experts, self._spread.same_experts))
        return sum(
            check_replicas(sorted(scales.items()), what="scale", group=group)
            for scales, group in found
            if group is not None
        )

    def _see(self, place: int, layer: Any, given: Any, out: Any) -> None:  # noqa: ARG002 - as torch calls it
        """Overwritten where a layer runs again: in a recomputation, or by the head that shares it."""
        if torch.is_grad_enabled():
            self._given[self.part, place] = out.whole().detach().double().square().sum()

    def _sum_streams(self) -> None:
        places = range(len(self._model.layers))
        squares = torch.stack([sum(one for (_, place), one in self._given.items() if place == own) for own in places])
        if self._spread.token_group is not None:
            distributed.all_reduce(squares, group=self._spread.token_group)
        for place, value in zip(places, squares.sqrt().tolist(), strict=True):
            self.stream_norms.setdefault(f"layers.{place}", []).append(value)
        self._given.clear()

    def _note_experts(self, gradients: Any) -> None:
        """Note which experts of this rank got a gradient."""
        for name in sorted(self._sharded.experts):
            layer, number = EXPERT.match(name).groups()  # type: ignore[union-attr]
            gradient, experts = gradients[name], len(self._spread.experts(self._model.size.num_experts))
            seen = self._moved.setdefault(layer, torch.zeros(experts, dtype=torch.bool, device=gradient.device))
            if number:
                seen[int(number)] |= gradient.any()
            else:
                seen |= gradient.flatten(1).any(1)

    def check_tokens(self) -> None:
        """A collective call of each expert group, after each forward pass.

        Raises:
            TokensNotConserved: the rows that were permuted are not those that the routers chose.
        """
        for layer in self._model.layers:
            if isinstance(layer, ExpertLayer) and layer.last is not None:
                check_routed(*layer.last, self._spread.expert_group)
                self.dispatches += 1
