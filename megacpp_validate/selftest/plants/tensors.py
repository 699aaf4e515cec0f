"""Faults in a tensor that comes out of a call, or in a gradient that goes back through it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakSet

import torch

from ...evidence.selftest import Fault, Mutant
from ..trace import PlantPointGone, Trace
from .calls import Call, around_calls

Damage = Callable[[Any], Any]


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
