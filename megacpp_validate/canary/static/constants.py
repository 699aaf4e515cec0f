"""Arithmetic of what is known: truth, comparison and the few functions by which projects read a version."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from .interpreted import (
    ANYTHING,
    Class,
    Const,
    Function,
    Import,
    Items,
    Method,
    Missing,
    ProjectModule,
    Unknown,
    Value,
    Values,
    Vendor,
    VendorModule,
    constant,
    either,
)

_OPERATORS: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda one, group: one in group, ast.NotIn: lambda one, group: one not in group,
}  # fmt: skip
_MOST: Final = 64
_THERE: Final = (Vendor, VendorModule, Function, Class, Import, Method, ProjectModule)  # neither None nor false
_METHODS: Final[dict[type, frozenset[str]]] = {
    str: frozenset(
        {
            "split",
            "partition",
            "rpartition",
            "startswith",
            "strip",
            "removeprefix",
            "replace",
            "lower",
            "join",
            "isdigit",
        }
    ),
    SpecifierSet: frozenset({"contains"}),
}
VERSION_PARTS: Final = frozenset({"major", "minor", "micro", "release", "base_version", "public"})
_VERSIONS: Final = frozenset({"Version", "LooseVersion", "StrictVersion", "TorchVersion", "parse", "parse_version"})
_BUILTINS: Final[dict[str, Callable[..., Any]]] = {
    "str": str, "int": int, "float": float, "bool": bool, "len": len, "tuple": tuple, "list": list, "max": max,
    "min": min, "any": any, "all": all,
}  # fmt: skip
_DISTRIBUTIONS: Final = (
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
)


def truth_of(values: Values) -> bool | None:
    """Whether all values are true, or all are false; None where that is not known."""
    found = {_truth(one) for one in values}
    return found.pop() if len(found) == 1 else None


def _truth(value: Value) -> bool | None:
    match value:
        case Const(value=known):
            return bool(known)
        case Items(values=parts):
            return bool(parts)
        case Missing():
            return False
        case Unknown(is_true=known):
            return known
    return True if isinstance(value, _THERE) else None


def compare(sides: Sequence[Values], ops: Sequence[ast.cmpop]) -> Values:
    """What a comparison gives; a pair of values that cannot be compared raises, and gives nothing."""
    outcomes: set[bool | None] = set()
    pairs = list(zip(sides, ops, sides[1:], strict=False))
    for one, op, other in pairs:
        for left, right in itertools.islice(itertools.product(one, other), _MOST):
            try:
                outcomes.add(_compare(left, op, right))
            except TypeError:
                continue
    if len(pairs) > 1:
        return constant(True) if outcomes == {True} else constant(False) if outcomes == {False} else ANYTHING
    return either(*(ANYTHING if one is None else constant(one) for one in outcomes)) if outcomes else ANYTHING


def _compare(left: Value, op: ast.cmpop, right: Value) -> bool | None:
    if isinstance(op, ast.Is | ast.IsNot):
        is_not = isinstance(op, ast.IsNot)
        if right == Const(None) and isinstance(left, (Const, Items, Missing, *_THERE)):
            return (left == right or isinstance(left, Missing)) is not is_not
        if isinstance(left, Const) and isinstance(right, Const):
            return (left == right) is not is_not
        return None
    one, other = plain(left), plain(right)
    if one is None or other is None:
        return None
    return bool(_OPERATORS[type(op)](one[0], other[0]))


def plain(value: Value) -> tuple[Any] | None:
    """A value that is wholly known, as the only element; None for any other."""
    match value:
        case Const(value=known):
            return (known,)
        case Items(values=parts):
            inner = [plain(next(iter(part))) if len(part) == 1 else None for part in parts]
            return None if None in inner else (tuple(one[0] for one in inner if one is not None),)
    return None


def wrap(value: Any) -> Values:
    """A Python value as values that the interpreter follows."""
    if isinstance(value, tuple | list):
        return frozenset({Items(tuple(wrap(one) for one in value))})
    return constant(value)


def subscript(owner: Values, key: Values) -> Values:
    """What `owner[key]` gives."""
    found: list[Values] = []
    for one in owner:
        for at in key:
            match one, at:
                case Items(values=parts), Const(value=int() as index) if -len(parts) <= index < len(parts):
                    found.append(parts[index])
                case _:
                    items = getattr(one, "items", None)
                    is_known = isinstance(items, dict) and isinstance(at, Const) and at.value in items
                    found.append(items[at.value] if is_known else ANYTHING)  # type: ignore[index,union-attr]
    return either(*found)


def cut(owner: Values, lower: Values, upper: Values) -> Values:
    """What `owner[lower:upper]` gives."""
    ends = [one.value for side in (lower, upper) for one in side if isinstance(one, Const)]
    start, end = ends if len(ends) == len(lower) + len(upper) == 2 else (..., ...)
    if len(owner) != 1 or not isinstance(start, int | None) or not isinstance(end, int | None):
        return ANYTHING
    match next(iter(owner)):
        case Items(values=parts):
            return frozenset({Items(parts[start:end])})
        case Const(value=str() as text):
            return constant(text[start:end])
    return ANYTHING


def is_version_of_vendor(name: object) -> bool:
    """Whether a distribution is one of Transformer Engine's."""
    return str(name).replace("_", "-").lower() in _DISTRIBUTIONS


def call_external(path: str, arguments: Sequence[Values], release: str) -> Values:
    """What a call of a function of another package gives, where it reads or makes a version.

    Args:
        path: dotted name of the function.
        arguments: positional ones.
        release: version of Transformer Engine.
    """
    last = path.rpartition(".")[2]
    given = [plain(next(iter(one))) if len(one) == 1 else None for one in arguments]
    if not given or None in given:
        return ANYTHING
    values = [one[0] for one in given if one is not None]
    if last in ("version", "get_distribution") and is_version_of_vendor(values[0]):
        return constant(release)
    made = Version if last in _VERSIONS else SpecifierSet if last == "SpecifierSet" else None
    if made is not None:
        try:
            return constant(made(str(values[0])))
        except (InvalidVersion, InvalidSpecifier):
            return ANYTHING
    if path.startswith("builtins.") and last in _BUILTINS:
        try:
            return wrap(_BUILTINS[last](*values))
        except (TypeError, ValueError):
            return ANYTHING
    return ANYTHING


def call_known(value: object, method: str, arguments: Sequence[Values]) -> Values:
    """What a method of a known text, or of a known set of versions, gives."""
    given = [plain(next(iter(one))) if len(one) == 1 else None for one in arguments]
    if None in given or method not in _METHODS.get(type(value), ()):
        return ANYTHING
    try:
        return wrap(getattr(value, method)(*(one[0] for one in given if one is not None)))
    except (TypeError, ValueError):
        return ANYTHING
