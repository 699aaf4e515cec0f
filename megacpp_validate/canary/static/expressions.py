"""Evaluates expressions of a project's code to sets of values, under one release, and notes what they use of it."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from packaging.version import Version

from ...evidence.values import SourceLine
from .interpreted import (
    ANYTHING,
    NOTHING,
    UNTOLD,
    VERSION_PARTS,
    Class,
    Const,
    External,
    Function,
    Import,
    Instance,
    Items,
    Keywords,
    Listing,
    Method,
    Missing,
    Names,
    ProjectModule,
    Several,
    Unknown,
    Value,
    Values,
    Vendor,
    VendorModule,
    argument_of_values,
    calculate,
    constant,
    cut,
    each_of,
    either,
    elements_of,
    is_untold,
    plain,
    subscript,
    truth_of,
    wrap,
)
from .project import Source, SourceFile
from .release import Absent, Release
from .surface import BELOW, RESULT, UNKNOWN, Argument, Symbol, Use, UseKind, argument_of, is_caught

Key = tuple[str, int, int, UseKind]
"""A place that uses something: file, line, column, kind."""


class Lacking(Exception):
    """The release at hand lacks a symbol, inside of a `try` that catches what this raises.

    Args:
        symbol: that is not there.
        raised: builtin exception.
        name: that an import would have bound.
    """

    def __init__(self, symbol: Symbol, raised: str, name: str) -> None:
        self.symbol, self.raised, self.name = symbol, raised, name


_HANDS_ON = (ast.BoolOp, ast.IfExp, ast.Name, ast.NamedExpr, ast.Await, ast.Starred)  # give what a part of them gives


@dataclass(frozen=True)
class Access:
    """An attribute that the code asks for; a use is noted unless it is called, which notes one of its own."""

    attr: str
    node: ast.AST
    names: Names
    called: bool = False


class Expressions(ABC):
    """Reads expressions: one method a kind of syntax (`_of_...`), one a kind of owner of an attribute (`_in_...`)."""

    def __init__(self, source: Source, release: Release, versions: Collection[str] = ()) -> None:
        self.source, self.project, self.release = source, source.project, release
        self.versions = versions  # of both releases that are compared
        self._version = constant(release.version) if release.version[:1].isdigit() else frozenset({UNTOLD})  # a folder
        self.uses: dict[Key, list[Use]] = {}
        self.entries: dict[str, SourceLine] = {}  # row -> its first import of Transformer Engine
        self.order: dict[str, None] = {}  # rows, each after those that it imports
        self.near: tuple[SourceFile, ...] = ()  # files that take what comes from Transformer Engine from others
        self._kinds: dict[str, dict[str, ast.expr]] = {}  # annotations that a module has a name for
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
        self._steps = 0
        self._owners: dict[tuple[str, str], Values] = {}
        self._loaded: set[tuple[str, str]] = set()  # files, and the modules of the package that each imports
        self._place: tuple[Any, ...] = ()  # a call that imports by texts, the names around it, and whether it is noted
        self._asked = 0  # values in the expression at hand from which the release could be told

    @abstractmethod
    def module(self, file: SourceFile) -> Names:
        """The names of a module of the project."""

    @abstractmethod
    def _statement(self, node: ast.stmt, names: Names) -> bool:
        """Read a statement; whether what follows is reached."""

    def _quietly(self, node: ast.expr, names: Names) -> Values:
        """The value of an expression that is read a second time."""
        with self._noting_nothing():
            return self._value(node, names.fork())

    @contextmanager
    def _noting_nothing(self, *place: Any) -> Iterator[None]:
        """Note nothing; with the place of a call, what is imported is noted there, as the call does that."""
        outer, self._place = self._place, (self._place or (*place, self._quiet)) if place else ()
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1
            self._place = outer

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
            value.symbol.path,
            value.path,
            kind,
            self.source.row_of(names.file),
            site,
            names.function,
            optional=optional,
            caught=names.caught,
            is_guarded=names.is_guarded,
        )

    def _note_name(self, symbol: Symbol, node: ast.AST, names: Names, raised: str, bound: str = "") -> Values:
        """Note a name of the package; what it gives, or what its lack raises where the code catches that.

        Args:
            raised: builtin exception.
            bound: name that an import binds.
        """
        optional = is_caught(raised, names.caught)
        at, around, quiet = self._place or (node, names, self._quiet)
        if not quiet:
            is_optional = optional or is_caught(raised, around.caught)
            self._keep_use(self._use(Vendor(symbol), UseKind.NAME, at, around, optional=is_optional), at)
        if not isinstance(self.release.lookup(symbol.module, symbol.name), Absent):
            return frozenset({Vendor(symbol)})
        if optional:
            raise Lacking(symbol, raised, bound)
        return ANYTHING

    def _use_of_call(
        self, value: Vendor, node: ast.Call, names: Names, *, unpack: int = 0, first: int = 0, partial: bool = False
    ) -> Use:  # fmt: skip
        plain: list[Argument] = []
        is_cut = False  # after `*args` of unknown length, the place of an argument is unknown
        for argument in node.args[first:]:
            if not isinstance(argument, ast.Starred):
                plain.append(self._argument(argument, names))
                continue
            match list(self._quietly(argument.value, names)):
                case [Items(values=values)]:
                    plain += [argument_of_values(one) or UNKNOWN for one in values]
                case _:
                    is_cut = True
        keywords: dict[str, Argument] = {}
        is_open, guarded = False, set[str]()
        for keyword in node.keywords:
            if keyword.arg is not None:
                keywords[keyword.arg] = self._argument(keyword.value, names)
                continue
            for one in self._quietly(keyword.value, names):
                is_open |= not isinstance(one, Keywords) or one.is_open
                if isinstance(one, Keywords):
                    keywords |= {key: argument_of_values(values) or UNKNOWN for key, values in one.items.items()}
                    guarded |= {key for key, values in one.items.items() if is_untold(values)}
        return replace(
            self._use(value, UseKind.CALL, node, names), positionals=tuple(plain), keywords=keywords,
            open_positionals=is_cut, open_keywords=is_open, guarded=frozenset(guarded), partial=partial, unpack=unpack,
        )  # fmt: skip

    def _argument(self, node: ast.expr, names: Names) -> Argument:
        return argument_of_values(self._quietly(node, names)) or argument_of(node, names.facts)

    @abstractmethod
    def _of_call(self, node: ast.Call, names: Names, unpack: int = 0) -> Values:
        """What a call gives."""

    def _value(self, node: ast.expr, names: Names) -> Values:
        if isinstance(node, ast.Constant):
            return constant(node.value)
        reader: Callable[[ast.expr, Names], Values] | None = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        asked, values = self._asked, ANYTHING
        if reader is not None:
            values = reader(node, names)
        else:
            self._children(node, names)
        if self._asked > asked and not isinstance(node, _HANDS_ON):
            known = frozenset(one for one in values if not isinstance(one, Unknown | Items | Several) or plain(one))
            values = known if known == values else known | {UNTOLD}
        self._asked = asked + any(map(self._tells, values))
        return values

    def _tells(self, value: Value) -> bool:
        """Whether a value is the version of Transformer Engine, or follows from the release and is not known."""
        if isinstance(value, Const):
            return isinstance(value.value, str | Version) and str(value.value) == self.release.version
        return isinstance(value, Unknown) and value.of_release

    def _children(self, node: ast.AST, names: Names) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._value(child, names)
            elif isinstance(child, ast.stmt):
                self._statement(child, names)
            else:
                self._children(child, names)

    def _of_name(self, node: ast.Name, names: Names) -> Values:
        found = names.find(node.id)
        if found is not None:
            return found
        return self._of_stars(node.id, names, node) or frozenset({External(f"builtins.{node.id}")})

    def _of_attribute(self, node: ast.Attribute, names: Names) -> Values:
        return either(*(self._member(one, Access(node.attr, node, names)) for one in self._value(node.value, names)))

    def _of_unaryop(self, node: ast.UnaryOp, names: Names) -> Values:
        values = self._value(node.operand, names)
        known = truth_of(values)
        if isinstance(node.op, ast.Not):
            return ANYTHING if known is None else constant(not known)
        return calculate(constant(0), ast.Sub(), values) if isinstance(node.op, ast.USub) else ANYTHING

    def _of_binop(self, node: ast.BinOp, names: Names) -> Values:
        return calculate(self._value(node.left, names), node.op, self._value(node.right, names))

    def _of_joinedstr(self, node: ast.JoinedStr, names: Names) -> Values:
        texts: list[object] = []
        for part in node.values:
            inner = part.value if isinstance(part, ast.FormattedValue) else part
            values = [plain(one) for one in self._value(inner, names)]
            is_plain = not isinstance(part, ast.FormattedValue) or (part.conversion < 0 and part.format_spec is None)
            texts += values[0] or () if len(values) == 1 and is_plain else ()
        return constant("".join(map(str, texts))) if len(texts) == len(node.values) else ANYTHING

    def _of_namedexpr(self, node: ast.NamedExpr, names: Names) -> Values:
        values = self._value(node.value, names)
        self._bind(node.target, values, names)
        return values

    def _of_tuple(self, node: ast.Tuple | ast.List, names: Names) -> Values:
        values = tuple(self._value(part, names) for part in node.elts)
        is_open = any(isinstance(part, ast.Starred) for part in node.elts)
        return ANYTHING if is_open else frozenset({Items(values)})

    _of_list = _of_tuple

    def _of_subscript(self, node: ast.Subscript, names: Names) -> Values:
        owner = self._value(node.value, names)
        if isinstance(node.slice, ast.Slice):
            ends = [NOTHING if e is None else self._value(e, names) for e in (node.slice.lower, node.slice.upper)]
            return cut(owner, *ends) if node.slice.step is None else ANYTHING
        return subscript(owner, self._value(node.slice, names))

    def _of_await(self, node: ast.Await | ast.Starred, names: Names) -> Values:
        return self._value(node.value, names)

    _of_starred = _of_await

    def _of_lambda(self, node: ast.Lambda, names: Names) -> Values:
        return frozenset({self._functions.setdefault(node, Function(node, names))})

    def _of_boolop(self, node: ast.BoolOp, names: Names) -> Values:
        """Each part is reached only where those before it let it be."""
        passes, found, way = isinstance(node.op, ast.And), list[Values](), names.fork()
        for part in node.values:
            values = self._value(part, way)
            known = truth_of(values)
            if known is (not passes) or part is node.values[-1]:
                return either(*found, values)
            if known is None:
                left = (v for v in values if truth_of(frozenset({v})) is not passes)
                found.append(frozenset(replace(v, is_true=not passes) if isinstance(v, Unknown) else v for v in left))
                way.is_guarded |= is_untold(values)
            if not self._narrow(part, way, wanted=passes):
                break
        return either(*found)

    def _of_dict(self, node: ast.Dict, names: Names) -> Values:
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

    def _of_listcomp(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, names: Names
    ) -> Values:  # fmt: skip
        way, each = names.fork(), list[Values]()
        for part in node.generators:
            over = self._value(part.iter, way)
            items = [one.values for one in over if isinstance(one, Items)]
            is_plain = not part.ifs and not isinstance(node, ast.DictComp) and len(node.generators) == 1
            if is_plain and len(items) == len(over) == 1:
                for value in items[0]:
                    self._bind(part.target, value, way)
                    each.append(self._value(node.elt, way))  # type: ignore[union-attr]
                return frozenset({Items(tuple(each))})
            self._bind(part.target, elements_of(over), way)
            for test in part.ifs:
                self._value(test, way)
                self._narrow(test, way, wanted=True)
        if isinstance(node, ast.DictComp):
            self._value(node.key, way)
        return frozenset({Several(self._value(node.value if isinstance(node, ast.DictComp) else node.elt, way))})

    _of_setcomp = _of_generatorexp = _of_dictcomp = _of_listcomp

    def _member(self, owner: Value, at: Access) -> Values:
        """What an attribute of a value can be."""
        if isinstance(owner, Import):  # what else such an object has says why the import failed
            return frozenset({Import(owner.function, insists=True)}) if at.attr == "require" else ANYTHING
        reader: Callable[[Value, Access], Values] | None = getattr(self, f"_in_{type(owner).__name__.lower()}", None)
        return ANYTHING if reader is None else reader(owner, at)

    def _in_vendormodule(self, owner: VendorModule, at: Access) -> Values:
        if at.attr.startswith("__"):  # every module has __file__, __path__ and their like
            special = {"__version__": self._version, "__dict__": frozenset({Listing(owner)})}
            return special.get(at.attr, ANYTHING)
        symbol = Symbol(owner.path, at.attr)
        if not self.release.gives_module(owner.path, at.attr):
            return self._note_name(symbol, at.node, at.names, "AttributeError")
        if not self._is_loaded(symbol.path, at.names.file.module):
            elsewhere = self._is_loaded(symbol.path)
            self._note(Vendor(symbol), UseKind.MODULE, at.node, at.names, optional=elsewhere)
            if not elsewhere and is_caught("AttributeError", at.names.caught):
                raise Lacking(symbol, "AttributeError", "")
        return frozenset({VendorModule(symbol.path)})

    def _is_loaded(self, dotted: str, file: str = "") -> bool:
        """Whether a submodule is an attribute of its package: the library or the code (this file of it) imports it."""
        return self.release.may_load(dotted) or any(name == dotted and file in ("", at) for at, name in self._loaded)

    def _load(self, dotted: str, names: Names) -> None:
        """Note that a file imports a module of the package, and with it the packages that hold that one."""
        self._loaded |= {(names.file.module, part) for part in accumulate(dotted.split("."), "{}.{}".format)}

    def _in_missing(self, owner: Missing, at: Access) -> Values:
        self._note(Vendor(owner.symbol), UseKind.NAME, at.node, at.names)  # an attribute of None raises
        return ANYTHING

    def _in_vendor(self, owner: Vendor, at: Access) -> Values:
        value = Vendor(owner.symbol, (*owner.path, at.attr))
        if at.attr == "__code__":
            return frozenset({Listing(owner, of_call=True)})
        if not at.called:
            self._note(value, UseKind.ATTRIBUTE, at.node, at.names)
        return frozenset({value})

    def _in_projectmodule(self, owner: ProjectModule, at: Access) -> Values:
        found = self.module(owner.file).names.get(at.attr)
        below = self.project.find(f"{owner.file.module}.{at.attr}")
        if found is None and below is not None:
            return frozenset({ProjectModule(below)})
        if found is None and self.release.library.names_version(at.attr):  # a file of another package by that name
            return self._in_external(External(owner.file.module), at)
        return found if found is not None else self._of_stars(at.attr, self.module(owner.file), at.node) or ANYTHING

    def _in_instance(self, owner: Instance, at: Access) -> Values:
        cls = owner.cls
        if at.attr == "_modules":
            return frozenset({Keywords(dict(cls.fields), is_open=True)})
        for one in cls.lineage[1:] if owner.is_above else cls.lineage:
            if isinstance(one, Vendor):
                made = Vendor(one.symbol, (*one.path, RESULT))
                return frozenset({one}) if at.attr == "__init__" else self._in_vendor(made, at)
            if isinstance(one, Class):
                found = either(one.fields.get(at.attr, frozenset()), one.members.get(at.attr, frozenset()))
                if found:
                    return frozenset(Method(f, Instance(cls)) if isinstance(f, Function) else f for f in found)
        return ANYTHING

    def _in_class(self, owner: Class, at: Access) -> Values:
        for one in owner.lineage:
            if isinstance(one, Vendor):
                return self._in_vendor(one, at)
            if isinstance(one, Class) and at.attr in one.members:
                return one.members[at.attr]
        return ANYTHING

    def _in_external(self, owner: External, at: Access) -> Values:
        told = [UNTOLD] if self.release.library.names_version(at.attr) else []
        found: Values = frozenset({External(f"{owner.path}.{at.attr}"), *told})
        return constant(False) if at.attr == "TYPE_CHECKING" else found

    def _in_const(self, owner: Const, at: Access) -> Values:
        is_part = isinstance(owner.value, Version) and at.attr in VERSION_PARTS
        return wrap(getattr(owner.value, at.attr)) if is_part else ANYTHING

    def _in_listing(self, owner: Listing, at: Access) -> Values:
        is_list = at.attr in ("parameters", "args", "kwonlyargs", "keys", "co_varnames")
        return frozenset({owner}) if is_list else ANYTHING

    def _of_stars(self, name: str, names: Names, node: ast.AST) -> Values | None:
        for module in names.module.stars:
            found = self.release.lookup(module, name)
            if not isinstance(found, Absent):
                self._note(Vendor(Symbol(module, name)), UseKind.NAME, node, names)
                return frozenset({Vendor(Symbol(module, name))})
        return None

    def _bind(self, target: ast.expr, values: Values, names: Names) -> None:
        """Bind what stands left of a `=`, behind an `as`, or between `for` and `in`."""
        if isinstance(target, ast.Starred):
            target, values = target.value, ANYTHING
        binder: Callable[[ast.expr, Values, Names], None] | None = getattr(
            self, f"_bind_{type(target).__name__.lower()}", None
        )
        if binder is not None:
            binder(target, values, names)

    def _bind_name(self, target: ast.Name, values: Values, names: Names) -> None:
        names.bind(target.id, values)

    def _bind_tuple(self, target: ast.Tuple | ast.List, values: Values, names: Names) -> None:
        parts = target.elts
        stars = [index for index, part in enumerate(parts) if isinstance(part, ast.Starred)]
        whole = [one.values for one in values if isinstance(one, Items)]
        whole = [one for one in whole if len(one) == len(parts) or (stars and len(one) >= len(parts) - 1)]
        for index, part in enumerate(parts):
            at = index if not stars or index <= stars[0] else index - len(parts)
            known = [one[at] for one in whole] if index not in stars else []
            self._bind(part, either(*known) if known and len(whole) == len(values) else ANYTHING, names)

    _bind_list = _bind_tuple

    def _bind_attribute(self, target: ast.Attribute, values: Values, names: Names) -> None:
        for one in self._value(target.value, names):
            if isinstance(one, Instance):
                one.cls.fields[target.attr] = either(one.cls.fields.get(target.attr, frozenset()), values)
            elif isinstance(one, Class):
                one.members[target.attr] = either(one.members.get(target.attr, frozenset()), values)
            elif isinstance(one, VendorModule):  # set where nothing reads it any more, it is lost without a word
                self._note(Vendor(Symbol(one.path, target.attr)), UseKind.NAME, target, names, optional=True)
                self._load(f"{one.path}.{target.attr}", names)  # `te.fp8 = te.quantization`
            elif isinstance(one, Vendor):
                value = Vendor(one.symbol, (*one.path, target.attr))
                self._note(value, UseKind.ATTRIBUTE, target, names, optional=True)

    def _bind_subscript(self, target: ast.Subscript, values: Values, names: Names) -> None:
        keys = [one.value for one in self._value(target.slice, names) if isinstance(one, Const)]
        for one in self._value(target.value, names):
            if isinstance(one, Keywords):
                given = values | ({UNTOLD} if names.is_guarded else frozenset())
                one.items |= {key: given for key in keys if isinstance(key, str)}
                one.is_open |= not keys
        self._grow(target.value, values, names)

    def _grow(self, owner: ast.expr, more: Values, names: Names) -> None:
        """Put an element into what a name or a field holds, where that is a container."""
        held = self._quietly(owner, names)
        if all(isinstance(one, Items | Several) for one in held):
            self._bind(owner, frozenset({Several(either(each_of(held), more))}), names)

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
                return self._keep(
                    name, names, lambda v: isinstance(v, Unknown) or (v in NOTHING or isinstance(v, Missing)) is is_none
                )
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kind]) if wanted:
                known = self._object_of(kind, names)
                if known and known != ANYTHING:
                    names.names[name] = known
            case ast.Call(func=func, args=[ast.Name(id=name)]) if wanted:
                for one in self._quietly(func, names):
                    if isinstance(one, Function) and (tested := self._tested(one)) != ANYTHING:
                        names.names[name] = tested
            case ast.Name(id=name):
                return self._keep(name, names, lambda one: truth_of(frozenset({one})) is not (not wanted))
            case ast.Constant(value=value):
                return bool(value) is wanted
        return True

    def _object_of(self, kind: ast.expr | None, names: Names) -> Values:
        """An object of the classes of Transformer Engine that an annotation or `isinstance` names, or a list of it."""
        match kind:
            case ast.BinOp(left=left, right=right):
                return self._object_of(ast.Tuple([left, right]), names)
            case ast.Subscript(value=ast.Name(id="Optional" | "Union"), slice=inner):
                return self._object_of(inner, names)
            case ast.Subscript(value=ast.Name(id="list" | "List" | "Sequence" | "Iterable"), slice=inner):
                return frozenset({Several(self._object_of(inner, names))})
            case ast.Tuple(elts=kinds):
                known = either(*(self._object_of(one, names) for one in kinds))
                return ANYTHING if known >= ANYTHING else known
            case ast.Name() | ast.Attribute():
                found = each_of(self._quietly(kind, names))
                known = frozenset(Vendor(one.symbol, (*one.path, BELOW)) for one in found if isinstance(one, Vendor))
                return known if len(known) == len(found) else ANYTHING
            case ast.Constant(value=None):
                return frozenset()
            case ast.Constant(value=str(text)):
                with suppress(SyntaxError):
                    return self._object_of(ast.parse(text, mode="eval").body, names)
        return ANYTHING

    def _tested(self, function: Function) -> Values:
        """What the first argument is where a function of the project returns true: `is_float8tensor(x)`."""
        body = getattr(function.node, "body", None)
        match body[-1] if isinstance(body, list) and len(body) <= 2 else None:  # a docstring, and what it returns
            case ast.Return(value=ast.expr() as returned) if function.node.args.args:
                first = function.node.args.args[0].arg
                inside = Names(function.names.file, function.names, names={first: ANYTHING})
                if function.node not in self._reading:
                    self._reading.append(function.node)
                    self._narrow(returned, inside, wanted=True)
                    self._reading.pop()
                return inside.names[first]
        return ANYTHING

    def _keep(self, name: str, names: Names, keeps: Callable[[Value], bool]) -> bool:
        known = names.find(name)
        if known is None:
            return True
        left = frozenset(one for one in known if keeps(one))
        if left != known and left:
            names.names[name] = left
        return bool(left)
