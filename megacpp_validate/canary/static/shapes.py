"""Resolves what a value of the code is in one release: a class, an instance, a function, and its signature."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import griffe

from . import bodies
from .recipes import IGNORES_UNKNOWN
from .release import Found, Release
from .surface import BELOW, ELEMENT, RESULT
from .syntax_nodes import once_per_node, statements_below, walk

_POSITIONAL = {griffe.ParameterKind.positional_only, griffe.ParameterKind.positional_or_keyword}
_VARIADIC = {griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword}
_OF_PYTHON = frozenset({"classmethod", "staticmethod"})
_CONTEXT_DECORATORS = ("contextmanager", "asynccontextmanager")


@dataclass(frozen=True)
class Parameter:
    """One parameter: its kind as griffe has it, default and annotation as source text ("" if none).

    `popped`: it is taken out of `**kwargs`.
    """

    name: str
    kind: griffe.ParameterKind
    default: str | None = None
    annotation: str = ""
    popped: bool = False

    @property
    def required(self) -> bool:
        """Whether a call must give it."""
        return self.default is None and self.kind not in _VARIADIC


@dataclass(frozen=True)
class Signature:
    """How something is called, `self` left out.

    Attributes:
        parameters: in order.
        ignores_unknown: keywords that are not parameters are dropped without a word.
        open_keywords: there is a `**kwargs` with keys that cannot all be read.
        mentioned: texts in the body of a function with `**kwargs`, any of which may be a key.
        refused: keys of `**kwargs` for which it raises.
    """

    parameters: tuple[Parameter, ...]
    ignores_unknown: bool = False
    open_keywords: bool = False
    mentioned: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()

    def named(self, name: str) -> Parameter | None:
        """The parameter of that name; `*args` and `**kwargs` themselves are none."""
        return next((p for p in self.parameters if p.name == name and p.kind not in _VARIADIC), None)

    @property
    def positionals(self) -> list[Parameter]:
        """Parameters that a positional argument can reach, in order."""
        return [p for p in self.parameters if p.kind in _POSITIONAL]

    @property
    def takes_any_positional(self) -> bool:
        """Whether there is a `*args`."""
        return any(p.kind is griffe.ParameterKind.var_positional for p in self.parameters)


@dataclass(frozen=True)
class Shape:
    """A value in one release.

    Attributes:
        what: "class", "instance", "function", "plain" (what calling a plain generator function, or one that returns
            nothing but literals, gives), "value", "assigned" (a value that may be callable), "missing" (definitely not
            there), "unknown".
        obj: the class of a class or an instance, or the function, or the attribute.
        bound: the function is reached through an instance or is a classmethod: its first parameter is given.
        maybe: it is there only as a name made at run time.
        is_base: an instance of this class or of any class below it, as an annotation has it.
    """

    what: str
    obj: griffe.Object | None = None
    bound: bool = False
    maybe: bool = False
    is_base: bool = False


UNKNOWN_SHAPE = Shape("unknown")


def shape_of(release: Release, found: Found, path: Sequence[str]) -> Shape:
    """The shape of the value at the end of `path` from a definition."""
    shape = holder = _shape_of_object(found)
    if found.wrapped and (made := applied_of(release, found.obj)) is not None:
        shape = Shape("function", made)
    for index, step in enumerate(path):
        if step == ELEMENT:
            return _element(release, holder, path[index - 1], path[index + 1 :])
        holder = shape
        if step == BELOW:
            shape = Shape("instance", shape.obj, is_base=True) if shape.what == "class" else UNKNOWN_SHAPE
        else:
            shape = _called(release, shape) if step == RESULT else _member(release, shape, step)
        if shape.what in {"unknown", "missing"}:
            return shape
    return shape


def _element(release: Release, holder: Shape, field: str, rest: Sequence[str]) -> Shape:
    """What is read of `holder.field[key]`: there is what the code of the class itself reads of such an element."""
    if not isinstance(holder.obj, griffe.Class) or len(rest) != 1:
        return UNKNOWN_SHAPE
    nodes = [release.node_of(cls) for cls in (holder.obj, *release.bases(holder.obj)[0])]
    known = set[str]().union(*(_read_of_elements(node).get(field, ()) for node in nodes if node is not None))
    what = "value" if rest[0] in known else "missing" if known else "unknown"
    return Shape(what, holder.obj, maybe=True)  # what the class reads no more may be there all the same


@once_per_node
def _read_of_elements(node: ast.AST) -> dict[str, set[str]]:
    """Field of a class -> attributes that its code reads of what the field holds under a key."""
    found: dict[str, set[str]] = {}
    for one in walk(node):
        match one:
            case ast.Attribute(value=ast.Subscript(value=ast.Attribute(attr=field)), attr=name):
                found.setdefault(field, set()).add(name)
    return found


def callee_of(release: Release, shape: Shape) -> tuple[griffe.Function | None, bool]:
    """The function that runs when a shape is called, and whether its first parameter is given by Python."""
    match shape:
        case Shape(what="function", obj=griffe.Function() as function):
            return function, shape.bound
        case Shape(what="class", obj=griffe.Class() as cls):
            return _method(release, cls, "__init__") or _method(release, cls, "__new__"), True
        case Shape(what="instance", obj=griffe.Class() as cls):
            return _method(release, cls, "__call__") or _method(release, cls, "forward"), True
    return None, False


def signature_of(release: Release, shape: Shape, lineage: Sequence[griffe.Class] = ()) -> Signature | None:
    """How a shape is called; None where that cannot be known.

    Args:
        lineage: of the class whose constructor a function is reached from, beginning with the one that holds it.
    """
    if shape.what == "class" and isinstance(shape.obj, griffe.Class):
        lineage = (shape.obj, *release.bases(shape.obj)[0])
    function, bound = callee_of(release, shape)
    if function is None:
        return Signature(()) if shape.what == "class" and _takes_nothing(release, shape.obj) else None
    if (other := forwarded_to(release, function)) is not None:
        return signature_of(release, _shape_of_object(other))
    parameters = list(function.parameters)
    given = 1 if bound and parameters and parameters[0].kind not in _VARIADIC else 0
    known = [_parameter(p) for p in parameters[given:]]
    if not any(p.kind is griffe.ParameterKind.var_keyword for p in known):
        return Signature(tuple(known), ignores_unknown=IGNORES_UNKNOWN in function.labels)
    extra, is_open, swallows, beyond = _keywords_in(release, function, lineage)
    names = {p.name for p in known}
    known += [p for p in extra if p.name not in names]
    node = release.node_of(function)
    texts, refused = bodies.texts_in(node), bodies.refused_keys(node) | beyond
    return Signature(tuple(known), swallows, is_open, mentioned=texts, refused=refused)


def made_by(release: Release, shape: Shape) -> Signature | None:
    """How a class's own `__new__` is called, where it has a constructor beside it: a call has to fit both."""
    if shape.what != "class" or not isinstance(shape.obj, griffe.Class) or not _method(release, shape.obj, "__init__"):
        return None
    made = _method(release, shape.obj, "__new__")
    lineage = (shape.obj, *release.bases(shape.obj)[0])
    return signature_of(release, Shape("function", made, bound=True), lineage) if made is not None else None


