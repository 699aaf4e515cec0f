"""What a source tree uses of Transformer Engine: typed values, and what is known of an argument without running it."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from ...evidence.values import SourceLine
from .syntax_nodes import parameters_of

RESULT = "()"  # a step in `Use.path`: the value that a call gives
ELEMENT = "[]"  # a step in `Use.path`: what a container holds under a key that is a text
BELOW = "<:"  # a step in `Use.path`: an object of this class, or of any class below it


class UseKind(StrEnum):
    """How a value from Transformer Engine is used at one place."""

    NAME = "name"  # imported
    CALL = "call"
    ATTRIBUTE = "attribute"
    CONTEXT = "context"  # with VALUE:
    DECORATOR = "decorator"
    CLASS = "class"  # subclassed or compared as a class
    MODULE = "module"  # an attribute that is a submodule, which neither the package nor this file loads
    REFUSAL = "refusal"  # a module that raises for this release by itself, when it is imported


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
class Use:
    """One place in the bridge that consumes something of Transformer Engine.

    Attributes:
        accessor: dotted name of the symbol that the value comes from.
        path: the way from the symbol to the value: names of attributes, and RESULT for a call.
        kind: what is done with the value at the end of the path.
        module: id of the bridge module.
        site: where.
        function: qualified name of the function that it stands in.
        positionals, keywords: what a CALL passes.
        open_positionals, open_keywords: it also passes `*something`, `**something` that cannot be followed.
        partial: arguments may follow later (functools.partial).
        unpack: into how many names the value is unpacked; 0 if it is not.
        optional: the code can do without (getattr with a default, an accessor that may give None, a `try`).
        caught: builtin exceptions that the code around it catches, and goes on.
        is_guarded: a check of the release decides whether it is reached, and what it gives is not known.
        guarded: keywords that such a check decides about.
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
    caught: frozenset[str] = frozenset()
    is_guarded: bool = False
    guarded: frozenset[str] = frozenset()


def is_caught(raised: str, caught: Collection[str]) -> bool:
    """Whether one of some builtin exceptions, by name, is `raised` or a base of it."""
    bases = getattr(builtins, raised, Exception).__mro__
    return any(base.__name__ in caught for base in bases)


@dataclass(frozen=True)
class Surface:
    """Everything that the bridge consumes.

    Attributes:
        symbols: what it names, under either release.
        uses: in the order of the files and lines.
        module_order: bridge module ids in dependency order.
        entries: module -> where it first imports Transformer Engine itself.
    """

    symbols: frozenset[Symbol]
    uses: tuple[Use, ...]
    module_order: tuple[str, ...]
    entries: Mapping[str, SourceLine]


_NEVER_NONE = frozenset(
    {"bool", "bytes", "dict", "float", "int", "list", "str", "tuple", "Callable", "Sequence", "Tensor"}
)

_WRITTEN_OUT: Final[dict[type[ast.expr], str]] = {ast.Dict: "dict", ast.List: "list", ast.JoinedStr: "str"}
_MADE: Final = {name: name for name in ("list", "tuple", "dict", "int", "float", "str", "Tensor")} | {"len": "int"}
_TENSOR_METHODS = frozenset({"contiguous", "float", "permute", "reshape", "to", "transpose", "unsqueeze", "view"})


def argument_of(node: ast.expr, facts: Mapping[str, Argument]) -> Argument:
    """What is known of an expression, given what is known of the names in it."""
    match node:
        case ast.Name(id=name):
            return facts.get(name, UNKNOWN)
        case ast.IfExp(body=body, orelse=orelse):
            return _either(argument_of(body, facts), argument_of(orelse, facts))
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return Argument((True, False), never_none=True)
        case ast.Dict() | ast.List() | ast.JoinedStr():
            return Argument(never_none=True, type_name=_WRITTEN_OUT[type(node)])
        case ast.Call(func=ast.Name(id=made)) if made in _MADE:
            return Argument(never_none=True, type_name=_MADE[made])
    is_made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TENSOR_METHODS
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return Argument(never_none=is_made or isinstance(node, ast.BinOp))
    return Argument((value,), never_none=value is not None)


def named_kinds(tree: ast.Module) -> dict[str, ast.expr]:
    """Kinds that a module writes out under a name: `Mode = Literal["a", "b"]`."""
    assigned = [n for n in tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Subscript)]
    return {n.targets[0].id: n.value for n in assigned if isinstance(n.targets[0], ast.Name)}


def parameter_facts(arguments: ast.arguments, kinds: Mapping[str, ast.expr]) -> dict[str, Argument]:
    """What the annotations of a function say of its parameters, and their defaults.

    Args:
        arguments: of the function.
        kinds: those that its module has a name for.
    """
    return {
        a.arg: Argument(usual=(None,))  # whatever is said: `x: Tensor = None`
        if isinstance(d, ast.Constant) and d.value is None and _annotated(a.annotation, kinds).never_none
        else replace(_annotated(a.annotation, kinds), usual=(d.value,) if isinstance(d, ast.Constant) else ())
        for a, d in parameters_of(arguments)
    }


def _annotated(node: ast.expr | None, kinds: Mapping[str, ast.expr]) -> Argument:
    if isinstance(node, ast.Attribute):  # `torch.Tensor`
        node = ast.Name(node.attr)
    if isinstance(node, ast.Name):
        node = kinds.get(node.id, node)
    match node:
        case ast.Name(id="bool"):
            return Argument((True, False), never_none=True)
        case ast.Name(id=name) if name in _NEVER_NONE:
            return Argument(never_none=True, type_name=_MADE.get(name, "") if name != "float" else "")
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            with suppress(ValueError):
                values = ast.literal_eval(inner)
                every = values if isinstance(values, tuple) else (values,)
                return Argument(every, never_none=None not in every)
        case ast.Subscript(value=ast.Name(id=name)) if name in _NEVER_NONE:
            return Argument(never_none=True)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _either(_annotated(left, kinds), _annotated(right, kinds))
        case ast.Constant(value=None):
            return Argument((None,))
    return UNKNOWN


def _either(first: Argument, second: Argument) -> Argument:
    both = None if first.values is None or second.values is None else (*first.values, *second.values)
    one_type = first.type_name if first.type_name == second.type_name else ""
    return Argument(both, first.never_none and second.never_none, one_type)
