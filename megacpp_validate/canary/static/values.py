"""What an expression of the bridge gives and consumes: values from Transformer Engine, followed and noted."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...evidence.values import SourceLine
from .accessors import ACCESSOR_FILE, BridgeFile
from .arguments import argument_of
from .presence import NOTHING, Presence, presence_of
from .surface import RESULT, Argument, Use, UseKind

_LOOKING = frozenset({"getattr", "hasattr", "isinstance", "issubclass", "partial"})


@dataclass(frozen=True)
class Ref:
    """An accessor itself, not yet asked for its symbol."""

    accessor: str


@dataclass(frozen=True)
class Value:
    """A value that came from Transformer Engine."""

    accessor: str
    path: tuple[str, ...] = ()


Known = Ref | Value


@dataclass
class Scope:
    """Where the reader stands: names in sight, and what it knows about the accessors there."""

    function: str = ""
    names: dict[str, Known] = field(default_factory=dict)
    facts: dict[str, Argument] = field(default_factory=dict)
    presence: Presence = NOTHING
    returns_class: bool = False
    returns_context: bool = False


class ExpressionReader(ABC):
    """Reads the expressions of one file; `uses` is what it found."""

    def __init__(self, file: BridgeFile, accessors: frozenset[str]) -> None:
        self.uses: list[Use] = []
        self._file = file
        self._accessors = accessors
        self._package = file.path.parent.name
        self._is_home = file.path.name == ACCESSOR_FILE
        self._modules: set[str] = set()  # names under which imports.py itself is known here
        self._globals: dict[str, Known] = {}  # names of the module itself
        self._kinds: dict[str, ast.expr] = {}  # kinds that it has a name for
        self._fields: dict[str, Known] = {}  # attributes of `self` of the class at hand
        self._functions: dict[str, ast.FunctionDef] = {}
        self._returns: dict[str, Known | None] = {}
        self._reading: set[str] = set()

    @abstractmethod
    def _any(self, node: ast.AST, scope: Scope) -> None:
        """Read whatever stands inside an expression."""

    def _bind(self, target: ast.expr, known: Known | None, scope: Scope) -> None:
        match target:
            case ast.Name(id=name):
                if known is None:
                    scope.names.pop(name, None)
                else:
                    scope.names[name] = known
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if known is not None:
                self._fields[attr] = known

    def _quietly(self, node: ast.expr, scope: Scope) -> Known | None:
        """The value of an expression that is read a second time: its uses are noted already."""
        kept = len(self.uses)
        value = self._value(node, replace(scope, names=dict(scope.names)))
        del self.uses[kept:]
        return value

    def _value(self, node: ast.expr, scope: Scope, *, unpack: int = 0) -> Known | None:
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
            case ast.BoolOp():
                return self._and_or(node, scope)
        for child in ast.iter_child_nodes(node):
            self._any(child, scope)
        return None

    def _if_else(self, test: ast.expr, body: ast.expr, orelse: ast.expr, scope: Scope) -> Known | None:
        self._value(test, scope)
        when_true, when_false = self._presence(test, scope)
        first = self._value(body, replace(scope, presence=scope.presence | when_true))
        second = self._value(orelse, replace(scope, presence=scope.presence | when_false))
        return first if first is not None else second

    def _and_or(self, node: ast.BoolOp, scope: Scope) -> Known | None:
        """Each part is reached only where those before it were true, or false."""
        known: list[Known | None] = []
        for part in node.values:
            known.append(self._value(part, scope))
            when_true, when_false = self._presence(part, scope)
            reached = when_true if isinstance(node.op, ast.And) else when_false
            scope = replace(scope, presence=scope.presence | reached)
        return next((value for value in known if value is not None), None)

    def _attribute(self, node: ast.Attribute, scope: Scope, *, note: bool) -> Known | None:
        match node.value:
            case ast.Name(id=name) if name in self._modules and name not in scope.names:
                return Ref(node.attr) if node.attr in self._accessors else None
            case ast.Name(id="self"):
                return self._fields.get(node.attr)
        owner = self._value(node.value, scope)
        if isinstance(owner, Ref):
            return owner if node.attr == "require" else None
        if owner is None:
            return None
        value = Value(owner.accessor, (*owner.path, node.attr))
        if note and isinstance(node.ctx, ast.Load):
            self._note(value, UseKind.ATTRIBUTE, node, scope)
        return value

    def _call(self, node: ast.Call, scope: Scope, unpack: int) -> Known | None:
        name = _plain_name(node.func)
        if name in _LOOKING and name not in scope.names:
            return self._look_into(node, name, scope)
        if name in self._functions and name not in (scope.names.keys() | self._accessors):
            self._arguments_of(node, scope)
            return self._returned_by(name)
        if isinstance(node.func, ast.Attribute):
            called = self._attribute(node.func, scope, note=False)
        else:
            called = self._value(node.func, scope)
        self._arguments_of(node, scope)
        if isinstance(called, Ref):
            value = Value(called.accessor)
            insists = isinstance(node.func, ast.Attribute) and node.func.attr == "require"
            self._note(value, UseKind.NAME, node, scope, optional=not insists)
            return value
        if called is None:
            return None
        self._note_call(called, node, node.args, scope, unpack=unpack)
        return Value(called.accessor, (*called.path, RESULT))

    def _look_into(self, node: ast.Call, name: str, scope: Scope) -> Known | None:
        """Builtins that look into a value, and `partial`."""
        first, *rest = self._arguments_of(node, scope) or [None]
        if name in {"getattr", "hasattr"} and isinstance(first, Value) and rest:
            value = Value(first.accessor, (*first.path, _attribute_name(node.args[1])))
            optional = name == "hasattr" or len(rest) > 1
            self._note(value, UseKind.ATTRIBUTE, node, scope, optional=optional)
            return None if name == "hasattr" else value
        if name in {"isinstance", "issubclass"} and rest:
            kinds = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
            for kind in kinds:
                found = self._quietly(kind, scope)
                if isinstance(found, Value):
                    self._note(found, UseKind.CLASS, kind, scope)
        if name == "partial" and isinstance(first, Value):
            self._note_call(first, node, node.args[1:], scope, partial=True)
            return first
        return None

    @abstractmethod
    def _returned_by(self, name: str) -> Known | None:
        """What a function of this file hands on."""

    def _arguments_of(self, node: ast.Call, scope: Scope) -> list[Known | None]:
        """The values of the positional arguments; those of keywords are read too."""
        positionals = [self._value(argument, scope) for argument in node.args]
        for keyword in node.keywords:
            self._value(keyword.value, scope)
        return positionals

    # --- notes --------------------------------------------------------------------------------------------

    def _note(self, value: Value, kind: UseKind, node: ast.AST, scope: Scope, *, optional: bool = False) -> None:
        self.uses.append(self._use(value, kind, node, scope, optional=optional))

    def _note_call(
        self,
        called: Value,
        node: ast.Call,
        args: Sequence[ast.expr],
        scope: Scope,
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

    def _use(self, value: Value, kind: UseKind, node: ast.AST, scope: Scope, *, optional: bool = False) -> Use:
        return Use(
            accessor=value.accessor,
            path=value.path,
            kind=kind,
            module=self._file.module,
            site=SourceLine(file=self._file.shown, line=getattr(node, "lineno", 0)),
            function=scope.function,
            optional=optional,
            present=scope.presence.present,
            absent=scope.presence.absent,
        )

    def _presence(self, test: ast.expr, scope: Scope) -> tuple[Presence, Presence]:
        return presence_of(test, lambda node: self._root(node, scope))

    def _root(self, node: ast.expr, scope: Scope) -> frozenset[str]:
        value = self._quietly(node, scope)
        return frozenset({value.accessor}) if isinstance(value, Value) and not value.path else frozenset()


def _plain_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="functools"), attr="partial"):
            return "partial"
    return ""


def _attribute_name(node: ast.expr) -> str:
    """The attribute that getattr asks for; `{}` stands for what is known only at run time."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in values)
    return "{}"
