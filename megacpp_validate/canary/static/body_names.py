"""Names that a consumed body reads when it runs, and that its module no longer has then: a call ends in a NameError.

Also what it imports of the package itself. What stands under a condition may not be run; what a `try` may catch is
left out.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import griffe

from ...evidence.values import SourceLine
from .changes import Change
from .findings import ChangeKind, Impact
from .import_names import bound_by, is_for_type_checkers, stored_by
from .import_time import absolute
from .release import Absent, Release
from .source_files import PACKAGE
from .syntax_nodes import children, statements_below, walk

_EVERYWHERE = frozenset({*dir(builtins), "__file__", "__name__", "__class__", "__doc__", "__package__", "__spec__"})


@dataclass(frozen=True)
class Lost:
    """Something that a body asks for and does not get: its name, what is raised, where, and whether at every call."""

    name: str
    what: str
    line: int
    always: bool


def compare_body_names(
    old: Release, new: Release, before: griffe.Function, after: griffe.Function, passed: Collection[str] = ()
) -> Iterator[Change]:
    """What a body asks for in vain in the new release, and did not in the old one.

    Args:
        passed: keywords of the call: one that is no parameter any more ends the call before its body does.
    """
    known = {lost.what for lost in lost_names(old, before)}
    takes = {parameter.name: parameter.kind for parameter in after.parameters}
    ended = set() if griffe.ParameterKind.var_keyword in takes.values() else set(passed) - takes.keys()
    for lost in lost_names(new, after):
        if lost.what not in known and lost.name not in ended:
            yield Change(
                ChangeKind.GUARD_ADDED,
                Impact.BREAKING if lost.always else Impact.RISK,
                after=SourceLine(file=str(after.filepath), line=lost.line),
                new=lost.what,
            )


def lost_names(release: Release, function: griffe.Function) -> list[Lost]:
    """What the body of a function or method asks for in vain, each once."""
    node = release.node_of(function)
    if not isinstance(node, ast.FunctionDef) or not isinstance(function.parent, griffe.Module | griffe.Class):
        return []
    key = f"lost names of {function.path}:{node.lineno}"
    if key not in release.memory:
        release.memory[key] = list(_Reader(release, function.module, node).lost())
    found: list[Lost] = release.memory[key]
    return found


class _Reader:
    def __init__(self, release: Release, module: griffe.Module, node: ast.FunctionDef) -> None:
        self._release, self._module, self._node = release, module, node
        file = str(module.filepath)
        self._package = module.path if file.endswith("__init__.py") else module.path.rpartition(".")[0]
        key = f"bound in {file}"
        if key not in release.memory:
            late, is_open = bound_by(release.text(file))
            there = {n for n, m in module.members.items() if not isinstance(m, griffe.Alias) or m.runtime}
            there |= late | _bound_at_all(release.syntax(file).body) | _EVERYWHERE
            is_open = is_open or "__getattr__" in module.members or _takes_all_of_others(release.syntax(file))
            release.memory[key] = there, is_open
        self._there, self._is_open = release.memory[key]
        self._own = _own_names(node)

    def lost(self) -> Iterator[Lost]:
        """In the order of the lines."""
        seen: set[str] = set()
        for statement, always in _statements(self._node.body):
            for name, what, line in (*self._unbound(statement), *self._not_imported(statement)):
                if what not in seen:
                    seen.add(what)
                    yield Lost(name, what, line, always)

    def _unbound(self, statement: ast.AST) -> Iterator[tuple[str, str, int]]:
        if self._is_open:
            return
        for name in _read(statement):
            if name.id not in self._own and name.id not in self._there:
                yield name.id, f"NameError: nothing binds {name.id} in {self._module.path}", name.lineno

    def _not_imported(self, statement: ast.AST) -> Iterator[tuple[str, str, int]]:
        if not isinstance(statement, ast.ImportFrom):
            return
        base = absolute(statement.module or "", statement.level, self._package)
        if base.partition(".")[0] != PACKAGE:
            return
        for alias in statement.names:
            found = self._release.lookup(base, alias.name)
            if isinstance(found, Absent) and self._release.module(f"{base}.{alias.name}") is None:
                yield alias.name, f"ImportError: {base} has no {alias.name}", statement.lineno


def _statements(body: Iterable[ast.stmt], *, always: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """The parts of a body that are run, and whether every call runs them; those that a `try` guards are left out."""
    for node in body:
        match node:
            case ast.If(test=test, body=then, orelse=orelse):
                yield test, always
                yield from _statements([*then, *orelse], always=False)
            case ast.For(iter=over, body=inner, orelse=orelse):
                yield over, always
                yield from _statements([*inner, *orelse], always=False)
            case ast.While(test=test, body=inner, orelse=orelse):
                yield test, always
                yield from _statements([*inner, *orelse], always=False)
            case ast.With(items=items, body=inner):
                yield from ((item.context_expr, always) for item in items)
                yield from _statements(inner, always=always)
            case ast.Try(body=inner, handlers=handlers, orelse=orelse, finalbody=final):
                if not handlers:
                    yield from _statements(inner, always=always)
                yield from _statements([*orelse, *final], always=False)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass  # run later, if at all
            case _:
                yield node, always
        if isinstance(node, ast.Return) or any(isinstance(inner, ast.Return) for inner in statements_below(node)):
            always = False


def _read(node: ast.AST) -> Iterator[ast.Name]:
    """Names that are read; annotations of local variables are not."""
    match node:
        case ast.Name(ctx=ast.Load()):
            yield node
        case ast.AnnAssign(value=value):
            yield from _read(value) if value is not None else ()
        case ast.Lambda() | ast.FunctionDef():
            return
        case _:
            for child in children(node):
                yield from _read(child)


def _own_names(node: ast.FunctionDef) -> set[str]:
    """Every name that the function or one within it binds: more than it may read, never less."""
    names: set[str] = set()
    for found in walk(node):
        match found:
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
    return names


def _takes_all_of_others(tree: ast.Module) -> bool:
    """Whether a module has a `from other import *` of something outside of the package."""
    stars = (n for n in tree.body if isinstance(n, ast.ImportFrom) and n.names[0].name == "*")
    return any(not n.level and (n.module or "").partition(".")[0] != PACKAGE for n in stars)


def _bound_at_all(body: Iterable[ast.stmt]) -> set[str]:
    """Names that a module's top level may bind when it is run: not what stands for type checkers alone."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.If) and is_for_type_checkers(node.test):
            names |= _bound_at_all(node.orelse)
        else:
            names |= stored_by(node)
    return names
