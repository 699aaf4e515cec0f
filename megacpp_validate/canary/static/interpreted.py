"""Values that the interpreter of a project's code follows, and the names that are bound to them."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from .project import SourceFile
from .surface import Argument, Symbol, UseKind


@dataclass(frozen=True)
class Const:
    """A value that the code writes out, or that follows from such values: a literal, a version."""

    value: object


@dataclass(frozen=True)
class Vendor:
    """A value that comes from Transformer Engine: attributes and calls lead to it from an imported symbol."""

    symbol: Symbol
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Missing:
    """None in the place of a symbol that a release lacks."""

    symbol: Symbol


@dataclass(frozen=True)
class VendorModule:
    """A module of Transformer Engine."""

    path: str


@dataclass(frozen=True)
class External:
    """A name of a package that is neither the project's nor Transformer Engine."""

    path: str


@dataclass(eq=False, repr=False)
class Function:
    """A function of the project.

    Attributes:
        names: in which it was defined.
        owner: the class that it is a method of.
    """

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    names: Names
    owner: Class | None = None


@dataclass(eq=False, repr=False)
class Class:
    """A class of the project."""

    node: ast.ClassDef
    names: Names
    bases: tuple[Value, ...] = ()
    members: dict[str, Values] = field(default_factory=dict)
    fields: dict[str, Values] = field(default_factory=dict)  # of `self`

    @property
    def lineage(self) -> list[Value]:
        """The class and its bases, depth first, each once."""
        found: list[Value] = [self]
        for base in self.bases:
            deeper = base.lineage if isinstance(base, Class) else [base]
            found += [one for one in deeper if one not in found]
        return found


@dataclass(frozen=True)
class Instance:
    """An object of a class of the project."""

    cls: Class


@dataclass(frozen=True)
class Method:
    """A method, bound to an object or a class."""

    function: Function
    holder: Value


@dataclass(frozen=True)
class Import:
    """What a decorator of the project makes of a function that only imports: an object that imports when it is called.

    Attributes:
        insists: it raises where the import fails, instead of giving None.
    """

    function: Function
    insists: bool = False


@dataclass(frozen=True)
class Super:
    """`super()` in a class of the project."""

    cls: Class


@dataclass(eq=False)
class Keywords:
    """A dictionary whose keys are texts that the code writes out.

    Attributes:
        is_open: it may have other keys, too.
        is_drained: a key was taken out that is not known: of what is held since, only what every way holds is sure.
    """

    items: dict[str, Values] = field(default_factory=dict)
    is_open: bool = False
    is_drained: bool = False


@dataclass(frozen=True)
class Items:
    """A tuple or a list that is written out."""

    values: tuple[Values, ...]


@dataclass(frozen=True)
class ProjectModule:
    """A module of the project."""

    file: SourceFile


@dataclass(frozen=True)
class Unknown:
    """Anything.

    Attributes:
        is_true: what its truth is known to be.
        of_release: it follows from the release, in a way that cannot be evaluated.
    """

    is_true: bool | None = None
    of_release: bool = False


@dataclass(frozen=True)
class Listing:
    """The names that something has (`dir(te)`), or that a call of it takes (`inspect.signature(te.Linear)`)."""

    owner: Value
    of_call: bool = False


Value: TypeAlias = (
    "Const | Vendor | Missing | VendorModule | External | Function | Class | Import | Instance | Method | Super "
    "| Keywords | Items | Listing | ProjectModule | Unknown"
)
Values: TypeAlias = "frozenset[Value]"
ANYTHING: Final[Values] = frozenset({Unknown()})
NOTHING: Final[Values] = frozenset({Const(None)})
UNTOLD: Final = Unknown(of_release=True)
_MOST: Final = 12


def either(*sides: Values) -> Values:
    """What is one of several values; of too many, anything beside what comes from Transformer Engine."""
    both: Values = frozenset().union(*sides)
    if len(both) <= _MOST:
        return both
    return frozenset(one for one in both if isinstance(one, Vendor | VendorModule | Class)) | ANYTHING


