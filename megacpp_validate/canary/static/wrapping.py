"""Callables that are not called as they were defined: `functools.partial`, and decorators that take other arguments."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import griffe

from ...evidence.values import SourceLine
from . import bodies
from .findings import Change, ChangeKind, Impact
from .import_time import absolute
from .release import Absent, Found, Lookup, Release
from .source_files import PACKAGE
from .surface import Use
from .syntax_nodes import walk

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


def applied_of(release: Release, attribute: griffe.Object) -> griffe.Function | None:
    """What `name = SomeFunction.apply` is called as: torch's autograd functions take places only, and no keyword."""
    value = attribute.value if isinstance(attribute, griffe.Attribute) else None
    owner, _, last = str(value or "").rpartition(".")
    if last != "apply" or not all(part.isidentifier() for part in owner.split(".")):
        return None
    found = release.in_scope(attribute.module, owner)
    if not isinstance(found, Found) or not isinstance(found.obj, griffe.Class):
        return None
    forward = found.obj.members.get("forward")
    if not isinstance(forward, griffe.Function) or not any(
        str(b).endswith("autograd.Function") for b in found.obj.bases
    ):
        return None
    own = griffe.ParameterKind.positional_only
    context = 0 if "setup_context" in found.obj.members else 1  # which `forward` gets only where nothing else does
    given = [p for p in [*forward.parameters][context:] if p.kind is not griffe.ParameterKind.var_keyword]
    places = (
        p if p.kind not in _BY_PLACE else griffe.Parameter(p.name, annotation=p.annotation, kind=own, default=p.default)
        for p in given
    )
    return griffe.Function(
        "apply",
        parameters=griffe.Parameters(*places),
        lineno=forward.lineno,
        endlineno=forward.endlineno,
        parent=forward.parent,
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
                found = _meant_inside(release, function, node, dotted)
                return found if isinstance(found, Found) and found.obj is not function else None
    return None


def _meant_inside(release: Release, function: griffe.Function, node: ast.FunctionDef, dotted: str) -> Lookup:
    """What a dotted name means in a function's body, where what the body imports itself comes first."""
    first, *rest = dotted.split(".")
    module = function.module
    for one in (statement for statement in node.body if isinstance(statement, ast.ImportFrom)):
        for alias in one.names:
            if (alias.asname or alias.name) == first:
                package = module.path if module.is_init_module else module.path.rpartition(".")[0]
                base = absolute(one.module or "", one.level, package)
                found = release.lookup(base, alias.name)
                if isinstance(found, Absent) and (below := release.module(f"{base}.{alias.name}")) is not None:
                    found = Found(below)
                for name in rest:
                    found = release.lookup(found.obj.path, name) if isinstance(found, Found) else found
                return found
    return release.in_scope(module, dotted)


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
                        above = 0
                    case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]), attr="__call__" as name):
                        above = 1  # the bases' own, and torch's calls `forward`
                    case _:
                        continue
                if not _hands_on(call, many, named):
                    continue
                own, bases = function.parent, release.bases(function.parent)[0]
                found = next((c.members[name] for c in (own, *bases)[above:] if name in c.members), None)
                if found is None and above:
                    found = next((c.members["forward"] for c in (own, *bases) if "forward" in c.members), None)
                return found if isinstance(found, griffe.Function) else None
    return None


def _hands_on(call: ast.Call, many: str, named: str) -> bool:
    """Whether a call is given `*many, **named` and nothing else."""
    given = [ast.unparse(a) for a in call.args], [ast.unparse(k) for k in call.keywords]
    return given == ([f"*{many}"], [f"**{named}"])


def _wrapper_of(release: Release, function: griffe.Function, decorator: ast.expr) -> ast.FunctionDef | None:
    maker = maker_of(release, function, decorator)
    if maker is None:
        return None
    inner = handed_back(maker[0])
    return handed_back(inner) if isinstance(decorator, ast.Call) else inner


def maker_of(release: Release, decorated: griffe.Object, decorator: ast.expr) -> tuple[ast.FunctionDef, str] | None:
    """The function of the package that a decorator names, and its file."""
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    if not all(part.isidentifier() for part in name.split(".")):
        return None
    found = release.in_scope(decorated.module, name)
    if not isinstance(found, Found) or not found.obj.path.startswith(PACKAGE):
        return None
    node = _first_definition(release, found.obj)
    return (node, str(found.obj.filepath)) if isinstance(node, ast.FunctionDef) else None


def _first_definition(release: Release, maker: griffe.Object) -> ast.AST | None:
    """A definition that is made twice, in the branches of an `if`, is the first: the other is for what is older."""
    tree = release.syntax(str(maker.filepath))
    for node in tree.body:
        if isinstance(node, ast.If):
            named = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}
            if maker.name in named and isinstance(maker.parent, griffe.Module):
                return named[maker.name]
    return release.node_of(maker)


def handed_back(node: ast.AST | None) -> ast.FunctionDef | None:
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


_OPERATORS: Final = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip

_OF_PYTHON: Final = frozenset({"classmethod", "staticmethod"})


