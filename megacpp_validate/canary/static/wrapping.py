"""What stands between a call and the function that it names: wrappers that refuse it, functions that hand it on."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import griffe

from ...evidence.values import SourceLine
from . import bodies
from .findings import Change, ChangeKind, Impact
from .release import Found, Release
from .source_files import PACKAGE
from .surface import Use
from .syntax_nodes import walk

_OF_PYTHON = frozenset({"classmethod", "staticmethod"})


@dataclass(frozen=True)
class Wrapper:
    """A function that a decorator puts in the place of another.

    Attributes:
        node: its definition.
        file: the file that holds it.
        closure: names of the decorator's parameters -> the literals that it was made with.
    """

    node: ast.FunctionDef
    file: str
    closure: Mapping[str, object]

    def fires(self, guard: bodies.Guard, use: Use) -> bool:
        """Whether a guard of the wrapper surely stops this call."""
        if any(guard.node in walk(around) for around in walk(self.node) if _runs_at_times(around)):
            return False
        return all(self._holds(test.expression, use) is test.wanted for test in guard.tests)

    def _holds(self, test: ast.expr, use: Use) -> bool | None:
        """The outcome of `"key" in kwargs`; None for any other test."""
        named = self.node.args.kwarg
        match test:
            case ast.Compare(left=key, ops=[ast.In()], comparators=[ast.Name(id=name)]) if named and name == named.arg:
                wanted = self.closure.get(key.id) if isinstance(key, ast.Name) else getattr(key, "value", None)
                return wanted in use.keywords if isinstance(wanted, str) and not use.open_keywords else None
        return None


def _runs_at_times(around: ast.AST) -> bool:
    """Whether what stands in a statement may not be run, or may be caught, without a test that tells."""
    return isinstance(around, ast.For | ast.While) or (isinstance(around, ast.Try) and bool(around.handlers))


def compare_decorators(
    old: Release, new: Release, before: griffe.Object, after: griffe.Object, use: Use
) -> Iterator[Change]:
    """What keeps a call from the function that it names, and did not in the old release."""
    met = {guard.kind == "warn" for wrapper, guard in _guards(old, before) if wrapper.fires(guard, use)}
    if False in met:
        return  # it never came through
    for wrapper, guard in _guards(new, after):
        is_warning = guard.kind == "warn"
        if wrapper.fires(guard, use) and not (is_warning and True in met):
            yield Change(
                ChangeKind.DEPRECATED if is_warning else ChangeKind.GUARD_ADDED,
                Impact.RISK if is_warning else Impact.BREAKING,
                after=SourceLine(file=wrapper.file, line=guard.line),
                new=guard.message if is_warning else f"{guard.exception} if {guard.said or 'it is called'}",
                suggestion="" if is_warning else guard.message[:200],
            )


def is_undecorated(obj: griffe.Object | None) -> bool:
    """Whether a function is surely what its class gives: a decorator may make a value of it, as `property` does."""
    return isinstance(obj, griffe.Function) and all(str(d.value) in _OF_PYTHON for d in obj.decorators)


def _guards(release: Release, obj: griffe.Object) -> Iterator[tuple[Wrapper, bodies.Guard]]:
    node = release.node_of(obj)
    for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
        wrapper = _wrapper_of(release, obj, decorator)
        for guard in bodies.guards(wrapper.node) if wrapper is not None else ():
            if wrapper is not None and (guard.kind != "warn" or guard.is_deprecation):
                yield wrapper, guard


def _wrapper_of(release: Release, decorated: griffe.Object, decorator: ast.expr) -> Wrapper | None:
    """The wrapper that a decorator of the package puts around a function."""
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    found = release.in_scope(decorated.module, name) if _is_dotted(name) else None
    if not isinstance(found, Found) or not found.obj.path.startswith(PACKAGE):
        return None
    made = release.node_of(found.obj)
    closure: dict[str, object] = {}
    if isinstance(decorator, ast.Call) and isinstance(made, ast.FunctionDef):
        closure, made = _closure_of(made, decorator), _returned_function(made)
    wrapper = _returned_function(made)
    return Wrapper(wrapper, str(found.obj.filepath), closure) if wrapper is not None else None


def _closure_of(maker: ast.FunctionDef, call: ast.Call) -> dict[str, object]:
    names = [a.arg for a in (*maker.args.posonlyargs, *maker.args.args)]
    given = dict(zip(reversed(names), reversed(maker.args.defaults), strict=False))
    given |= dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
    return {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}


def _returned_function(node: ast.AST | None) -> ast.FunctionDef | None:
    """The function within a function that it returns, if it returns nothing else."""
    if not isinstance(node, ast.FunctionDef):
        return None
    inner = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    match [n for n in node.body if isinstance(n, ast.Return)]:
        case [ast.Return(value=ast.Name(id=name))]:
            return inner.get(name)
    return None


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def forwarded_to(release: Release, function: griffe.Function) -> Found | None:
    """What a function hands all of `*args, **kwargs` to, where it takes nothing else and returns what that gives."""
    match release.node_of(function):
        case ast.FunctionDef(
            args=ast.arguments(
                posonlyargs=[], args=[], kwonlyargs=[], vararg=ast.arg(arg=many), kwarg=ast.arg(arg=named)
            ),
            body=[*_, ast.Return(value=ast.Call() as call)],
        ) if ([*map(ast.unparse, call.args)], [*map(ast.unparse, call.keywords)]) == ([f"*{many}"], [f"**{named}"]):
            dotted = ast.unparse(call.func)
            found = release.in_scope(function.module, dotted) if _is_dotted(dotted) else None
            return found if isinstance(found, Found) and found.obj is not function else None
    return None


def applied_of(release: Release, attribute: griffe.Object) -> griffe.Function | None:
    """The signature of `name = SomeFunction.apply`: torch's autograd functions take places only, and no keyword."""
    owner, _, last = str(getattr(attribute, "value", "")).rpartition(".")
    found = release.in_scope(attribute.module, owner) if last == "apply" and _is_dotted(owner) else None
    forward = found.obj.members.get("forward") if isinstance(found, Found) else None
    if not isinstance(forward, griffe.Function):
        return None
    kinds = griffe.ParameterKind
    given = [p for p in [*forward.parameters][1:] if p.kind is not kinds.var_keyword]  # the first is the context
    places = [griffe.Parameter(p.name, annotation=p.annotation, kind=p.kind, default=p.default) for p in given]
    for place in places:
        place.kind = kinds.var_positional if place.kind is kinds.var_positional else kinds.positional_only
    return griffe.Function("apply", parameters=griffe.Parameters(*places), lineno=forward.lineno, parent=forward.parent)
