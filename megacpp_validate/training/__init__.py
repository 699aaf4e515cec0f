"""Training of the hybrid model, and what training refuses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints


class TrainingError(Exception):
    """Anything that training refuses; the text has what happened, the likely cause and the next step."""


class WrongSize(TrainingError, ValueError):
    """Numbers of a model, a language, a plan or a run that do not go together."""


# --- dataclasses whose values come from JSON


def check_fields(
    value: Any, more: Iterable[str] = (), *, least: int = 1, others: Mapping[str, int] | None = None
) -> None:
    """Refuse a dataclass with fields of another type or out of range.

    Args:
        value: the dataclass.
        more: further faults, looked at where every field has its type.
        least: that a whole number has to be.
        others: name of a field -> its own least value.

    Raises:
        WrongSize: with every fault.
    """
    if faults := list(_wrong_types(value, least, others or {})) or list(more):
        raise WrongSize(f"{value} is not possible: {'; '.join(faults)}. Next step: change these numbers.")


def _wrong_types(value: Any, least: int, others: Mapping[str, int]) -> Iterator[str]:
    for name, kind in get_type_hints(type(value)).items():
        one, wanted, lowest = getattr(value, name), get_origin(kind) or kind, others.get(name, least)
        if wanted is Literal:
            if one not in get_args(kind):
                yield f"{name} is {one!r}, and is one of {', '.join(get_args(kind))}"
        elif wanted is int and (type(one) is not int or one < lowest):
            yield f"{name} is {one!r}, and is a whole number from {lowest} up"
        elif type(one) is not wanted and not (wanted is float and type(one) is int):
            yield f"{name} is {one!r}, and is a {wanted.__name__}"
