"""Faults in one call: in a tensor that it returns or a gradient that goes back, in its arguments, in its result."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final
from weakref import WeakSet

import torch

from ..evidence.selftest import Fault, Mutant
from .points import Call, PlantPointGone, Trace, around_calls, traced

Damage = Callable[[Any], Any]

# --- tensors and gradients -------------------------------------------------------------------------------------------


def _half_zeros(tensor: Any) -> Any:
    kept = torch.ones(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    kept[: max(1, tensor.numel() // 2)] = 0
    return tensor * kept.view(tensor.shape)


def _shuffled(tensor: Any) -> Any:
    axis = next((axis for axis, size in enumerate(tensor.shape) if size > 1), None)
    return tensor if axis is None else tensor.roll(1, axis)


def _nan(tensor: Any) -> Any:
    hit = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    hit[tensor.numel() // 2 : tensor.numel() // 2 + 1] = True
    return tensor.masked_fill(hit.view(tensor.shape), float("nan"))


def damage_of(mutant: Mutant) -> Damage:
    """What a mutant does to a tensor."""
    factor = float(mutant.parameters.get("factor", 1.0))
    return {
        Fault.ZEROS: lambda tensor: tensor * 0,
        Fault.HALF_ZEROS: _half_zeros,
        Fault.SCALED: lambda tensor: tensor * factor,
        Fault.NEGATED: lambda tensor: -tensor,
        Fault.SHUFFLED: _shuffled,
        Fault.NAN: _nan,
    }[mutant.fault]


TENSOR_FAULTS: Final = (Fault.ZEROS, Fault.HALF_ZEROS, Fault.SCALED, Fault.NEGATED, Fault.SHUFFLED, Fault.NAN)


class _DamagedGradient(torch.autograd.Function):
    """Passes a tensor on, and a damaged gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, damage: Damage) -> Any:
        ctx.damage = damage
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return ctx.damage(grad), None


