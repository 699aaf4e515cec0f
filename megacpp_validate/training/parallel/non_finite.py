"""Which module, tensor, step and rank first made a value that is no number.

While a run trains, each module has one flag on the device: a reduction of what it gives out and a few scalars, and one
read by the host a step. Where that, a loss or a gradient is not finite, the step is run once more with every input,
output, parameter and gradient looked at in the order in which they come up; the first that is not finite is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import distributed

from ..errors import TrainingError


class NotReproduced(TrainingError, RuntimeError):
    """A step that was not finite, and is when it is run again."""


@dataclass(frozen=True)
class NonFinite:
    """The first value that is no number.

    Attributes:
        step, rank: where.
        module: by its name in the model; empty for the model itself.
        tensor: "input", "output", "parameter weight", "gradient of the input", "gradient of weight", ...
        order: how many tensors were looked at before it.
    """

    step: int
    rank: int
    module: str
    tensor: str
    order: int

    def words(self) -> str:
        """For a message."""
        return (
            f"step {self.step}, rank {self.rank}: the first value that is no number is the {self.tensor} of "
            f"{self.module or 'the model itself'}"
        )


@dataclass(frozen=True, eq=False)
class RandomState:
    """Where the generators stood at the beginning of a step."""

    cpu: Any
    cuda: Any

    @staticmethod
    def take() -> RandomState:
        """As they stand now: the CPU's, and that of the current GPU once it is used."""
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        return RandomState(torch.get_rng_state(), torch.cuda.get_rng_state() if used else None)

    def put_back(self) -> None:
        """As they stood then."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


class FiniteWatch:
    """Flags of the modules of a model; hooks stay until `close`.

    Args:
        model: whose modules are watched, wherever their output holds tensors.

    Attributes:
        names: of the modules, by flag.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.names = tuple(name for name, _ in model.named_modules())
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        # 0 as long as all is finite: 0 times a NaN or an Inf is NaN, and stays it in a sum.
        self._flags = torch.zeros(len(self.names), device=device)
        self._handles = [
            module.register_forward_hook(self._hook(place)) for place, module in enumerate(model.modules())
        ]
        self._random = RandomState.take()

    def begin(self) -> None:
        """The beginning of a step: what is drawn from here on can be drawn again."""
        self._flags.zero_()
        self._random = RandomState.take()

    def is_finite(self, *values: Any, group: Any = None) -> bool:
        """Whether all outputs since `begin` were numbers, and `values` are: the one place where the host waits.

        Args:
            values: [] tensors, or DTensors: loss, gradient norm, ...
            group: ranks that decide together, so that all of them run the step again; None is this rank alone, unless
                there is a world.
        """
        whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]
        scalars = [value.detach().to(self._flags) for value in whole]
        total = self._flags.sum() + sum((value * 0 for value in scalars), torch.zeros_like(self._flags[0]))
        if distributed.is_initialized():
            distributed.all_reduce(total, group=group)  # a NaN of one rank is everyone's
        return bool(total.isfinite())

    def flagged(self) -> tuple[str, ...]:
        """Names of the modules that gave out what is no number since `begin`."""
        return tuple(name for name, fine in zip(self.names, self._flags.isfinite().tolist(), strict=True) if not fine)

    def find(self, replay: Callable[[], Any], *, step: int, group: Any = None) -> NonFinite:
        """Run the step again and name the first value that is no number; on all ranks of the group the same.

        Gradients of the model are None after it.

        Args:
            replay: the forward and backward passes of the step, from the weights that it began with; it also puts back
                whatever else a step moves, such as the amax histories of Transformer Engine.
            step: its number.
            group: ranks that run it together.

        Raises:
            NotReproduced: all was finite this time.
        """
        self._random.put_back()
        self._model.zero_grad(set_to_none=True)
        with look_at_everything(self._model) as looks:
            replay()
        self._model.zero_grad(set_to_none=True)
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        place, look = first_not_finite(looks)
        found: Any = None if look is None else NonFinite(step, rank, look.module, look.tensor, place)
        if distributed.is_initialized():
            everyone: list[Any] = [None] * distributed.get_world_size(group)
            distributed.all_gather_object(everyone, found, group=group)
            found = min(filter(None, everyone), key=lambda one: (one.order, one.rank), default=None)
        if found is None:
            raise NotReproduced(
                f"step {step} gave a value that is no number, and none when it was run again. Likely cause: a kernel "
                "whose sums have no fixed order, a broken device, or state that the replay did not put back. Next "
                "step: run it with torch.use_deterministic_algorithms(True)."
            )
        return found

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, place: int) -> Callable[..., None]:
        def look(module: Any, given: Any, out: Any) -> None:  # noqa: ARG001 - as torch calls it
            with torch.no_grad():
                for _, tensor in find_tensors(out):
                    low, high = torch.aminmax(tensor.detach())  # propagates NaN, in one pass
                    self._flags[place].add_(low * 0).add_(high * 0)

        return look


