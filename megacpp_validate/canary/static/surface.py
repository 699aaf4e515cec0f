"""What the bridge consumes of Transformer Engine: typed values, derived from the bridge's code by `derive`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ...evidence.values import SourceLine

RESULT = "()"  # a step in `Use.path`: the value that a call gives
BELOW = "<:"  # a step in `Use.path`: an object of this class, or of any class below it


class UseKind(StrEnum):
    """How a value from Transformer Engine is used at one place."""

    NAME = "name"  # imported
    CALL = "call"
    ATTRIBUTE = "attribute"
    CONTEXT = "context"  # with VALUE:
    DECORATOR = "decorator"
    CLASS = "class"  # handed on, subclassed or compared as a class


@dataclass(frozen=True)
class Symbol:
    """A name in a module of Transformer Engine, as an import statement says it."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """Dotted path."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Member:
    """A member of an enumeration, by the names that the code has for both."""

    owner: str
    name: str


@dataclass(frozen=True)
class Argument:
    """What is known, without running it, of a value that the bridge passes.

    Attributes:
        values: every literal it can be; None if it can be others.
        never_none: it is annotated as something that is not None.
        type_name: the builtin type that it surely has; empty where that is not known.
        usual: what it is where the bridge's own caller leaves it out, as its only element.
    """

    values: tuple[object, ...] | None = None
    never_none: bool = False
    type_name: str = ""
    usual: tuple[object, ...] = ()


UNKNOWN = Argument()


@dataclass(frozen=True)
class Accessor:
    """An accessor of `bridge/imports.py`: the places it imports from, in the order in which it tries them."""

    name: str
    symbols: tuple[Symbol, ...]
    sites: tuple[SourceLine, ...]


@dataclass(frozen=True)
class Use:
    """One place in the bridge that consumes something of Transformer Engine.

    Attributes:
        accessor: which accessor the value comes from.
        path: the way from the symbol to the value: names of attributes, and RESULT for a call.
        kind: what is done with the value at the end of the path.
        module: id of the bridge module.
        site: where.
        function: qualified name of the function that it stands in.
        positionals, keywords: what a CALL passes.
        open_positionals, open_keywords: it also passes `*something`, `**something` that cannot be followed.
        partial: arguments may follow later (functools.partial).
        unpack: into how many names the value is unpacked; 0 if it is not.
        optional: the code can do without (getattr with a default, hasattr, an accessor that may give None, a `try`).
        present, absent: accessors that are known to be there, or not, where the use stands.
    """

    accessor: str
    path: tuple[str, ...]
    kind: UseKind
    module: str
    site: SourceLine
    function: str = ""
    positionals: tuple[Argument, ...] = ()
    keywords: Mapping[str, Argument] = field(default_factory=dict)
    open_positionals: bool = False
    open_keywords: bool = False
    partial: bool = False
    unpack: int = 0
    optional: bool = False
    present: frozenset[str] = frozenset()
    absent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Surface:
    """Everything that the bridge consumes.

    Attributes:
        accessors: by name.
        uses: in the order of the files and lines.
        module_order: bridge module ids in dependency order.
        entry: where Transformer Engine is imported first.
    """

    accessors: Mapping[str, Accessor]
    uses: tuple[Use, ...]
    module_order: tuple[str, ...]
    entry: SourceLine

    def first(self, modules: set[str]) -> str:
        """The module that comes first in dependency order."""
        return min(modules, key=self.module_order.index)