def plant_in_tensor(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Damage what the mutant's `tensor` names."""
    kind, _, name = str(mutant.parameters.get("tensor", "output")).partition(".")
    damage = damage_of(mutant)

    def damaged(tensor: Any) -> Any:
        after = damage(tensor)
        trace.note(tensor, after)
        return after

    if kind == "output":
        return around_calls(target, lambda call: _in_output(call.run(), name, damaged))
    if kind != "gradient" or not name:
        raise PlantPointGone(f"{kind}.{name} names no tensor. Next step: write output, output.N or gradient.NAME.")
    return around_calls(target, _Backward(name, damaged, trace))


class _Backward:
    """Damages the gradient of an argument, or of a parameter of the layer that is called."""

    def __init__(self, name: str, damage: Damage, trace: Trace) -> None:
        self.name, self.damage, self.trace = name, damage, trace
        self.hooked: WeakSet[Any] = WeakSet()

    def __call__(self, call: Call) -> Any:
        given = call.arguments.get(self.name)
        if isinstance(given, torch.Tensor):
            if given.requires_grad:
                call.arguments[self.name] = _DamagedGradient.apply(given, self.damage)
            return call.run()
        parameter = call.parameter(self.name)
        # A layer may be given other parameters after it was made, so they are looked at in each call.
        if parameter is not None and parameter.requires_grad and not any(parameter is known for known in self.hooked):
            parameter.register_hook(self.damage)
            self.hooked.add(parameter)
        if parameter is None and self.name not in call.arguments:
            self.trace.absent = f"there is no argument or parameter {self.name!r} to damage the gradient of"
        return call.run()


def _in_output(output: Any, name: str, damage: Damage) -> Any:
    """The output with one tensor of it damaged: itself, by index, or by field."""
    if not name:
        if not isinstance(output, torch.Tensor):
            return output
        return damage(output)
    if name.isdigit():
        if not isinstance(output, tuple | list):
            return output
        items = list(output)
        if isinstance(items[int(name)], torch.Tensor):
            items[int(name)] = damage(items[int(name)])
        return type(output)(items)
    value = getattr(output, name)
    return dataclasses.replace(output, **{name: damage(value)}) if isinstance(value, torch.Tensor) else output


# --- arguments --------------------------------------------------------------------------------------------------------


def plant_in_argument(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Change one argument of each call, or of each making."""
    name, at_init = str(mutant.parameters["name"]), mutant.parameters.get("call") == "init"
    default = _default_of(target, name, at_init=at_init)

    def around(call: Call) -> Any:
        if name not in call.arguments:
            raise trace.is_gone(f"{mutant.at} has no argument {name!r}. Next step: see how it is called now.")
        before = call.arguments[name]
        call.arguments[name] = _changed(mutant, before, default)
        trace.note(before, call.arguments[name])
        return call.run()

    return around_calls(target, around, at_init=at_init)


def _default_of(target: Any, name: str, *, at_init: bool) -> Any:
    function = target
    if inspect.isclass(target):
        function = target.__init__ if at_init else getattr(target, "forward", target.__call__)
    parameter = inspect.signature(function).parameters.get(name)
    if parameter is None:
        raise PlantPointGone(f"{target!r} has no parameter {name!r}. Next step: see how it is called now.")
    return None if parameter.default is inspect.Parameter.empty else parameter.default


def _changed(mutant: Mutant, value: Any, default: Any) -> Any:
    given = mutant.parameters
    if mutant.fault is Fault.ARGUMENT:
        return given["value"] if given.get("only", value) == value else value
    if mutant.fault is Fault.ARGUMENT_LOST:
        return default
    if mutant.fault is Fault.ARGUMENT_SCALED:
        return None if value is None else value * given["factor"]
    if isinstance(value, torch.Tensor):
        return value.roll(1, int(given["axis"]))
    return type(value)((*value[-1:], *value[:-1])) if isinstance(value, list | tuple) else value


def plant_mask_off_by_one(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Let each query see the key after its own, whatever computes the attention.

    Queries that are put one place later see one key more; their outputs are put back one place earlier. The last one
    sees everything as it is.
    """
    name, axis = str(mutant.parameters["name"]), int(mutant.parameters["axis"])

    def around(call: Call) -> Any:
        query, plain = call.arguments[name], call.run()
        length = query.shape[axis]
        if length < 2:
            return plain
        call.arguments[name] = torch.cat([query.narrow(axis, 0, 1), query.narrow(axis, 0, length - 1)], dim=axis)
        late = call.run()
        shifted = torch.cat([late.narrow(axis, 1, length - 1), plain.narrow(axis, length - 1, 1)], dim=axis)
        trace.note(plain, shifted)
        return shifted

    return around_calls(target, around)


# --- results, and rows of tables --------------------------------------------------------------------------------------


def plant_answer(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """The same answer whatever is asked, as a whole or in one item."""
    value, index = mutant.parameters["value"], mutant.parameters.get("index")

    def around(call: Call) -> Any:
        plain = call.run()
        answer: Any = value
        if index is not None:
            answer = tuple(value if place == index else item for place, item in enumerate(plain))
        trace.note(plain, answer)
        return answer

    return around_calls(target, around)


def plant_skip(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Nothing is done; what is given is None, or the argument that `returns` names."""
    name = str(mutant.parameters.get("returns", ""))

    def around(call: Call) -> Any:
        if name and name not in call.arguments:
            raise trace.is_gone(f"{mutant.at} has no argument {name!r}. Next step: see how it is called now.")
        trace.note_use()
        return call.arguments[name] if name else None

    return around_calls(target, around)


def plant_kept(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """Whatever tensors it gives stay for good."""
    del mutant
    kept: list[Any] = []

    def around(call: Call) -> Any:
        given = call.run()
        items = given if isinstance(given, tuple | list) else (given,)
        kept.extend(item.detach() for item in items if isinstance(item, torch.Tensor))
        trace.note_use()
        return given

    return around_calls(target, around)


def plant_item_lost(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """One of the items that it gives is lost."""
    index = int(mutant.parameters["index"])

    def around(call: Call) -> Any:
        given = call.run()
        items = list(given)
        if index >= len(items):
            return tuple(items) if isinstance(given, tuple) else items
        del items[index]
        trace.note_use()
        return tuple(items) if isinstance(given, tuple) else items

    return around_calls(target, around)


def plant_entry_lost(target: Any, mutant: Mutant, trace: Trace) -> Any:
    """A table without one of its rows: a mapping without a key, a sequence without the row of that code or name."""
    name = mutant.parameters["name"]
    if isinstance(target, Mapping):
        left = {key: value for key, value in target.items() if key != name}
        lost = len(left) < len(target)
        found: Any = left
    elif isinstance(target, tuple | list | frozenset | set):
        rows = [row for row in target if name not in (row, getattr(row, "code", None), getattr(row, "id", None))]
        lost = len(rows) < len(target)
        found = frozenset(rows) if isinstance(target, frozenset | set) else tuple(rows)
    else:
        raise PlantPointGone(f"{mutant.at} is no table. Next step: point the mutant at one.")
    if not lost:
        raise PlantPointGone(f"{mutant.at} has no row {name!r}. Next step: see what the row is called now.")
    return traced(found, trace)
