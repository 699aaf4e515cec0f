"""What a statement asks of the machine that it runs on, and whether one check asks for less than another."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from packaging.version import InvalidVersion, Version

from .source_files import PACKAGE
from .syntax_nodes import children, walk

_LOADERS = frozenset({"CDLL", "LoadLibrary", "PyDLL"})
_PROGRAMS = frozenset({"check_call", "check_output"})


def ways_to_versions(tree: ast.Module) -> frozenset[str]:
    """How a module's code calls `importlib.metadata.version`."""
    ways = {"importlib.metadata.version", "metadata.version"}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "importlib.metadata":
            ways |= {alias.asname or alias.name for alias in node.names if alias.name == "version"}
    return frozenset(ways)


def variables_set(tree: ast.Module) -> frozenset[str]:
    """Environment variables that a module's code sets itself, always or where they are not set."""
    found: set[str] = set()
    for node in walk(tree):
        match node:
            case (
                ast.Subscript(value=owner, slice=ast.Constant(value=str(name)), ctx=ast.Store())
                | ast.Call(func=ast.Attribute(value=owner, attr="setdefault"), args=[ast.Constant(value=str(name)), *_])
            ) if ast.unparse(owner).rpartition(".")[2] == "environ":
                found.add(name)
    return frozenset(found)


def asked_of_the_machine(node: ast.AST, versions: frozenset[str]) -> Iterator[tuple[str, str]]:
    """What a statement cannot do without, and how it raises: a variable, a program, a library, a distribution.

    Args:
        node: the statement.
        versions: how it calls `importlib.metadata.version`.
    """
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef() | ast.IfExp() | ast.BoolOp():
            return  # run later, or at times
        case ast.Subscript(
            value=ast.Name(id="environ") | ast.Attribute(attr="environ"),
            slice=ast.Constant(value=str(name)),
            ctx=ast.Load(),
        ):
            yield name, f"KeyError if {name} is not in os.environ"
        case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
            called = ast.unparse(func).rpartition(".")[2]
            if called in _LOADERS:
                yield name, f"OSError if the library {name} is not found"
            elif called in _PROGRAMS:
                yield name, f"CalledProcessError if the driver or tool {name} is not found"
            elif ast.unparse(func) in versions and not _is_own(name):
                yield name, f"PackageNotFoundError if {name} is not installed"
        case ast.Call(func=func, args=[ast.List(elts=[ast.Constant(value=str(name)), *_]), *_]):
            if ast.unparse(func).rpartition(".")[2] in _PROGRAMS:
                yield name, f"CalledProcessError if the program {name} is not found"
    for child in children(node):
        yield from asked_of_the_machine(child, versions)


def _is_own(distribution: str) -> bool:
    return distribution.lower().replace("-", "_").startswith(PACKAGE)


_LOWER_IS_LESS: Final = {ast.Lt: True, ast.LtE: True, ast.Gt: False, ast.GtE: False}


def asks_for_less(new: str, old: str) -> bool:
    """Whether a condition under which a check raises is another one's with a bound that more versions pass."""
    one, other = _bound(new), _bound(old)
    if one is None or other is None or one[:2] != other[:2]:
        return False
    lower: Callable[[object, object], bool] = operator.le if one[1] else operator.ge  # type: ignore[assignment]
    try:
        return lower(one[2], other[2])
    except TypeError:
        return False


def _bound(condition: str) -> tuple[str, bool, object] | None:
    """What is compared, whether a lower bound refuses less, and the bound."""
    try:
        node = ast.parse(condition, mode="eval").body
    except SyntaxError:
        return None
    wanted = True
    while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node, wanted = node.operand, not wanted
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[ast.Tuple(elts=parts) | ast.Call(args=parts)]) if (
            type(op) in _LOWER_IS_LESS
        ):
            values = [_read_bound(part.value) for part in parts if isinstance(part, ast.Constant)]
            lower = _LOWER_IS_LESS[type(op)] is wanted
            return (ast.unparse(left), lower, tuple(values)) if len(values) == len(parts) else None
    return None


def _read_bound(value: object) -> object:
    """A version that is written as text is compared as one: 2.10 comes behind 2.9."""
    with suppress(InvalidVersion):
        return Version(value) if isinstance(value, str) else value
    return None
