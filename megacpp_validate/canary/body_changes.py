"""Changes inside a body that a signature does not show: guards, deprecations, what a default turns into, returns."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher

import griffe

from ..evidence.findings import Cause, ChangeKind, Impact, SourceLine
from . import bodies
from .arguments import argument_of
from .changes import Change
from .conditions import can_fire
from .release import Found, Release
from .surface import Argument, Use

_REWORDED = 0.75  # likeness of two guards' texts from which one is the other, reworded


def compare_bodies(
    old: Release, new: Release, before: griffe.Function, after: griffe.Function, given: Mapping[str, Argument], use: Use
) -> Iterator[Change]:
    """Every change in the body of a consumed function that the call meets.

    Args:
        old, new: the releases.
        before, after: the function in each.
        given: parameter -> what the call passes for it; a parameter that is left out is not in it.
        use: the call.
    """
    one, other = old.node_of(before), new.node_of(after)
    if not isinstance(one, ast.FunctionDef) or not isinstance(other, ast.FunctionDef):
        return
    file = str(after.filepath)
    full = _known_inside(other, given)
    yield from _new_guards(one, other, given, full, file)
    yield from _default_meanings(old, new, (before, one), (after, other), given)
    yield from _returns(one, other, use, file)


def compare_deprecations(old: Release, new: Release, before: griffe.Object, after: griffe.Object, given: Mapping[str, Argument]) -> Iterator[Change]:
    """Deprecation notices of a consumed class or function that are new, or reached by what the call passes."""
    known = {(condition, message) for condition, _, message in bodies.deprecations(old.node_of(before))}
    for condition, node, message in bodies.deprecations(new.node_of(after)):
        if (condition, message) in known:
            continue
        tests = _tests_of(node, new.node_of(after))
        if can_fire(tests, _known_inside(new.node_of(after), given)) is False:
            continue
        yield Change(
            ChangeKind.DEPRECATED,
            Impact.RISK,
            parameter=_parameter_in(tests, given),
            after=SourceLine(file=str(after.filepath), line=node.lineno),
            old=condition,
            new=message,
        )


def _new_guards(
    one: ast.FunctionDef, other: ast.FunctionDef, given: Mapping[str, Argument], full: Mapping[str, Argument], file: str
) -> Iterator[Change]:
    before = bodies.guards(one)
    aliases = _aliases(other)
    for guard in bodies.guards(other):
        if guard.is_deprecation:
            continue  # told as a deprecation
        concerned = {p for name in guard.names() for p in aliases.get(name, {name})} & set(given)
        if not concerned or any(_same_guard(guard, known) for known in before):
            continue
        fires = can_fire(guard.tests, full)
        if fires is False:
            continue
        is_warning = guard.kind == "warn"
        impact = Impact.BREAKING if fires and not is_warning and guard.tests else Impact.RISK
        yield Change(
            ChangeKind.WARNING_ADDED if is_warning else ChangeKind.GUARD_ADDED,
            impact,
            parameter=", ".join(sorted(concerned)),
            after=SourceLine(file=file, line=guard.line),
            new=f"{guard.exception or guard.kind} if {guard.condition}",
            suggestion=guard.message[:200],
        )


def _same_guard(new: bodies.Guard, old: bodies.Guard) -> bool:
    """The same guard, moved or reworded: the same test, or the same message for nearly the same test."""
    if (new.kind == "warn") != (old.kind == "warn"):
        return False
    if new.tests and old.tests and ast.dump(new.tests[-1][0]) == ast.dump(old.tests[-1][0]):
        return True
    if new.condition == old.condition:
        return True
    likeness = SequenceMatcher(None, new.condition, old.condition).ratio()
    same_message = bool(new.message) and SequenceMatcher(None, new.message, old.message).ratio() > _REWORDED
    return same_message and (likeness > 0.5 or new.names() == old.names())


def _default_meanings(
    old: Release,
    new: Release,
    before: tuple[griffe.Function, ast.FunctionDef],
    after: tuple[griffe.Function, ast.FunctionDef],
    given: Mapping[str, Argument],
) -> Iterator[Change]:
    one, other = bodies.default_meanings(before[1]), bodies.default_meanings(after[1])
    for name in sorted(set(one) & set(other) - set(given)):
        if one[name] != other[name]:
            yield _meaning(name, one[name], other[name])
    for had in before[0].parameters:
        if had.name in given or had.name not in after[0].parameters or had.default is None:
            continue
        has = after[0].parameters[had.name]
        if str(has.default) == str(had.default) and str(had.default).replace(".", "").isidentifier():
            first, second = _constant_behind(old, before[0], str(had.default)), _constant_behind(new, after[0], str(has.default))
            if first and second and first != second:
                yield _meaning(had.name, f"{had.default} = {first}", f"{has.default} = {second}")


def _meaning(name: str, old: str, new: str) -> Change:
    return Change(ChangeKind.DEFAULT_MEANING_CHANGED, Impact.RISK, Cause.NUMERICS, parameter=name, old=old, new=new)


def _constant_behind(release: Release, function: griffe.Function, dotted: str) -> str:
    """The value of the module constant that a default names; empty where it is no constant."""
    found = release.in_scope(function.module, dotted)
    if isinstance(found, Found) and isinstance(found.obj, griffe.Attribute):
        return str(found.obj.value)
    return ""


def _returns(one: ast.FunctionDef, other: ast.FunctionDef, use: Use, file: str) -> Iterator[Change]:
    before, after = bodies.returned_lengths(one), bodies.returned_lengths(other)
    wanted = use.unpack or 1
    if before == {wanted} and None not in after and wanted not in after:
        yield Change(
            ChangeKind.RETURN_CHANGED,
            Impact.BREAKING,
            after=SourceLine(file=file, line=other.lineno),
            old=f"{wanted} value(s)",
            new=f"{', '.join(str(n) for n in sorted(filter(None, after)))} value(s)",
        )


def _aliases(node: ast.FunctionDef) -> dict[str, set[str]]:
    """Local names -> the parameters that their values come from, one assignment deep."""
    parameters = {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    aliases: dict[str, set[str]] = {name: {name} for name in parameters}
    for found in ast.walk(node):
        if isinstance(found, ast.Assign) and len(found.targets) == 1 and isinstance(found.targets[0], ast.Name):
            if isinstance(found.value, ast.Name | ast.Attribute | ast.BoolOp | ast.Compare | ast.IfExp):
                read = {n.id for n in ast.walk(found.value) if isinstance(n, ast.Name)} & parameters
                if read:
                    aliases.setdefault(found.targets[0].id, set()).update(read)
    return aliases


def _known_inside(node: ast.AST | None, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """What is known of a function's parameters in its body: what is passed, and literal defaults of the rest."""
    if not isinstance(node, ast.FunctionDef):
        return dict(given)
    known: dict[str, Argument] = {}
    positional = [*node.args.posonlyargs, *node.args.args]
    pairs = [*zip(reversed(positional), reversed(node.args.defaults), strict=False)]
    pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None]
    for argument, default in pairs:
        known[argument.arg] = argument_of(default, {})
    known.update(given)
    for found in ast.walk(node):  # a parameter that the body assigns to may be anything where a guard stands
        if isinstance(found, ast.Name) and isinstance(found.ctx, ast.Store) and found.id in known:
            known[found.id] = Argument(never_none=known[found.id].never_none)
    return known


def _tests_of(node: ast.stmt | ast.expr, function: ast.AST | None) -> tuple[tuple[ast.expr, bool], ...]:
    if isinstance(function, ast.FunctionDef):
        for guard in bodies.guards(function):
            if guard.node is node:
                return guard.tests
    return ()


def _parameter_in(tests: tuple[tuple[ast.expr, bool], ...], given: Mapping[str, Argument]) -> str:
    names = {n.id for test, _ in tests for n in ast.walk(test) if isinstance(n, ast.Name)}
    return ", ".join(sorted(names & set(given)))
