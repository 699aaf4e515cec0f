"""Callables that are not called as they were defined: `functools.partial`, and decorators that take other arguments."""

from __future__ import annotations

import ast

import griffe

from .release import Found, Release
from .source_files import PACKAGE

_ONLY = griffe.ParameterKind.keyword_only
_BY_PLACE = {griffe.ParameterKind.positional_only, griffe.ParameterKind.positional_or_keyword}


def partial_of(release: Release, attribute: griffe.Object) -> griffe.Function | None:
    """What `name = functools.partial(function, ...)` is called as; None where it is something else."""
    value = attribute.value if isinstance(attribute, griffe.Attribute) else None
    if not isinstance(value, griffe.ExprCall) or str(value.function).rpartition(".")[2] != "partial":
        return None
    first, *given = value.arguments or [""]
    found = release.in_scope(attribute.module, str(first))
    if not isinstance(found, Found) or not isinstance(found.obj, griffe.Function):
        return None
    named = {a.name: str(a.value) for a in given if isinstance(a, griffe.ExprKeyword)}
    places = len(given) - len(named)
    parameters: list[griffe.Parameter] = []
    for parameter in found.obj.parameters:
        if places and parameter.kind in _BY_PLACE:
            places -= 1
            continue
        filled = parameter.name in named
        by_name = filled or any(p.kind is _ONLY and p.name in named for p in parameters)
        kind = _ONLY if by_name and parameter.kind in _BY_PLACE else parameter.kind
        default = named[parameter.name] if filled else parameter.default
        parameters.append(griffe.Parameter(parameter.name, annotation=parameter.annotation, kind=kind, default=default))
    return griffe.Function(
        found.obj.name,
        parameters=griffe.Parameters(*parameters),
        decorators=found.obj.decorators,
        returns=found.obj.returns,
        lineno=found.obj.lineno,
        endlineno=found.obj.endlineno,
        parent=found.obj.parent,
    )


def taken_by_decorators(release: Release, function: griffe.Function) -> list[griffe.Parameter] | None:
    """Parameters of the outermost wrapper that a decorator of the package puts around a function.

    None where what is called takes whatever the function takes, or where nobody can say.
    """
    node = release.node_of(function)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    for decorator in node.decorator_list:  # the outermost first
        wrapper = _wrapper_of(release, function, decorator)
        if wrapper is None:
            return None
        if wrapper.args.vararg is None or wrapper.args.kwarg is None:
            return _parameters(wrapper.args)
    return None


def stands_for(release: Release, function: griffe.Function) -> Found | None:
    """What a function hands all of `*args, **kwargs` to, where it takes nothing else and returns what that gives."""
    node = release.node_of(function)
    match node:
        case ast.FunctionDef(
            args=ast.arguments(
                posonlyargs=[], args=[], kwonlyargs=[], vararg=ast.arg(arg=many), kwarg=ast.arg(arg=named)
            ),
            body=[*_, ast.Return(value=ast.Call() as call)],
        ) if _hands_on(call, many, named):
            dotted = ast.unparse(call.func)
            if all(part.isidentifier() for part in dotted.split(".")):
                found = release.in_scope(function.module, dotted)
                return found if isinstance(found, Found) and found.obj is not function else None
    return None


def method_behind(release: Release, function: griffe.Function) -> griffe.Function | None:
    """The method of the same object that a method hands all of its `*args, **kwargs` to, whatever else it does."""
    node = release.node_of(function)
    match node:
        case ast.FunctionDef(
            args=ast.arguments(
                posonlyargs=[],
                args=[ast.arg(arg=this)],
                kwonlyargs=[],
                vararg=ast.arg(arg=many),
                kwarg=ast.arg(arg=named),
            ),
            body=body,
        ) if isinstance(function.parent, griffe.Class):
            calls = [
                s.value for s in body if isinstance(s, ast.Expr | ast.Return) and isinstance(s.value, ast.Call)
            ]  # at once, under no condition
            for call in calls:
                match call.func:
                    case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == this:
                        if not _hands_on(call, many, named):
                            continue
                        lineage = (function.parent, *release.bases(function.parent)[0])
                        found = next((c.members[name] for c in lineage if name in c.members), None)
                        return found if isinstance(found, griffe.Function) else None
    return None


def _hands_on(call: ast.Call, many: str, named: str) -> bool:
    """Whether a call is given `*many, **named` and nothing else."""
    given = [ast.unparse(a) for a in call.args], [ast.unparse(k) for k in call.keywords]
    return given == ([f"*{many}"], [f"**{named}"])


def _wrapper_of(release: Release, function: griffe.Function, decorator: ast.expr) -> ast.FunctionDef | None:
    made_by_a_call = isinstance(decorator, ast.Call)
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    found = release.in_scope(function.module, name)
    if not isinstance(found, Found) or not found.obj.path.startswith(PACKAGE):
        return None
    inner = _handed_back(_first_definition(release, found.obj))
    return _handed_back(inner) if made_by_a_call else inner


def _first_definition(release: Release, maker: griffe.Object) -> ast.AST | None:
    """A definition that is made twice, in the branches of an `if`, is the first: the other is for what is older."""
    tree = release.syntax(str(maker.filepath))
    for node in tree.body:
        if isinstance(node, ast.If):
            named = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
            if maker.name in named and isinstance(maker.parent, griffe.Module):
                return named[maker.name]
    return release.node_of(maker)


def _handed_back(node: ast.AST | None) -> ast.FunctionDef | None:
    """The function within a function that it returns, if it returns nothing else."""
    if not isinstance(node, ast.FunctionDef):
        return None
    inner = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
    returned = [n for n in node.body if isinstance(n, ast.Return)]
    match returned:
        case [ast.Return(value=ast.Name(id=name))] if name in inner:
            return inner[name]
    return None


def _parameters(args: ast.arguments) -> list[griffe.Parameter]:
    kinds = griffe.ParameterKind
    places = [(a, kinds.positional_only) for a in args.posonlyargs]
    places += [(a, kinds.positional_or_keyword) for a in args.args]
    defaults = [None] * (len(places) - len(args.defaults)) + [ast.unparse(d) for d in args.defaults]
    found = [griffe.Parameter(a.arg, kind=k, default=d) for (a, k), d in zip(places, defaults, strict=True)]
    if args.vararg is not None:
        found.append(griffe.Parameter(args.vararg.arg, kind=kinds.var_positional))
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        text = None if default is None else ast.unparse(default)
        found.append(griffe.Parameter(argument.arg, kind=_ONLY, default=text))
    if args.kwarg is not None:
        found.append(griffe.Parameter(args.kwarg.arg, kind=kinds.var_keyword))
    return found
