"""What is known of a value without running the code that makes it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from .surface import UNKNOWN, Argument

_NEVER_NONE = frozenset({"bool", "bytes", "dict", "float", "int", "list", "str", "tuple", "Callable", "Sequence"})

_TENSOR_METHODS = frozenset({"contiguous", "float", "permute", "reshape", "to", "transpose", "unsqueeze", "view"})


def argument_of(node: ast.expr, facts: Mapping[str, Argument]) -> Argument:
    """What is known of an expression, given what is known of the names in it."""
    match node:
        case ast.Name(id=name):
            return facts.get(name, UNKNOWN)
        case ast.IfExp(body=body, orelse=orelse):
            return _either(argument_of(body, facts), argument_of(orelse, facts))
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return Argument((True, False), never_none=True)
        case ast.Dict() | ast.List() | ast.JoinedStr() | ast.BinOp():
            return Argument(never_none=True)
        case ast.Call(func=ast.Name(id="list" | "tuple" | "dict" | "int" | "float" | "str" | "len")):
            return Argument(never_none=True)
        case ast.Call(func=ast.Attribute(attr=method)) if method in _TENSOR_METHODS:
            return Argument(never_none=True)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN
    return Argument((value,), never_none=value is not None)


def parameter_facts(arguments: ast.arguments) -> dict[str, Argument]:
    """What the annotations of a function say of its parameters."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg: _annotated(argument.annotation) for argument in every}


def _annotated(node: ast.expr | None) -> Argument:
    match node:
        case ast.Name(id="bool"):
            return Argument((True, False), never_none=True)
        case ast.Name(id=name) if name in _NEVER_NONE:
            return Argument(never_none=True)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            try:
                values = ast.literal_eval(inner)
            except ValueError:
                return UNKNOWN
            every = values if isinstance(values, tuple) else (values,)
            return Argument(every, never_none=None not in every)
        case ast.Subscript(value=ast.Name(id=name)) if name in _NEVER_NONE:
            return Argument(never_none=True)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _either(_annotated(left), _annotated(right))
        case ast.Constant(value=None):
            return Argument((None,))
    return UNKNOWN


def _either(first: Argument, second: Argument) -> Argument:
    both = None if first.values is None or second.values is None else (*first.values, *second.values)
    return Argument(both, first.never_none and second.never_none)
