"""Values that the interpreter of a project's code follows, the names that are bound to them, and their arithmetic.

Arithmetic: truth, comparison and the few functions by which projects read a version.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from .project import SourceFile
from .surface import ELEMENT, Argument, Member, Symbol


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
    """An object of a class of the project; with `is_above` what `super()` gives in that class."""

    cls: Class
    is_above: bool = False


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
class Several:
    """A container of any length: what each of its elements can be."""

    each: Values


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
    "Const | Vendor | Missing | VendorModule | External | Function | Class | Import | Instance | Method "
    "| Keywords | Items | Several | Listing | ProjectModule | Unknown"
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


def title_of(defined: Function | Class) -> str:
    """The qualified name of a function or a class, as reports show it."""
    return ".".join(filter(None, (defined.names.function, getattr(defined.node, "name", "<lambda>"))))


def each_of(values: Values) -> Values:
    """The values, with the elements of a container in its place."""
    return either(*(elements_of(frozenset({v})) if isinstance(v, Items | Several) else frozenset({v}) for v in values))


def elements_of(containers: Values) -> Values:
    """What an element of a container can be; anything where nothing is known of a container, or it is empty."""
    held = (
        v.values if isinstance(v, Items) else [v.each] if isinstance(v, Several) else [ANYTHING] for v in containers
    )
    return either(*itertools.chain(*held)) or ANYTHING


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
            for name, values in at.names.items():
                if name not in way.names and any(isinstance(one, Keywords) for one in values):
                    way.names[name] = forked(values)
            at = at.outer if at.is_way else None
        return way

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


def argument_of_values(values: Values) -> Argument | None:
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


# --- arithmetic --------------------------------------------------------------------------------------------------

OPERATORS: Final[dict[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda one, group: one in group, ast.NotIn: lambda one, group: one not in group,
}  # fmt: skip
_THERE: Final = (Vendor, VendorModule, Function, Class, Import, Method, ProjectModule)  # neither None nor false
_METHODS: Final[dict[type, frozenset[str]]] = {
    str: frozenset({"split", "rsplit", "partition", "rpartition", "startswith", "strip", "replace", "join"}),
    SpecifierSet: frozenset({"contains"}),
}
VERSION_PARTS: Final = frozenset({"major", "minor", "micro", "release", "base_version", "public"})
_VERSIONS: Final = frozenset({"Version", "LooseVersion", "StrictVersion", "TorchVersion", "parse", "parse_version"})
_BUILTINS: Final[dict[str, Callable[..., Any]]] = {
    "str": str, "int": int, "float": float, "bool": bool, "len": len, "tuple": tuple, "list": list, "max": max,
    "min": min, "any": any, "all": all,
}  # fmt: skip
ARITHMETIC: Final[dict[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def truth_of(values: Values) -> bool | None:
    """Whether all values are true, or all are false; None where that is not known."""
    found = {_truth(one) for one in values}
    return found.pop() if len(found) == 1 else None


def _truth(value: Value) -> bool | None:
    match value:
        case Const(value=known):
            return bool(known)
        case Items(values=parts):
            return bool(parts)
        case Missing():
            return False
        case Unknown(is_true=known):
            return known
    return True if isinstance(value, _THERE) else None


def compare(sides: Sequence[Values], ops: Sequence[ast.cmpop]) -> Values:
    """What a comparison gives; a pair of values that cannot be compared raises, and gives nothing."""
    outcomes: set[bool | None] = set()
    pairs = list(zip(sides, ops, sides[1:], strict=False))
    for one, op, other in pairs:
        for left, right in itertools.islice(itertools.product(one, other), 64):
            with suppress(TypeError):
                outcomes.add(_compare(left, op, right))
    if len(pairs) > 1:
        return constant(True) if outcomes == {True} else constant(False) if outcomes == {False} else ANYTHING
    return either(*(ANYTHING if one is None else constant(one) for one in outcomes)) if outcomes else ANYTHING


def _compare(left: Value, op: ast.cmpop, right: Value) -> bool | None:
    if isinstance(op, ast.Is | ast.IsNot):
        is_not = isinstance(op, ast.IsNot)
        if right == Const(None) and isinstance(left, (Const, Items, Missing, *_THERE)):
            return (left == right or isinstance(left, Missing)) is not is_not
        if isinstance(left, Const) and isinstance(right, Const):
            return (left == right) is not is_not
        return None
    one, other = plain(left), plain(right)
    if one is None or other is None:
        return None
    return bool(OPERATORS[type(op)](one[0], other[0]))


def calculate(one: Values, op: ast.operator, other: Values) -> Values:
    """What arithmetic of numbers gives, and the sum of two texts or two lists."""
    do, found = ARITHMETIC.get(type(op)), list[Values]()
    for left, right in itertools.product(map(plain, one), map(plain, other)):
        kinds = {type(side[0]) if side is not None else None for side in (left, right)}
        is_sum = isinstance(op, ast.Add) and kinds in ({str}, {tuple})
        if do is None or left is None or right is None or not (is_sum or kinds <= {int, float}):
            return ANYTHING
        with suppress(ZeroDivisionError):
            found.append(wrap(do(left[0], right[0])))
    return either(*found) if found else ANYTHING


def plain(value: Value) -> tuple[Any] | None:
    """A value that is wholly known, as the only element; None for any other."""
    match value:
        case Const(value=known):
            return (known,)
        case Items(values=parts):
            inner = _plain_each(parts)
            return None if inner is None else (tuple(inner),)
    return None


def _plain_each(parts: Sequence[Values]) -> list[Any] | None:
    """Values that are all wholly known; None where one of them is not."""
    found = [plain(next(iter(part))) if len(part) == 1 else None for part in parts]
    return None if None in found else [one[0] for one in found if one is not None]


def wrap(value: Any) -> Values:
    """A Python value as values that the interpreter follows."""
    if isinstance(value, tuple | list):
        return frozenset({Items(tuple(wrap(one) for one in value))})
    return constant(value)


def subscript(owner: Values, key: Values) -> Values:
    """What `owner[key]` gives."""
    found: list[Values] = []
    for one in owner:
        for at in key:
            match one, at:
                case Vendor(symbol=symbol, path=(_, *_) as path), Const(value=str()):
                    found.append(frozenset({Vendor(symbol, (*path, ELEMENT))}))
                case Items(values=parts), Const(value=int() as index) if -len(parts) <= index < len(parts):
                    found.append(parts[index])
                case Items() | Several(), _:
                    found.append(elements_of(frozenset({one})) | ANYTHING)
                case _:
                    items = getattr(one, "items", None)
                    is_known = isinstance(items, dict) and isinstance(at, Const) and at.value in items
                    found.append(items[at.value] if is_known else ANYTHING)  # type: ignore[index,union-attr]
    return either(*found)


def cut(owner: Values, lower: Values, upper: Values) -> Values:
    """What `owner[lower:upper]` gives."""
    if any(isinstance(one, Several) for one in owner):
        return owner
    ends = [one.value for side in (lower, upper) for one in side if isinstance(one, Const)]
    start, end = ends if len(ends) == len(lower) + len(upper) == 2 else (..., ...)
    if len(owner) != 1 or not isinstance(start, int | None) or not isinstance(end, int | None):
        return ANYTHING
    match next(iter(owner)):
        case Items(values=parts):
            return frozenset({Items(parts[start:end])})
        case Const(value=str() as text):
            return constant(text[start:end])
    return ANYTHING


def call_external(path: str, arguments: Sequence[Values]) -> Values:
    """What a call of a function of another package gives, where it reads or makes a version.

    Args:
        path: dotted name of the function.
        arguments: positional ones.
    """
    last = path.rpartition(".")[2]
    values = _plain_each(arguments)
    if not values:  # what is made of a version that is not known is not known either
        return frozenset({UNTOLD}) if any(map(is_untold, arguments)) else ANYTHING
    made = Version if last in _VERSIONS else SpecifierSet if last == "SpecifierSet" else None
    if made is not None:
        with suppress(InvalidVersion, InvalidSpecifier):
            return constant(made(str(values[0])))
    known = _BUILTINS.get(last) if path.startswith("builtins.") else getattr(operator, last, None)
    if known is not None and path in (f"builtins.{last}", f"operator.{last}"):
        with suppress(TypeError, ValueError):
            return wrap(known(*values))
    return ANYTHING


def container_of(path: str, arguments: Sequence[Values]) -> Values | None:
    """A container that a call of a function of Python or torch makes of others; None for any other function."""
    match path.removeprefix("builtins.").removeprefix("torch.nn."), arguments:
        case ("staticmethod" | "list" | "tuple" | "reversed" | "ModuleList" | "ModuleDict" | "torch.compile", [held]):
            return held
        case ("ModuleList" | "ModuleDict" | "Sequential", layers):
            return frozenset({Several(either(*map(each_of, layers)))})
        case ("enumerate", [over, *_]):
            return frozenset({Several(frozenset({Items((ANYTHING, elements_of(over)))}))})
        case ("zip", overs):
            return frozenset({Several(frozenset({Items(tuple(map(elements_of, overs)))}))})
    return None


def call_known(value: object, method: str, arguments: Sequence[Values]) -> Values:
    """What a method of a known text, or of a known set of versions, gives."""
    given = _plain_each(arguments)
    if given is None or method not in _METHODS.get(type(value), ()):
        return ANYTHING
    with suppress(TypeError, ValueError):
        return wrap(getattr(value, method)(*given))
    return ANYTHING
