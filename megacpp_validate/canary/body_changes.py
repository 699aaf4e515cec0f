"""Changes inside a body that a signature does not show: guards, deprecations, what a default turns into, returns."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher

import griffe

from ..evidence.findings import Cause, ChangeKind, Impact, SourceLine
from . import bodies
from .arguments import argument_of
from .changes import Change
from .conditions import can_fire
from .reach import guards_reached
from .release import Found, Release
from .surface import Argument, Use

_REWORDED = 0.6  # likeness of two guards' messages from which one is the other, if both test the same names
_SAME_WORDS = 0.75  # ... if they test others, in nearly the same way
_KNOWN_DEPTH = 3  # calls to follow in the old release: a check that only moved is not new


def compare_bodies(
    old: Release,
    new: Release,
    before: griffe.Function,
    after: griffe.Function,
    given: Mapping[str, Argument],
    use: Use,
) -> Iterator[Change]:
    """Every change in the body of a consumed function that the call meets.

    Args:
        old, new: the releases.
        before, after: the function in each.
        given: parameter -> what the call passes for it; a parameter that is left out is not in it.
        use: the call.
    """
    one, other = old.node_of(before), new.node_of(after)
    file = str(after.filepath)
    if isinstance(one, ast.FunctionDef) and isinstance(other, ast.AsyncFunctionDef):
        where = SourceLine(file=file, line=other.lineno)
        yield Change(ChangeKind.RETURN_CHANGED, Impact.BREAKING, after=where, old="a value", new="a coroutine")
    if not isinstance(one, ast.FunctionDef) or not isinstance(other, ast.FunctionDef):
        return
    yield from _new_guards(old, new, (before, one), (after, other), given)
    yield from _default_meanings(old, new, (before, one), (after, other), given)
    yield from _returns(one, other, use, file)


def compare_deprecations(
    old: Release, new: Release, before: griffe.Object, after: griffe.Object, given: Mapping[str, Argument]
) -> Iterator[Change]:
    """Deprecation notices of a consumed class or function that are new, or reached by what the call passes."""
    known = {(condition, message) for condition, _, message in bodies.deprecations(old.node_of(before))}
    for condition, node, message in bodies.deprecations(new.node_of(after)):
        if (condition, message) in known:
            continue
        tests = _tests_of(node, new.node_of(after))
        if tests and not _parameter_in(tests, given):
            continue  # it is not about anything that the bridge passes
        function = new.node_of(after)
        if can_fire(tests, lambda line, function=function: _known_inside(function, given, line)) is False:  # type: ignore[misc]
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
    old: Release,
    new: Release,
    before: tuple[griffe.Function, ast.FunctionDef],
    after: tuple[griffe.Function, ast.FunctionDef],
    given: Mapping[str, Argument],
) -> Iterator[Change]:
    known = [reached.guard for reached in guards_reached(old, before[0], before[1], depth=_KNOWN_DEPTH)]
    conditions = {(guard.kind == "warn", guard.condition) for guard in known}
    other = after[1]
    fields, near, far = _fields(other), _origins(other, calls=False), _origins(other, calls=True)
    new_features = _parameter_names(other) - _parameter_names(before[1]) - set(given)
    for reached in guards_reached(new, after[0], other):
        guard = reached.guard
        if (guard.kind == "warn", guard.condition) in conditions or guard.is_deprecation:
            continue  # it was there before, or is told as a deprecation
        tests = tuple(test._replace(expression=fields.visit(copy.deepcopy(test.expression))) for test in guard.tests)
        names = {n.id for t in tests if not t.passed_by for n in ast.walk(t.expression) if isinstance(n, ast.Name)}
        concerned = {p for name in names for p in near.get(name, {name})} & set(given)
        always = not reached.through and not names and can_fire(tests, lambda _: {}) is True
        if not (concerned or always) or any(_same_guard(guard, one) for one in known):
            continue
        if any(_asks_for(test, far, new_features) for test in tests):
            continue  # it guards a feature that this release brings and that the bridge does not ask for
        if any(_is_new_kind(test, old, before[0]) for test in tests):
            continue  # it is about a class that the old release did not have: no value of it was ever passed
        if guard.enclosing and all(
            ast.unparse(test.expression).endswith(".is_cuda") for test in tests if not test.passed_by
        ):
            continue  # the bridge takes this path with tensors of the GPU only
        fires = can_fire(tests, lambda line, at=reached.called_at: _known_inside(other, given, at or line))  # type: ignore[misc]
        if fires is False:
            continue
        is_warning = guard.kind == "warn"
        yield Change(
            ChangeKind.WARNING_ADDED if is_warning else ChangeKind.GUARD_ADDED,
            Impact.BREAKING if fires and not is_warning and not reached.through else Impact.RISK,
            parameter=", ".join(sorted(concerned)),
            after=SourceLine(file=reached.file, line=guard.line),
            new=f"{guard.exception or guard.kind} if {guard.said}",
            suggestion=guard.message[:200],
        )


class _Fields(ast.NodeTransformer):
    """Puts the parameter in the place of `self.name` where the body stores it there, once and unchanged."""

    def __init__(self, stored: dict[str, str]) -> None:
        self._stored = stored

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace `self.name`."""
        if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self._stored:
            return ast.copy_location(ast.Name(self._stored[node.attr], ast.Load()), node)
        self.generic_visit(node)
        return node