# --- tensor looks
#
# Every tensor of one step, in the order in which it comes up: inputs, outputs, parameters and their gradients.


_LOOKED_AT: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Look:
    """One tensor that came up.

    Attributes:
        module: whose, by its name in the model.
        tensor: which of its tensors.
        finite: [] bool, still on the device.
        same: another look at the same gradient has this number too; 0 for no gradient of an input or output.
    """

    module: str
    tensor: str
    finite: Any
    same: int = 0


@contextmanager
def look_at_everything(model: Any) -> Iterator[list[Look]]:
    """A region in which every tensor that a module of the model takes, holds or gives is looked at; no host waits.

    Of a DTensor the part of this rank is looked at. A parameter that FSDP2 shards has its gradient put in place past
    autograd, and that is not seen; those of inputs and outputs are.
    """
    looks: list[Look] = []
    handles: list[Any] = []
    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(_before, looks, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(_after, looks, name)))
            for part, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    handles.append(parameter.register_hook(_gradient_look(looks, name, part)))
        yield looks
    finally:
        for handle in handles:
            handle.remove()


def first_not_finite(looks: Sequence[Look]) -> tuple[int, Look | None]:
    """How many came before the first that is not finite, and that; None where all are. The host waits here.

    A gradient that is looked at more than once is its consumer's, which made it: the hook that was put on last, that of
    the input of the innermost module.
    """
    fine = torch.stack([look.finite for look in looks]).tolist() if looks else []
    if False not in fine:
        return len(looks), None
    place = chosen = fine.index(False)
    while looks[place].same and chosen + 1 < len(looks) and looks[chosen + 1].same == looks[place].same:
        chosen += 1
    return place, looks[chosen]


def find_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Tensors with fractions in what a module takes or gives, with where they lie in it: "0", "rows", "1.seen"."""
    if isinstance(value, torch.Tensor):
        if value.dtype in _LOOKED_AT and value.numel():
            yield name, value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from find_tensors(getattr(value, field.name), f"{name}.{field.name}".strip("."))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from find_tensors(item, f"{name}.{key}".strip("."))
    elif isinstance(value, tuple | list):
        for place, item in enumerate(value):
            yield from find_tensors(item, name if len(value) == 1 else f"{name}.{place}".strip("."))


def _before(looks: list[Look], name: str, module: Any, given: Any, named: Mapping[str, Any]) -> None:
    for part, parameter in module.named_parameters(recurse=False):
        _look(looks, name, f"parameter {part}", parameter)
    _look_at(looks, name, "input", given)
    _look_at(looks, name, "input", named)


def _after(looks: list[Look], name: str, module: Any, given: Any, out: Any) -> None:  # noqa: ARG001 - as torch calls it
    _look_at(looks, name, "output", out)


def _look_at(looks: list[Look], name: str, kind: str, values: Any) -> None:
    for part, value in find_tensors(values):
        shown = f"{kind} {part}".strip()
        _look(looks, name, shown, value)
        if value.requires_grad:
            value.register_hook(_gradient_look(looks, name, f"the {shown}", same=id(value)))


def _gradient_look(looks: list[Look], name: str, shown: str, same: int = 0) -> Callable[[Any], None]:
    def hook(gradient: Any) -> None:
        _look(looks, name, f"gradient of {shown}", gradient, same)

    return hook


def _look(looks: list[Look], name: str, shown: str, value: Any, same: int = 0) -> None:
    part = value.to_local() if hasattr(value, "to_local") else value
    looks.append(Look(name, shown, part.detach().isfinite().all(), same))
