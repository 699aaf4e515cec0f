"""Reads what a project uses of one release of Transformer Engine, by following values through its code.

An abstract interpreter on `ast`: sets of values for each name, both ways where a test is not known, one way where the
release decides (`is_te_min_version("1.10")`, `hasattr`, `try: import`). It runs nothing of the project. Loops are read
once, functions once with unknown arguments; only functions that reach the version are read again for each call.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ...evidence.values import SourceLine
from .bodies import yields
from .calls import Calls
from .expressions import Access, Key, Lacking
from .interpreted import (
    ANYTHING,
    NOTHING,
    UNTOLD,
    Class,
    External,
    Function,
    Import,
    Instance,
    Method,
    Names,
    ProjectModule,
    Unknown,
    Value,
    Values,
    Vendor,
    VendorModule,
    constant,
    each_of,
    either,
    elements_of,
    is_untold,
    title_of,
    truth_of,
)
from .project import SourceFile
from .release import Absent
from .surface import Symbol, Use, UseKind, argument_of, is_caught, named_kinds, parameter_facts
from .syntax_nodes import parameters_of, stored_by

_PASSES: Final = 2  # what fields, parameters and results are is known after the first; the second notes uses
_DEEPEST: Final = 12  # functions within functions
_OF_A_LACK: Final = frozenset({"ImportError", "ModuleNotFoundError", "AttributeError", "PackageNotFoundError"})
_OF_ANY: Final = _OF_A_LACK | {"Exception", "BaseException"}
_TOO_DEEP: Final = RecursionError("the code is nested too deep to be followed")
_EXITS: Final = frozenset({"sys.exit", "exit", "quit", "os._exit"})


@dataclass(frozen=True)
class _Later(ProjectModule):
    """A name of a file that does not name Transformer Engine: the file is read when the name is used."""

    name: str


class Interpreter(Calls):
    """Reads a source tree under one release: one method a kind of statement (`_do_...`)."""

    def read(self) -> dict[Key, list[Use]]:
        """Every use, by its place in the code and its kind."""
        for number in range(_PASSES):
            self._quiet = self._before = int(number < _PASSES - 1)
            own = self._own = {file.module: file for file in (*self.project.using, *self.near)}
            self._modules = {name: known for name, known in self._modules.items() if name not in own}
            self._functions = {n: one for n, one in self._functions.items() if one.names.file.module not in own}
            done, self.named = set[ast.AST](), set[tuple[str, str]]()  # what is named: functions and classes
            self._loading = True
            for file in own.values():
                self.module(file)
            self._loading = False
            while waiting := [f for node, f in self._functions.items() if node not in done and self._is_reached(f)]:
                for function in waiting:
                    done.add(function.node)
                    self._read_function(function)
            self.near = self.project.near(self._exported())
        for uses in self.uses.values():
            uses.sort(key=lambda use: (use.accessor, use.path))
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
                given = self._returns.get(node, frozenset()) | self._tested(value)
                return any(self._is_from_vendor(v) for v in given if not isinstance(v, Function))
        return False

    def _is_reached(self, function: Function) -> bool:
        """Whether a function stands in a file that uses Transformer Engine, or is called and its result is unknown."""
        given = self._parameters.get(function.node)  # by calls
        is_open = given is not None and function.node not in self._returns
        return bool(given) or is_open or function.names.file.module in self._own

    def module(self, file: SourceFile) -> Names:
        """The names of a module of the project."""
        if file.module not in self._modules:
            names = self._modules[file.module] = Names(file, facts={})
            kept = self._quiet, self._place, self._asked  # of the expression that needs a name of this module
            self._quiet, self._place = self._before, ()
            if (tree := self.project.tree(file)) is not None:
                names.names["__name__"] = constant(file.module)
                self._kinds[file.module] = named_kinds(tree)
                try:
                    self._block(tree.body, names)
                except RecursionError:
                    self.project.leave_out(file, _TOO_DEEP)
            self._quiet, self._place, self._asked = kept
            self.order.setdefault(self.source.row_of(file))
        return self._modules[file.module]

    def _in_projectmodule(self, owner: ProjectModule, at: Access) -> Values:
        return self._settled(super()._in_projectmodule(owner, at), at.node, at.names)

    def _settled(self, values: Values, node: ast.AST, names: Names) -> Values:
        """The values, with those of files that are read only now."""
        later = [one for one in values if isinstance(one, _Later)]
        read = (self._member(ProjectModule(one.file), Access(one.name, node, names)) for one in later)
        return either(values.difference(later), *read) if later else values

    def _of_name(self, node: ast.Name, names: Names) -> Values:
        values = self._settled(super()._of_name(node, names), node, names)
        defined = (one for one in values if isinstance(one, Function | Class))
        self.named |= {(self.source.row_of(one.names.file), title_of(one)) for one in defined}
        return values

    def _read_function(self, function: Function) -> Values:
        """What a function returns, its parameters unknown but for what the project's own calls pass."""
        node = function.node
        if node in self._reading or len(self._reading) >= _DEEPEST:
            return self._returns.get(node, ANYTHING)
        self._reading.append(node)
        names = self._inside(function)
        for name, values in self._parameters.get(node, {}).items():
            names.names[name] = either(names.names.get(name, ANYTHING), values)
        try:
            returned = self._run_body(function, names)
        except RecursionError:
            self.project.leave_out(names.file, _TOO_DEEP)
            returned = ANYTHING
        finally:
            self._reading.pop()
        self._returns[node] = returned
        return returned

    def _inside(self, function: Function) -> Names:
        """The names inside of a function before its first statement."""
        node, outer = function.node, function.names
        names = Names(outer.file, outer, title_of(function), cls=function.owner, is_guarded=outer.is_guarded)
        names.facts = parameter_facts(node.args, self._kinds.get(outer.file.module, {}))
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for argument in (*every, *filter(None, (node.args.vararg, node.args.kwarg))):
            names.names[argument.arg] = ANYTHING
        for argument in every:  # an annotation may be wrong
            names.names[argument.arg] |= self._object_of(argument.annotation, outer)
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
        if yields(node):
            return ANYTHING
        return either(*names.returned, *([] if ends else [NOTHING])) if names.returned or not ends else ANYTHING

    def _block(self, body: list[ast.stmt], names: Names) -> bool:
        """Read statements; whether what follows them is reached."""
        for at, one in enumerate(body):
            if isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return) and self._asks_outside(one.test, names):
                return self._do_if(ast.If(one.test, one.body, [*one.orelse, *body[at + 1 :]]), names)
            if not self._statement(one, names):
                return False
        return True

    def _statement(self, node: ast.stmt, names: Names) -> bool:
        kind = type(node).__name__.lower().removeprefix("async")
        reader: Callable[[ast.stmt, Names], bool | None] | None = getattr(self, f"_do_{kind}", None)
        for one in getattr(node, "decorator_list", ()):
            if "skipif(" in ast.unparse(one) and one.args and truth_of(self._quietly(one.args[0], names)):
                return True  # a test that does not run under this release
        if reader is None:
            self._children(node, names)
            return True
        return reader(node, names) is not False

    def _do_assign(self, node: ast.Assign, names: Names) -> None:
        self._assign(node.targets, node.value, names)

    def _do_annassign(self, node: ast.AnnAssign, names: Names) -> None:
        if node.value is not None:
            self._assign([node.target], node.value, names)
        elif (known := self._object_of(node.annotation, names)) != ANYTHING:
            self._bind(node.target, known | ANYTHING, names)

    def _do_augassign(self, node: ast.AugAssign, names: Names) -> None:
        self._assign([node.target], ast.BinOp(node.target, node.op, node.value), names)

    def _do_return(self, node: ast.Return, names: Names) -> bool:
        names.returned.append(NOTHING if node.value is None else self._value(node.value, names))
        return False

    def _do_raise(self, node: ast.stmt, names: Names) -> bool:
        """What follows is not reached; at the top level of a module the release has decided that, and is refused."""
        self._children(node, names)
        if names.outer is None:
            self._note(Vendor(Symbol(self.release.library.package, "__version__")), UseKind.REFUSAL, node, names)
        return False

    _do_continue = _do_break = _do_raise  # of a loop, so that nothing is refused

    def _do_assert(self, node: ast.Assert, names: Names) -> bool:
        refusal = ast.copy_location(ast.Raise(), node)
        return self._do_if(ast.If(ast.UnaryOp(ast.Not(), node.test), [refusal], []), names)

    def _do_with(self, node: ast.With | ast.AsyncWith, names: Names) -> bool:
        match node.items:
            case [ast.withitem(context_expr=ast.Call(func=func, args=kinds))] if ast.unparse(func).endswith("suppress"):
                handler = ast.ExceptHandler(type=ast.Tuple(elts=kinds), body=[ast.Pass()])
                return self._do_try(ast.Try(node.body, [handler], [], []), names)
        for item in node.items:
            for one in self._value(item.context_expr, names):
                if isinstance(one, Vendor):
                    self._note(one, UseKind.CONTEXT, item.context_expr, names)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, ANYTHING, names)
        return self._block(node.body, names)

    def _do_match(self, node: ast.Match, names: Names) -> bool:
        """Read like a row of `if isinstance(...)`; what other patterns test is not known."""
        rest: list[ast.stmt] = []
        for case in reversed(node.cases):
            parts = case.pattern.patterns if isinstance(case.pattern, ast.MatchOr) else [case.pattern]
            kinds = ast.Tuple([one.cls for one in parts if isinstance(one, ast.MatchClass)])
            test = ast.copy_location(ast.Call(ast.Name("isinstance"), [node.subject, kinds], []), case.pattern)
            rest = [ast.If(ast.BoolOp(ast.And(), [test, *filter(None, [case.guard])]), case.body, rest)]
        return self._do_if(rest[0], names)  # type: ignore[arg-type]

    def _do_global(self, node: ast.Global, names: Names) -> None:
        names.is_global |= set(node.names)

    def _do_if(self, node: ast.If, names: Names) -> bool:
        ends = [way for body, way in self._ways(node, names) if self._block(body, way)]
        names.join(ends)
        names.is_guarded |= len(ends) == 1 and ends[0].is_guarded
        return bool(ends)

    def _of_ifexp(self, node: ast.IfExp, names: Names) -> Values:
        return either(*(self._value(part, way) for part, way in self._ways(node, names)))

    def _ways(self, node: ast.If | ast.IfExp, names: Names) -> Iterator[tuple[Any, Names]]:
        """The parts that a test chooses between and may reach, each with the names there."""
        tested = self._value(node.test, names)
        known, is_guard = truth_of(tested), is_untold(tested)
        if known is None and self._asks_outside(node.test, names):
            is_guard |= all(self._is_used(part, names) for part in (node.body, node.orelse))
        for wanted, part in ((True, node.body), (False, node.orelse)):
            if known in (None, wanted):
                way = names if known is not None else names.fork()
                way.is_guarded |= known is None and is_guard
                if self._narrow(node.test, way, wanted=wanted):
                    yield part, way

    def _asks_outside(self, test: ast.expr, names: Names) -> bool:
        """Whether a test reads what is not in the tree, under a name that speaks of the library: `HAS_NEW_TE`."""
        read = (node for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute))
        named = (node for node in read if self.release.library.is_named_in(ast.unparse(node).rpartition(".")[2]))
        found = frozenset[Value]().union(*(self._quietly(node, names) for node in named))
        return UNTOLD not in found and any(isinstance(one, External) for one in found)

    def _is_used(self, part: ast.expr | list[ast.stmt], names: Names) -> bool:
        """Whether a piece of code imports or names something of Transformer Engine."""
        for node in ast.walk(ast.Module(part, [])):  # type: ignore[arg-type]
            text = next((t for f in ("module", "name", "value") if isinstance(t := getattr(node, f, None), str)), "")
            held = names.find(getattr(node, "id", "")) or ()
            if self.release.library.owns(text.replace("-", "_")) or any(map(self._is_from_vendor, held)):
                return True
        return False

    def _do_for(self, node: ast.For | ast.AsyncFor | ast.While, names: Names) -> None:
        """The body of a loop is read once, and may not be reached at all."""
        if isinstance(node, ast.While):
            self._value(node.test, names)
        else:
            self._bind(node.target, elements_of(self._value(node.iter, names)), names)
        way = names.fork()
        names.join([names.fork(), *([way] if self._block(node.body, way) else [])])
        self._block(node.orelse, names)

    _do_while = _do_for

    def _do_expr(self, node: ast.Expr, names: Names) -> bool:
        self._value(node.value, names)
        return not (isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in _EXITS)

    def _do_try(self, node: ast.Try | ast.TryStar, names: Names) -> bool:
        handlers = [(handler, self._caught_by(handler, names)) for handler in node.handlers]
        before, way = names.fork(), names.fork()
        way.caught = names.caught.union(*(kinds for one, kinds in handlers if not isinstance(one.body[-1], ast.Raise)))
        ends: list[Names] = []
        fault: Lacking | None = None
        noted = {key: len(uses) for key, uses in self.uses.items()}
        try:
            is_done = self._block(node.body, way)
        except Lacking as one:
            is_done, fault = False, one
        way.caught = names.caught
        if is_done and self._block(node.orelse, way):
            ends.append(way)
        if fault is not None:
            handlers = [one for one in handlers if is_caught(fault.raised, one[1])][:1]
        elif self._is_used(node.body, way):  # what it lacks would have been a fault
            is_call = any(isinstance(one, ast.Call) for statement in node.body for one in ast.walk(statement))
            handlers = [one for one in handlers if one[1] - (_OF_A_LACK if is_call else _OF_ANY)]
        tried = [use for key, uses in self.uses.items() for use in uses[noted.get(key, 0) :]]
        for handler, kinds in handlers:
            other = before.fork()  # the handler runs only if the body fails, which may not be known of its uses
            fails = fault is not None or (is_caught("TypeError", kinds) and any(map(self._refuses, tried)))
            other.is_guarded |= bool(tried) and not fails
            other.join([other, way] if fault is None else [way])  # what was bound before the fault is there
            if handler.name:
                other.names[handler.name] = ANYTHING
            given = len(names.returned)
            is_done = self._block(handler.body, other)
            ends += [other] if is_done else []
            if fault is not None:
                lost = {fault.name} if fault.name else set().union(*map(stored_by, node.body))
                new = (other.names.get(name, frozenset()) - way.names.get(name, frozenset()) for name in lost)
                found = either(*new, *names.returned[given:])
                leaves = any(isinstance(one, ast.Return | ast.Continue | ast.Break) for one in ast.walk(handler))
                self._settle(noted, is_found=any(map(self._is_from_vendor, each_of(found))), goes_on=is_done or leaves)
        if fault is not None and not handlers:
            raise fault
        names.join(ends)
        return bool(ends) & self._block(node.finalbody, names)

    _do_trystar = _do_try

    def _caught_by(self, handler: ast.ExceptHandler, names: Names) -> frozenset[str]:
        """Names of the builtin exceptions that a handler catches."""
        if handler.type is None:
            return frozenset({"BaseException"})
        kinds = each_of(self._quietly(handler.type, names))
        return frozenset(one.path.rpartition(".")[2] for one in kinds if isinstance(one, External))

    def _settle(self, noted: dict[Key, int], *, is_found: bool, goes_on: bool) -> None:
        """Change what was noted of symbols that the release lacks, by what the handler does.

        Args:
            noted: how many uses were known before the `try`, by place.
            is_found: the handler has the symbol from another place.
            goes_on: it does without.
        """
        for key, uses in self.uses.items():
            kept = uses[: noted.get(key, 0)]
            for use in uses[len(kept) :]:
                is_gone = use.kind is UseKind.NAME and isinstance(
                    self.release.lookup(*use.accessor.rpartition(".")[::2]), Absent
                )
                if not (is_found and (is_gone or use.kind is UseKind.MODULE)):
                    kept.append(replace(use, optional=False) if is_gone and not goes_on else use)
            self.uses[key] = kept

    # --- imports, definitions, assignments -------------------------------------------------------------------

    def _do_import(self, node: ast.Import | ast.ImportFrom, names: Names) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._import_module(alias, node, names)
            return
        module = names.file.absolute(node.level, node.module or "")
        if self.release.library.owns(module):
            self._note_entry(node, names)
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
            bound = alias.asname or alias.name
            if file is not None and file.module not in self._own and file.module not in self._modules:  # else a circle
                names.bind(bound, frozenset({_Later(file, alias.name)}))
                continue
            owner = External(module) if file is None else ProjectModule(file)
            values = self._member(owner, Access(alias.name, node, names))
            below = self.project.find(f"{module}.{alias.name}")
            if below is not None and (file is None or values == ANYTHING):
                values = frozenset({ProjectModule(below)})
            names.bind(bound, values)
            self._of_name(ast.Name(bound), names)  # an import names it, too: others may call it

    _do_importfrom = _do_import

    def _note_entry(self, node: ast.stmt, names: Names) -> None:
        row = self.source.row_of(names.file)
        here = SourceLine(file=self.source.shown_below + names.file.shown, line=node.lineno)
        self.entries[row] = min(here, self.entries.get(row, here), key=lambda one: (one.file, one.line))

    def _import_module(self, alias: ast.alias, node: ast.stmt, names: Names) -> None:
        first = alias.name.partition(".")[0]
        bound, target = (alias.asname, alias.name) if alias.asname else (first, first)
        if self.release.library.owns(first):
            self._note_entry(node, names)
            if "." in alias.name:
                self._note_name(Symbol(*alias.name.rpartition(".")[::2]), node, names, "ModuleNotFoundError", bound)
                self._load(alias.name, names)
            names.bind(bound, frozenset({VendorModule(target)}))
        else:
            names.bind(bound, self._of_text(target))

    def _import_symbol(self, module: str, alias: ast.alias, node: ast.stmt, names: Names) -> None:
        raised = "ModuleNotFoundError" if self.release.module(module) is None else "ImportError"
        if alias.name == "*":
            names.stars.append(module)
            self._load(module, names)
            if raised == "ModuleNotFoundError":
                self._note_name(Symbol(*module.rpartition(".")[::2]), node, names, raised)
            return
        self._load(f"{module}.{alias.name}", names)
        bound, values = alias.asname or alias.name, frozenset[Value]({VendorModule(f"{module}.{alias.name}")})
        if not self.release.gives_module(module, alias.name):
            values = self._note_name(Symbol(module, alias.name), node, names, raised, bound)
        names.bind(bound, values)

    def _do_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef, names: Names) -> None:
        function = self._functions.setdefault(node, Function(node, names))
        function.names = names
        read = [*node.args.defaults, *node.args.kw_defaults]
        if names.find("annotations") is None:  # `from __future__ import annotations` leaves them alone
            read += [node.returns, *(argument.annotation for argument, _ in parameters_of(node.args))]
        for expression in filter(None, read):
            self._value(expression, names)
        values: Values = frozenset({function})
        for decorator in reversed(node.decorator_list):
            for one in self._value(decorator, names):
                if isinstance(one, Vendor):
                    self._note(one, UseKind.DECORATOR, decorator, names)
                elif isinstance(one, Function | Method | Instance | Unknown) and _only_imports(node):
                    values = frozenset({Import(function)})
                    self._functions.pop(node, None)
        names.bind(node.name, values)

    def _do_classdef(self, node: ast.ClassDef, names: Names) -> None:
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
        inner = Names(names.file, names, title_of(cls), cls=cls, caught=names.caught, is_guarded=names.is_guarded)
        self._block(node.body, inner)
        cls.members = inner.names
        for values in inner.names.values():
            for one in values:
                if isinstance(one, Function) and one.names is inner:
                    one.owner = cls  # a method sees the names around its class, under the title of the class
                    one.names = Names(names.file, names, title_of(cls), facts={}, is_guarded=names.is_guarded)
        names.bind(node.name, frozenset({cls}))

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, names: Names) -> None:
        unpack = 0
        if isinstance(targets[0], ast.Tuple | ast.List) and not any(
            isinstance(t, ast.Starred) for t in targets[0].elts
        ):
            unpack = len(targets[0].elts)
        values = self._of_call(value, names, unpack) if isinstance(value, ast.Call) else self._value(value, names)
        for target in targets:
            self._bind(target, values, names)
            if isinstance(target, ast.Name):
                names.facts[target.id] = argument_of(value, names.facts)


def _is_decorated(node: ast.AST, name: str) -> bool:
    return any(ast.unparse(one).rpartition(".")[2] == name for one in getattr(node, "decorator_list", ()))


def _only_imports(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function does nothing but import from Transformer Engine and hand on what it found."""
    kinds = ast.Import | ast.ImportFrom | ast.Try | ast.Return | ast.Expr
    imports = (isinstance(one, ast.ImportFrom) or "import_module(" in ast.unparse(one) for one in ast.walk(node))
    return any(imports) and all(isinstance(statement, kinds) for statement in node.body)