def is_context_manager(release: Release, shape: Shape) -> bool | None:
    """Whether `with` takes the value; None where that cannot be known."""
    return False if shape.what == "plain" else _has_methods(release, shape, "__enter__", "__exit__")


def is_decorator(release: Release, shape: Shape) -> bool | None:
    """Whether the value can stand after `@`; None where that cannot be known."""
    return True if shape.what in {"function", "class"} else _has_methods(release, shape, "__call__")


def _has_methods(release: Release, shape: Shape, *names: str) -> bool | None:
    """Whether an instance has methods; what a generator context manager gives can be entered and decorates."""
    if shape.what == "instance" and isinstance(shape.obj, griffe.Class):
        if all(_method(release, shape.obj, name) for name in names):
            return True
        return False if release.bases(shape.obj)[1] else None
    is_generated = shape.what == "value" and isinstance(shape.obj, griffe.Function) and is_generator_context(shape.obj)
    return True if is_generated else None


def is_generator_context(function: griffe.Function) -> bool:
    """Whether a function is decorated as a context manager."""
    return any(str(d.value).rpartition(".")[2] in _CONTEXT_DECORATORS for d in function.decorators)


def _shape_of_object(found: Found) -> Shape:
    match found.obj:
        case griffe.Class() as cls:
            return Shape("class", cls)
        case griffe.Function() as function:
            return Shape("function", function)
        case griffe.Module() as module:
            return Shape("module", module)
        case other:
            return UNKNOWN_SHAPE if found.wrapped else Shape(_value_or_assigned(other), other)


