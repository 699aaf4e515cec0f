"""Gradients over ranks: which are summed over which ranks beside what FSDP2 does, and the norm of all of them together.

Work is done on what lies here of each parameter, in the dtype of the optimizer's copies. Four kinds of parameters:

- sharded over the data group by FSDP2, which sums their gradients over it;
- routers, whole on every rank: summed over all ranks that see other tokens;
- experts, replicated over the ranks that hold the same experts (expert_data, and the tensor group under sequence
  parallelism, whose ranks see other tokens): summed over those;
- split over the tensor group by positions (norms, embedding, router, ...): summed over it (Korthikanti et al. 2022,
  arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed


@dataclass(frozen=True, eq=False)
class GradientSums:
    """What is summed, and how often each part is held.

    Attributes:
        sums: names of parameters, each in one entry at most, and the process group over which their gradients are
            summed after the last pass.
        copies: name -> ranks of the world that hold the same part of it; 1 without an entry.
    """

    sums: tuple[tuple[frozenset[str], Any], ...] = ()
    copies: Mapping[str, int] = field(default_factory=dict)

    def reduce(self, gradients: Mapping[str, Any]) -> None:
        """Sum in place, once a step: a collective call.

        Args:
            gradients: name -> what lies here, contiguous, fp32 at least, the same names on all ranks of a group.
        """
        waits = [
            distributed.all_reduce(gradient, group=group, async_op=True)
            for names, group in self.sums
            for name, gradient in gradients.items()
            if name in names
        ]
        for wait in waits:
            wait.wait()

    def norm(self, gradients: Mapping[str, Any]) -> Any:
        """[] fp64, the L2 norm of the gradients of the whole model; squares are summed in fp64: a collective call."""
        return self.norms_by(gradients, lambda _: "all")["all"]

    def norms_by(self, gradients: Mapping[str, Any], part_of: Callable[[str], str]) -> dict[str, Any]:
        """Part -> the same of its parameters alone; parts are those of the names, which ranks have alike."""
        norms = torch.stack(torch._foreach_norm(list(gradients.values()))).double()
        held = torch.tensor([float(self.copies.get(name, 1)) for name in gradients], dtype=torch.float64)
        parts = list(dict.fromkeys(map(part_of, gradients)))
        places = torch.tensor([parts.index(part_of(name)) for name in gradients])
        squares = norms.square() / held.to(norms.device, non_blocking=True)
        sums = torch.zeros(len(parts), dtype=torch.float64, device=norms.device)
        sums.index_add_(0, places.to(norms.device, non_blocking=True), squares)
        distributed.all_reduce(sums)
        return dict(zip(parts, sums.sqrt(), strict=True))


def local_part(tensor: Any) -> Any:
    """What lies here of a DTensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
