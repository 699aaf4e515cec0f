"""What a function gives back, as far as its `return` statements say: how many values, which names in which order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import griffe

from ...evidence.values import SourceLine
from . import bodies
from .changes import Change
from .conditions import can_fire
from .findings import ChangeKind, Impact
from .guard_changes import known_inside
from .release import Found, Release
from .source_files import PACKAGE
from .surface import Argument, Use
from .syntax_nodes import walk

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
    if wrong and (before_all == {wanted} or (lengths == wrong and _may_have_given(wanted, before_all, before))):
        yield Change(
            ChangeKind.RETURN_CHANGED,
            Impact.BREAKING if lengths == wrong else Impact.RISK,  # else some way through the function gives them
            after=where,
            old=f"{wanted} value(s)",
            new=f"{', '.join(str(n) for n in sorted(filter(None, wrong)))} value(s)",
        )
    elif not use.unpack and (pair := _joined(old, new, before, after)):
        impact = Impact.BREAKING if lengths == wrong else Impact.RISK  # else some way through gives one still
        yield Change(ChangeKind.RETURN_CHANGED, impact, after=where, old=ast.unparse(pair[0]), new=ast.unparse(pair[1]))
    if use.unpack and len(one) == len(other) == 1:
        (was,), (now,) = one, other
        if was.names != now.names and sorted(was.names) == sorted(now.names):
            names = ", ".join(was.names), ", ".join(now.names)
            yield Change(ChangeKind.RETURN_CHANGED, Impact.BREAKING, after=where, old=names[0], new=names[1])
    if lengths & {None, 1}:
        yield from _annotations(old, new, (before, after), use, where)


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
        self._release, self._function, self._depth = release, function, depth
        self._assigned = _assigned(node)
        self._singles = bodies.unpacked_names(node) | {
            a.arg
            for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            if a.annotation is not None and ast.unparse(a.annotation) in _ONE and a.arg not in self._assigned
        }

    def value(self, value: ast.expr | None) -> Iterator[Returned]:
        """What one returned expression gives."""
        match value:
            case ast.Tuple(elts=elts) if not any(isinstance(e, ast.Starred) for e in elts):
                yield Returned(len(elts), _names(elts))
            case ast.Name(id=name) if len(kept := self._assigned.get(name, [])) == 1 and isinstance(kept[0], ast.Tuple):
                yield from self.value(kept[0])
            case ast.Name(id=name) if name in self._singles:
                yield Returned(1)
            case ast.Call() if self._depth:
                yield from self._call(value)
            case _:
                yield Returned(None)

    def _call(self, call: ast.Call) -> Iterator[Returned]:
        dotted = ast.unparse(call.func)
        found = None
        if all(part.isidentifier() for part in dotted.split(".")):
            found = self._release.in_scope(self._function.module, dotted)
        obj = found.obj if isinstance(found, Found) and found.obj.path.startswith(PACKAGE) else None
        if isinstance(obj, griffe.Function) and not obj.decorators:
            yield from returned(self._release, obj, self._depth - 1)
        elif isinstance(obj, griffe.Class) and (fields := _fields(obj)):
            given = dict(zip(fields, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
            yield Returned(len(fields), _names([given.get(field, ast.Constant(None)) for field in fields]))
        elif isinstance(obj, griffe.Class) and _is_one(self._release, obj):
            yield Returned(1)
        else:
            yield Returned(None)


def _names(values: list[ast.expr]) -> tuple[str, ...]:
    names = tuple(value.id for value in values if isinstance(value, ast.Name))
    return names if len(names) == len(values) else ()


def _assigned(node: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """Local name -> every value that is assigned to it."""
    found: dict[str, list[ast.expr]] = {}
    for one in walk(node):
        if isinstance(one, ast.Assign):
            for target in one.targets:
                for name in walk(target):
                    if isinstance(name, ast.Name):
                        found.setdefault(name.id, []).append(one.value if target is name else ast.Constant(None))
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.setdefault(one.id, [])
    return found


def _fields(cls: griffe.Class) -> list[str]:
    """Fields of a named tuple, in order."""
    if not any(str(base).rpartition(".")[2] == "NamedTuple" for base in cls.bases):
        return []
    return [n for n, m in cls.members.items() if isinstance(m, griffe.Attribute) and m.annotation is not None]


def _is_one(release: Release, cls: griffe.Class) -> bool:
    """Whether an instance surely cannot be taken apart: nothing in its lineage iterates."""
    bases, complete = release.bases(cls)
    lineage = (cls, *bases)
    tuples = any(str(base).rpartition(".")[2] in {"NamedTuple", "Enum"} for one in lineage for base in one.bases)
    return complete and not tuples and not any({"__iter__", "__getitem__"} & set(one.members) for one in lineage)


def _annotations(
    old: Release, new: Release, pair: tuple[griffe.Function, griffe.Function], use: Use, where: SourceLine
) -> Iterator[Change]:
    """An annotation that spoke of several values and speaks of one, where the `return` statements changed with it.

    Or the other way round, for a call that takes what it is given as one value.
    """
    texts = ["" if f.returns is None else str(f.returns) for f in pair]
    several = [text.lower().startswith("tuple[") and "..." not in text for text in texts]
    nodes = (old.node_of(pair[0]), new.node_of(pair[1]))
    values = [[ast.unparse(v) for v in bodies.returned_values(n) if v is not None] for n in nodes]
    fewer = several[0] and (texts[1] in _ONE or {r.length for r in returned(new, pair[1])} == {1})
    more = several[1] and texts[0] in _ONE and not use.unpack
    as_said = fewer and {r.length for r in returned(old, pair[0])} != {1}  # else the annotation was wrong all along
    if (as_said or more) and values[0] != values[1]:
        yield Change(ChangeKind.RETURN_CHANGED, Impact.BREAKING, after=where, old=texts[0], new=texts[1])
