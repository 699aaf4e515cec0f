"""Can a guard fire with what the bridge passes? Three-valued: yes, no, or only running it would tell."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from .bodies import Test
from .surface import Argument

_OPERATORS: Final[dict[type[ast.cmpop], Callable[[object, object], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,  # type: ignore[dict-item]
    ast.LtE: operator.le,  # type: ignore[dict-item]
    ast.Gt: operator.gt,  # type: ignore[dict-item]
    ast.GtE: operator.ge,  # type: ignore[dict-item]
    ast.In: lambda one, group: one in group,  # type: ignore[operator]
    ast.NotIn: lambda one, group: one not in group,  # type: ignore[operator]
}
_MOST_COMBINATIONS = 64


class Unknowable(Exception):
    """A part of a condition that only running the code would tell."""


def can_fire(tests: Iterable[Test], known_at: Callable[[int], Mapping[str, Argument]]) -> bool | None:
    """Whether all `tests` can come out as wanted; None where that is not known.

    Args:
        tests: the tests that lead to a guard.
        known_at: line -> parameter -> what is known of its value there.
    """
    outcomes = [_possible(test.expression, test.wanted, known_at(test.expression.lineno)) for test in tests]
    if False in outcomes:
        return False
    return None if None in outcomes else True


def _possible(test: ast.expr, wanted: bool, given: Mapping[str, Argument]) -> bool | None:
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    choices: list[list[tuple[str, object]]] = []
    never_none: set[str] = set()
    for name in sorted(names):
        argument = given.get(name)
        if argument is not None and argument.values is not None:
            choices.append([(name, value) for value in argument.values])
        elif argument is not None and argument.never_none:
            never_none.add(name)
    seen: set[bool | None] = set()
    for combination in itertools.islice(itertools.product(*choices), _MOST_COMBINATIONS):
        value = _evaluate(test, dict(combination), never_none)
        seen.add(None if value is None else value is wanted)
    if seen == {True} or (True in seen and None not in seen):
        return True
    return None if None in seen else False


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
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kinds]) if name in values:
            lineage = {cls.__name__ for cls in type(values[name]).__mro__}
            return bool(lineage & {n.id for n in ast.walk(kinds) if isinstance(n, ast.Name)})
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
            try:
                return bool(_OPERATORS[type(op)](_constant(left, values), _constant(right, values)))
            except (Unknowable, TypeError):
                return None
    try:
        return bool(_constant(node, values))
    except Unknowable:
        return None


def _constant(node: ast.expr, values: Mapping[str, object]) -> object:
    if isinstance(node, ast.Name) and node.id in values:
        return values[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError) as fault:
        raise Unknowable from fault
