"""Compares the checks of a called function in two releases: which are new, and which this call can fail."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial

import griffe

from ...evidence.values import SourceLine
from . import bodies
from .conditions import can_fire
from .findings import Change, ChangeKind, Impact
from .reach import Callee, Reached, bound_names, callees, guards_reached, rewritten
from .release import Release
from .surface import UNKNOWN, Argument, argument_of
from .syntax_nodes import children, once_per_node, parameters_of, statements_below, stored_by, substituted, walk

_REWORDED = 0.6  # likeness of two guards' messages from which one is the other, if both test the same names
_SAME_WORDS = 0.75  # ... if they test others, in nearly the same way
_SHARED_WORDS = 0.8  # ... if they test one of the same names: words that the shorter message shares with the other
_NULLABLE = r"\b(None|Optional|Any|object)\b"  # annotations of what may be None
_KNOWN_DEPTH = 3  # calls to follow in the old release: a check that only moved is not new


@dataclass(frozen=True)
class Consumed:
    """A consumed function in one release, and its syntax tree."""

    release: Release
    function: griffe.Function
    node: ast.FunctionDef


@dataclass(frozen=True)
class Passed:
    """What is known of a call.

    Attributes:
        before, after: parameter -> what the call passes for it, under each release; not in it if it is left out.
        fields: field of the object whose method is called -> what is known of it under the new release.
    """

    before: Mapping[str, Argument]
    after: Mapping[str, Argument]
    fields: Mapping[str, Argument]


def compare_guards(before: Consumed, after: Consumed, passed: Passed) -> Iterator[Change]:
    """Checks that the new release has and the old one had not, and that the call may run into.

    Args:
        before, after: the function in each release.
        passed: what is known of the call.
    """
    known = [reached.guard for reached in _on_the_way(before, depth=_KNOWN_DEPTH)]
    old_view = _View(before, _as_required(before.node, passed.before), {})
    given = _as_required(before.node, passed.after)
    view = _View(after, given, passed.fields)
    new_features = _parameter_names(after.node) - _parameter_names(before.node) - set(given)
    for reached in _on_the_way(after):
        guard = reached.guard
        if guard.is_deprecation:
            continue  # `compare_deprecations` reports it
        tests = view.tests_of(guard)
        fires = view.can_fire(guard, reached.called_at)
        same = [one for one in known if (one.kind == "warn", one.condition) == (guard.kind == "warn", guard.condition)]
        if same and not (fires and all(old_view.can_fire(one) is False for one in same)):
            continue  # it was there before, and it is not only now that this call runs into it
        own = tests[len(tests) - len(reached.own) :]  # those in the function that holds the guard
        # A helper that raises whatever it is given is about what leads to its call, and what it lets pass before.
        about = own if any(not test.passed_by for test in own) or not reached.through else tests
        concerned = view.concerned_by(about) or (view.concerned_by(own, passed=True) if reached.through else set())
        if fires is False or not (concerned or (fires and not reached.through)):
            continue
        if any(_same_guard(guard, one) and not (fires and old_view.can_fire(one) is False) for one in known):
            continue
        if any(_asks_for(test, view.far, new_features) for test in tests):
            continue  # it guards a feature that this release brings and that the bridge does not ask for
        if any(_is_new_kind(test, before.release, before.function) for test in tests):
            continue  # it is about a class that the old release did not have: no value of it was ever passed
        if any(ast.unparse(test.expression).endswith(".is_cuda") for test in tests if test.wanted is test.passed_by):
            continue  # this path is taken with tensors of the GPU only
        left_out = (_names_in(tests) & _parameter_names(after.node)) - set(given)
        yield _told(reached, concerned or left_out, certain=fires is True)


def _on_the_way(consumed: Consumed, *, depth: int = 1) -> list[Reached]:
    """Guards of a call; of a class that is a context manager also those of `__enter__`, which runs next."""
    release, function, node = consumed.release, consumed.function, consumed.node
    found = guards_reached(release, function, node, depth=depth)
    holder = function.parent
    entered = holder.members.get("__enter__") if isinstance(holder, griffe.Class) else None
    if node.name != "__init__" or not isinstance(entered, griffe.Function):
        return found
    inner = release.node_of(entered)
    if not isinstance(inner, ast.FunctionDef):
        return found
    told = substituted(inner, partial(_stored_in, stored_fields(node)))  # in terms of what the constructor was given
    late = guards_reached(release, entered, told, depth=depth)
    return [*found, *(replace(one, through=one.through or entered.name) for one in late)]


def _told(reached: Reached, parameters: set[str], *, certain: bool) -> Change:
    guard = reached.guard
    is_warning = guard.kind == "warn"
    return Change(
        ChangeKind.WARNING_ADDED if is_warning else ChangeKind.GUARD_ADDED,
        Impact.BREAKING if certain and not is_warning and not reached.through else Impact.RISK,
        parameter=", ".join(sorted(parameters)),
        after=SourceLine(file=reached.file, line=guard.line),
        new=f"{guard.exception or guard.kind} if {guard.said or 'it is called'}",
        suggestion=(guard.message or reached.message)[:400],
        raises=guard.exception,
    )


class _View:
    """What is known of a function's names, seen from one call of it."""

    def __init__(self, consumed: Consumed, given: Mapping[str, Argument], fields: Mapping[str, Argument]) -> None:
        self._consumed, self._node = consumed, consumed.node
        self._given = given
        self._of_self = {f"self.{name}": argument for name, argument in fields.items()}
        own = given if consumed.node.name == "__post_init__" else ()
        self._stored = {name: f"self.{name}" for name in fields}
        self._stored |= stored_fields(consumed.node) | {name: name for name in own}
        self._tests: dict[bodies.Guard, tuple[bodies.Test, ...]] = {}
        self.near, self.far = _origins(consumed.node)

    def tests_of(self, guard: bodies.Guard) -> tuple[bodies.Test, ...]:
        """A guard's tests, with parameters in the place of the fields that hold them."""
        if guard not in self._tests:  # each guard is held against all of the other release's
            self._tests[guard] = rewritten(partial(_stored_in, self._stored), guard.tests)
        return self._tests[guard]

    def concerned_by(self, tests: Iterable[bodies.Test], *, passed: bool = False) -> set[str]:
        """The parameters that the call passes and that the enclosing tests are about; with `passed` the others."""
        origins = self.far if passed else self.near
        return {p for name in _names_in(tests, passed=passed) for p in origins.get(name, {name})} & set(self._given)

    def can_fire(self, guard: bodies.Guard, called_at: int = 0) -> bool | None:
        """Whether a guard can fire with what the call passes."""
        called = callees(self._consumed.release, self._consumed.function, self._node)

        def known_at(line: int) -> dict[str, Argument]:
            return self._of_self | known_inside(self._node, self._given, called_at or line, called)

        return can_fire(self.tests_of(guard), known_at)


