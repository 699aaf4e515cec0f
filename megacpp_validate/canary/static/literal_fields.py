"""Values that pydantic refuses: a field takes those of its `Literal`, within the bounds of its `Field(ge=...)`."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from typing import Final

from .binding import bind
from .changes import Change
from .findings import ChangeKind, Impact
from .shapes import Signature
from .surface import Use
from .syntax_nodes import walk

_REFUSES_TEXT = frozenset(
    {"None", "Callable", "int", "float", "bool", "bytes", "list", "dict", "tuple", "List", "Dict"}
)
_BOUNDS: Final[dict[str, Callable[[float, float], bool]]] = {
    "ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt,
    "multiple_of": lambda value, step: value % step == 0,
}  # fmt: skip


def compare_literals(old: Signature, new: Signature, use: Use) -> Iterator[Change]:
    """Texts that a call passes for a field of a checked dataclass which no longer takes them."""
    if not new.is_checked:
        return
    for name, argument in bind(new, use).given.items():
        had, has = old.named(name), new.named(name)
        if had is None or has is None or had.annotation == has.annotation:
            continue
        for values, impact in ((argument.values or (), Impact.BREAKING), (argument.usual, Impact.RISK)):
            if any(is_refused(has.annotation, value) and not is_refused(had.annotation, value) for value in values):
                refusal = f"ValidationError unless {name} is of {has.annotation}"
                yield Change(ChangeKind.GUARD_ADDED, impact, parameter=name, old=had.annotation, new=refusal)
                break


def is_refused(annotation: str, value: object) -> bool:
    """Whether an annotation surely takes no such text or number; what is not known takes everything."""
    try:
        node = ast.parse(annotation.strip("'\""), mode="eval").body
    except SyntaxError:
        return False
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return False
    if _is(node, "Annotated") and not isinstance(value, str) and _is_outside(node, value):
        return True
    kinds = list(_kinds(node))
    literal = any(_is(kind, "Literal") for kind in kinds)
    return literal and not any(_takes(kind, value) for kind in kinds)


def _kinds(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _kinds(left)
            yield from _kinds(right)
        case ast.Subscript(value=value, slice=inner) if _name(value) in {"Union", "Optional", "Annotated"}:
            many = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            for one in many[:1] if _name(value) == "Annotated" else many:
                yield from _kinds(one)
        case _:
            yield node


def _is_outside(node: ast.expr, value: float) -> bool:
    """Whether a number breaks a bound of `Annotated[int, Field(ge=1)]` or `Annotated[int, Ge(1)]`."""
    for call in walk(node):
        if isinstance(call, ast.Call):
            bounds = [(k.arg or "", k.value) for k in call.keywords]
            bounds += [(_name(call.func).lower(), argument) for argument in call.args[:1]]
            for name, bound in bounds:
                holds, limit = _BOUNDS.get(name), bound.value if isinstance(bound, ast.Constant) else None
                if holds is not None and isinstance(limit, int | float) and not holds(value, limit):
                    return True
    return False


def _takes(kind: ast.expr, text: str | float) -> bool:
    if isinstance(kind, ast.Subscript) and _is(kind, "Literal"):
        values = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        return not all(isinstance(value, ast.Constant) and value.value != text for value in values)
    named = _name(kind.value if isinstance(kind, ast.Subscript) else kind)
    return named not in _REFUSES_TEXT if isinstance(text, str) else named != "None"


def _is(kind: ast.expr, name: str) -> bool:
    return isinstance(kind, ast.Subscript) and _name(kind.value) == name


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]
