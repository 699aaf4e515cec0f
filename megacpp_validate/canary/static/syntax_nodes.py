"""Walks of syntax trees, done once and no deeper than needed. A tree is never changed: who rewrites one copies it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

N = TypeVar("N", bound=ast.AST)
T = TypeVar("T")

_NO_NODES = frozenset({"id", "attr", "ctx"})  # of the fields of most nodes; a context says nothing that is asked here
_FIELDS = {
    kind: tuple(field for field in kind._fields if field not in _NO_NODES)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
_BRANCHES = ("body", "handlers", "orelse", "finalbody", "cases")


def once_per_node(read: Callable[[N], T]) -> Callable[[N], T]:
    """A function that reads a node, made to read each node once: the answer is kept for as long as the node is.

    The answer may hold parts of the node, but not the node itself, and nobody may change it.
    """
    known: WeakKeyDictionary[N, T] = WeakKeyDictionary()

    @wraps(read)
    def kept(node: N) -> T:
        if node not in known:
            known[node] = read(node)
        return known[node]

    return kept


def children(node: ast.AST) -> list[ast.AST]:
    """What `ast.iter_child_nodes` gives, contexts left out, in a third of the time."""
    found: list[ast.AST] = []
    for field in _FIELDS[type(node)]:
        value = getattr(node, field, None)
        if isinstance(value, ast.AST):
            found.append(value)
        elif isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
    return found


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """What `ast.walk` gives, in its order, contexts left out."""
    waiting = [node]
    for one in waiting:
        yield one
        waiting += children(one)


def substituted(node: N, instead: Callable[[ast.expr], ast.expr | None]) -> N:
    """A tree with other expressions in the place of some; it shares every node below which nothing is replaced.

    Args:
        node: the tree, which stays as it is.
        instead: what to put in the place of an expression; None to look below it.
    """
    if isinstance(node, ast.expr) and (other := instead(node)) is not None:
        return ast.copy_location(copy.copy(other), node)  # type: ignore[return-value]
    changed: dict[str, Any] = {}
    for field in _FIELDS[type(node)]:
        value = made = getattr(node, field, None)
        if isinstance(value, ast.AST):
            made = substituted(value, instead)
        elif isinstance(value, list):
            made = [substituted(one, instead) if isinstance(one, ast.AST) else one for one in value]
        if made != value:  # nodes are equal to themselves alone
            changed[field] = made
    if changed:
        node = copy.copy(node)
        vars(node).update(changed)
    return node


def parameters_of(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr | None]]:
    """Parameters with their defaults, `*args` and `**kwargs` left out."""
    places = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(places) - len(arguments.defaults)), *arguments.defaults]
    pairs = zip((*places, *arguments.kwonlyargs), (*defaults, *arguments.kw_defaults), strict=True)
    return list(pairs)


def statements_below(node: ast.AST) -> Iterator[ast.stmt]:
    """Every statement at any depth below a module or a statement; expressions, most of a tree, are not entered."""
    for field in _BRANCHES:
        for inner in getattr(node, field, ()):
            if isinstance(inner, ast.stmt):  # else an `except` or a `case`
                yield inner
            yield from statements_below(inner)


def stored_by(node: ast.AST) -> set[str]:
    """Names that a statement binds in the namespace that it stands in."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name.partition(".")[0] for alias in names}
        case ast.Name(id=name, ctx=ast.Store()):
            return {name}
        case ast.Lambda():
            return set()
        case ast.ExceptHandler(name=str(name)):
            return {name}.union(*map(stored_by, node.body))
    return set().union(*map(stored_by, children(node)))