def _names_in(tests: Iterable[bodies.Test], *, passed: bool = False) -> set[str]:
    return {n.id for t in tests if t.passed_by is passed for n in walk(t.expression) if isinstance(n, ast.Name)}


def _is_new_kind(test: bodies.Test, old: Release, function: griffe.Function) -> bool:
    """Whether a test holds only for instances of a class that the old release does not know."""
    match test:
        case bodies.Test(passed_by=True):
            return False
        case bodies.Test(ast.Call(func=ast.Name(id="isinstance"), args=[_, ast.Name(id=kind)]), wanted=True):
            return not hasattr(builtins, kind) and not any(
                kind in module.members for module in (function.module, *old.modules())
            )
        case bodies.Test(ast.UnaryOp(op=ast.Not(), operand=operand), wanted=wanted):
            return _is_new_kind(bodies.Test(operand, not wanted), old, function)
        case bodies.Test(ast.Call(func=ast.Name(id=name), args=[_, *_]), wanted=True) if "is_" in name:
            kind = name.partition("is_")[2]  # `_is_nvfp4_row_scaled_tensor(a)`
            return not any(kind in old.text(file) for file in old.files())
        case bodies.Test(ast.BoolOp(op=ast.And(), values=values), wanted=wanted):
            parts = (_is_new_kind(bodies.Test(value, wanted), old, function) for value in values)
            return any(parts) if wanted else all(parts)
    return False


