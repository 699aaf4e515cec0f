"""Derives the consumed surface from the bridge's own code, so that no list of it has to be kept by hand.

The bridge takes every symbol of Transformer Engine from an accessor of `imports.py`. The reader below follows the
values that the accessors give through assignments, attributes of `self`, calls, `with` statements and decorators,
and notes each use with what is known of its arguments and under which accessors' presence it is reached.
It is an abstract interpreter of straight code, not of loops or of containers: a value it loses is not consumed as
far as the canary knows, so call sites in the bridge are written plainly.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..evidence.findings import SourceLine
from .arguments import argument_of, parameter_facts
from .surface import RESULT, UNKNOWN, Accessor, Argument, Surface, Symbol, Use, UseKind

ACCESSOR_FILE = "imports.py"
VENDOR = "transformer_engine"


class BridgeUnreadable(ValueError):
    """The bridge's code cannot be read as the canary needs it; the text says where and why."""


@dataclass(frozen=True)
class BridgeFile:
    """One file of the bridge: which module it belongs to, its path, and its name in reports."""

    module: str
    path: Path
    shown: str


@dataclass(frozen=True)
class _Ref:
    """An accessor itself, not yet asked for its symbol."""

    accessor: str


@dataclass(frozen=True)
class _Value:
    """A value that came from Transformer Engine."""

    accessor: str
    path: tuple[str, ...] = ()


_Known = _Ref | _Value


def derive_surface(files: Sequence[BridgeFile], module_order: Sequence[str]) -> Surface:
    """The consumed surface of the bridge in `files`.

    Raises:
        BridgeUnreadable: a file is missing or is not Python, or there is no accessor in it.
    """
    trees = {file: _parse(file) for file in files}
    accessors: dict[str, Accessor] = {}
    for file, tree in trees.items():
        if file.path.name == ACCESSOR_FILE:
            accessors.update((found.name, found) for found in _read_accessors(file, tree))
    if not accessors:
        raise BridgeUnreadable(
            f"no accessor was found in the bridge's {ACCESSOR_FILE}. Likely cause: the accessors are no longer "
            "functions that import one symbol. Next step: write them as plain import statements again."
        )
    uses: list[Use] = []
    for file, tree in trees.items():
        reader = _Reader(file, frozenset(accessors))
        reader.read(tree)
        uses.extend(reader.uses)
    return Surface(accessors, tuple(uses), tuple(module_order))


