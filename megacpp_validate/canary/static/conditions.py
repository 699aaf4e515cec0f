"""Evaluates whether a guard can fire with what a call passes: True, False, or None where only running would tell."""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from .bodies import Test
from .interpreted import ARITHMETIC, OPERATORS
from .surface import Argument, Member
from .syntax_nodes import walk

_MOST_COMBINATIONS = 64
_OF_TORCH = {"torch.Tensor", "torch.nn.Parameter", "torch.nn.Module", "torch.dtype", "torch.device"}


@dataclass(frozen=True)
class OfType:
    """A value of which its type alone is known: a builtin one, or "Tensor"."""

    name: str


class Unknowable(Exception):
    """A part of a condition that only running the code would tell."""


def can_fire(tests: Iterable[Test], known_at: Callable[[int], Mapping[str, Argument]]) -> bool | None:
    """Whether all `tests` can come out as wanted; None where that is not known.

    Args:
        tests: the tests that lead to a guard.
        known_at: line -> parameter -> what is known of its value there.
    """
    asked: list[tuple[Test, dict[str, Argument]]] = []
    for test in tests:
        given = known_at(test.expression.lineno)
        named = (node.id for node in walk(test.expression) if isinstance(node, ast.Name))
        asked.append((test, {name: given[name] for name in named if name in given}))
    choices: dict[tuple[str, str], list[object]] = {}
    for _, known in asked:
        for name, argument in known.items():
            if argument.values is not None:
                choices[name, repr(argument)] = list(argument.values)
            elif argument.type_name:
                choices[name, repr(argument)] = [OfType(argument.type_name)]
    seen: set[bool | None] = set()
    for combination in itertools.islice(itertools.product(*choices.values()), _MOST_COMBINATIONS):
        chosen = dict(zip(choices, combination, strict=True))
        outcomes = set[bool | None]()
        for test, known in asked:
            values = {name: chosen[name, repr(one)] for name, one in known.items() if (name, repr(one)) in chosen}
            never_none = {name for name, one in known.items() if one.never_none} - values.keys()
            value = _evaluate(test.expression, values, never_none)
            outcomes.add(None if value is None else value is test.wanted)
        seen.add(False if False in outcomes else None if None in outcomes else True)
    # Which of several values the code gives is not known.
    return None if None in seen or len(seen) > 1 else True in seen


def _evaluate(node: ast.expr, values: Mapping[str, object], never_none: set[str]) -> bool | None:
    match node:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            inner = _evaluate(operand, values, never_none)
            return None if inner is None else not inner
        case ast.BoolOp(op=op, values=parts):
            decisive = isinstance(op, ast.Or)
            outcomes = [_evaluate(part, values, never_none) for part in parts]
            if decisive in outcomes:
                return decisive
            return None if None in outcomes else not decisive
        case ast.Compare(
            left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]
        ):
            if name in never_none:
                return isinstance(op, ast.IsNot)
            return None if name not in values else (values[name] is None) is isinstance(op, ast.Is)
        case ast.Call(func=ast.Name(id="callable"), args=[ast.Name(id=name)]) if name in values:
            return False  # nothing that is written out or of a builtin type is
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kinds]) if name in values:
            return _is_instance(values[name], kinds)
        case ast.Compare(left=left, ops=[_, _, *_] as ops, comparators=others):  # a < b < c
            pairs = zip([left, *others], ops, others, strict=False)
            parts = [ast.Compare(one, [op], [other]) for one, op, other in pairs]
            return _evaluate(ast.BoolOp(ast.And(), parts), values, never_none)
    with suppress(Unknowable):
        value = _constant(node, values)
        return None if isinstance(value, Member) else bool(value)
    return None


def _is_instance(value: object, kinds: ast.expr) -> bool | None:
    """The outcome of `isinstance(value, kinds)`; a class without a builtin name is taken for another class."""
    if isinstance(value, Member):
        return None
    is_tensor = value == OfType("Tensor")
    made = getattr(builtins, value.name, object) if isinstance(value, OfType) else type(value)
    names = {cls.__name__ for cls in made.__mro__} | ({"Tensor", "torch.Tensor"} if is_tensor else set())
    every = kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]
    if any(ast.unparse(kind) in names for kind in every):
        return True
    # An abstract class (Sequence, Iterable) may accept a builtin type; a concrete class of torch does not.
    others = set() if is_tensor else _OF_TORCH
    known = (hasattr(builtins, k.id) if isinstance(k, ast.Name) else ast.unparse(k) in others for k in every)
    return False if all(known) or not isinstance(value, OfType) else None


def _constant(node: ast.expr, values: Mapping[str, object]) -> object:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        one, other = _constant(node.left, values), _constant(node.comparators[0], values)
        if isinstance(one, Member) is isinstance(other, Member):  # else the member may be a text, too
            with suppress(TypeError):
                return bool(OPERATORS[type(node.ops[0])](one, other))
        raise Unknowable
    if isinstance(node, ast.NamedExpr):
        return _constant(node.value, values)
    if isinstance(node, ast.Name) and isinstance(values.get(node.id), OfType):
        raise Unknowable
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr.isupper():
        return Member(node.value.id, node.attr)
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        one, other = _constant(node.left, values), _constant(node.right, values)
        if isinstance(one, int | float) and isinstance(other, int | float):
            return ARITHMETIC[type(node.op)](one, other)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError) as fault:
        raise Unknowable from fault
