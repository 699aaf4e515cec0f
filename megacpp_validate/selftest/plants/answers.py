"""Faults in what a call gives: the same always, nothing, one item too few, kept for good; and in what a table holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...evidence.selftest import Mutant
from ..trace import PlantPointGone, Trace
from .calls import Call, around_calls


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
        found: Any = _TracedDict(left, trace)
    elif isinstance(target, tuple | list | frozenset | set):
        rows = [row for row in target if name not in (row, getattr(row, "code", None), getattr(row, "id", None))]
        lost = len(rows) < len(target)
        found = _TracedSet(rows, trace) if isinstance(target, frozenset | set) else _TracedTuple(rows, trace)
    else:
        raise PlantPointGone(f"{mutant.at} is no table. Next step: point the mutant at one.")
    if not lost:
        raise PlantPointGone(f"{mutant.at} has no row {name!r}. Next step: see what the row is called now.")
    return found


class _TracedDict(dict[Any, Any]):
    """A dict that tells when it is asked."""

    def __init__(self, values: dict[Any, Any], trace: Trace) -> None:
        super().__init__(values)
        self._trace = trace

    def __getitem__(self, key: Any) -> Any:
        self._trace.note_use()
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._trace.note_use()
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._trace.note_use()
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._trace.note_use()
        return super().get(key, default)

    def items(self) -> Any:
        self._trace.note_use()
        return super().items()

    def values(self) -> Any:
        self._trace.note_use()
        return super().values()


class _TracedTuple(tuple[Any, ...]):
    """A tuple that tells when it is asked."""

    _trace: Trace

    def __new__(cls, rows: list[Any], trace: Trace) -> _TracedTuple:
        made = super().__new__(cls, rows)
        made._trace = trace
        return made

    def __iter__(self) -> Iterator[Any]:
        self._trace.note_use()
        return super().__iter__()

    def __contains__(self, row: Any) -> bool:
        self._trace.note_use()
        return super().__contains__(row)


class _TracedSet(frozenset[Any]):
    """A set that tells when it is asked."""

    _trace: Trace

    def __new__(cls, rows: list[Any], trace: Trace) -> _TracedSet:
        made = super().__new__(cls, rows)
        made._trace = trace
        return made

    def __contains__(self, row: Any) -> bool:
        self._trace.note_use()
        return super().__contains__(row)
