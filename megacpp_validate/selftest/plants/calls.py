"""A class or function with something done before and after each call: what most faults are made of."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..trace import PlantPointGone


@dataclass
class Call:
    """One call of the original.

    Attributes:
        owner: the layer, where it is one that is called.
        arguments: by name; what is put there is what the original gets.
        run: the original, with arguments as they then are.
    """

    owner: Any
    arguments: dict[str, Any]
    run: Callable[[], Any]

    def parameter(self, name: str) -> Any:
        """A parameter of the layer by name; None where it has none."""
        return getattr(self.owner, name, None) if isinstance(self.owner, nn.Module) else None


Around = Callable[[Call], Any]


def around_calls(target: Any, around: Around, *, at_init: bool = False) -> Any:
    """The same class or function, each call of which goes through `around`.

    Args:
        target: a class (its `forward`, `__call__` or, with `at_init`, its making is what counts) or a function.
        around: given a `Call`, gives the result.
        at_init: whether the making of an object is the call.

    Raises:
        PlantPointGone: the target cannot be called, or its parameters cannot be told.
    """
    if not inspect.isclass(target):
        if not callable(target):
            raise PlantPointGone(f"{target!r} is not callable. Next step: point the mutant at a class or function.")
        return _wrapped(target, around, owned=False)
    name = "__init__" if at_init else _called(target)
    return subclass(target, {name: _wrapped(getattr(target, name), around, owned=True)})


def subclass(target: Any, body: dict[str, Any], *, module: str = "") -> Any:
    """A class that differs from `target` in `body` and passes for it in every other way."""
    names = {"__module__": module or target.__module__, "__qualname__": target.__qualname__, "__doc__": target.__doc__}
    return type(target)(target.__name__, (target,), {**names, **body})


def _called(target: Any) -> str:
    for name in ("forward", "__call__"):
        if callable(getattr(target, name, None)) and (name == "forward" or name in _own_names(target)):
            return name
    raise PlantPointGone(f"{target!r} has no forward. Next step: point the mutant at what is called.")


def _own_names(target: Any) -> set[str]:
    return {name for kind in target.__mro__[:-1] for name in vars(kind)}


def _wrapped(function: Any, around: Around, *, owned: bool) -> Any:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as fault:
        raise PlantPointGone(f"the parameters of {function!r} cannot be told: {fault}") from fault

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)  # a TypeError of the original is one here
        bound.apply_defaults()
        arguments = bound.arguments
        owner = next(iter(arguments.values())) if owned or next(iter(arguments), "") == "self" else None

        def run() -> Any:
            return function(*bound.args, **bound.kwargs)

        return around(Call(owner, arguments, run))

    return call
