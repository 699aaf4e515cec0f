"""Faults in what goes into a call: another value, a default, places changed, a mask that is off by one."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ...evidence.selftest import Fault, Mutant
from ..trace import PlantPointGone, Trace
from .calls import Call, around_calls


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