def _value_or_assigned(obj: griffe.Object) -> str:
    """A property and a literal cannot be called; what any other expression gives is not known."""
    if not isinstance(obj, griffe.Attribute) or "property" in obj.labels:
        return "value"
    literal = isinstance(obj.value, str | griffe.ExprList | griffe.ExprDict | griffe.ExprTuple | griffe.ExprSet)
    return "value" if literal else "assigned"


def _called(release: Release, shape: Shape) -> Shape:
    match shape:
        case Shape(what="class", obj=griffe.Class() as cls):
            return Shape("instance", cls)
        case Shape(what="function", obj=griffe.Function() as function):
            given = _returned_class(release, function)
            if given is not None:
                return Shape("instance", given, is_base=True)
            if is_generator_context(function):
                return Shape("value", function)
            node = release.node_of(function)
            is_plain = not function.decorators and (bodies.returns_literals(node) or (node and bodies.yields(node)))
            return Shape("plain", function) if is_plain else UNKNOWN_SHAPE
    return UNKNOWN_SHAPE


def _takes_nothing(release: Release, cls: griffe.Object | None) -> bool:
    """Whether a class without a constructor surely has that of `object`."""
    if not isinstance(cls, griffe.Class):
        return False
    bases, complete = release.bases(cls)
    outside = {str(base) for one in (cls, *bases) for base in one.bases}
    made = outside & {"Enum", "IntEnum", "NamedTuple"} or any(one.decorators for one in (cls, *bases))
    return complete and not made


def _returned_class(release: Release, function: griffe.Function) -> griffe.Class | None:
    """The class of what a function gives, from its annotation or from `return Class(...)`."""
    names = [str(function.returns).strip("'\"")] if function.returns is not None else []
    node = release.node_of(function)
    if isinstance(node, ast.FunctionDef):
        returned = [n.value for n in statements_below(node) if isinstance(n, ast.Return) and n.value is not None]
        names += [ast.unparse(v.func) for v in returned if isinstance(v, ast.Call)][:1] if len(returned) == 1 else []
    for name in names:
        if name.replace(".", "").isidentifier():
            found = release.in_scope(function.module, name)
            if isinstance(found, Found) and isinstance(found.obj, griffe.Class):
                return found.obj
    return None


def _member(release: Release, shape: Shape, name: str) -> Shape:
    if shape.what == "module" and isinstance(shape.obj, griffe.Module):
        found = release.lookup(shape.obj.path, name)
        return _shape_of_object(found) if isinstance(found, Found) else Shape("missing")
    if shape.what in {"class", "instance"} and isinstance(shape.obj, griffe.Class):
        return _member_of_class(release, shape, shape.obj, name)
    lost = shape.what in {"function", "assigned"} and _has_no_members(shape.obj)
    return Shape("missing", shape.obj) if lost else UNKNOWN_SHAPE


def _member_of_class(release: Release, shape: Shape, holder: griffe.Class, name: str) -> Shape:
    if shape.is_base:
        return _member_of_any(release, replace(shape, is_base=False), holder, name)
    bases, complete = release.bases(holder)
    for cls in (holder, *bases):
        member = cls.members.get(name)
        if isinstance(member, griffe.Function):
            labels = member.labels
            if "staticmethod" in labels:
                return Shape("function", member)
            return Shape("function", member, bound=shape.what == "instance" or "classmethod" in labels)
        if isinstance(member, griffe.Object):
            return _held(release, member)
    if name == "apply" and (made := _applied(holder)) is not None:
        return Shape("function", made)
    nodes = [release.node_of(cls) for cls in (holder, *bases)]
    if any(texts_naming(node, name) for node in nodes):
        return Shape("value", holder, maybe=not any(node and name in _registered_in(node) for node in nodes))
    if "__getattr__" in {m for cls in (holder, *bases) for m in cls.members}:
        return UNKNOWN_SHAPE
    return Shape("missing", holder, maybe=not complete)