def _asks_for(test: bodies.Test, origins: Mapping[str, set[str]], features: set[str]) -> bool:
    """Whether a test holds only where one of `features` was asked for: `x is not None`, or `x` itself."""
    name, is_left_out = bodies.tested(test.expression)
    return bool(name) and test.wanted is not is_left_out and bool(origins.get(name, {name}) & features)


def _stored_in(stored: Mapping[str, str], node: ast.expr) -> ast.expr | None:
    """The parameter that `self.name` holds."""
    match node:
        case ast.Attribute(value=ast.Name(id="self"), attr=attr) if attr in stored:
            return ast.Name(stored[attr], ast.Load())
    return None


@once_per_node
def stored_fields(node: ast.FunctionDef) -> dict[str, str]:
    """Fields of `self` that the body sets once, each to a parameter, unchanged."""
    stored: dict[str, str] = {}
    spoilt: set[str] = set()
    parameters = _parameter_names(node)
    for found in walk(node):
        if isinstance(found, ast.Attribute) and isinstance(found.ctx, ast.Store) and ast.unparse(found.value) == "self":
            spoilt |= {found.attr} & set(stored)
            stored.setdefault(found.attr, "")
    for found in walk(node):
        match found:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)], value=ast.Name(id=name)):
                if name in parameters and attr not in spoilt:
                    stored[attr] = name
    return {attr: name for attr, name in stored.items() if name}


def _same_guard(new: bodies.Guard, old: bodies.Guard) -> bool:
    """The same guard, moved or reworded: the same test, or the same message for nearly the same test."""
    if (new.kind == "warn") != (old.kind == "warn"):
        return False  # what used to warn now raises, or the other way round
    if new.condition == old.condition or (new.innermost and new.innermost == old.innermost):
        return True
    if not new.message or not old.message:
        return False
    likeness = SequenceMatcher(None, new.message, old.message).ratio()
    if new.names & old.names and _shared_words(new.message, old.message) >= _SHARED_WORDS:
        return True
    is_near = likeness > _SAME_WORDS and SequenceMatcher(None, new.condition, old.condition).ratio() > 0.5
    return is_near or (likeness > _REWORDED and new.names == old.names)


def _shared_words(one: str, other: str) -> float:
    """Share of the words of the shorter message that the other has too; 0 for messages of a word or two."""
    words, others = (set(re.findall(r"[a-z_]{3,}", text.lower())) for text in (one, other))
    return len(words & others) / min(len(words), len(others)) if min(len(words), len(others)) > 2 else 0.0


