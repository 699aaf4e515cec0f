"""Compares function bodies in two releases: guards, deprecations, what a default turns into, return values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import griffe

from ...evidence.values import Cause, SourceLine
from . import bodies
from .conditions import can_fire
from .findings import Change, ChangeKind, Impact
from .guard_changes import Consumed, Passed, compare_guards, known_inside
from .reach import callees, constant_in
from .release import Release
from .surface import Argument, Use
from .syntax_nodes import parameters_of, walk


def compare_bodies(
    old: Release, new: Release, before: griffe.Function, after: griffe.Function, passed: Passed, use: Use
) -> Iterator[Change]:
    """Every change in the body of a consumed function that the call meets.

    Args:
        old, new: the releases.
        before, after: the function in each.
        passed: what is known of the call.
        use: the call.
    """
    one, other = old.node_of(before), new.node_of(after)
    file = str(after.filepath)
    if isinstance(one, ast.FunctionDef) and isinstance(other, ast.AsyncFunctionDef):
        where = SourceLine(file=file, line=other.lineno)
        yield Change(ChangeKind.RETURN_CHANGED, Impact.BREAKING, after=where, old="a value", new="a coroutine")
    if not isinstance(one, ast.FunctionDef) or not isinstance(other, ast.FunctionDef):
        return
    yield from compare_guards(Consumed(old, before, one), Consumed(new, after, other), passed)
    yield from _default_meanings(old, new, (before, one), (after, other), passed.after)
    yield from compare_returns(old, new, before, after, use, passed.after)


def compare_deprecations(
    old: Release, new: Release, before: griffe.Object, after: griffe.Object, given: Mapping[str, Argument]
) -> Iterator[Change]:
    """Deprecation notices of a consumed class or function that are new, or reached by what the call passes."""
    known = {(notice.condition, notice.message) for notice in bodies.deprecations(old.node_of(before))}
    function = new.node_of(after)
    for notice in bodies.deprecations(function):
        if (notice.condition, notice.message) in known:
            continue
        read = {n.id for test in notice.tests for n in walk(test.expression) if isinstance(n, ast.Name)}
        named = ", ".join(sorted(read & set(given)))
        if notice.tests and not named:
            continue  # it is not about anything that the bridge passes
        if can_fire(notice.tests, lambda line: known_inside(function, given, line)) is False:
            continue
        where = SourceLine(file=str(after.filepath), line=notice.line)
        deprecated = Change(ChangeKind.DEPRECATED, Impact.RISK, parameter=named, after=where)
        yield replace(deprecated, old=notice.condition, new=notice.message)


def _default_meanings(
    old: Release, new: Release, before: tuple[griffe.Function, ast.FunctionDef],
    after: tuple[griffe.Function, ast.FunctionDef], given: Mapping[str, Argument],
) -> Iterator[Change]:  # fmt: skip
    one, other = bodies.default_meanings(before[1]), bodies.default_meanings(after[1])
    taken = {name for name, argument in given.items() if argument.usual != (None,)}  # None is for the default again
    for name in sorted(set(one) & set(other) - taken):
        if one[name] != other[name] and not _widened(one[name], other[name]):
            yield _meaning(name, one[name], other[name])
    for had in before[0].parameters:
        dotted = str(had.default)
        same = had.name in after[0].parameters and str(after[0].parameters[had.name].default) == dotted
        if same and had.name not in given and dotted.replace(".", "").isidentifier():
            values = constant_in(old, before[0].module, dotted), constant_in(new, after[0].module, dotted)
            first, second = (f"{dotted} = {ast.unparse(value)}" if value is not None else "" for value in values)
            if first and second and first != second:
                yield _meaning(had.name, first, second)


def _widened(old: str, new: str) -> bool:
    """Whether a new expression is the old one with a case added: `x` became `x if ... else y`."""
    for node in walk(ast.parse(new)):
        for branch in (node.body, node.orelse) if isinstance(node, ast.IfExp) else ():
            if ast.unparse(ast.parse(new.replace(ast.unparse(node), ast.unparse(branch)))) == old:
                return True
    return False


def _meaning(name: str, old: str, new: str) -> Change:
    return Change(ChangeKind.DEFAULT_MEANING_CHANGED, Impact.RISK, Cause.NUMERICS, parameter=name, old=old, new=new)


_DEPTH = 2  # calls to follow: `return helper(x)`
_ONE = frozenset({"torch.Tensor", "Tensor", "bool", "int", "float", "str"})


class Returned(NamedTuple):
    """One `return`.

    Attributes:
        length: how many values; None where that is not known.
        names: the local names that are given, in order; empty where one of them is something else.
    """

    length: int | None
    names: tuple[str, ...] = ()


def compare_returns(
    old: Release, new: Release, before: griffe.Function, after: griffe.Function, use: Use,
    given: Mapping[str, Argument],
) -> Iterator[Change]:  # fmt: skip
    """Another number of values, or the same ones in another order, where the call takes the result apart."""
    never = _never_given(new, after, given)
    one, other = set(returned(old, before)), set(returned(new, after))
    wanted = use.unpack or 1
    lengths = {r.length for r in other}
    lengths -= never if lengths - {wanted, None} <= never and lengths - never else set()
    where = SourceLine(file=str(after.filepath), line=after.lineno or 1)
    wrong, before_all = lengths - {wanted, None}, {r.length for r in one}
    impact = Impact.BREAKING if lengths == wrong else Impact.RISK  # else some way through the function gives as many
    if wrong and (before_all == {wanted} or (lengths == wrong and _may_have_given(wanted, before_all, before))):
        numbers = ", ".join(str(n) for n in sorted(filter(None, wrong)))
        changed = Change(ChangeKind.RETURN_CHANGED, impact, after=where)
        yield replace(changed, old=f"{wanted} value(s)", new=f"{numbers} value(s)")
    elif not use.unpack and (pair := _joined(old, new, before, after)):
        yield Change(ChangeKind.RETURN_CHANGED, impact, after=where, old=ast.unparse(pair[0]), new=ast.unparse(pair[1]))
    if use.unpack and len(one) == len(other) == 1:
        (was,), (now,) = one, other
        if was.names != now.names and sorted(was.names) == sorted(now.names):
            names = ", ".join(was.names), ", ".join(now.names)
            yield Change(ChangeKind.RETURN_CHANGED, Impact.BREAKING, after=where, old=names[0], new=names[1])


def _never_given(release: Release, function: griffe.Function, given: Mapping[str, Argument]) -> set[int | None]:
    """Numbers of values that only returns give which are not reached with what the call passes."""
    node = release.node_of(function)
    if not isinstance(node, ast.FunctionDef):
        return set()
    lengths: dict[bool, set[int | None]] = {True: set(), False: set()}
    for found, tests in bodies.returns_reached(node):
        is_reached = can_fire(tests, lambda line: known_inside(node, given, line)) is not False
        length = len(found.value.elts) if isinstance(found.value, ast.Tuple) else None
        lengths[is_reached].add(length)
    return lengths[False] - lengths[True] - {None}


def _joined(
    old: Release, new: Release, before: griffe.Function, after: griffe.Function
) -> tuple[ast.expr, ast.Tuple] | None:
    """A value that was returned alone, and is only returned with others beside it now."""
    one, other = _values(old.node_of(before)), _values(new.node_of(after))
    alone = {text for text, value in other if not isinstance(value, ast.Tuple)}
    for text, value in one:
        if isinstance(value, ast.Tuple | ast.Constant) or text in alone:
            continue
        for _, now in other:
            if isinstance(now, ast.Tuple) and text in {_text(value, new.node_of(after)) for value in now.elts}:
                return value, now
    return None


def _values(node: ast.AST | None) -> list[tuple[str, ast.expr]]:
    return [(_text(value, node), value) for value in bodies.returned_values(node) if value is not None]


def _text(value: ast.expr, node: ast.AST | None) -> str:
    """An expression as text; a name that is assigned once is what it is assigned."""
    if isinstance(value, ast.Name) and isinstance(node, ast.FunctionDef):
        kept = _assigned(node).get(value.id, [])
        value = kept[0] if len(kept) == 1 and not isinstance(kept[0], ast.Constant) else value
    return ast.unparse(value)


def _may_have_given(wanted: int, lengths: set[int | None], function: griffe.Function) -> bool:
    """Whether a function of which not every `return` can be read gave that many values to a call that worked."""
    if None not in lengths:
        return wanted in lengths
    if wanted > 1:  # it was taken apart
        return True
    kinds = re.split(r"[\[\],|\s]+", str(function.returns or ""))
    written_out = len(lengths) > 1  # some return is a tuple as written, so the others are something else
    return written_out or str(function.returns) in _ONE or (kinds[0] in {"Union", "Optional"} and kinds[1] in _ONE)


def returned(release: Release, function: griffe.Function, depth: int = _DEPTH) -> list[Returned]:
    """What each `return` of a function gives."""
    node = release.node_of(function)
    if not isinstance(node, ast.FunctionDef) or bodies.yields(node):
        return [Returned(None)]
    key = f"returned by {function.path}:{node.lineno} at {depth}"
    if key not in release.memory:  # several call sites consume one function
        read = _Reader(release, function, node, depth)
        values = [r for value in bodies.returned_values(node) for r in read.value(value)]
        release.memory[key] = values or [Returned(None)]
    found: list[Returned] = release.memory[key]
    return found


class _Reader:
    def __init__(self, release: Release, function: griffe.Function, node: ast.FunctionDef, depth: int) -> None:
        self._release, self._depth = release, depth
        self._called = callees(release, function, node)
        self._assigned = _assigned(node)
        parts = {name for name, kept in self._assigned.items() for value in kept if isinstance(value, ast.Starred)}
        self._singles = parts | {
            a.arg
            for a, _ in parameters_of(node.args)
            if a.annotation is not None and ast.unparse(a.annotation) in _ONE and a.arg not in self._assigned
        }

    def value(self, value: ast.expr | None) -> Iterator[Returned]:
        """What one returned expression gives."""
        match value:
            case ast.Tuple(elts=elts) if not any(isinstance(e, ast.Starred) for e in elts):
                names = tuple(value.id for value in elts if isinstance(value, ast.Name))
                yield Returned(len(elts), names if len(names) == len(elts) else ())
            case ast.Name(id=name) if len(kept := self._assigned.get(name, [])) == 1 and isinstance(kept[0], ast.Tuple):
                yield from self.value(kept[0])
            case ast.Name(id=name) if name in self._singles:
                yield Returned(1)
            case ast.Call() if self._depth:
                yield from self._call(value)
            case _:
                yield Returned(None)

    def _call(self, call: ast.Call) -> Iterator[Returned]:
        callee = self._called.get(id(call))
        if callee is not None and not callee.function.decorators:
            yield from returned(self._release, callee.function, self._depth - 1)
        else:
            yield Returned(None)


def _assigned(node: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """Local name -> every value that is assigned to it; a `Starred` where it stands among others in a target."""
    found: dict[str, list[ast.expr]] = {}
    for one in walk(node):
        if isinstance(one, ast.Assign):
            for target in one.targets:
                for name in walk(target):
                    if isinstance(name, ast.Name):
                        found.setdefault(name.id, []).append(one.value if target is name else ast.Starred(name))
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.setdefault(one.id, [])
    return found
