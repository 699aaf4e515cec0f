"""AdamW on fp32 copies of low-precision parameters, with warm-up, decay and clipping.

A parameter in bf16 has 8 bits: an update below 1/512 of a weight is lost when it is added to it. So the sum is kept in
fp32 and the parameter is its rounded copy, as in Micikevicius et al. 2018, arXiv:1710.03740, section 3.1. A parameter
in fp32 or fp64 is its own copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed, nn

from ..bridge.parallel_hooks import local_part, sum_gradients


@dataclass(frozen=True)
class Schedule:
    """How a run is optimised.

    Attributes:
        steps: of the whole run, N.
        learning_rate: the highest, reached after warm-up.
        warm_up: steps over which it rises linearly from 0.
        last: share of it that a cosine decays to at step N (Loshchilov & Hutter 2017, arXiv:1608.03983).
        weight_decay: decoupled, of matrices; norms, biases and other vectors have none (arXiv:1711.05101).
        beta1, beta2, eps: of Adam.
        clip: largest norm of all gradients together.
    """

    steps: int
    learning_rate: float = 3e-3
    warm_up: int = 20
    last: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = min(1.0, (step - self.warm_up) / max(1, self.steps - self.warm_up))
        return self.learning_rate * (self.last + (1 - self.last) * 0.5 * (1 + math.cos(math.pi * done)))


class MasterAdamW:
    """AdamW over fp32 copies of what lies here of each parameter.

    Args:
        named: names and parameters, each once; of a DTensor this rank's part is taken.
        schedule: rates and the rest.
        sums: over which ranks gradients are summed; None where this rank is alone.

    Attributes:
        schedule, sums: as given.
    """

    def __init__(
        self, named: Iterable[tuple[str, Any]], schedule: Schedule, *, sums: GradientSums | None = None
    ) -> None:
        self.schedule, self.sums = schedule, sums
        # FSDP2 puts others in their place while a block is whole.
        self._named: dict[str, Any] = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._masters = {name: _master_of(parameter) for name, parameter in self._named.items()}
        self._room = {
            name: torch.empty_like(master)
            for name, master in self._masters.items()
            if master.dtype != self._named[name].dtype
        }
        matrices, vectors = (
            [master for master in self._masters.values() if (master.dim() > 1) is decays] for decays in (True, False)
        )
        groups = [
            {"params": matrices, "weight_decay": schedule.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            groups,
            lr=schedule.learning_rate,
            betas=(schedule.beta1, schedule.beta2),
            eps=schedule.eps,
            fused=True,  # one kernel for all weights, on the CPU and on CUDA: the loop of a small model is the host's
        )
        for master in self._masters.values():  # as AdamW makes it at the first step; a run that resumes fills it before
            step = torch.zeros((), device=master.device)
            moments = {part: torch.zeros_like(master) for part in ("exp_avg", "exp_avg_sq")}
            self._adam.state[master] = {"step": step, **moments}

    def take_gradients(self, *, first: bool = True) -> Any:
        """Move the gradients of the parameters to their copies; [] their norm together, before clipping.

        A parameter without a gradient counts as one of zeros: a bank of experts that no token reached.

        Args:
            first: whether this is the only pass of the step; else `add_gradients` has taken those before it.
        """
        self.add_gradients(first=first)
        if self.sums is None:
            return nn.utils.get_total_norm([master.grad for master in self._masters.values()])
        self.sums.reduce(self.gradients())
        return self.norms_by(lambda _: "all")["all"]

    def add_gradients(self, *, first: bool) -> None:
        """Move the gradients of one pass to the copies, and sum them there, in fp32 at least.

        Args:
            first: whether what the copies have is of an earlier step, and is forgotten.
        """
        wide, narrow = [], []
        for name, parameter in self._named.items():
            master, gradient = self._masters[name], parameter.grad
            if name not in self._room:  # torch itself sums the passes of a parameter that is its own copy
                if gradient is None:
                    parameter.grad = gradient = torch.zeros_like(parameter)
                master.grad = local_part(gradient)
                continue
            master.grad, parameter.grad = self._room[name], None
            if gradient is not None:
                wide.append(master.grad)
                narrow.append(local_part(gradient))
            elif first:
                master.grad.zero_()
        if wide and first:
            torch._foreach_copy_(wide, narrow)  # one launch for all: a step of a small model is its launches
        elif wide:
            torch._foreach_add_(wide, [gradient.to(room.dtype) for room, gradient in zip(wide, narrow, strict=True)])

    def norms_by(self, part_of: Callable[[str], str]) -> dict[str, Any]:
        """Part -> [] the L2 norm of the gradients that were taken for its parameters, before clipping.

        Squares are summed in fp64; over several ranks those of the whole model, in a collective call.

        Args:
            part_of: which part a parameter belongs to, by its name; the same parts on all ranks.
        """
        gradients, sums = self.gradients(), self.sums
        norms, copies = torch.stack(torch._foreach_norm(list(gradients.values()))), sums.copies if sums else {}
        held = torch.tensor([float(copies.get(name, 1)) for name in gradients], dtype=torch.float64)
        squares = norms.double().square() / held.to(norms.device, non_blocking=True)
        parts = list(dict.fromkeys(map(part_of, gradients)))
        places = torch.tensor([parts.index(part_of(name)) for name in gradients]).to(norms.device, non_blocking=True)
        totals = torch.zeros(len(parts), dtype=squares.dtype, device=norms.device).index_add(0, places, squares)
        if sums is not None:
            distributed.all_reduce(totals)
        return dict(zip(parts, totals.sqrt(), strict=True))

    def drop_gradients(self) -> None:
        """Forget what was taken: the weights stay as they are."""
        self._adam.zero_grad(set_to_none=True)
        for parameter in self._named.values():
            parameter.grad = None

    def update(self, step: int, norm: Any) -> None:
        """Clip what was taken, move the copies, round them into the parameters."""
        for group in self._adam.param_groups:
            group["lr"] = self.schedule.rate(step)
        nn.utils.clip_grads_with_norm_(self._masters.values(), self.schedule.clip, norm)
        self._adam.step()
        self.drop_gradients()
        self.round_weights()

    def round_weights(self) -> None:
        """Make the parameters the rounded copies of what is kept in fp32."""
        rounded = [(local_part(self._named[name]), self._masters[name]) for name in self._room]
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_(*map(list, zip(*rounded, strict=True)))

    def parameters(self) -> dict[str, Any]:
        """Name -> parameter as it was given: of FSDP2 the DTensor, also while a block of the model is whole."""
        return dict(self._named)

    def state_tensors(self) -> dict[str, dict[str, Any]]:
        """Parameter -> "master", "exp_avg", "exp_avg_sq" -> what lies here of it: the tensors themselves."""
        found = {name: dict(self._adam.state[master]) for name, master in self._masters.items()}
        for name, parts in found.items():
            del parts["step"]
            parts["master"] = self.master(name)
        return found

    def master(self, name: str) -> Any:
        """What is kept of a parameter's part here, outside of any graph."""
        return self._masters[name].detach()

    def gradients(self) -> dict[str, Any]:
        """Parameter -> what was taken of its gradient, of what lies here."""
        return {name: master.grad for name, master in self._masters.items()}

    def set_step(self, step: int) -> None:
        """Say how many steps the state is of."""
        for state in self._adam.state.values():
            state["step"].fill_(float(step))


def _master_of(parameter: Any) -> Any:
    part = local_part(parameter)
    if part.dtype in (torch.float32, torch.float64):
        return parameter if part is parameter else nn.Parameter(part.detach())  # of one storage
    return nn.Parameter(part.detach().to(torch.float32))


# --- gradient sums
#
# Gradients over ranks: which are summed over which ranks beside what FSDP2 does, and the norm of all of them together.
#
# Work is done on what lies here of each parameter, in the dtype of the optimizer's copies. Four kinds of parameters:
#
# - sharded over the data group by FSDP2, which sums their gradients over it;
# - routers, whole on every rank: summed over all ranks that see other tokens;
# - experts, replicated over the ranks that hold the same experts (expert_data, and the tensor group under sequence
#   parallelism, whose ranks see other tokens): summed over those;
# - split over the tensor group by positions (norms, embedding, router, ...): summed over it (Korthikanti et al. 2022,
#   arXiv:2205.05198, section 4.2.2).


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
        for names, group in self.sums:
            sum_gradients([gradient for name, gradient in gradients.items() if name in names], group)
