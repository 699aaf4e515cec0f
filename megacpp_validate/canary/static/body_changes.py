"""Changes inside a body that a signature does not show: guards, deprecations, what a default turns into, returns."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import griffe

from ...evidence.values import Cause, SourceLine
from . import bodies
from .body_names import compare_body_names
from .changes import Change
from .conditions import can_fire
from .findings import ChangeKind, Impact
from .guard_changes import Consumed, compare_guards, known_inside
from .reach import callees
from .release import Found, Release
from .returns import compare_returns
from .surface import Argument, Use
from .syntax_nodes import walk


def compare_bodies(
    old: Release,
    new: Release,
    before: griffe.Function,
    after: griffe.Function,
    given: Mapping[str, Argument],
    given_before: Mapping[str, Argument],
    use: Use,
) -> Iterator[Change]:
    """Every change in the body of a consumed function that the call meets.

    Args:
        old, new: the releases.
        before, after: the function in each.
        given: parameter -> what the call passes for it; a parameter that is left out is not in it.
        given_before: the same for the parameters of the old release.
        use: the call.
    """
    one, other = old.node_of(before), new.node_of(after)
    file = str(after.filepath)
    if isinstance(one, ast.FunctionDef) and isinstance(other, ast.AsyncFunctionDef):
        where = SourceLine(file=file, line=other.lineno)
        yield Change(ChangeKind.RETURN_CHANGED, Impact.BREAKING, after=where, old="a value", new="a coroutine")
    if not isinstance(one, ast.FunctionDef) or not isinstance(other, ast.FunctionDef):
        return
    yield from compare_guards(Consumed(old, before, one), Consumed(new, after, other), given, given_before)
    yield from _default_meanings(old, new, (before, one), (after, other), given)
    yield from _environment(old, new, (before, one), (after, other))
    yield from compare_body_names(old, new, before, after, use.keywords)
    for name in ("__enter__", "__exit__") if other.name == "__init__" else ():  # what a scope runs next
        first, second = (f.parent.members.get(name) if f.parent is not None else None for f in (before, after))
        if isinstance(first, griffe.Function) and isinstance(second, griffe.Function):
            yield from compare_body_names(old, new, first, second)
    yield from compare_returns(old, new, before, after, use, given)


def compare_deprecations(
    old: Release, new: Release, before: griffe.Object, after: griffe.Object, given: Mapping[str, Argument]
) -> Iterator[Change]:
    """Deprecation notices of a consumed class or function that are new, or reached by what the call passes."""
    known = {(condition, message) for condition, _, message in _notices(old, before)}
    for condition, node, message in _notices(new, after):
        if (condition, message) in known:
            continue
        tests = _tests_of(node, new.node_of(after))
        if tests and not _parameter_in(tests, given):
            continue  # it is not about anything that the bridge passes
        function = new.node_of(after)
        if can_fire(tests, lambda line, function=function: known_inside(function, given, line)) is False:  # type: ignore[misc]
            continue
        yield Change(
            ChangeKind.DEPRECATED,
            Impact.RISK,
            parameter=_parameter_in(tests, given),
            after=SourceLine(file=str(after.filepath), line=node.lineno),
            old=condition,
            new=message,
        )


def _notices(release: Release, obj: griffe.Object) -> list[tuple[str, ast.stmt | ast.expr, str]]:
    """Deprecation notices of a class or function, and of helpers that it calls at once whatever it is given."""
    node = release.node_of(obj)
    notices = bodies.deprecations(node)
    if not isinstance(node, ast.FunctionDef) or not isinstance(obj, griffe.Function):
        return notices
    calls = {id(s.value): s for s in node.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call)}
    for call, callee, _ in callees(release, obj, node):
        said = [message for condition, _, message in bodies.deprecations(callee) if not condition]
        if said and id(call) in calls:
            notices.append(("", calls[id(call)], " ".join((*said, bodies.text_of(call)))))
    return notices


def _environment(
    old: Release,
    new: Release,
    before: tuple[griffe.Function, ast.FunctionDef],
    after: tuple[griffe.Function, ast.FunctionDef],
) -> Iterator[Change]:
    """Environment variables that are taken for something else now where they are not set."""
    one, other = _variables(old, *before), _variables(new, *after)
    for name in sorted(set(one) & set(other)):
        if one[name] != other[name]:
            where = SourceLine(file=str(after[0].filepath), line=after[1].lineno)
            yield Change(
                ChangeKind.DEFAULT_CHANGED, Impact.RISK, parameter=name, after=where, old=one[name], new=other[name]
            )


def _variables(release: Release, function: griffe.Function, node: ast.FunctionDef) -> dict[str, str]:
    """Environment variable -> its default, of a function and of those of the package that it calls."""
    found: dict[str, str] = {}
    for _, callee, _ in callees(release, function, node):
        found |= bodies.environment_defaults(callee)
    return found | bodies.environment_defaults(node)


def _default_meanings(
    old: Release,
    new: Release,
    before: tuple[griffe.Function, ast.FunctionDef],
    after: tuple[griffe.Function, ast.FunctionDef],
    given: Mapping[str, Argument],
) -> Iterator[Change]:
    one, other = bodies.default_meanings(before[1]), bodies.default_meanings(after[1])
    taken = {name for name, argument in given.items() if argument.usual != (None,)}  # None is for the default again
    for name in sorted(set(one) & set(other) - taken):
        if one[name] != other[name] and not _widened(one[name], other[name]):
            yield _meaning(name, one[name], other[name])
    for had in before[0].parameters:
        if had.name in given or had.name not in after[0].parameters or had.default is None:
            continue
        has = after[0].parameters[had.name]
        if str(has.default) == str(had.default) and str(had.default).replace(".", "").isidentifier():
            first, second = (
                _constant_behind(old, before[0], str(had.default)),
                _constant_behind(new, after[0], str(has.default)),
            )
            if first and second and first != second:
                yield _meaning(had.name, f"{had.default} = {first}", f"{has.default} = {second}")


def _widened(old: str, new: str) -> bool:
    """Whether a new expression is the old one with a case added: `x` became `x if ... else y`."""
    for node in walk(ast.parse(new)):
        for branch in (node.body, node.orelse) if isinstance(node, ast.IfExp) else ():
            if ast.unparse(ast.parse(new.replace(ast.unparse(node), ast.unparse(branch)))) == old:
                return True
    return False


def _meaning(name: str, old: str, new: str) -> Change:
    return Change(ChangeKind.DEFAULT_MEANING_CHANGED, Impact.RISK, Cause.NUMERICS, parameter=name, old=old, new=new)


def _constant_behind(release: Release, function: griffe.Function, dotted: str) -> str:
    """The value of the module constant that a default names; empty where it is no constant."""
    found = release.in_scope(function.module, dotted)
    if isinstance(found, Found) and isinstance(found.obj, griffe.Attribute):
        return str(found.obj.value)
    return ""


def _tests_of(node: ast.stmt | ast.expr, function: ast.AST | None) -> tuple[bodies.Test, ...]:
    if isinstance(function, ast.FunctionDef):
        for guard in bodies.guards(function):
            if guard.node is node:
                return guard.tests
    return ()


def _parameter_in(tests: tuple[bodies.Test, ...], given: Mapping[str, Argument]) -> str:
    names = {n.id for test in tests for n in walk(test.expression) if isinstance(n, ast.Name)}
    return ", ".join(sorted(names & set(given)))
