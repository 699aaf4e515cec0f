"""Plant one row of `matrix/mutants.toml` in this process: find the patch point, and put the faulty thing there."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from ..bridge import features, recipes
from ..bridge import imports as te
from ..bridge.recipes import TargetRecipes
from ..bridge.vendor import Entry
from ..evidence.selftest import Fault, Mutant
from .faults import FAULTS, Call, Trace

BRIDGE: Final = "megacpp_validate.bridge"
_LOST: Final = "a planted fault takes this entry point away"


class PlantPointGone(LookupError):
    """A mutant cannot be planted; the text says why and what to do."""


@dataclass(frozen=True)
class Point:
    """One place that can be patched.

    Attributes:
        holder, name: the attribute that is set.
        value: the class, function or table there.
        wrap: makes the attribute of such a value: a property, a static method, what an accessor keeps.
    """

    holder: Any
    name: str
    value: Any
    wrap: Callable[[Any], Any]


def plant(mutant: Mutant) -> Trace:
    """Plant a mutant for the rest of this process's life.

    Returns:
        How often the planted code changed something, counted from now on.

    Raises:
        PlantPointGone: its patch point is not there, or is not what the fault works on.
    """
    trace = Trace()
    try:
        point = find_point(mutant)
        setattr(point.holder, point.name, point.wrap(_make_faulty(point.value, mutant, trace)))
    except Exception as fault:
        raise PlantPointGone(
            f"the mutant {mutant.id} cannot be planted at {mutant.at}: {type(fault).__name__}: {fault}. Likely cause: "
            "the wrapper was rewritten. Next step: point its row in matrix/mutants.toml at what does that work now."
        ) from fault
    return trace


def find_point(mutant: Mutant) -> Point:
    """The place that a mutant names; raises whatever the import or the attribute raises where there is none."""
    head, *path = mutant.at.split(".")
    if mutant.where == "wrapper":
        owner: Any = importlib.import_module(f"{BRIDGE}.{head}")
    else:
        entry = entries()[head]
        owner = entry.require()
        if not path:
            return Point(entry, "_found", owner, lambda made: (made, "" if made is not None else _LOST))
    for step in path[:-1]:
        owner = getattr(owner, step)
    name = path[-1]
    value = inspect.getattr_static(owner, name)
    if isinstance(value, property):
        return Point(owner, name, value.fget, property)
    if isinstance(value, staticmethod | classmethod):  # called through the class, so its first argument is bound
        return Point(owner, name, getattr(owner, name), staticmethod)
    return Point(owner, name, value, lambda made: made)


def _make_faulty(target: Any, mutant: Mutant, trace: Trace) -> Any:
    if mutant.fault is Fault.MISSING:
        trace.reached = 1
        return None
    if mutant.fault is Fault.ENTRY_LOST:
        trace.reached = 1
        return _without_row(target, mutant.parameters["name"])
    fault = FAULTS[mutant.fault]
    calls, every, when = count(1), int(mutant.parameters.get("every", 1)), mutant.parameters.get("when")

    def around(call: Call) -> Any:
        spared = when == "eval" and torch.is_grad_enabled()
        return call.run() if spared or next(calls) % every else fault(call, mutant, trace)

    # A class that is looked up by its module must not pass for the vendor's.
    module = __name__ if mutant.fault is Fault.NATIVE_INSTEAD else ""
    at_init = mutant.parameters.get("call") == "init"
    return around_calls(target, around, at_init=at_init, module=module)


def _without_row(table: Any, name: Any) -> Any:
    """A mapping without a key, or a sequence or set without the row of that name, code or id."""
    if isinstance(table, Mapping):
        left: Any = {key: value for key, value in table.items() if key != name}
    else:
        rows = (row for row in table if name not in (row, getattr(row, "code", None), getattr(row, "id", None)))
        left = type(table)(rows)
    if len(left) == len(table):
        raise LookupError(f"the table has no row {name!r}")
    return left


def around_calls(target: Any, around: Callable[[Call], Any], *, at_init: bool = False, module: str = "") -> Any:
    """The same class or function, each call of which goes through `around`.

    Args:
        target: a function, or a class: its `forward`, `__call__` or, with `at_init`, its making is the call.
        around: takes the call, gives the result.
        module: that the class names as its own; that of the target without it.
    """
    if not inspect.isclass(target):
        return _wrap(target, around)
    name = "__init__" if at_init else "forward" if hasattr(target, "forward") else "__call__"
    body = {
        "__module__": module or target.__module__, "__qualname__": target.__qualname__, "__doc__": target.__doc__,
        name: _wrap(getattr(target, name), around),
    }  # fmt: skip
    metaclass: Any = type(target)
    return metaclass(target.__name__, (target,), body)


def _wrap(function: Any, around: Callable[[Call], Any]) -> Any:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)  # a TypeError of the original is one here
        bound.apply_defaults()
        return around(Call(bound, lambda: function(*bound.args, **bound.kwargs)))

    return call


# --- the double of Transformer Engine

FOLDER: Final = Path(__file__).resolve().parents[2] / "tests" / "te_double"  # of a checkout; a wheel has none
CPU: Final = TargetRecipes("cpu", "", ("delayed", "current", "block"), "delayed")


def use_te_double() -> None:
    """Put the double first on `sys.path` and let wrappers take it for tensors on the CPU, whose recipes it emulates.

    Call it before the first question to `bridge.imports`. It lasts as long as the process.
    """
    sys.path.insert(0, str(FOLDER))
    features.TE_DEVICES = frozenset({*features.TE_DEVICES, "cpu"})  # type: ignore[misc]
    recipes.TARGETS["cpu"] = CPU


def entries() -> dict[str, Entry[Any]]:
    """Every accessor of `bridge.imports` by name."""
    return {name: value for name, value in vars(te).items() if isinstance(value, Entry)}