def _parse(file: BridgeFile) -> ast.Module:
    try:
        return ast.parse(file.path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as fault:
        raise BridgeUnreadable(
            f"{file.shown} cannot be read as Python: {fault}. Next step: mend it, or the path in matrix/bridge.toml."
        ) from fault


def _read_accessors(file: BridgeFile, tree: ast.Module) -> Iterable[Accessor]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        symbols: list[Symbol] = []
        sites: list[SourceLine] = []
        for found in ast.walk(node):
            if isinstance(found, ast.ImportFrom) and (found.module or "").partition(".")[0] == VENDOR:
                symbols += [Symbol(found.module or "", alias.name) for alias in found.names]
                sites += [SourceLine(file=file.shown, line=found.lineno)] * len(found.names)
        if symbols:
            yield Accessor(node.name, tuple(symbols), tuple(sites))


@dataclass
class _Scope:
    """Where the reader stands: names in sight, and what it knows about the accessors there."""

    function: str = ""
    names: dict[str, _Known] = field(default_factory=dict)
    facts: dict[str, Argument] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()
    returns_class: bool = False
    returns_context: bool = False


class _Reader:
    """Reads one file of the bridge; `uses` is what it found."""

    def __init__(self, file: BridgeFile, accessors: frozenset[str]) -> None:
        self.uses: list[Use] = []
        self._file = file
        self._accessors = accessors
        self._is_home = file.path.name == ACCESSOR_FILE
        self._modules: set[str] = set()  # names under which imports.py itself is known here
        self._fields: dict[str, _Known] = {}  # attributes of `self` of the class at hand
        self._functions: dict[str, ast.FunctionDef] = {}
        self._returns: dict[str, _Known | None] = {}
        self._reading: set[str] = set()

    def read(self, tree: ast.Module) -> None:
        """Read the whole file."""
        scope = _Scope()
        if self._is_home:
            scope.names.update((name, _Ref(name)) for name in self._accessors)
        self._functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        if self._is_home:  # the accessors' own bodies are read as accessors, not as call sites
            kept = [
                n for n in tree.body if not (isinstance(n, ast.FunctionDef) and n.name in self._accessors)
            ]
            self._block(kept, scope)
        else:
            self._block(tree.body, scope)

    # --- statements ---------------------------------------------------------------------------------------

    def _block(self, body: Iterable[ast.stmt], scope: _Scope) -> None:
        for statement in body:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: _Scope) -> None:
        match node:
            case ast.ImportFrom():
                self._import(node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, scope)
            case ast.ClassDef():
                self._class(node, scope)
            case ast.Assign(targets=[target], value=value):
                self._assign(target, value, scope)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign(target, value, scope)
            case ast.Return(value=value) if value is not None:
                self._return(value, scope)
            case ast.If():
                self._if(node, scope)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    self._context(item, scope)
                self._block(body, scope)
            case _:
                for child in ast.iter_child_nodes(node):
                    self._any(child, scope)

    def _any(self, node: ast.AST, scope: _Scope) -> None:
        if isinstance(node, ast.stmt):
            self._statement(node, scope)
        elif isinstance(node, ast.expr):
            self._value(node, scope)
        else:
            for child in ast.iter_child_nodes(node):
                self._any(child, scope)

    def _import(self, node: ast.ImportFrom, scope: _Scope) -> None:
        home = ACCESSOR_FILE.removesuffix(".py")
        for alias in node.names:
            known_as = alias.asname or alias.name
            if alias.name == home and node.level:
                self._modules.add(known_as)
            elif (node.module or "").rpartition(".")[2] == home and alias.name in self._accessors:
                scope.names[known_as] = _Ref(alias.name)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: _Scope) -> None:
        for decorator in node.decorator_list:
            value = self._value(decorator, scope)
            if isinstance(value, _Value):
                self._note(value, UseKind.DECORATOR, decorator, scope)
        inner = replace(
            scope,
            function=f"{scope.function}.{node.name}".lstrip("."),
            names=dict(scope.names),
            facts=parameter_facts(node.args),
            returns_class=_mentions(node.returns, "type"),
            returns_context=_mentions(node.returns, "AbstractContextManager"),
        )
        for name in inner.facts:
            inner.names.pop(name, None)  # a parameter hides what the module calls the same
        self._block(node.body, inner)

    def _class(self, node: ast.ClassDef, scope: _Scope) -> None:
        for base in node.bases:
            value = self._value(base, scope)
            if isinstance(value, _Value):
                self._note(value, UseKind.CLASS, base, scope)
        outer, self._fields = self._fields, {}
        inner = replace(scope, function=f"{scope.function}.{node.name}".lstrip("."), names=dict(scope.names))
        methods = sorted(
            node.body, key=lambda n: not (isinstance(n, ast.FunctionDef) and n.name == "__init__")
        )
        self._block(methods, inner)  # __init__ first: it says what the fields are
        self._fields = outer

    def _assign(self, target: ast.expr, value: ast.expr, scope: _Scope) -> None:
        if isinstance(target, ast.Tuple):
            known = self._value(value, scope, unpack=len(target.elts))
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                for one, other in zip(target.elts, value.elts, strict=True):
                    self._bind(one, self._quietly(other, scope), scope)
            elif known is not None:
                for one in target.elts:
                    self._bind(one, None, scope)
            return
        self._bind(target, self._value(value, scope), scope)
        if isinstance(target, ast.Name):
            scope.facts[target.id] = argument_of(value, scope.facts)

    def _bind(self, target: ast.expr, known: _Known | None, scope: _Scope) -> None:
        match target:
            case ast.Name(id=name):
                if known is None:
                    scope.names.pop(name, None)
                else:
                    scope.names[name] = known
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if known is not None:
                self._fields[attr] = known

    def _return(self, value: ast.expr, scope: _Scope) -> None:
        known = self._value(value, scope)
        if isinstance(known, _Value) and scope.function in self._functions:
            self._returns[scope.function] = known
        if scope.returns_context and isinstance(known, _Value):
            self._note(known, UseKind.CONTEXT, value, scope)
        if scope.returns_class:
            for node in ast.walk(value):
                found = self._quietly(node, scope) if isinstance(node, ast.expr) else None
                if isinstance(found, _Value) and not found.path:
                    self._note(found, UseKind.CLASS, node, scope)

    def _if(self, node: ast.If, scope: _Scope) -> None:
        self._value(node.test, scope)
        present, absent = self._presence(node.test, scope)
        self._block(node.body, replace(scope, present=scope.present | present, absent=scope.absent | absent))
        self._block(
            node.orelse, replace(scope, present=scope.present | absent, absent=scope.absent | present)
        )
        if _leaves(node.body):  # what follows is reached only where the test was false
            scope.present |= absent
            scope.absent |= present

    def _presence(self, test: ast.expr, scope: _Scope) -> tuple[frozenset[str], frozenset[str]]:
        """Accessors that are there, and that are not, where the test is true. Only what a test says outright."""
        match test:
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return self._root(left, scope), frozenset()
            case ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
                return frozenset(), self._root(left, scope)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                present, absent = self._presence(operand, scope)
                return (absent, present) if len(present) + len(absent) == 1 else (frozenset(), frozenset())
            case ast.NamedExpr() | ast.Name() | ast.Call():
                return self._root(test, scope), frozenset()
        return frozenset(), frozenset()

    def _root(self, node: ast.expr, scope: _Scope) -> frozenset[str]:
        value = self._quietly(node, scope)
        return frozenset({value.accessor}) if isinstance(value, _Value) and not value.path else frozenset()

    def _context(self, item: ast.withitem, scope: _Scope) -> None:
        value = self._value(item.context_expr, scope)
        if isinstance(value, _Value):
            self._note(value, UseKind.CONTEXT, item.context_expr, scope)

    # --- expressions --------------------------------------------------------------------------------------

    def _quietly(self, node: ast.expr, scope: _Scope) -> _Known | None:
        """The value of an expression that is read a second time: its uses are noted already."""
        kept = len(self.uses)
        value = self._value(node, replace(scope, names=dict(scope.names)))
        del self.uses[kept:]
        return value

    def _value(self, node: ast.expr, scope: _Scope, *, unpack: int = 0) -> _Known | None:
        match node:
            case ast.Name(id=name):
                return scope.names.get(name)
            case ast.NamedExpr(target=target, value=value):
                known = self._value(value, scope)
                self._bind(target, known, scope)
                return known
            case ast.Attribute():
                return self._attribute(node, scope, note=True)
            case ast.Call():
                return self._call(node, scope, unpack)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._if_else(test, body, orelse, scope)
        for child in ast.iter_child_nodes(node):
            self._any(child, scope)
        return None

    def _if_else(self, test: ast.expr, body: ast.expr, orelse: ast.expr, scope: _Scope) -> _Known | None:
        self._value(test, scope)
        present, absent = self._presence(test, scope)
        then = replace(scope, present=scope.present | present, absent=scope.absent | absent)
        other = replace(scope, present=scope.present | absent, absent=scope.absent | present)
        first, second = self._value(body, then), self._value(orelse, other)
        return first if first is not None else second

    def _attribute(self, node: ast.Attribute, scope: _Scope, *, note: bool) -> _Known | None:
        match node.value:
            case ast.Name(id=name) if name in self._modules and name not in scope.names:
                return _Ref(node.attr) if node.attr in self._accessors else None
            case ast.Name(id="self"):
                return self._fields.get(node.attr)
        owner = self._value(node.value, scope)
        if isinstance(owner, _Ref):
            return owner if node.attr == "require" else None
        if owner is None:
            return None
        value = _Value(owner.accessor, (*owner.path, node.attr))
        if note and isinstance(node.ctx, ast.Load):
            self._note(value, UseKind.ATTRIBUTE, node, scope)
        return value

    def _call(self, node: ast.Call, scope: _Scope, unpack: int) -> _Known | None:
        if isinstance(node.func, ast.Name) and node.func.id not in scope.names:
            special = self._named_call(node, node.func.id, scope)
            if special is not NotImplemented:
                return special
        if isinstance(node.func, ast.Attribute):
            called = self._attribute(node.func, scope, note=False)
        else:
            called = self._value(node.func, scope)
        self._arguments_of(node, scope)
        if isinstance(called, _Ref):
            value = _Value(called.accessor)
            insists = isinstance(node.func, ast.Attribute) and node.func.attr == "require"
            self._note(value, UseKind.NAME, node, scope, optional=not insists)
            return value
        if called is None:
            return None
        self._note_call(called, node, node.args, scope, unpack=unpack)
        return _Value(called.accessor, (*called.path, RESULT))

    def _named_call(self, node: ast.Call, name: str, scope: _Scope) -> _Known | None:
        """Builtins that look into a value, and functions of this file that hand one on."""
        arguments = [self._value(argument, scope) for argument in node.args] if name in _LOOKING else []
        first = arguments[0] if arguments else None
        if name in {"getattr", "hasattr"} and isinstance(first, _Value) and len(node.args) > 1:
            value = _Value(first.accessor, (*first.path, _attribute_name(node.args[1])))
            optional = name == "hasattr" or len(node.args) > 2
            self._note(value, UseKind.ATTRIBUTE, node, scope, optional=optional)
            return None if name == "hasattr" else value
        if name in {"isinstance", "issubclass"}:
            for value, argument in zip(arguments[1:], node.args[1:], strict=True):
                if isinstance(value, _Value):
                    self._note(value, UseKind.CLASS, argument, scope)
            return None
        if name == "partial" and isinstance(first, _Value):
            self._note_call(first, node, node.args[1:], scope, partial=True)
            return first
        if name in self._functions and name not in self._accessors:
            self._arguments_of(node, scope)
            return self._returned_by(name)
        return NotImplemented

    def _returned_by(self, name: str) -> _Known | None:
        if name not in self._returns and name not in self._reading:
            self._reading.add(name)
            probe = _Reader(self._file, self._accessors)
            probe._modules, probe._functions, probe._reading = self._modules, self._functions, self._reading
            probe._function(self._functions[name], _Scope())
            self._returns[name] = probe._returns.get(name)
            self._reading.discard(name)
        return self._returns.get(name)

    def _arguments_of(self, node: ast.Call, scope: _Scope) -> None:
        for argument in node.args:
            self._value(argument, scope)
        for keyword in node.keywords:
            self._value(keyword.value, scope)

    # --- notes --------------------------------------------------------------------------------------------

    def _note(
        self, value: _Value, kind: UseKind, node: ast.AST, scope: _Scope, *, optional: bool = False
    ) -> None:
        self.uses.append(self._use(value, kind, node, scope, optional=optional))

    def _note_call(
        self,
        called: _Value,
        node: ast.Call,
        args: Sequence[ast.expr],
        scope: _Scope,
        *,
        unpack: int = 0,
        partial: bool = False,
    ) -> None:
        plain = [argument for argument in args if not isinstance(argument, ast.Starred)]
        keywords = {k.arg: argument_of(k.value, scope.facts) for k in node.keywords if k.arg is not None}
        self.uses.append(
            replace(
                self._use(called, UseKind.CALL, node, scope),
                positionals=tuple(argument_of(argument, scope.facts) for argument in plain),
                keywords=keywords,
                open_positionals=len(plain) < len(args),
                open_keywords=any(keyword.arg is None for keyword in node.keywords),
                partial=partial,
                unpack=unpack,
            )
        )

    def _use(
        self, value: _Value, kind: UseKind, node: ast.AST, scope: _Scope, *, optional: bool = False
    ) -> Use:
        return Use(
            accessor=value.accessor,
            path=value.path,
            kind=kind,
            module=self._file.module,
            site=SourceLine(file=self._file.shown, line=getattr(node, "lineno", 0)),
            function=scope.function,
            optional=optional,
            present=scope.present,
            absent=scope.absent,
        )


_LOOKING = frozenset({"getattr", "hasattr", "isinstance", "issubclass", "partial"})


def _mentions(annotation: ast.expr | None, name: str) -> bool:
    names = () if annotation is None else ast.walk(annotation)
    return any(isinstance(node, ast.Name) and node.id == name for node in names)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _attribute_name(node: ast.expr) -> str:
    """The attribute that getattr asks for; `{}` stands for what is known only at run time."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in values)
    return "{}"


__all__ = ["BridgeFile", "BridgeUnreadable", "Mapping", "derive_surface"]
