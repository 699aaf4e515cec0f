"""Every tensor of one step, in the order in which it comes up: inputs, outputs, parameters and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, Final

import torch

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
