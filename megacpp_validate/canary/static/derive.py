"""Derives the consumed surface from the bridge's own code, so that no list of it has to be kept by hand.

The bridge takes every symbol of Transformer Engine from an accessor of `imports.py`. The reader below follows the
values that the accessors give through assignments, attributes of `self`, calls, `with` statements and decorators,
and notes each use with what is known of its arguments and under which accessors' presence it is reached.
It is an abstract interpreter of straight code, not of loops or of containers: a value it loses is not consumed as
far as the canary knows, so call sites in the bridge are written plainly.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .accessors import ACCESSOR_FILE, BridgeFile, BridgeUnreadable, parse_file, read_accessors
from .arguments import argument_of, named_kinds, parameter_facts
from .surface import Accessor, Surface, Use, UseKind
from .values import ExpressionReader, Known, Ref, Scope, Value

__all__ = ["BridgeFile", "BridgeUnreadable", "derive_surface"]


def derive_surface(files: Sequence[BridgeFile], module_order: Sequence[str]) -> Surface:
    """The consumed surface of the bridge in `files`.

    Raises:
        BridgeUnreadable: a file is missing or is not Python, or there is no accessor in it, or no use of one.
    """
    trees = {file: parse_file(file) for file in files}
    accessors: dict[str, Accessor] = {}
    for file, tree in trees.items():
        if file.path.name == ACCESSOR_FILE:
            accessors.update((found.name, found) for found in read_accessors(file, tree))
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
    if not uses:  # a surface of nothing would be clean for every release
        raise BridgeUnreadable(
            "the bridge consumes nothing of Transformer Engine. Likely cause: its call sites are written in a way "
            "that the canary cannot follow. Next step: take symbols from the accessors of imports.py, as "
            "`te.linear.require()`."
        )
    return Surface(accessors, tuple(uses), tuple(module_order))


class _Reader(ExpressionReader):
    """Reads one file of the bridge; `uses` is what it found."""

    def read(self, tree: ast.Module) -> None:
        """Read the whole file."""
        scope = Scope(names=self._globals)
        if self._is_home:
            scope.names.update((name, Ref(name)) for name in self._accessors)
        self._functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._kinds = named_kinds(tree)
        if self._is_home:  # the accessors' own bodies are read as accessors, not as call sites
            kept = [n for n in tree.body if not (isinstance(n, ast.FunctionDef) and n.name in self._accessors)]
            self._block(kept, scope)
        else:
            self._block(tree.body, scope)

    # --- statements ---------------------------------------------------------------------------------------

    def _block(self, body: Iterable[ast.stmt], scope: Scope) -> None:
        for statement in body:
            self._statement(statement, scope)

    def _statement(self, node: ast.stmt, scope: Scope) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node, scope)
            case ast.ClassDef():
                self._class(node, scope)
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value, scope)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._assign([target], value, scope)
            case ast.Return(value=value) if value is not None:
                self._return(value, scope)
            case ast.If():
                self._if(node, scope)
            case ast.Assert():
                self._value(node.test, scope)
                scope.presence |= self._presence(node.test, scope)[0]
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    self._context(item, scope)
                self._block(body, scope)
            case _:
                for child in ast.iter_child_nodes(node):
                    self._any(child, scope)

    def _any(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.stmt):
            self._statement(node, scope)
        elif isinstance(node, ast.expr):
            self._value(node, scope)
        else:
            for child in ast.iter_child_nodes(node):
                self._any(child, scope)

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        home = ACCESSOR_FILE.removesuffix(".py")
        if isinstance(node, ast.Import):
            ends = f".{self._package}.{home}"
            self._modules |= {alias.asname for alias in node.names if alias.asname and f".{alias.name}".endswith(ends)}
            return
        for alias in node.names:
            known_as = alias.asname or alias.name
            if alias.name == home and (node.level or (node.module or "").rpartition(".")[2] == self._package):
                self._modules.add(known_as)
            elif (node.module or "").rpartition(".")[2] == home and alias.name in self._accessors:
                scope.names[known_as] = Ref(alias.name)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        for decorator in node.decorator_list:
            value = self._value(decorator, scope)
            if isinstance(value, Value):
                self._note(value, UseKind.DECORATOR, decorator, scope)
        inner = replace(
            scope,
            function=f"{scope.function}.{node.name}".lstrip("."),
            names=dict(scope.names),
            facts=parameter_facts(node.args, self._kinds),
            returns_class=_mentions(node.returns, "type"),
            returns_context=_mentions(node.returns, "AbstractContextManager"),
        )
        for name in inner.facts:
            inner.names.pop(name, None)  # a parameter hides what the module calls the same
        self._block(node.body, inner)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        for base in node.bases:
            value = self._value(base, scope)
            if isinstance(value, Value):
                self._note(value, UseKind.CLASS, base, scope)
        outer, self._fields = self._fields, {}
        inner = replace(scope, function=f"{scope.function}.{node.name}".lstrip("."), names=dict(scope.names))
        methods = sorted(node.body, key=lambda n: not (isinstance(n, ast.FunctionDef) and n.name == "__init__"))
        self._block(methods, inner)  # __init__ first: it says what the fields are
        self._fields = outer

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, scope: Scope) -> None:
        target, *others = targets
        self._assign_one(target, value, scope)
        for other in others:
            self._bind(other, self._quietly(value, scope), scope)

    def _assign_one(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Tuple):
            is_open = any(isinstance(element, ast.Starred) for element in target.elts)
            known = self._value(value, scope, unpack=0 if is_open else len(target.elts))
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

    def _return(self, value: ast.expr, scope: Scope) -> None:
        known = self._value(value, scope)
        if isinstance(known, Value) and scope.function in self._functions:
            self._returns[scope.function] = known
        if scope.returns_context and isinstance(known, Value):
            self._note(known, UseKind.CONTEXT, value, scope)
        if scope.returns_class:
            for node in ast.walk(value):
                found = self._quietly(node, scope) if isinstance(node, ast.expr) else None
                if isinstance(found, Value) and not found.path:
                    self._note(found, UseKind.CLASS, node, scope)

    def _if(self, node: ast.If, scope: Scope) -> None:
        self._value(node.test, scope)
        when_true, when_false = self._presence(node.test, scope)
        self._block(node.body, replace(scope, presence=scope.presence | when_true))
        self._block(node.orelse, replace(scope, presence=scope.presence | when_false))
        if _leaves(node.body):  # what follows is reached only where the test was false
            scope.presence |= when_false

    def _context(self, item: ast.withitem, scope: Scope) -> None:
        value = self._value(item.context_expr, scope)
        if isinstance(value, Value):
            self._note(value, UseKind.CONTEXT, item.context_expr, scope)

    def _returned_by(self, name: str) -> Known | None:
        if name not in self._returns and name not in self._reading:
            self._reading.add(name)
            probe = _Reader(self._file, self._accessors)
            probe._modules, probe._functions, probe._reading = self._modules, self._functions, self._reading
            probe._kinds = self._kinds
            probe._function(self._functions[name], Scope(names=dict(self._globals)))
            self._returns[name] = probe._returns.get(name)
            self._reading.discard(name)
        return self._returns.get(name)


def _mentions(annotation: ast.expr | None, name: str) -> bool:
    names = () if annotation is None else ast.walk(annotation)
    return any(isinstance(node, ast.Name) and node.id == name for node in names)


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
