"""Reads what a project uses of one release of Transformer Engine, by following values through its code.

An abstract interpreter on `ast`: sets of values for each name, both ways where a test is not known, one way where the
release decides (`is_te_min_version("1.10")`, `hasattr`, `try: import`). It runs nothing of the project. Loops are read
once, functions once with unknown arguments; only functions that reach the version are read again for each call.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from packaging.version import Version

from ...evidence.values import SourceLine
from .arguments import argument_of, named_kinds, parameter_facts
from .constants import METHODS, VERSION_PARTS, call_external, call_text, compare, subscript, truth_of
from .interpreted import (
    ANYTHING,
    NOTHING,
    Class,
    Const,
    External,
    Function,
    Import,
    Instance,
    Items,
    Keywords,
    Method,
    Names,
    ProjectModule,
    Super,
    Unknown,
    Value,
    Values,
    Vendor,
    VendorModule,
    constant,
    either,
)
from .project import Source, SourceFile
from .release import Absent, Release
from .shapes import shape_of
from .source_files import PACKAGE
from .surface import RESULT, UNKNOWN, Argument, Symbol, Use, UseKind

_PASSES: Final = 2  # fields, parameters and results are known after the first two; the last one notes uses
_DEEPEST: Final = 12  # calls within calls
_STEPS: Final = 20_000  # statements of functions that are read again for a call
_CATCHES_IMPORT: Final = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})
_MINDS_VERSION: Final = frozenset({"__version__", "get_distribution", "version"})

Key = tuple[str, int, int, UseKind]


class _ImportFails(Exception):
    """An import of the release at hand raises, inside of a `try` that catches it.

    Args:
        symbol: that is not there.
        name: that it would have bound.
    """

    def __init__(self, symbol: Symbol, name: str) -> None:
        super().__init__(symbol, name)
        self.symbol, self.name = symbol, name


class Interpreter:
    """Reads a source tree under one release of Transformer Engine."""

    def __init__(self, source: Source, release: Release) -> None:
        self.source, self.project, self.release = source, source.project, release
        self.uses: dict[Key, list[Use]] = {}
        self.order: dict[str, None] = {}  # rows, each after those that it imports
        self.near: tuple[SourceFile, ...] = ()  # files that take what comes from Transformer Engine from others
        self._quiet = 1
        self._loading = False
        self._modules: dict[str, Names] = {}
        self._functions: dict[ast.AST, Function] = {}
        self._classes: dict[ast.AST, Class] = {}
        self._parameters: dict[ast.AST, dict[str, Values]] = {}
        self._returns: dict[ast.AST, Values] = {}
        self._again: dict[tuple[object, ...], Values] = {}
        self._reading: list[ast.AST] = []
        self._minding: dict[ast.AST, bool] = {}
        self._yields: dict[ast.AST, bool] = {}
        self._steps = 0

    def read(self) -> dict[Key, list[Use]]:
        """Every use, by its place in the code and its kind."""
        for number in range(_PASSES):
            self._quiet = int(number < _PASSES - 1)
            self._modules, done = {}, set[ast.AST]()
            self._functions = {}
            self._loading = True
            for file in (*self.project.using, *self.near):
                self.module(file)
            self._loading = False
            while waiting := [f for node, f in self._functions.items() if node not in done]:
                for function in waiting:
                    done.add(function.node)
                    self._read_function(function)
            self.near = self.project.near(self._exported())
        return self.uses

    def _exported(self) -> set[str]:
        """Names by which other files of the project can take what comes from Transformer Engine."""
        found = set()
        for names in self._modules.values():
            own = {name for name, values in names.names.items() if any(map(self._is_from_vendor, values))}
            found |= own | ({names.file.module.rpartition(".")[2]} if own else set())
        return found

    def _is_from_vendor(self, value: Value) -> bool:
        match value:
            case Vendor() | VendorModule() | Import():
                return True
            case Class():
                return any(isinstance(one, Vendor) for one in value.lineage)
            case Function(node=node):
                return any(self._is_from_vendor(v) for v in self._returns.get(node, ()) if not isinstance(v, Function))
        return False

    # --- modules and functions --------------------------------------------------------------------------------

    def module(self, file: SourceFile) -> Names:
        """The names of a module of the project."""
        if file.module not in self._modules:
            matters = self.project.mentions(file) or file in self.near
            tree = self.project.tree(file) if matters else None
            names = self._modules[file.module] = Names(file, facts={})
            if tree is not None:
                names.names["__name__"] = constant(file.module)
                self._kinds = named_kinds(tree)
                try:
                    self._block(tree.body, names)
                except _ImportFails:
                    pass  # a `try` around the import of this module catches it
            self.order.setdefault(self.source.row_of(file))
        return self._modules[file.module]

    def _read_function(self, function: Function) -> Values:
        """What a function returns, its parameters unknown but for what the project's own calls pass."""
        node = function.node
        if node in self._reading or len(self._reading) >= _DEEPEST:
            return self._returns.get(node, ANYTHING)
        self._reading.append(node)
        names = self._inside(function)
        for name, values in self._parameters.get(node, {}).items():
            names.names[name] = either(names.names.get(name, ANYTHING), values)
        returned = self._run_body(function, names)
        self._reading.pop()
        self._returns[node] = returned
        return returned

    def _inside(self, function: Function) -> Names:
        """The names inside of a function before its first statement."""
        node, outer = function.node, function.names
        title = ".".join(filter(None, (outer.function, getattr(node, "name", "<lambda>"))))
        names = Names(outer.file, outer, title, cls=function.owner)
        names.facts = parameter_facts(node.args, {})
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in (*every, *filter(None, (node.args.vararg, node.args.kwarg))):
            names.names[argument.arg] = ANYTHING
        if function.owner is not None and every and not _is_decorated(node, "staticmethod"):
            made_by_class = _is_decorated(node, "classmethod") or node.name == "__new__"  # type: ignore[union-attr]
            holder: Value = function.owner if made_by_class else Instance(function.owner)
            names.names[every[0].arg] = frozenset({holder})
        return names

    def _run_body(self, function: Function, names: Names) -> Values:
        node = function.node
        if isinstance(node, ast.Lambda):
            return self._value(node.body, names)
        ends = not self._block(node.body, names)
        if node not in self._yields:
            self._yields[node] = any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(node))
        if self._yields[node]:
            return ANYTHING
        return either(*names.returned, *([] if ends else [NOTHING])) if names.returned or not ends else ANYTHING

    # --- statements -------------------------------------------------------------------------------------------

    def _block(self, body: Iterable[ast.stmt], names: Names) -> bool:
        """Read statements; whether what follows them is reached."""
        return all(self._statement(statement, names) for statement in body)

    def _statement(self, node: ast.stmt, names: Names) -> bool:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node, names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define_function(node, names)
            case ast.ClassDef():
                self._define_class(node, names)
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value, names)
            case ast.AnnAssign(target=target, value=value):
                if value is not None:
                    self._assign([target], value, names)
            case ast.AugAssign(target=target, value=value):
                self._value(value, names)
                self._bind(target, ANYTHING, names)
            case ast.Return(value=value):
                names.returned.append(NOTHING if value is None else self._value(value, names))
                return False
            case ast.Raise() | ast.Continue() | ast.Break():
                self._children(node, names)
                return False
            case ast.If():
                return self._if(node, names)
            case ast.Assert(test=test):
                self._value(test, names)
                return self._narrow(test, names, wanted=True)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    self._enter(item, names)
                return self._block(body, names)
            case ast.For() | ast.AsyncFor():
                self._for(node, names)
            case ast.While(test=test, body=body, orelse=orelse):
                self._value(test, names)
                self._ways(names, [body, []])
                self._block(orelse, names)
            case ast.Try() | ast.TryStar():
                return self._try(node, names)
            case ast.Global(names=listed):
                names.is_global |= set(listed)
            case ast.Match(subject=subject, cases=cases):
                self._value(subject, names)
                self._ways(names, [*(case.body for case in cases), []])
            case _:
                self._children(node, names)
        return True

    def _ways(self, names: Names, bodies: Sequence[Sequence[ast.stmt]]) -> bool:
        """Read several ways of which any may be taken."""
        ends = []
        for body in bodies:
            way = names.fork()
            if self._block(body, way):
                ends.append(way)
        names.join(ends)
        return bool(ends)

    def _if(self, node: ast.If, names: Names) -> bool:
        known = truth_of(self._value(node.test, names))
        ends = []
        for wanted, body in ((True, node.body), (False, node.orelse)):
            if known is not None and known is not wanted:
                continue
            way = names if known is not None else names.fork()
            if self._narrow(node.test, way, wanted=wanted) and self._block(body, way):
                ends.append(way)
        if known is None:
            names.join(ends)
        return bool(ends)

    def _narrow(self, test: ast.expr, names: Names, *, wanted: bool) -> bool:
        """Keep of a name what a test lets pass; whether anything is left."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._narrow(operand, names, wanted=not wanted)
            case ast.BoolOp(op=op, values=parts) if isinstance(op, ast.And) is wanted:
                return all(self._narrow(part, names, wanted=wanted) for part in parts)
            case ast.Compare(
                left=ast.Name(id=name), ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(None)]
            ):
                is_none = isinstance(op, ast.Is) is wanted
                return self._keep(name, names, lambda one: isinstance(one, Unknown) or (one == Const(None)) is is_none)
            case ast.Name(id=name):
                return self._keep(name, names, lambda one: truth_of(frozenset({one})) is not (not wanted))
            case ast.Constant(value=value):
                return bool(value) is wanted
        return True

    def _keep(self, name: str, names: Names, keeps: Callable[[Value], bool]) -> bool:
        known = names.find(name)
        if known is None:
            return True
        left = frozenset(one for one in known if keeps(one))
        if left != known and left:
            names.names[name] = left
        return bool(left)

    def _for(self, node: ast.For | ast.AsyncFor, names: Names) -> None:
        over = self._value(node.iter, names)
        each = [value for one in over if isinstance(one, Items) for value in one.values]
        is_known = all(isinstance(one, Items) for one in over)
        self._bind(node.target, either(*each, *([] if is_known and each else [ANYTHING])), names)
        self._ways(names, [node.body, []])
        self._block(node.orelse, names)

    def _try(self, node: ast.Try | ast.TryStar, names: Names) -> bool:
        catches = any(_catches_import(handler) for handler in node.handlers)
        before, way = names.fork(), names.fork()
        way.catching = names.catching or catches
        ends, failed, lost = [], False, ""
        noted = {key: len(uses) for key, uses in self.uses.items()}
        try:
            if self._block(node.body, way) and self._block(node.orelse, way):
                ends.append(way)
        except _ImportFails as fault:
            if not catches:
                raise
            failed, lost = True, fault.name
        way.catching = names.catching
        sure = not failed and all(self._is_of_vendor(statement, names) for statement in node.body)
        for handler in node.handlers:
            if (sure and _catches_import(handler)) or (failed and not _catches_import(handler)):
                continue
            other = (before if failed else before).fork()
            other.join([other, way]) if not failed else None
            if handler.name:
                other.names[handler.name] = ANYTHING
            if self._block(handler.body, other):
                ends.append(other)
                if any(self._is_from_vendor(value) for value in other.names.get(lost, ())):
                    self._forget_failed(noted)
            if failed:
                break
        names.join(ends)
        return bool(ends) & self._block(node.finalbody, names)

    def _forget_failed(self, noted: dict[Key, int]) -> None:
        """Drop the note of an import that failed, where the handler imports the same from another place."""
        for key, uses in self.uses.items():
            kept = uses[: noted.get(key, 0)]
            for use in uses[len(kept) :]:
                module, _, name = use.accessor.rpartition(".")
                gone = use.kind is UseKind.NAME and isinstance(self.release.lookup(module, name), Absent)
                kept += [] if gone else [use]
            self.uses[key] = kept

    def _is_of_vendor(self, statement: ast.stmt, names: Names) -> bool:
        """Whether a statement of a `try` can only fail where Transformer Engine does."""
        match statement:
            case ast.Import(names=aliases):
                return all(alias.name.partition(".")[0] == PACKAGE for alias in aliases)
            case ast.ImportFrom(module=module, level=0):
                return (module or "").partition(".")[0] == PACKAGE
            case ast.Assign(value=ast.Constant() | ast.Name()) | ast.Expr(value=ast.Constant()) | ast.Pass():
                return True
            case ast.Return(value=ast.Name() | ast.Constant()):
                return True
        return False

    def _enter(self, item: ast.withitem, names: Names) -> None:
        values = self._value(item.context_expr, names)
        for one in values:
            if isinstance(one, Vendor):
                self._note(one, UseKind.CONTEXT, item.context_expr, names)
        if item.optional_vars is not None:
            self._bind(item.optional_vars, ANYTHING, names)

    # --- imports ----------------------------------------------------------------------------------------------

    def _import(self, node: ast.Import | ast.ImportFrom, names: Names) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._import_module(alias, node, names)
            return
        module = names.file.absolute(node.level, node.module or "")
        if module.partition(".")[0] == PACKAGE:
            for alias in node.names:
                self._import_symbol(module, alias, node, names)
            return
        file = self.project.find(module)
        for alias in node.names:
            if alias.name == "*":
                if file is not None:
                    found = self.module(file)
                    names.names |= {n: v for n, v in found.names.items() if not n.startswith("_")}
                    names.stars += found.stars
                continue
            below = self.project.find(f"{module}.{alias.name}")
            values: Values = frozenset({External(f"{module}.{alias.name}")})
            if file is not None:
                known = self.module(file).names.get(alias.name)
                values = known if known is not None else ANYTHING
                if known is None and (star := self._of_stars(alias.name, self.module(file), node)):
                    values = star
            if below is not None and (file is None or values == ANYTHING):
                values = frozenset({ProjectModule(below)})
            names.bind(alias.asname or alias.name, values)

    def _import_module(self, alias: ast.alias, node: ast.stmt, names: Names) -> None:
        first = alias.name.partition(".")[0]
        bound, target = (alias.asname, alias.name) if alias.asname else (first, first)
        if first == PACKAGE:
            if self.release.module(alias.name) is None:
                owner, _, last = alias.name.rpartition(".")
                self._note(Vendor(Symbol(owner, last)), UseKind.NAME, node, names, optional=names.catching)
                if names.catching:
                    raise _ImportFails(Symbol(owner, last), bound)
                names.bind(bound, ANYTHING)
                return
            if "." in alias.name:
                owner, _, last = alias.name.rpartition(".")
                self._note(Vendor(Symbol(owner, last)), UseKind.NAME, node, names, optional=names.catching)
            names.bind(bound, frozenset({VendorModule(target)}))
        elif (file := self.project.find(target)) is not None:
            names.bind(bound, frozenset({ProjectModule(file)}))
        else:
            names.bind(bound, frozenset({External(target)}))

    def _import_symbol(self, module: str, alias: ast.alias, node: ast.stmt, names: Names) -> None:
        if alias.name == "*":
            names.stars.append(module)
            return
        if self.release.module(f"{module}.{alias.name}") is not None:
            names.bind(alias.asname or alias.name, frozenset({VendorModule(f"{module}.{alias.name}")}))
            return
        symbol = Symbol(module, alias.name)
        self._note(Vendor(symbol), UseKind.NAME, node, names, optional=names.catching)
        if isinstance(self.release.lookup(module, alias.name), Absent):
            if names.catching:
                raise _ImportFails(symbol, alias.asname or alias.name)
            names.bind(alias.asname or alias.name, ANYTHING)
            return
        names.bind(alias.asname or alias.name, frozenset({Vendor(symbol)}))

    def _of_stars(self, name: str, names: Names, node: ast.AST) -> Values | None:
        for module in names.module.stars:
            found = self.release.lookup(module, name)
            if not isinstance(found, Absent):
                self._note(Vendor(Symbol(module, name)), UseKind.NAME, node, names)
                return frozenset({Vendor(Symbol(module, name))})
        return None

    # --- definitions and bindings -----------------------------------------------------------------------------

    def _define_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, names: Names) -> None:
        function = self._functions.setdefault(node, Function(node, names))
        function.names = names
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self._value(default, names)
        values: Values = frozenset({function})
        for decorator in reversed(node.decorator_list):
            for one in self._value(decorator, names):
                if isinstance(one, Vendor):
                    self._note(one, UseKind.DECORATOR, decorator, names)
                elif isinstance(one, Function | Method | Instance | Unknown) and _only_imports(node):
                    values = frozenset({Import(function)})
                    self._functions.pop(node, None)
        names.bind(node.name, values)

    def _define_class(self, node: ast.ClassDef, names: Names) -> None:
        cls = self._classes.setdefault(node, Class(node, names))
        bases: list[Value] = []
        for base in node.bases:
            found = self._value(base, names)
            for one in found:
                if isinstance(one, Vendor):
                    self._note(one, UseKind.CLASS, base, names)
            bases += [one for one in found if isinstance(one, Class | Vendor) and one is not cls]
        cls.names, cls.bases = names, tuple(bases)
        for decorator in node.decorator_list:
            self._value(decorator, names)
        title = ".".join(filter(None, (names.function, node.name)))
        inner = Names(names.file, names, title, cls=cls, catching=names.catching)
        self._block(node.body, inner)
        cls.members = inner.names
        for values in inner.names.values():
            for one in values:
                if isinstance(one, Function) and one.names is inner:
                    one.owner, one.names = cls, _without_class(inner, names)
        names.bind(node.name, frozenset({cls}))

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, names: Names) -> None:
        unpack = 0
        if isinstance(targets[0], ast.Tuple | ast.List) and not any(
            isinstance(t, ast.Starred) for t in targets[0].elts
        ):
            unpack = len(targets[0].elts)
        values = self._value(value, names, unpack=unpack)
        for target in targets:
            self._bind(target, values, names)
            if isinstance(target, ast.Name):
                names.facts[target.id] = argument_of(value, names.facts)

    def _bind(self, target: ast.expr, values: Values, names: Names) -> None:
        match target:
            case ast.Name(id=name):
                names.bind(name, values)
            case ast.Starred(value=inner):
                self._bind(inner, ANYTHING, names)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                whole = [one for one in values if isinstance(one, Items) and len(one.values) == len(parts)]
                for index, part in enumerate(parts):
                    known = [one.values[index] for one in whole]
                    self._bind(part, either(*known) if known and len(whole) == len(values) else ANYTHING, names)
            case ast.Attribute(value=owner, attr=attr):
                for one in self._value(owner, names):
                    if isinstance(one, Instance):
                        one.cls.fields[attr] = either(one.cls.fields.get(attr, frozenset()), values)
                    elif isinstance(one, Class):
                        one.members[attr] = either(one.members.get(attr, frozenset()), values)
            case ast.Subscript(value=owner, slice=key):
                keys = [one.value for one in self._value(key, names) if isinstance(one, Const)]
                for one in self._value(owner, names):
                    if isinstance(one, Keywords):
                        for found in keys:
                            if isinstance(found, str):
                                one.items[found] = values
                        one.is_open |= not keys

    # --- expressions ------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, names: Names, *, unpack: int = 0) -> Values:
        match node:
            case ast.Constant(value=value):
                return constant(value)
            case ast.Name(id=name):
                return self._name(name, node, names)
            case ast.Attribute(value=owner, attr=attr):
                found = [self._member(one, attr, node, names) for one in self._value(owner, names)]
                return either(*found)
            case ast.Call():
                return self._call(node, names, unpack)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._if_else(test, body, orelse, names)
            case ast.BoolOp():
                return self._and_or(node, names)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = truth_of(self._value(operand, names))
                return ANYTHING if known is None else constant(not known)
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [self._value(one, names) for one in (left, *others)]
                return compare(sides, ops)
            case ast.NamedExpr(target=target, value=value):
                values = self._value(value, names)
                self._bind(target, values, names)
                return values
            case ast.Dict():
                return self._dictionary(node, names)
            case ast.Tuple(elts=parts) | ast.List(elts=parts) if not any(isinstance(p, ast.Starred) for p in parts):
                return frozenset({Items(tuple(self._value(part, names) for part in parts))})
            case ast.Lambda():
                function = self._functions.setdefault(node, Function(node, names))
                return frozenset({function})
            case ast.Subscript(value=owner, slice=key):
                return subscript(self._value(owner, names), self._value(key, names))
            case ast.Await(value=value) | ast.Starred(value=value):
                return self._value(value, names)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, names)
        self._children(node, names)
        return ANYTHING

    def _children(self, node: ast.AST, names: Names) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._value(child, names)
            elif isinstance(child, ast.stmt):
                self._statement(child, names)
            else:
                self._children(child, names)

    def _name(self, name: str, node: ast.AST, names: Names) -> Values:
        found = names.find(name)
        if found is not None:
            return found
        if name == "TYPE_CHECKING":
            return constant(False)
        return self._of_stars(name, names, node) or frozenset({External(f"builtins.{name}")})

    def _member(self, owner: Value, attr: str, node: ast.AST, names: Names, *, called: bool = False) -> Values:
        match owner:
            case VendorModule(path=path):
                return self._of_module(path, attr, node, names)
            case Vendor(symbol=symbol, path=path):
                value = Vendor(symbol, (*path, attr))
                if not called:
                    self._note(value, UseKind.ATTRIBUTE, node, names)
                return frozenset({value})
            case ProjectModule(file=file):
                found = self.module(file).names.get(attr)
                below = self.project.find(f"{file.module}.{attr}")
                if found is None and below is not None:
                    return frozenset({ProjectModule(below)})
                return found if found is not None else self._of_stars(attr, self.module(file), node) or ANYTHING
            case Instance(cls=cls) | Super(cls=cls):
                return self._of_instance(owner, cls, attr, node, names, called=called)
            case Class():
                return self._of_class(owner, attr)
            case Import(function=function):
                return frozenset({Import(function, insists=True)})
            case External(path=path):
                return constant(False) if attr == "TYPE_CHECKING" else frozenset({External(f"{path}.{attr}")})
            case Const(value=Version() as version) if attr in VERSION_PARTS:
                return constant(getattr(version, attr))
            case Const(value=str()) if attr in METHODS:
                return frozenset({owner})
        return ANYTHING

    def _of_module(self, path: str, attr: str, node: ast.AST, names: Names) -> Values:
        if attr == "__version__":
            return constant(self.release.version)
        if self.release.module(f"{path}.{attr}") is not None:
            return frozenset({VendorModule(f"{path}.{attr}")})
        value = Vendor(Symbol(path, attr))
        self._note(value, UseKind.NAME, node, names)
        return ANYTHING if isinstance(self.release.lookup(path, attr), Absent) else frozenset({value})

    def _of_instance(
        self, owner: Value, cls: Class, attr: str, node: ast.AST, names: Names, *, called: bool
    ) -> Values:  # fmt: skip
        lineage = cls.lineage[1:] if isinstance(owner, Super) else cls.lineage
        for one in lineage:
            if isinstance(one, Vendor):
                value = Vendor(one.symbol, one.path if attr == "__init__" else (*one.path, RESULT, attr))
                if not called:
                    self._note(value, UseKind.ATTRIBUTE, node, names)
                return frozenset({value})
            if isinstance(one, Class):
                found = either(one.fields.get(attr, frozenset()), one.members.get(attr, frozenset()))
                if found:
                    return frozenset(Method(f, Instance(cls)) if isinstance(f, Function) else f for f in found)
        return ANYTHING

    def _of_class(self, cls: Class, attr: str) -> Values:
        for one in cls.lineage:
            if isinstance(one, Vendor):
                return frozenset({Vendor(one.symbol, (*one.path, attr))})
            if isinstance(one, Class) and attr in one.members:
                return one.members[attr]
        return ANYTHING

    def _if_else(self, test: ast.expr, body: ast.expr, orelse: ast.expr, names: Names) -> Values:
        known = truth_of(self._value(test, names))
        found = []
        for wanted, part in ((True, body), (False, orelse)):
            if known in (None, wanted):
                way = names.fork()
                self._narrow(test, way, wanted=wanted)
                found.append(self._value(part, way))
        return either(*found)

    def _and_or(self, node: ast.BoolOp, names: Names) -> Values:
        """Each part is reached only where those before it let it be."""
        passes, found, way = isinstance(node.op, ast.And), list[Values](), names.fork()
        for part in node.values:
            values = self._value(part, way)
            known = truth_of(values)
            if known is (not passes):
                return either(*found, values)
            found.append(
                frozenset(v for v in values if truth_of(frozenset({v})) is not passes) if known is None else frozenset()
            )
            if part is node.values[-1]:
                found.append(values)
            elif not self._narrow(part, way, wanted=passes):
                break
        return either(*found)

    def _dictionary(self, node: ast.Dict, names: Names) -> Values:
        made = Keywords()
        for key, value in zip(node.keys, node.values, strict=True):
            values = self._value(value, names)
            if key is None:
                self._merge(made, values)
                continue
            known = [one.value for one in self._value(key, names) if isinstance(one, Const)]
            made.items |= {name: values for name in known if isinstance(name, str)}
            made.is_open |= not known
        return frozenset({made})

    @staticmethod
    def _merge(made: Keywords, values: Values) -> None:
        for one in values:
            if isinstance(one, Keywords):
                made.items |= {k: either(v, made.items.get(k, frozenset())) for k, v in one.items.items()}
            made.is_open |= not isinstance(one, Keywords) or one.is_open

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, names: Names
    ) -> Values:  # fmt: skip
        way, each = names.fork(), list[Values]()
        for part in node.generators:
            over = self._value(part.iter, way)
            items = [one.values for one in over if isinstance(one, Items)]
            known = items[0] if len(items) == len(over) == 1 and len(node.generators) == 1 else None
            if known is not None and not part.ifs and not isinstance(node, ast.DictComp) and len(known) <= 16:
                for value in known:
                    self._bind(part.target, value, way)
                    each.append(self._value(node.elt, way))
                return frozenset({Items(tuple(each))})
            self._bind(part.target, either(*(v for i in items for v in i), ANYTHING), way)
            for test in part.ifs:
                self._value(test, way)
        for child in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self._value(child, way)
        return ANYTHING

    # --- calls ------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, names: Names, unpack: int) -> Values:
        callees: list[tuple[Value, str]] = []  # what is called; of a method of something known, its name
        match node.func:
            case ast.Name(id="super") if names.find("super") is None:
                return self._super(names)
            case ast.Attribute(value=owner, attr=attr):
                for one in self._value(owner, names):
                    if isinstance(one, Keywords | Const | External) and not isinstance(one, External):
                        callees.append((one, attr))
                    else:
                        callees += [(f, attr) for f in self._member(one, attr, node.func, names, called=True)]
            case _:
                callees = [(one, "") for one in self._value(node.func, names)]
        given = [self._value(argument, names) for argument in node.args]
        for keyword in node.keywords:
            self._value(keyword.value, names)
        return either(*(self._call_one(one, attr, node, given, names, unpack) for one, attr in callees))

    def _call_one(
        self, callee: Value, attr: str, node: ast.Call, given: list[Values], names: Names, unpack: int
    ) -> Values:  # fmt: skip
        match callee:
            case Vendor():
                self._note_call(callee, node, names, unpack=unpack)
                return frozenset({Vendor(callee.symbol, (*callee.path, RESULT))})
            case Function():
                return self._call_function(callee, node, given, names)
            case Import():
                return self._call_import(callee, node, names)
            case Method(function=function, holder=holder):
                return self._call_function(function, node, [frozenset({holder}), *given], names)
            case Class():
                return self._make(callee, node, given, names, unpack)
            case Instance(cls=cls):
                return either(*(
                    self._call_one(one, "forward", node, given, names, unpack)
                    for one in self._of_instance(callee, cls, "forward", node, names, called=True)
                ))  # fmt: skip
            case Keywords():
                return self._change_dictionary(callee, attr, node, given, names)
            case Const(value=str() as text):
                return call_text(text, attr, given)
            case External(path=path):
                return self._call_external(path, node, given, names)
        return ANYTHING

    def _super(self, names: Names) -> Values:
        at: Names | None = names
        while at is not None and at.cls is None:
            at = at.outer
        return frozenset({Super(at.cls)}) if at is not None and at.cls is not None else ANYTHING

    def _make(self, cls: Class, node: ast.Call, given: list[Values], names: Names, unpack: int) -> Values:
        made: Values = frozenset({Instance(cls)})
        for one in cls.lineage:
            if isinstance(one, Vendor):
                self._note_call(one, node, names, unpack=unpack)
                return made
            for name in ("__init__", "__new__"):
                for function in one.members.get(name, frozenset()) if isinstance(one, Class) else ():
                    if isinstance(function, Function):
                        returned = self._call_function(function, node, [made, *given], names)
                        return returned if name == "__new__" else made
        return made

    def _call_function(self, function: Function, node: ast.Call, given: list[Values], names: Names) -> Values:
        bound = self._bind_arguments(function, node, given, names)
        if self._minds_version(function) and len(self._reading) < _DEEPEST and self._steps < _STEPS:
            return self._read_again(function, bound)
        known = self._parameters.setdefault(function.node, {})
        for name, values in bound.items():
            told = frozenset(v for v in values if isinstance(v, Vendor | VendorModule | Class | Instance))
            if told:
                both = either(known.get(name, frozenset()), told)
                known[name] = both if len(both) == 1 else ANYTHING  # what differs from call to call is not followed
        if function.node in self._returns or self._loading:
            return self._returns.get(function.node, ANYTHING)
        return self._read_function(function)

    def _call_import(self, callee: Import, node: ast.Call, names: Names) -> Values:
        """What an object gives that imports when it is called; its use is noted where the call stands."""
        inner = self._inside(callee.function)
        inner.catching = True
        with self._noting_nothing():
            try:
                found = self._run_body(callee.function, inner)
            except _ImportFails as fault:
                self._quiet -= 1
                self._note(Vendor(fault.symbol), UseKind.NAME, node, names, optional=not callee.insists)
                self._quiet += 1
                return ANYTHING if callee.insists else NOTHING
        for one in found:
            if isinstance(one, Vendor):
                self._note(one, UseKind.NAME, node, names, optional=not callee.insists)
        return found

    def _read_again(self, function: Function, bound: dict[str, Values]) -> Values:
        """What a function that reaches the version returns for these arguments."""
        key = (function.node, *sorted((n, v) for n, v in bound.items() if all(isinstance(o, Const) for o in v)))
        try:
            if key in self._again:
                return self._again[key]
        except TypeError:
            return ANYTHING
        self._again[key] = ANYTHING  # for a function that calls itself
        names = self._inside(function)
        names.names |= bound
        self._reading.append(function.node)
        self._quiet += 1
        self._steps += 1
        returned = self._run_body(function, names)
        self._quiet -= 1
        self._reading.pop()
        self._again[key] = returned
        return returned

    def _bind_arguments(
        self, function: Function, node: ast.Call, given: list[Values], names: Names
    ) -> dict[str, Values]:
        arguments = function.node.args
        places = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        bound: dict[str, Values] = {}
        defaults = zip(reversed(places), reversed(arguments.defaults), strict=False)
        only = zip((one.arg for one in arguments.kwonlyargs), arguments.kw_defaults, strict=True)
        for name, default in (*defaults, *only):
            if isinstance(default, ast.Constant):
                bound[name] = constant(default.value)
        bound |= dict(zip(places, given, strict=False))
        for keyword in node.keywords:
            if keyword.arg is not None:
                bound[keyword.arg] = self._quietly(keyword.value, names)
        return bound

    def _minds_version(self, function: Function) -> bool:
        """Whether a function reads the version of Transformer Engine, itself or through functions of the project."""
        node = function.node
        if node not in self._minding:
            self._minding[node] = False
            named = {getattr(one, "attr", getattr(one, "id", "")) for one in ast.walk(node)}
            found = not named.isdisjoint(_MINDS_VERSION)
            for name in sorted(named) if not found else ():
                called = function.names.find(name) or frozenset()
                found |= any(isinstance(f, Function) and self._minds_version(f) for f in called)
            self._minding[node] = found
        return self._minding[node]

    def _change_dictionary(
        self, made: Keywords, method: str, node: ast.Call, given: list[Values], names: Names
    ) -> Values:  # fmt: skip
        match method:
            case "update":
                for values in given:
                    self._merge(made, values)
                made.items |= {k.arg: self._quietly(k.value, names) for k in node.keywords if k.arg}
                made.is_open |= any(k.arg is None for k in node.keywords)
            case "copy":
                return frozenset({Keywords(dict(made.items), made.is_open)})
            case "pop" | "get" | "setdefault":
                keys = [one.value for one in given[0] if isinstance(one, Const)] if given else []
                found = [made.items[key] for key in keys if key in made.items]
                if method == "pop":
                    for key in keys:
                        made.items.pop(key, None)  # type: ignore[arg-type]
                if method == "setdefault" and len(given) > 1:
                    made.items |= {key: given[1] for key in keys if isinstance(key, str) and key not in made.items}
                return either(*found, *given[1:2], *([] if found and not made.is_open else [ANYTHING]))
        return ANYTHING

    def _call_external(self, path: str, node: ast.Call, given: list[Values], names: Names) -> Values:
        match path.removeprefix("builtins."), given:
            case ("getattr" | "hasattr" as look, [owners, key, *default]):
                return self._look_up(look, owners, key, default, node, names)
            case ("isinstance" | "issubclass", [_, kinds, *_]):
                every = [v for one in kinds for v in (one.values if isinstance(one, Items) else [frozenset({one})])]
                for one in either(*every) if every else ():
                    if isinstance(one, Vendor):
                        self._note(one, UseKind.CLASS, node.args[1], names)
                return ANYTHING
            case ("dict", _):
                made = Keywords({k.arg: self._quietly(k.value, names) for k in node.keywords if k.arg})
                for values in (*given, *(self._quietly(k.value, names) for k in node.keywords if k.arg is None)):
                    self._merge(made, values)
                return frozenset({made})
            case ("importlib.import_module" | "import_module" | "__import__", [target, *_]):
                found = [one.value for one in target if isinstance(one, Const)]
                return either(*(self._of_text(str(name)) for name in found)) if found else ANYTHING
            case (("functools.partial" | "partial"), [called, *_]):
                for one in called:
                    if isinstance(one, Vendor):
                        self._note_call(one, node, names, first=1, partial=True)
                return called
            case ("print" | "setattr" | "delattr", _):
                return ANYTHING
        return call_external(path, given, self.release.version)

    def _of_text(self, dotted: str) -> Values:
        if dotted.partition(".")[0] == PACKAGE:
            return frozenset({VendorModule(dotted)}) if self.release.module(dotted) is not None else ANYTHING
        file = self.project.find(dotted)
        return frozenset({ProjectModule(file) if file is not None else External(dotted)})

    def _look_up(
        self, look: str, owners: Values, key: Values, default: list[Values], node: ast.Call, names: Names
    ) -> Values:  # fmt: skip
        """`hasattr` and `getattr` with a name that is known."""
        found: list[Values] = []
        for owner in owners:
            for attr in (one.value for one in key if isinstance(one, Const) and isinstance(one.value, str)):
                there = self._has(owner, attr)
                if look == "hasattr":
                    found.append(ANYTHING if there is None else constant(there))
                    continue
                if there is not False or not default:
                    self._quiet += bool(default)
                    found.append(self._member(owner, attr, node, names))
                    self._quiet -= bool(default)
                if there is not True:
                    found += default
        return either(*found) if found else ANYTHING

    def _has(self, owner: Value, attr: str) -> bool | None:
        match owner:
            case VendorModule(path=path):
                if attr == "__version__" or self.release.module(f"{path}.{attr}") is not None:
                    return True
                found = self.release.lookup(path, attr)
                return False if isinstance(found, Absent) else True if hasattr(found, "obj") else None
            case Vendor(symbol=symbol, path=path):
                found = self.release.lookup(symbol.module, symbol.name)
                shape = shape_of(self.release, found, (*path, attr)) if hasattr(found, "obj") else None
                if shape is None or shape.what == "unknown" or shape.maybe:
                    return None
                return shape.what != "missing"
            case ProjectModule(file=file):
                return True if attr in self.module(file).names else None
        return None

    # --- notes ------------------------------------------------------------------------------------------------

    def _quietly(self, node: ast.expr, names: Names) -> Values:
        """The value of an expression that is read a second time."""
        with self._noting_nothing():
            return self._value(node, names.fork())

    @contextmanager
    def _noting_nothing(self) -> Iterator[None]:
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def _note(self, value: Vendor, kind: UseKind, node: ast.AST, names: Names, *, optional: bool = False) -> None:
        if not self._quiet:
            self._keep_use(self._use(value, kind, node, names, optional=optional), node)

    def _keep_use(self, use: Use, node: ast.AST) -> None:
        line, column = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
        known = self.uses.setdefault((use.site.file, line, column, use.kind), [])
        if use not in known:
            known.append(use)

    def _use(self, value: Vendor, kind: UseKind, node: ast.AST, names: Names, *, optional: bool = False) -> Use:
        site = SourceLine(file=self.source.shown_below + names.file.shown, line=getattr(node, "lineno", 0))
        return Use(
            value.symbol.path, value.path, kind, self.source.row_of(names.file), site, names.function, optional=optional
        )

    def _note_call(
        self, value: Vendor, node: ast.Call, names: Names, *, unpack: int = 0, first: int = 0, partial: bool = False
    ) -> None:  # fmt: skip
        if self._quiet:
            return
        args = node.args[first:]
        plain = [argument for argument in args if not isinstance(argument, ast.Starred)]
        keywords: dict[str, Argument] = {}
        is_open = False
        for keyword in node.keywords:
            if keyword.arg is not None:
                keywords[keyword.arg] = self._argument(keyword.value, names)
                continue
            for one in self._quietly(keyword.value, names):
                is_open |= not isinstance(one, Keywords) or one.is_open
                if isinstance(one, Keywords):
                    keywords |= {key: _of_values(values) or UNKNOWN for key, values in one.items.items()}
        use = self._use(value, UseKind.CALL, node, names)
        self._keep_use(
            replace(
                use, positionals=tuple(self._argument(argument, names) for argument in plain), keywords=keywords,
                open_positionals=len(plain) < len(args), open_keywords=is_open, partial=partial, unpack=unpack,
            ),
            node,
        )  # fmt: skip

    def _argument(self, node: ast.expr, names: Names) -> Argument:
        return _of_values(self._quietly(node, names)) or argument_of(node, names.facts)


def _of_values(values: Values) -> Argument | None:
    """What is known of an argument by its values; None where one of them can be anything."""
    if all(isinstance(one, Const) for one in values):
        literals = tuple(one.value for one in values if isinstance(one, Const))
        return Argument(literals, never_none=None not in literals)
    if all(isinstance(one, Vendor | VendorModule | Function | Class | Method) for one in values):
        return Argument(never_none=True)
    return None


def _catches_import(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in _CATCHES_IMPORT) for kind in kinds)


def _is_decorated(node: ast.AST, name: str) -> bool:
    return any(ast.unparse(one).rpartition(".")[2] == name for one in getattr(node, "decorator_list", ()))


def _only_imports(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function does nothing but import from Transformer Engine and hand on what it found."""
    kinds = ast.Import | ast.ImportFrom | ast.Try | ast.Return | ast.Expr
    imports = [one for one in ast.walk(node) if isinstance(one, ast.ImportFrom)]
    return bool(imports) and all(isinstance(statement, kinds) for statement in node.body)


def _without_class(inner: Names, outer: Names) -> Names:
    """The names that a method sees: those around its class, under the title of the class."""
    return Names(outer.file, outer, inner.function, facts={})
