"""What stands between a name and the function that runs: decorators, functions that hand all arguments on, `apply`."""

from __future__ import annotations

import ast

import griffe

from .release import Found, Release

_OF_PYTHON = frozenset({"classmethod", "staticmethod"})


def is_undecorated(obj: griffe.Object | None) -> bool:
    """Whether a function is surely what its class gives: a decorator may make a value of it, as `property` does."""
    return isinstance(obj, griffe.Function) and all(str(d.value) in _OF_PYTHON for d in obj.decorators)


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