def each_of(values: Values) -> list[Value]:
    """The values, and those in a tuple or a list among them."""
    return [inner for one in values for inner in (either(*one.values) if isinstance(one, Items) else (one,))]


def is_untold(values: Values) -> bool:
    """Whether one of some values follows from the release in a way that cannot be evaluated."""
    return any(isinstance(one, Unknown) and one.of_release for one in values)


def constant(value: object) -> Values:
    """A value that is known."""
    return frozenset({Const(value)})


@dataclass(repr=False)
class Names:
    """Names in sight at one place of the code.

    Attributes:
        file: that holds the place.
        outer: names around it, without those of a class body.
        function: qualified name of the function or class, as reports show it.
        stars: modules of Transformer Engine whose names are all imported.
        facts: what annotations say of the parameters.
        returned: what the function around it returns.
        caught: builtin exceptions that a `try` around it catches, and goes on.
        is_guarded: a check of the release that is not known decides whether the place is reached.
        hands_on: as what the function around it returns values, by its annotation.
        is_way: one of several ways through the code, not a scope of its own.
    """

    file: SourceFile
    outer: Names | None = None
    function: str = ""
    names: dict[str, Values] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    facts: dict[str, Argument] = field(default_factory=dict)
    returned: list[Values] = field(default_factory=list)
    is_global: set[str] = field(default_factory=set)
    cls: Class | None = None
    caught: frozenset[str] = frozenset()
    is_guarded: bool = False
    hands_on: UseKind | None = None
    is_way: bool = False

    def find(self, name: str) -> Values | None:
        """What a name is bound to here or around; None where nothing binds it."""
        at: Names | None = self
        while at is not None:
            if name in at.names:
                return at.names[name]
            at = at.outer
        return None

    @property
    def module(self) -> Names:
        """The names of the module itself."""
        at = self
        while at.outer is not None:
            at = at.outer
        return at

    def bind(self, name: str, values: Values) -> None:
        """Bind a name."""
        self.names[name] = values
        if name in self.is_global:
            known = self.module.names.get(name)
            self.module.names[name] = values if known is None else either(known, values)

    def fork(self) -> Names:
        """The same place on one of several ways: what is bound there, and dictionaries that grow there, is its own."""
        way = replace(self, outer=self, names={}, is_way=True)
        at: Names | None = self
        while at is not None:
            way.names |= {n: forked(v) for n, v in at.grown().items() if n not in way.names}
            at = at.outer if at.is_way else None
        return way

    def grown(self) -> dict[str, Values]:
        """Names that are bound to dictionaries."""
        return {n: v for n, v in self.names.items() if any(isinstance(one, Keywords) for one in v)}

    def join(self, ways: Iterable[Names]) -> None:
        """Continue where several ways meet."""
        every = list(ways)
        for name in {name for way in every for name in way.names}:
            known = self.find(name) or frozenset()
            self.names[name] = _joined([way.names.get(name, known) for way in every])


def forked(values: Values) -> Values:
    """The same values; a dictionary among them is a copy, which grows on its own."""
    return frozenset(replace(v, items=dict(v.items)) if isinstance(v, Keywords) else v for v in values)


def _joined(sides: list[Values]) -> Values:
    """Dictionaries of several ways become one, that has the keys of all."""
    both = either(*sides)
    made = [one for one in both if isinstance(one, Keywords)]
    if len(made) < 2:
        return both
    is_drained = any(one.is_drained for one in made)
    keys = dict.fromkeys(key for one in made for key in one.items)
    if is_drained:
        keys = {key: None for key in keys if all(key in one.items for one in made)}
    whole = Keywords(
        {key: either(*(one.items[key] for one in made if key in one.items)) for key in keys},
        any(one.is_open for one in made),
        is_drained,
    )
    return frozenset({one for one in both if not isinstance(one, Keywords)} | {whole})