@once_per_node
def _origins(node: ast.FunctionDef) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Local names -> the parameters that their values come from.

    Through plain assignments; the second also through calls, and through the tests under which they are made.
    """
    near: dict[str, set[str]] = {name: {name} for name in _parameter_names(node)}
    far = {name: {name} for name in near}
    _trace(node.body, near, set(), calls=False)
    _trace(node.body, far, set(), calls=True)
    return near, far


def _trace(body: Iterable[ast.AST], origins: dict[str, set[str]], under: set[str], *, calls: bool) -> None:
    for found in body:
        inner = under
        if isinstance(found, ast.Assign | ast.AnnAssign) and found.value is not None:
            if isinstance(found.value, ast.Call) and (key := _popped(found.value)):
                sources = {key}
            elif not calls and any(isinstance(n, ast.Call) for n in walk(found.value)):
                continue
            else:
                sources = _read_from(found.value, origins)
            for name in stored_by(found):
                origins.setdefault(name, set()).update(sources | (under if calls else set()))
        elif isinstance(found, ast.If):
            inner = under | _read_from(found.test, origins)
        _trace(children(found), origins, inner, calls=calls)


def _read_from(node: ast.AST, origins: Mapping[str, set[str]]) -> set[str]:
    return set().union(*(origins.get(n.id, set()) for n in walk(node) if isinstance(n, ast.Name)))


def _parameter_names(node: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument, _ in parameters_of(node.args)}


def _popped(call: ast.Call) -> str:
    match call:
        case ast.Call(func=ast.Attribute(attr="pop" | "get"), args=[ast.Constant(value=str(key)), *_]):
            return key
    return ""


def _as_required(before: ast.FunctionDef, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """What a call passes, with what the old release asked of it already.

    An argument without a default there is not None: a call that passes None failed before. `self` is no argument.
    """
    known = {name: argument for name, argument in given.items() if name != "self"}
    for parameter, default in parameters_of(before.args):
        passed, kind = known.get(parameter.arg), ast.unparse(parameter.annotation or ast.Tuple([]))
        if passed and default is None and passed.values is None and not re.search(_NULLABLE, kind):
            known[parameter.arg] = replace(passed, never_none=True)
    return known


def kept_fields(release: Release, function: griffe.Function, passed: Iterable[str]) -> dict[str, Argument]:
    """What is known of the fields that a constructor sets to its parameters, where a call passes some of them."""
    node = release.node_of(function)
    if not isinstance(node, ast.FunctionDef):
        return {}
    known = known_inside(node, dict.fromkeys(passed, UNKNOWN), called=callees(release, function, node))
    return {field: known[name] for field, name in stored_fields(node).items() if name in known}


def known_inside(
    node: ast.AST | None, given: Mapping[str, Argument], line: int = sys.maxsize,
    called: Mapping[int, Callee] | None = None,
) -> dict[str, Argument]:  # fmt: skip
    """What is known of a function's parameters above `line`: what is passed, and literal defaults of the rest.

    Args:
        called: calls in the function: one may give back what it is given.
    """
    if not isinstance(node, ast.FunctionDef):
        return dict(given)
    known = {a.arg: argument_of(default, {}) for a, default in parameters_of(node.args) if default is not None}
    known.update(given)
    for stored_at, name, value in _assigned(node):  # a parameter that was assigned to on the way may be anything there
        callee = (called or {}).get(id(value))
        if stored_at < line and name in known and not (callee and _gives_back(callee, name, known)):
            known[name] = Argument(never_none=known[name].never_none)
    return known


def _gives_back(callee: Callee, name: str, known: Mapping[str, Argument]) -> bool:
    """Whether a call surely returns what it is given under a name: `a, b = resolve(a, b)` where both are off."""
    passed = {p: v.id for p, v in bound_names(callee.call, callee.code).items() if isinstance(v, ast.Name)}
    inside = {p: known[outer] for p, outer in passed.items() if outer in known}
    for found, tests in bodies.returns_reached(callee.code):
        fires = can_fire(tests, lambda _: inside)
        if fires is not False:
            returned = found.value.elts if isinstance(found.value, ast.Tuple) else [found.value]
            return bool(fires) and any(isinstance(v, ast.Name) and passed.get(v.id) == name for v in returned)
    return False


@once_per_node
def _assigned(node: ast.FunctionDef) -> list[tuple[int, str, ast.expr]]:
    """Lines, names and values that a function assigns; not where a name is given what `**kwargs` holds under it."""
    return [
        (found.lineno, name, found.value)
        for found in statements_below(node)
        if isinstance(found, ast.Assign)
        for name in stored_by(found)
        if not isinstance(found.value, ast.Call) or name != _popped(found.value)
    ]
