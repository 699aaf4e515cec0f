"""What an interpreter of a project's code keeps while it reads, and the uses that it notes."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ...evidence.values import SourceLine
from .interpreted import (
    ANYTHING,
    Class,
    Const,
    Function,
    Items,
    Keywords,
    Method,
    Names,
    Values,
    Vendor,
    VendorModule,
)
from .project import Source, SourceFile
from .release import Absent, Release
from .surface import UNKNOWN, Argument, Member, Symbol, Use, UseKind, argument_of, is_caught

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
        super().__init__(symbol, raised, name)
        self.symbol, self.raised, self.name = symbol, raised, name


class Notes(ABC):
    """Reads a source tree under one release of Transformer Engine; here, what it notes."""

    def __init__(self, source: Source, release: Release) -> None:
        self.source, self.project, self.release = source, source.project, release
        self.uses: dict[Key, list[Use]] = {}
        self.entry: SourceLine | None = None  # the first import of Transformer Engine
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
        self._asked = 0  # values in the expression at hand from which the release could be told

    @abstractmethod
    def module(self, file: SourceFile) -> Names:
        """The names of a module of the project."""

    @abstractmethod
    def _value(self, node: ast.expr, names: Names) -> Values:
        """What an expression can be."""

    @abstractmethod
    def _statement(self, node: ast.stmt, names: Names) -> bool:
        """Read a statement; whether what follows is reached."""

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
        self._note(Vendor(symbol), UseKind.NAME, node, names, optional=optional)
        if not isinstance(self.release.lookup(symbol.module, symbol.name), Absent):
            return frozenset({Vendor(symbol)})
        if optional:
            raise Lacking(symbol, raised, bound)
        return ANYTHING

    def _note_call(
        self, value: Vendor, node: ast.Call, names: Names, *, unpack: int = 0, first: int = 0, partial: bool = False
    ) -> None:  # fmt: skip
        if self._quiet:
            return
        plain: list[Argument] = []
        is_cut = False  # after `*args` of unknown length, the place of an argument is unknown
        for argument in node.args[first:]:
            if not isinstance(argument, ast.Starred):
                plain.append(self._argument(argument, names))
                continue
            match list(self._quietly(argument.value, names)):
                case [Items(values=values)]:
                    plain += [_of_values(one) or UNKNOWN for one in values]
                case _:
                    is_cut = True
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
                use, positionals=tuple(plain), keywords=keywords, open_positionals=is_cut, open_keywords=is_open,
                partial=partial, unpack=unpack,
            ),
            node,
        )  # fmt: skip

    def _argument(self, node: ast.expr, names: Names) -> Argument:
        return _of_values(self._quietly(node, names)) or argument_of(node, names.facts)


def _of_values(values: Values) -> Argument | None:
    """What is known of an argument by its values; None where one of them can be anything."""
    if all(isinstance(one, Const) for one in values):
        literals = tuple(sorted((one.value for one in values if isinstance(one, Const)), key=repr))
        return Argument(literals, never_none=None not in literals)
    members = [_member(one) for one in values]
    if None not in members:
        return Argument(tuple(sorted(members, key=repr)), never_none=True)
    if all(isinstance(one, Vendor | VendorModule | Function | Class | Method) for one in values):
        return Argument(never_none=True)
    return None


def _member(value: object) -> Member | None:
    """`Format.E4M3`: what a class of Transformer Engine holds under a name in capitals."""
    match value:
        case Vendor(symbol=Symbol(name=owner), path=(name,)) if name.isupper() and owner[:1].isupper():
            return Member(owner, name)
    return None
