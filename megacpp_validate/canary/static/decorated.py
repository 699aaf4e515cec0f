"""What decorators of the package do with a call before the function behind them runs: refuse it, or rename in it."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import griffe

from ...evidence.values import SourceLine
from . import bodies
from .changes import Change
from .findings import ChangeKind, Impact
from .release import Release
from .surface import Use
from .syntax_nodes import walk
from .wrapping import handed_back, maker_of

_OPERATORS: Final = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip

_OF_PYTHON: Final = frozenset({"classmethod", "staticmethod"})


@dataclass(frozen=True)
class Wrapper:
    """A function that a decorator puts in the place of another, or of a class's constructor.

    Attributes:
        node: it.
        file: where it stands.
        closure: names of the decorator's parameters -> the literals that it was made with.
        is_bound: its `*args` begin with the object itself.
    """

    node: ast.FunctionDef
    file: str
    closure: Mapping[str, object]
    is_bound: bool

    def fires(self, guard: bodies.Guard, use: Use) -> bool:
        """Whether a guard of the wrapper surely stops this call."""
        if any(guard.node in walk(around) for around in walk(self.node) if _runs_at_times(around)):
            return False
        return all(self._holds(test.expression, use) is test.wanted for test in guard.tests)

    def _holds(self, test: ast.expr, use: Use) -> bool | None:
        many, named = self.node.args.vararg, self.node.args.kwarg
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._holds(operand, use)
                return None if inner is None else not inner
            case ast.BoolOp(op=op, values=values):
                outcomes = [self._holds(value, use) for value in values]
                decisive = isinstance(op, ast.Or)
                return decisive if decisive in outcomes else None if None in outcomes else not decisive
            case ast.Compare(left=key, ops=[ast.In()], comparators=[ast.Name(id=name)]) if named and name == named.arg:
                wanted = self._literal(key)
                return wanted in use.keywords if isinstance(wanted, str) and not use.open_keywords else None
            case ast.Compare(
                left=ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]), ops=[op], comparators=[limit]
            ) if many and name == many.arg and not use.open_positionals and type(op) in _OPERATORS:
                number = self._literal(limit)
                count = len(use.positionals) + self.is_bound - len(self.node.args.args)
                return bool(_OPERATORS[type(op)](count, number)) if isinstance(number, int) else None
        return None

    def _literal(self, node: ast.expr) -> object:
        if isinstance(node, ast.Name):
            return self.closure.get(node.id)
        return node.value if isinstance(node, ast.Constant) else None

    def renamed(self) -> dict[str, str]:
        """Keywords that it hands on under another name: old -> new."""
        found: dict[str, str] = {}
        named = self.node.args.kwarg.arg if self.node.args.kwarg else ""
        for one in walk(self.node):
            match one:
                case ast.Assign(
                    targets=[ast.Subscript(value=ast.Name(id=owner), slice=new)],
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id=other), attr="pop"), args=[old, *_]),
                ) if owner == other == named:
                    names = self._literal(old), self._literal(new)
                    if isinstance(names[0], str) and isinstance(names[1], str):
                        found[names[0]] = names[1]
        return found


def _runs_at_times(around: ast.AST) -> bool:
    """Whether what stands in a statement may not be run, or may be caught, without a test that tells."""
    return isinstance(around, ast.For | ast.While) or (isinstance(around, ast.Try) and bool(around.handlers))


def compare_decorators(
    old: Release, new: Release, before: griffe.Object, after: griffe.Object, use: Use
) -> Iterator[Change]:
    """What keeps a call from the function or class that it names, and did not in the old release."""
    met = {guard.kind == "warn" for wrapper, guard in _guards(old, before) if wrapper.fires(guard, use)}
    if False in met:
        return  # it never came through
    for wrapper, guard in _guards(new, after):
        is_warning = guard.kind == "warn"
        if wrapper.fires(guard, use) and not (is_warning and True in met):
            yield Change(
                ChangeKind.DEPRECATED if is_warning else ChangeKind.GUARD_ADDED,
                Impact.RISK if is_warning else Impact.BREAKING,
                after=SourceLine(file=wrapper.file, line=guard.line),
                new=guard.message if is_warning else f"{guard.exception} if {guard.said or 'it is called'}",
                suggestion="" if is_warning else guard.message[:200],
            )


def is_undecorated(obj: griffe.Object | None) -> bool:
    """Whether a function is surely what its class gives: a decorator may make a value of it, as `property` does."""
    return isinstance(obj, griffe.Function) and all(str(d.value) in _OF_PYTHON for d in obj.decorators)


def _guards(release: Release, obj: griffe.Object) -> Iterator[tuple[Wrapper, bodies.Guard]]:
    for wrapper in wrappers_of(release, obj):
        for guard in bodies.guards(wrapper.node):
            if guard.kind != "warn" or guard.is_deprecation:
                yield wrapper, guard


def wrappers_of(release: Release, obj: griffe.Object) -> list[Wrapper]:
    """The wrappers that decorators of the package put around a function or a class's constructor, outermost first."""
    node = release.node_of(obj)
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return []
    found: list[Wrapper] = []
    for decorator in node.decorator_list:
        maker = maker_of(release, obj, decorator)
        if maker is None:
            continue
        made, file = maker
        closure: dict[str, object] = {}
        if isinstance(decorator, ast.Call):
            closure, inner = _bound(made, decorator), handed_back(made)
            if inner is None:
                continue
            made = inner
        wrapper = _new_constructor(made) if isinstance(node, ast.ClassDef) else handed_back(made)
        if wrapper is not None:
            is_method = isinstance(obj.parent, griffe.Class) and "staticmethod" not in obj.labels
            found.append(Wrapper(wrapper, file, closure, is_bound=is_method or wrapper.name == "__init__"))
    return found


def _bound(maker: ast.FunctionDef, call: ast.Call) -> dict[str, object]:
    names = [a.arg for a in (*maker.args.posonlyargs, *maker.args.args)]
    defaults = zip(reversed(names), reversed(maker.args.defaults), strict=False)
    given = (
        dict(defaults) | dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
    )
    return {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}


def _new_constructor(maker: ast.FunctionDef) -> ast.FunctionDef | None:
    """The function that a class decorator puts in the place of `__init__`."""
    inner = {n.name: n for n in maker.body if isinstance(n, ast.FunctionDef)}
    for one in maker.body:
        match one:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id=owner), attr="__init__")], value=ast.Name(id=name)
            ):
                if maker.args.args and owner == maker.args.args[0].arg:
                    return inner.get(name)
    return None
