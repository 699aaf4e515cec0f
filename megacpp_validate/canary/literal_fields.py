"""Values that pydantic refuses: a field annotated with `Literal` takes those that stand there, and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..evidence.findings import ChangeKind, Impact
from .binding import bind
from .changes import Change
from .shapes import Signature
from .surface import Use

_REFUSES_TEXT = frozenset(
    {"None", "Callable", "int", "float", "bool", "bytes", "list", "dict", "tuple", "List", "Dict"}
)


def compare_literals(old: Signature, new: Signature, use: Use) -> Iterator[Change]:
    """Texts that a call passes for a field of a checked dataclass which no longer takes them."""
    if not new.is_checked:
        return
    for name, argument in bind(new, use).given.items():
        had, has = old.named(name), new.named(name)
        if had is None or has is None or had.annotation == has.annotation:
            continue
        texts = [value for value in argument.values or () if isinstance(value, str)]
        if any(is_refused(has.annotation, text) and not is_refused(had.annotation, text) for text in texts):
            refusal = f"ValidationError unless {name} is of {has.annotation}"
            yield Change(ChangeKind.GUARD_ADDED, Impact.BREAKING, parameter=name, old=had.annotation, new=refusal)


def is_refused(annotation: str, text: str) -> bool:
    """Whether an annotation surely takes no such text; what is not known takes everything."""
    try:
        node = ast.parse(annotation.strip("'\""), mode="eval").body
    except SyntaxError:
        return False
    kinds = list(_kinds(node))
    literal = any(_is(kind, "Literal") for kind in kinds)
    return literal and not any(_takes(kind, text) for kind in kinds)


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


def _takes(kind: ast.expr, text: str) -> bool:
    if isinstance(kind, ast.Subscript) and _is(kind, "Literal"):
        values = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        return not all(isinstance(value, ast.Constant) and value.value != text for value in values)
    return _name(kind.value if isinstance(kind, ast.Subscript) else kind) not in _REFUSES_TEXT


def _is(kind: ast.expr, name: str) -> bool:
    return isinstance(kind, ast.Subscript) and _name(kind.value) == name


def _name(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]
