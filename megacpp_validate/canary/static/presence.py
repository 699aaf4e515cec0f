"""What a test says about which accessors give something: each is there, or not, where it is true or false."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_


@dataclass(frozen=True)
class Presence:
    """Accessors that are known to be there, and known not to be."""

    present: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()

    def __or__(self, other: Presence) -> Presence:
        return Presence(self.present | other.present, self.absent | other.absent)


NOTHING = Presence()


def presence_of(test: ast.expr, root: Callable[[ast.expr], frozenset[str]]) -> tuple[Presence, Presence]:
    """What holds where a test is true, and where it is false. Only what it says outright.

    Args:
        test: the test.
        root: the accessor whose own value an expression is; empty for anything else.
    """
    match test:
        case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return Presence(present=root(left)), Presence(absent=root(left))
        case ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            return Presence(absent=root(left)), Presence(present=root(left))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            when_true, when_false = presence_of(operand, root)
            return when_false, when_true
        case ast.BoolOp(op=op, values=values):
            parts = [presence_of(value, root)[isinstance(op, ast.Or)] for value in values]
            together = reduce(or_, parts)
            return (together, NOTHING) if isinstance(op, ast.And) else (NOTHING, together)
        case ast.NamedExpr() | ast.Name() | ast.Call():
            return Presence(present=root(test)), Presence(absent=root(test))
    return NOTHING, NOTHING