def _member_of_any(release: Release, exact: Shape, holder: griffe.Class, name: str) -> Shape:
    """The member of an object of a class or of any class below it: unknown where they differ."""
    found, below = _member_of_class(release, exact, holder, name), _classes_below(release, holder)
    if found.what == "missing":
        members = [_member_of_class(release, exact, cls, name) for cls in below]
        return UNKNOWN_SHAPE if any(member.what != "missing" for member in members) else found
    return UNKNOWN_SHAPE if any(name in cls.members for cls in below) else found


def _classes_below(release: Release, holder: griffe.Class) -> list[griffe.Class]:
    """The classes of a release that stand on a class, directly or not."""
    known: dict[str, list[griffe.Class]] = release.memory.setdefault("classes below", {})
    if not known:
        for module in release.modules():
            for cls in (member for member in module.members.values() if isinstance(member, griffe.Class)):
                for base in release.bases(cls)[0]:
                    known.setdefault(base.path, []).append(cls)
    return known.get(holder.path, [])


def _has_no_members(obj: griffe.Object | None) -> bool:
    """Whether something surely has no attributes of its own: a plain function, a type that is written out."""
    if isinstance(obj, griffe.Attribute):
        return isinstance(obj.value, griffe.ExprSubscript) and str(obj.value.left).rpartition(".")[2] == "Literal"
    return isinstance(obj, griffe.Function) and not obj.decorators and isinstance(obj.parent, griffe.Module)


def _held(release: Release, member: griffe.Object) -> Shape:
    """What a class holds under a name: another class, an instance by `name = Class()` in its body, or a value."""
    if isinstance(member, griffe.Class):
        return Shape("class", member)
    value = member.value if isinstance(member, griffe.Attribute) else None
    bases = member.parent.bases if isinstance(member.parent, griffe.Class) else ()
    is_enumeration = any(str(base).endswith(("Enum", "Flag")) for base in bases)
    if isinstance(value, griffe.ExprCall) and "class-attribute" in member.labels and not is_enumeration:
        found = release.in_scope(member.module, str(value.function))
        if isinstance(found, Found) and isinstance(found.obj, griffe.Class):
            return Shape("instance", found.obj)
    return Shape(_value_or_assigned(member), member)


def _method(release: Release, cls: griffe.Class, name: str) -> griffe.Function | None:
    members = (one.members.get(name) for one in (cls, *release.bases(cls)[0]))
    return next((member for member in members if isinstance(member, griffe.Function)), None)


def _parameter(parameter: griffe.Parameter) -> Parameter:
    default = None if parameter.default is None else str(parameter.default)
    annotation = "" if parameter.annotation is None else str(parameter.annotation)
    kind = parameter.kind or griffe.ParameterKind.positional_or_keyword
    return Parameter(parameter.name, kind, None if kind in _VARIADIC else default, annotation)


def _keywords_in(
    release: Release, function: griffe.Function, lineage: Sequence[griffe.Class]
) -> tuple[Iterable[Parameter], bool, bool, frozenset[str]]:
    """Keys that a function takes out of its `**kwargs`; whether the rest may hold any key, and whether it is dropped.

    Last the keys for which what it hands them to raises.
    """
    node = release.node_of(function)
    taken, handed_on = bodies.keywords_taken(node)
    only = griffe.ParameterKind.keyword_only
    parameters = [Parameter(name, only, default, popped=True) for name, default in taken.items()]
    above = _above(release, function, lineage) if handed_on == "super" else None
    if above is None:
        return parameters, handed_on != "", handed_on == "", frozenset()
    filled = bodies.given_to_super(node, [p.name for p in above.positionals])
    free = [p for p in above.parameters if p.name not in filled]
    given = {Parameter(p.name, only, p.default or "...", p.annotation) for p in free}
    return [*parameters, *given], above.open_keywords, above.ignores_unknown, above.refused


