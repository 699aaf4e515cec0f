"""Collects the guards that a call reaches, in the called function and in functions that it passes its arguments to."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import griffe

from . import bodies
from .release import Found, Release
from .syntax_nodes import parameters_of, substituted, walk

_LOST = "_lost_"  # before a name of the callee whose value cannot be followed, so that it is no name of the caller


class Callee(NamedTuple):
    """A call, the code that it runs, and what that belongs to."""

    call: ast.Call
    code: ast.FunctionDef
    function: griffe.Function


@dataclass(frozen=True)
class Reached:
    """A guard in terms of the consumed function's own parameters.

    Attributes:
        guard: its tests speak of the parameters of the function that the bridge calls.
        file: where it stands.
        own: those of its tests that stand in the function that holds it; the others lead to the call of that function.
        through: the function that it stands in, where that is another one.
        called_at: the line of the call through which it is reached; 0 where there is none.
        message: what a function gives that makes the text of what is raised.
    """

    guard: bodies.Guard
    file: str
    own: tuple[bodies.Test, ...]
    through: str = ""
    called_at: int = 0
    message: str = ""


def guards_reached(
    release: Release, function: griffe.Function, node: ast.FunctionDef, *, depth: int = 1
) -> list[Reached]:
    """Guards of a function, then those of functions of the package that it calls with its own names.

    Args:
        release: where the function stands.
        function, node: the function and its syntax tree.
        depth: how many calls to follow.
    """
    key = f"guards reached from {function.path}:{node.lineno} at {depth}"
    if key not in release.memory:  # several call sites consume one function
        release.memory[key] = list(_reach(release, function, node, depth))
    found: list[Reached] = release.memory[key]
    return found


def _reach(release: Release, function: griffe.Function, node: ast.FunctionDef, depth: int) -> Iterator[Reached]:
    file = str(function.filepath)
    constants = partial(_constant_for, release, function.module)
    called = callees(release, function, node)
    for guard in bodies.guards(node):
        tests = rewritten(constants, guard.tests)
        given = [called[id(n)].code for n in walk(guard.node) if id(n) in called]
        texts = [bodies.text_of(s) for callee in given for s in callee.body if isinstance(s, ast.Return)]
        yield Reached(bodies.Guard(guard.kind, guard.node, tests), file, tests, message=" ".join(texts))
    if depth == 0:
        return
    before_calls = bodies.tests_before_calls(node)
    for call, callee, source in called.values():
        names = bound_names(call, callee)
        if not any(isinstance(value, ast.Name) for value in names.values()):
            continue
        theirs = {n.id for n in walk(callee) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        theirs |= {parameter.arg for parameter, _ in parameters_of(callee.args)}
        renamed = partial(_callers_name, names, theirs)
        leading = rewritten(constants, before_calls.get(id(call), ()))
        for deeper in _reach(release, source, callee, depth - 1):
            tests = rewritten(renamed, deeper.guard.tests)
            guard = bodies.Guard(deeper.guard.kind, deeper.guard.node, (*leading, *tests))
            own = tests[len(tests) - len(deeper.own) :]
            yield Reached(guard, deeper.file, own, callee.name, call.lineno, deeper.message)


def rewritten(
    instead: Callable[[ast.expr], ast.expr | None], tests: tuple[bodies.Test, ...]
) -> tuple[bodies.Test, ...]:  # fmt: skip
    """Tests with other expressions in the place of some."""
    return tuple(test._replace(expression=substituted(test.expression, instead)) for test in tests)


def callees(release: Release, function: griffe.Function, node: ast.FunctionDef) -> dict[int, Callee]:
    """Calls in a function that run code of the package, by the `id` of the call."""
    known: dict[ast.FunctionDef, dict[int, Callee]] = release.memory.setdefault("callees", {})
    if node not in known:
        known[node] = {id(callee.call): callee for callee in _callees(release, function, node)}
    return known[node]


def _callees(release: Release, function: griffe.Function, node: ast.FunctionDef) -> Iterator[Callee]:
    for call in (n for n in walk(node) if isinstance(n, ast.Call)):
        target = ast.unparse(call.func)
        obj = _custom_op(function, target) if target.startswith("torch.ops.") else _named(release, function, target)
        callee = release.node_of(obj) if obj is not None else None
        if isinstance(callee, ast.FunctionDef) and obj is not None:
            yield Callee(call, callee, obj)


def _named(release: Release, function: griffe.Function, target: str) -> griffe.Function | None:
    """The function of the package that a call names, or the `forward` behind its `.apply`."""
    dotted = target.removesuffix(".apply")
    if not dotted.replace(".", "").replace("_", "a").isalnum() or dotted.startswith(("self.", "torch.", "super")):
        return None
    found = release.in_scope(function.module, dotted)
    if not isinstance(found, Found) or not release.library.owns(found.obj.path):
        return None
    obj = found.obj.members.get("forward") if dotted != target and isinstance(found.obj, griffe.Class) else found.obj
    return obj if isinstance(obj, griffe.Function) else None


def _custom_op(function: griffe.Function, target: str) -> griffe.Function | None:
    """`torch.ops.space.name(...)` is the function of this file that is registered as "space::name"."""
    registered = "::".join(target.split(".")[2:4])
    members = (one for one in function.module.members.values() if isinstance(one, griffe.Function))
    return next((one for one in members if any(f"'{registered}'" in str(d.value) for d in one.decorators)), None)


def bound_names(call: ast.Call, callee: ast.FunctionDef) -> dict[str, ast.expr]:
    """Parameter of the callee -> what is passed for it."""
    parameters = [a.arg for a in (*callee.args.posonlyargs, *callee.args.args)]
    if parameters[:1] in (["ctx"], ["self"]):
        parameters = parameters[1:]
    bound = dict(zip(parameters, call.args, strict=False))
    bound |= {k.arg: k.value for k in call.keywords if k.arg}
    for node in callee.body:  # `kept = parameter` at the top is the parameter under another name
        match node:
            case ast.Assign(targets=[ast.Name(id=kept)], value=ast.Name(id=parameter)) if parameter in bound:
                bound.setdefault(kept, bound[parameter])
    return bound


def _constant_for(release: Release, module: griffe.Module, node: ast.expr) -> ast.expr | None:
    """The value of a module constant: a check changes with the list that it looks into."""
    return constant_in(release, module, node.id) if isinstance(node, ast.Name) else None


def constant_in(release: Release, module: griffe.Module, name: str) -> ast.expr | None:
    """The literal value of a module-level constant, by the name that a module's own code knows it under."""
    key = f"constant {module.path}.{name}"
    if key not in release.memory:
        release.memory[key] = None
        found = release.in_scope(module, name)
        constant = found.obj if isinstance(found, Found) and isinstance(found.obj, griffe.Attribute) else None
        if constant is not None and constant.value is not None and not _is_state(release, constant):
            with suppress(ValueError, SyntaxError, TypeError):
                ast.literal_eval(str(constant.value))
                release.memory[key] = ast.parse(str(constant.value), mode="eval").body
    value: ast.expr | None = release.memory[key]
    return value


def _is_state(release: Release, attribute: griffe.Attribute) -> bool:
    """Whether a function of the module sets it anew while the program runs (`global NAME`)."""
    nodes = walk(release.syntax(str(attribute.filepath)))
    return any(isinstance(node, ast.Global) and attribute.name in node.names for node in nodes)


def _callers_name(names: Mapping[str, ast.expr], own: set[str], node: ast.expr) -> ast.expr | None:
    """The caller's name for one of the callee's."""
    value = names.get(node.id) if isinstance(node, ast.Name) else None
    if isinstance(value, ast.Name | ast.Constant):
        return value
    return ast.Name(f"{_LOST}{node.id}", ast.Load()) if isinstance(node, ast.Name) and node.id in own else None
