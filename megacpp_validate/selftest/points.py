"""Where a fault is planted: the patch point of a row, calls that go through planted code, and a trace of them."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from ..bridge.vendor import Entry
from ..evidence.selftest import Mutant
from .double import entries

BRIDGE: Final = "megacpp_validate.bridge"


class PlantPointGone(LookupError):
    """There is nothing to patch where a mutant says, or it is not what the fault works on; the text says what to do."""


@dataclass
class Trace:
    """What became of planted code.

    Attributes:
        reached: how often it changed something.
        gone: why it could not do its work, found out when it was called; the run then says nothing about the probes.
        absent: what one of the calls did not have. Another may have had it.
    """

    reached: int = 0
    gone: str = ""
    absent: str = ""

    @property
    def why_gone(self) -> str:
        """Why the run says nothing about the probes; empty where it does."""
        return self.gone or ("" if self.reached else self.absent)

    def note(self, before: Any, after: Any) -> None:
        """Count it if the two differ."""
        if _differ(before, after):
            self.reached += 1

    def note_use(self) -> None:
        """Count it: the planted thing was used, and differs by what it is."""
        self.reached += 1

    def is_gone(self, why: str) -> PlantPointGone:
        """Keep why planted code could not do its work, as an exception to raise: a probe would swallow that."""
        self.gone = why
        return PlantPointGone(why)


def _differ(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before.shape != after.shape or not torch.equal(before.detach(), after.detach())
    try:
        return bool(before != after)
    except (RuntimeError, ValueError, TypeError):
        return before is not after


_READS: Final = ("__getitem__", "__contains__", "__iter__", "get", "items", "values")


def traced(table: Any, trace: Trace) -> Any:
    """The same dict, tuple or frozenset, which notes each time that it is read."""
    kind = type(table)

    def noting(plain: Any) -> Any:
        def read(self: Any, *args: Any) -> Any:
            trace.note_use()
            return plain(self, *args)

        return read

    return type(kind.__name__, (kind,), {name: noting(getattr(kind, name)) for name in _READS if hasattr(kind, name)})(
        table
    )


@dataclass(frozen=True)
class Point:
    """One place that can be patched.

    Attributes:
        holder, name: the attribute that is set.
        value: what works there, as it is called.
        wrap: what makes an attribute of it again: a property, a static method, what an accessor has found.
    """

    holder: Any
    name: str
    value: Any
    wrap: Callable[[Any], Any]

    def put(self, value: Any) -> None:
        """Let something else work there."""
        setattr(self.holder, self.name, self.wrap(value))

    def take_away(self, trace: Trace) -> None:
        """Let the accessor give nothing, as in a release that lacks the entry point.

        Raises:
            PlantPointGone: it is no accessor.
        """
        if not isinstance(self.holder, Entry):
            raise PlantPointGone("only what an accessor gives can be missing. Next step: name an accessor alone.")
        why = f"this release has no `{self.holder.name}`: it was taken away"
        setattr(self.holder, self.name, traced((None, why), trace))


def find_point(mutant: Mutant) -> Point:
    """The place that a mutant names.

    Raises:
        PlantPointGone: there is no such place.
    """
    head, *rest = mutant.at.split(".")
    if mutant.where == "wrapper":
        try:
            owner = importlib.import_module(f"{BRIDGE}.{head}")
        except ModuleNotFoundError:
            raise _gone(mutant, f"the bridge has no module {head!r}") from None
        if not rest:
            raise _gone(mutant, "a module is no place for a fault")
        return _attribute(mutant, owner, rest)
    entry = entries().get(head)
    if entry is None:
        raise _gone(mutant, f"bridge.imports has no accessor {head!r}")
    if (found := entry()) is None:
        raise _gone(mutant, entry.why_missing())
    return _attribute(mutant, found, rest) if rest else Point(entry, "_found", found, lambda value: (value, ""))


def _attribute(mutant: Mutant, owner: Any, path: list[str]) -> Point:
    """The attribute at the end of a path; what a class only inherits counts as its own."""
    for name in path[:-1]:
        owner = _get(mutant, owner, name)
    name = path[-1]
    if not inspect.isclass(owner):
        return Point(owner, name, _get(mutant, owner, name), _as_it_is)
    value = inspect.getattr_static(owner, name, None)
    if value is None:
        raise _gone(mutant, f"{owner.__name__} has no attribute {name!r}")
    if isinstance(value, property):
        return Point(owner, name, value.fget, property)
    if isinstance(value, staticmethod | classmethod):  # called through the class, so what it gets is already bound
        return Point(owner, name, getattr(owner, name), staticmethod)
    return Point(owner, name, value, _as_it_is)


def _as_it_is(value: Any) -> Any:
    return value


def _get(mutant: Mutant, owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _gone(mutant, f"{getattr(owner, '__name__', owner)} has no attribute {name!r}") from None


def _gone(mutant: Mutant, why: str) -> PlantPointGone:
    return PlantPointGone(
        f"the mutant {mutant.id} cannot be planted at {mutant.at}: {why}. Likely cause: the wrapper was rewritten. "
        "Next step: point its row in matrix/mutants.toml at what does that work now."
    )


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
        PlantPointGone: the target cannot be called, or its parameters cannot be read.
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
        raise PlantPointGone(f"the parameters of {function!r} cannot be read: {fault}") from fault

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