def _fields(node: ast.FunctionDef) -> _Fields:
    stored: dict[str, str] = {}
    spoilt: set[str] = set()
    parameters = _parameter_names(node)
    for found in ast.walk(node):
        if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store) and ast.unparse(found.value) == "self":
            spoilt |= {found.attr} & set(stored)
            stored.setdefault(found.attr, "")
    for found in ast.walk(node):
        match found:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)], value=ast.Name(id=name)):
                if name in parameters and attr not in spoilt:
                    stored[attr] = name
    return _Fields({attr: name for attr, name in stored.items() if name})


def _is_new_kind(test: bodies.Test, old: Release, function: griffe.Function) -> bool:
    """Whether a test holds only for instances of a class that the old release does not know."""
    match test:
        case bodies.Test(ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id=kind)]), wanted=True):
            return not any(kind in module.members for module in (function.module, *old.modules()))
        case bodies.Test(ast.BoolOp(op=ast.And(), values=values), wanted=True):
            return any(_is_new_kind(bodies.Test(value, True), old, function) for value in values)
    return False


def _asks_for(test: bodies.Test, origins: Mapping[str, set[str]], features: set[str]) -> bool:
    """Whether a test holds only where one of `features` was asked for: `x is not None`, or `x` itself."""
    match test.expression:
        case ast.Compare(left=ast.Name(id=name), ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            wanted = True
        case ast.Compare(left=ast.Name(id=name), ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            wanted = False
        case ast.Name(id=name):
            wanted = True
        case _:
            return False
    return test.wanted is wanted and bool(origins.get(name, {name}) & features)


def _same_guard(new: bodies.Guard, old: bodies.Guard) -> bool:
    """The same guard, moved or reworded: the same test, or the same message for nearly the same test."""
    if (new.kind == "warn") != (old.kind == "warn"):
        return False  # what used to warn now raises, or the other way round
    if new.condition == old.condition:
        return True
    if new.innermost and new.innermost == old.innermost:
        return True
    if not new.message or not old.message:
        return False
    likeness = SequenceMatcher(None, new.message, old.message).ratio()
    if likeness > _REWORDED and new.names == old.names:
        return True
    return likeness > _SAME_WORDS and SequenceMatcher(None, new.condition, old.condition).ratio() > 0.5


def _default_meanings(
    old: Release,
    new: Release,
    before: tuple[griffe.Function, ast.FunctionDef],
    after: tuple[griffe.Function, ast.FunctionDef],
    given: Mapping[str, Argument],
) -> Iterator[Change]:
    one, other = bodies.default_meanings(before[1]), bodies.default_meanings(after[1])
    for name in sorted(set(one) & set(other) - set(given)):
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
    for node in ast.walk(ast.parse(new)):
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


def _origins(node: ast.FunctionDef, *, calls: bool) -> dict[str, set[str]]:
    """Local names -> the parameters that their values come from.

    Through plain assignments; with `calls` also through calls, and through the tests under which they are made.
    """
    origins: dict[str, set[str]] = {name: {name} for name in _parameter_names(node)}
    _trace(node.body, origins, set(), calls=calls)
    return origins


def _trace(body: Iterable[ast.AST], origins: dict[str, set[str]], under: set[str], *, calls: bool) -> None:
    for found in body:
        inner = under
        if isinstance(found, ast.Assign | ast.AnnAssign) and found.value is not None:
            if isinstance(found.value, ast.Call) and (key := _popped(found.value)):
                sources = {key}
            elif not calls and any(isinstance(n, ast.Call) for n in ast.walk(found.value)):
                continue
            else:
                sources = _read_from(found.value, origins)
            for name in _stored_names(found):
                origins.setdefault(name, set()).update(sources | (under if calls else set()))
        elif isinstance(found, ast.If):
            inner = under | _read_from(found.test, origins)
        _trace(ast.iter_child_nodes(found), origins, inner, calls=calls)


def _read_from(node: ast.AST, origins: Mapping[str, set[str]]) -> set[str]:
    return set().union(*(origins.get(n.id, set()) for n in ast.walk(node) if isinstance(n, ast.Name)))


def _stored_names(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _parameter_names(node: ast.FunctionDef) -> set[str]:
    return {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def _popped(call: ast.Call) -> str:
    match call:
        case ast.Call(func=ast.Attribute(attr="pop" | "get"), args=[ast.Constant(value=str(key)), *_]):
            return key
    return ""


def _known_inside(node: ast.AST | None, given: Mapping[str, Argument], line: int = sys.maxsize) -> dict[str, Argument]:
    """What is known of a function's parameters above `line`: what is passed, and literal defaults of the rest."""
    if not isinstance(node, ast.FunctionDef):
        return dict(given)
    known: dict[str, Argument] = {}
    positional = [*node.args.posonlyargs, *node.args.args]
    pairs = [*zip(reversed(positional), reversed(node.args.defaults), strict=False)]
    pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None]
    for argument, default in pairs:
        known[argument.arg] = argument_of(default, {})
    known.update(given)
    for found in ast.walk(node):  # a parameter that was assigned to on the way may be anything there
        if isinstance(found, ast.Assign) and found.lineno < line:
            takes_its_own = isinstance(found.value, ast.Call) and _popped(found.value)
            for name in _stored_names(found):
                if name in known and name != takes_its_own:
                    known[name] = Argument(never_none=known[name].never_none)
    return known


def _tests_of(node: ast.stmt | ast.expr, function: ast.AST | None) -> tuple[bodies.Test, ...]:
    if isinstance(function, ast.FunctionDef):
        for guard in bodies.guards(function):
            if guard.node is node:
                return guard.tests
    return ()


def _parameter_in(tests: tuple[bodies.Test, ...], given: Mapping[str, Argument]) -> str:
    names = {n.id for test in tests for n in ast.walk(test.expression) if isinstance(n, ast.Name)}
    return ", ".join(sorted(names & set(given)))