def _above(release: Release, function: griffe.Function, lineage: Sequence[griffe.Class]) -> Signature | None:
    """What `super()` reaches from a method: in the lineage of the class that is called, not of the one that holds it.

    A mixin (`class Tensor(Storage, Base)`) hands on to `Base`, which is none of its own bases.
    """
    holder = function.parent
    if not isinstance(holder, griffe.Class):
        return None
    rest = list(lineage[lineage.index(holder) + 1 :]) if holder in lineage else release.bases(holder)[0]
    for index, base in enumerate(rest):
        method = base.members.get(function.name)
        if isinstance(method, griffe.Function):
            return signature_of(release, Shape("function", method, bound=True), rest[index:])
    return None


@once_per_node
def _registered_in(node: ast.AST) -> set[object]:
    """Attributes that a class registers under their very names: `register_parameter("weight", ...)`."""
    names: set[object] = set()
    for found in walk(node):
        match found:
            case ast.Call(
                func=ast.Attribute(attr="register_parameter" | "register_buffer"), args=[ast.Constant(value=name), *_]
            ):
                names.add(name)
    return names


def texts_naming(node: ast.AST | None, name: str) -> set[str]:
    """Texts in a class's code that mention an attribute, as `register_parameter("weight")` and f-strings do."""
    texts, patterns = _texts_in(node) if node is not None else (frozenset(), {})
    if "{}" in name:
        return {name} if name in texts or name in patterns else set()
    return {way for way, pattern in patterns.items() if pattern and pattern.fullmatch(name)} | ({name} & texts)


@once_per_node
def _texts_in(node: ast.AST) -> tuple[frozenset[str], dict[str, re.Pattern[str] | None]]:
    """Texts of one line in a class's code; its f-strings with "{}" for what they put in, and what names they make."""
    texts: set[str] = set()
    patterns: dict[str, re.Pattern[str] | None] = {}
    for found in walk(node):
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and "\n" not in found.value:
            texts.add(found.value)
        elif isinstance(found, ast.JoinedStr):
            parts = [str(v.value) if isinstance(v, ast.Constant) else "{}" for v in found.values]
            pattern = "".join(".+" if part == "{}" else re.escape(part) for part in parts)
            names_few = sum(c.isalpha() for part in parts for c in part) > 3  # f"{a}_{b}" names everything
            patterns["".join(parts)] = re.compile(pattern) if names_few else None
    return frozenset(texts), patterns


def is_undecorated(obj: griffe.Object | None) -> bool:
    """Whether a function is surely what its class gives: a decorator may make a value of it, as `property` does."""
    return isinstance(obj, griffe.Function) and all(str(d.value) in _OF_PYTHON for d in obj.decorators)


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


def forwarded_to(release: Release, function: griffe.Function) -> Found | None:
    """What a function hands all of `*args, **kwargs` to, where it takes nothing else and returns what that gives."""
    node = release.node_of(function)
    if not isinstance(node, ast.FunctionDef) or not all(p.kind in _VARIADIC for p in function.parameters):
        return None
    target = bodies.handed_on_to(node)
    dotted = ast.unparse(target) if target is not None else ""
    found = release.in_scope(function.module, dotted) if _is_dotted(dotted) else None
    return found if isinstance(found, Found) and found.obj is not function else None


def applied_of(release: Release, attribute: griffe.Object) -> griffe.Function | None:
    """The signature of `name = SomeFunction.apply`: torch's autograd functions take places only, and no keyword."""
    owner, _, last = str(getattr(attribute, "value", "")).rpartition(".")
    found = release.in_scope(attribute.module, owner) if last == "apply" and _is_dotted(owner) else None
    return _applied(found.obj) if isinstance(found, Found) else None


def _applied(cls: griffe.Object) -> griffe.Function | None:
    """`apply` of one of torch's autograd functions: `forward` less its context."""
    is_autograd = isinstance(cls, griffe.Class) and any(str(base).endswith("Function") for base in cls.bases)
    forward = cls.members.get("forward") if is_autograd else None
    if not isinstance(forward, griffe.Function):
        return None
    kinds = griffe.ParameterKind
    given = [p for p in [*forward.parameters][1:] if p.kind is not kinds.var_keyword]  # the first is the context
    places = [griffe.Parameter(p.name, annotation=p.annotation, kind=p.kind, default=p.default) for p in given]
    for place in places:
        place.kind = kinds.var_positional if place.kind is kinds.var_positional else kinds.positional_only
    return griffe.Function("apply", parameters=griffe.Parameters(*places), lineno=forward.lineno, parent=forward.parent)
