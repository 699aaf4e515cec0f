"""Patch points: where a mutant says that it is planted, read and set."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from ..bridge.vendor import Entry
from ..evidence.selftest import Mutant
from .double import entries
from .trace import PlantPointGone, Trace

BRIDGE: Final = "megacpp_validate.bridge"


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
        nothing = _Nothing(f"this release has no `{self.holder.name}`: it was taken away", trace)
        setattr(self.holder, self.name, nothing)


class _Nothing(tuple[None, str]):
    """What an accessor has found where there is nothing; tells when it is asked."""

    _trace: Trace

    def __new__(cls, why: str, trace: Trace) -> _Nothing:
        made = super().__new__(cls, (None, why))
        made._trace = trace
        return made

    def __getitem__(self, index: Any) -> Any:
        self._trace.note_use()
        return super().__getitem__(index)


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