@dataclass(frozen=True)
class Wrapper:
    """A function that a decorator puts in the place of another, or of a class's constructor.

    Attributes:
        node: it.
        file: where it stands.
        closure: names of the decorator's parameters -> the literals that it was made with.
        is_bound: its `*args` begin with the object itself.
    """

    node: ast.FunctionDef
    file: str
    closure: Mapping[str, object]
    is_bound: bool

    def fires(self, guard: bodies.Guard, use: Use) -> bool:
        """Whether a guard of the wrapper surely stops this call."""
        if any(guard.node in walk(around) for around in walk(self.node) if _runs_at_times(around)):
            return False
        return all(self._holds(test.expression, use) is test.wanted for test in guard.tests)

    def _holds(self, test: ast.expr, use: Use) -> bool | None:
        many, named = self.node.args.vararg, self.node.args.kwarg
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._holds(operand, use)
                return None if inner is None else not inner
            case ast.BoolOp(op=op, values=values):
                outcomes = [self._holds(value, use) for value in values]
                decisive = isinstance(op, ast.Or)
                return decisive if decisive in outcomes else None if None in outcomes else not decisive
            case ast.Compare(left=key, ops=[ast.In()], comparators=[ast.Name(id=name)]) if named and name == named.arg:
                wanted = self._literal(key)
                return wanted in use.keywords if isinstance(wanted, str) and not use.open_keywords else None
            case ast.Compare(
                left=ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]), ops=[op], comparators=[limit]
            ) if many and name == many.arg and not use.open_positionals and type(op) in _OPERATORS:
                number = self._literal(limit)
                count = len(use.positionals) + self.is_bound - len(self.node.args.args)
                return bool(_OPERATORS[type(op)](count, number)) if isinstance(number, int) else None
        return None

    def _literal(self, node: ast.expr) -> object:
        if isinstance(node, ast.Name):
            return self.closure.get(node.id)
        return node.value if isinstance(node, ast.Constant) else None

    def renamed(self) -> dict[str, str]:
        """Keywords that it hands on under another name: old -> new."""
        found: dict[str, str] = {}
        named = self.node.args.kwarg.arg if self.node.args.kwarg else ""
        for one in walk(self.node):
            match one:
                case ast.Assign(
                    targets=[ast.Subscript(value=ast.Name(id=owner), slice=new)],
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id=other), attr="pop"), args=[old, *_]),
                ) if owner == other == named:
                    names = self._literal(old), self._literal(new)
                    if isinstance(names[0], str) and isinstance(names[1], str):
                        found[names[0]] = names[1]
        return found


def _runs_at_times(around: ast.AST) -> bool:
    """Whether what stands in a statement may not be run, or may be caught, without a test that tells."""
    return isinstance(around, ast.For | ast.While) or (isinstance(around, ast.Try) and bool(around.handlers))


def compare_decorators(
    old: Release, new: Release, before: griffe.Object, after: griffe.Object, use: Use
) -> Iterator[Change]:
    """What keeps a call from the function or class that it names, and did not in the old release."""
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
    for wrapper in wrappers_of(release, obj):
        for guard in bodies.guards(wrapper.node):
            if guard.kind != "warn" or guard.is_deprecation:
                yield wrapper, guard


def wrappers_of(release: Release, obj: griffe.Object) -> list[Wrapper]:
    """The wrappers that decorators of the package put around a function or a class's constructor, outermost first."""
    node = release.node_of(obj)
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return []
    found: list[Wrapper] = []
    for decorator in node.decorator_list:
        maker = maker_of(release, obj, decorator)
        if maker is None:
            continue
        made, file = maker
        closure: dict[str, object] = {}
        if isinstance(decorator, ast.Call):
            closure, inner = _bound(made, decorator), handed_back(made)
            if inner is None:
                continue
            made = inner
        wrapper = _new_constructor(made) if isinstance(node, ast.ClassDef) else handed_back(made)
        if wrapper is not None:
            is_method = isinstance(obj.parent, griffe.Class) and "staticmethod" not in obj.labels
            found.append(Wrapper(wrapper, file, closure, is_bound=is_method or wrapper.name == "__init__"))
    return found


def _bound(maker: ast.FunctionDef, call: ast.Call) -> dict[str, object]:
    names = [a.arg for a in (*maker.args.posonlyargs, *maker.args.args)]
    defaults = zip(reversed(names), reversed(maker.args.defaults), strict=False)
    given = (
        dict(defaults) | dict(zip(names, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
    )
    return {name: value.value for name, value in given.items() if isinstance(value, ast.Constant)}


def _new_constructor(maker: ast.FunctionDef) -> ast.FunctionDef | None:
    """The function that a class decorator puts in the place of `__init__`."""
    inner = {n.name: n for n in maker.body if isinstance(n, ast.FunctionDef)}
    for one in maker.body:
        match one:
            case ast.Assign(
                targets=[ast.Attribute(value=ast.Name(id=owner), attr="__init__")], value=ast.Name(id=name)
            ):
                if maker.args.args and owner == maker.args.args[0].arg:
                    return inner.get(name)
    return None
