"""What is checked while a run trains: tokens are conserved, experts learn, and what is replicated stays the same."""

from __future__ import annotations

from typing import Any

import torch

from ..expert_layer import ExpertLayer
from ..model import HybridModel
from ..optimizer import MasterAdamW
from ..parallel.gradient_sums import local_part
from ..parallel.mesh import RankGroups
from ..parallel.replicas import check_replicas
from ..parallel.sharding import Sharded
from ..parallel.token_counts import check_conservation
from .saved import EXPERT


class Audit:
    """Looks at each step, before the weights move.

    Attributes:
        dispatches: how many were found to conserve their tokens.
        replicas: how many tensors were compared bit by bit, the last time.
    """

    def __init__(self, model: HybridModel, sharded: Sharded, groups: RankGroups) -> None:
        self._model, self._sharded, self._groups = model, sharded, groups
        self._moved: dict[str, Any] = {}
        self.dispatches = self.replicas = 0

    def look(self, step: int, optimizer: MasterAdamW) -> None:
        """A collective call.

        Raises:
            TokensNotConserved: what reached the experts is not what the routers gave them.
            ReplicaDiverged: ranks that should hold the same weights do not.
        """
        del step
        for place, layer in enumerate(self._model.layers):
            if isinstance(layer, ExpertLayer):
                self._check_tokens(place, layer)
        gradients = optimizer.gradients()
        for name in sorted(self._sharded.experts):
            if match := EXPERT.match(name):
                self._note(match, gradients[name])
        self.replicas = self.compare_replicas()

    def compare_replicas(self) -> int:
        """Compare all that is replicated, bit by bit; how many tensors. Raises ReplicaDiverged."""
        named = {name: local_part(one) for name, one in self._model.named_parameters()}
        return sum(
            check_replicas(((name, named[name]) for name in sorted(names)), what=kind, group=group)
            for kind, names, group in self._sharded.alike
        )

    def experts_without_gradient(self) -> list[str]:
        """Experts of this rank that no step gave a gradient, as in "layers.1 expert 17"."""
        first = self._groups.spread.experts(self._model.size.num_experts).start
        lacking = []
        for layer, seen in sorted(self._moved.items()):
            lacking += [f"{layer} expert {first + int(place)}" for place in (~seen).nonzero().flatten().tolist()]
        return lacking

    def _note(self, match: Any, gradient: Any) -> None:
        layer, number = match[1], match[2]
        experts = len(self._groups.spread.experts(self._model.size.num_experts))
        seen = self._moved.setdefault(layer, torch.zeros(experts, dtype=torch.bool, device=gradient.device))
        if number:
            seen[int(number)] |= gradient.any()
        else:
            seen |= gradient.flatten(1).any(1)

    def _check_tokens(self, place: int, layer: ExpertLayer) -> None:
        last = layer.last
        if last is None:
            return
        check_conservation(last.counts, last.routing_map, self._groups.spread.expert_group)
        self.dispatches += 1
