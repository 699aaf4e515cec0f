"""Evaluates calls in a project's code: of Transformer Engine, of the project itself, of what reads a version."""

from __future__ import annotations

import ast
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from packaging.utils import canonicalize_name
from packaging.version import Version

from . import bodies
from .call_changes import bind
from .expressions import Access, Expressions, Lacking
from .interpreted import (
    ANYTHING,
    NOTHING,
    UNTOLD,
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
    call_external,
    call_known,
    compare,
    constant,
    container_of,
    each_of,
    either,
    forked,
)
from .release import Absent, Found
from .shapes import UNKNOWN_SHAPE, Shape, shape_of, signature_of
from .surface import RESULT, UNKNOWN, Symbol, Use, UseKind
from .syntax_nodes import once_per_node, parameters_of

_DEEPEST: Final = 12  # calls within calls
_STEPS: Final = 20_000  # calls for which a function is read again
_OF_TORCH: Final = re.compile("state_dict|zero_grad|param_group|parameters|extra_state|extra_repr|^register_|_hook$")
# What can be a module whose state is loaded, and words in the names of what else has such a method.
_MODULES: Final[set[type]] = {Unknown, External, Vendor, Items, Several}
_NO_MODULES: Final = ("optim", "sched", "scaler", "loader", "sampler", "callback")
_IMPORTS: Final = frozenset({"import_module", "__import__", "importorskip"})
_MINDS_VERSION: Final = frozenset({"__version__", "find_spec", "get_distribution", "version"})


@dataclass(frozen=True)
class Call:
    """A call in the code.

    Attributes:
        given: values of the positional arguments.
        attr: name of the method, where one is called.
        unpack: into how many names the result is unpacked; 0 if it is not.
    """

    node: ast.Call
    names: Names
    given: list[Values]
    attr: str = ""
    unpack: int = 0

    def with_first(self, value: Value) -> Call:
        """The same call with one more argument in front."""
        return replace(self, given=[frozenset({value}), *self.given])


class Calls(Expressions):
    """Reads calls: one method a kind of what is called (`_call_...`)."""

    @abstractmethod
    def _inside(self, function: Function) -> Names:
        """The names inside of a function before its first statement."""

    @abstractmethod
    def _run_body(self, function: Function, names: Names) -> Values:
        """Read the body of a function; what it returns."""

    @abstractmethod
    def _read_function(self, function: Function) -> Values:
        """What a function returns, its parameters unknown but for what the project's own calls pass."""

    def _of_call(self, node: ast.Call, names: Names, unpack: int = 0) -> Values:
        callees: list[tuple[Value, str]] = []  # what is called; of a method of something known, its name
        match node.func:
            case ast.Name(id="super") if names.find("super") is None:
                return self._super(names)
            case ast.Attribute(value=owner, attr=attr):
                owners = self._value(owner, names)
                for one in owners if owners != ANYTHING else self._owners_by(attr, names):
                    if isinstance(one, Keywords | Several | Items | Const):
                        callees.append((one, attr))
                    else:
                        callees += [(f, attr) for f in self._member(one, Access(attr, node.func, names, called=True))]
            case _:
                asked, called = self._asked, self._value(node.func, names)
                callees = [(one, "") for one in called]
                self._asked = asked if any(isinstance(one, External) for one in called) else self._asked
        given = [self._value(argument, names) for argument in node.args]
        for keyword in node.keywords:
            self._value(keyword.value, names)
        match node.func:
            case ast.Name(id="patch") | ast.Attribute(attr="patch" | "object" | "setattr"):  # of `mock`, `monkeypatch`
                self._note_replaced(node, names, given)
            case ast.Attribute(value=owner, attr="append" | "extend" | "insert" | "add") if given:
                self._grow(owner, each_of(given[-1]) if node.func.attr == "extend" else given[-1], names)
            case ast.Attribute(attr="load_state_dict" | "set_extra_state") as func:
                self._note_load(node, func, names, {type(one) for one, _ in callees})
        return either(*(self._call_one(one, Call(node, names, given, attr, unpack)) for one, attr in callees))

    def _note_call(self, value: Vendor, node: ast.Call, names: Names, **facts: Any) -> None:
        if not self._quiet:
            self._keep_use(self._use_of_call(value, node, names, **facts), node)

    def _owners_by(self, method: str, names: Names) -> Values:
        """An object of which a method is known alone: of the only class that the file names and that has such a method.

        `opt.initialize_state(p)` in a function that gets an optimizer; not a method that objects of torch have, too.
        """
        if self._loading or "_" not in method.strip("_") or method.startswith("_") or _OF_TORCH.search(method):
            return ANYTHING
        key = (names.file.module, method)
        if key not in self._owners:
            named = {one for values in names.module.names.values() for one in values}
            has = [one for one in named if isinstance(one, Vendor) and not one.path and self._defines(one, method)]
            is_sure = len(has) == 1 and not any(method in cls.members for cls in self._classes.values())
            self._owners[key] = frozenset({Vendor(has[0].symbol, (RESULT,))}) if is_sure else ANYTHING
        return self._owners[key]

    def _defines(self, value: Vendor, method: str) -> bool:
        """Whether something is a class that defines a method in its own body."""
        obj = self._shape(value).obj
        return obj is not None and obj.is_class and method in obj.members and obj.members[method].is_function

    def _note_replaced(self, node: ast.Call, names: Names, given: list[Values]) -> None:
        """Note what a test replaces, which has to be there: `patch("transformer_engine.f")`, `setattr(te, "f", g)`."""
        match [next((one.value for one in values if isinstance(one, Const)), None) for values in given[:2]]:
            case [str(dotted), *_] if "." in dotted and self.release.library.owns(dotted):
                package, *steps = dotted.split(".")
                self._load(dotted, names)
                owners: Values = frozenset({VendorModule(package)})
            case [None, str(name)]:
                owners, steps = given[0], [name]
            case _:
                return
        for step in steps:
            at = Access(step, node, names)
            owners = either(*(self._member(one, at) for one in owners if isinstance(one, Vendor | VendorModule)))

    def _note_load(self, node: ast.Call, func: ast.Attribute, names: Names, called: set[type]) -> None:
        """Note that a state is loaded: of any module, the layers of Transformer Engine in it load theirs.

        Which layers those are is decided where the code runs (a loop over modules, a model of another file). A call
        counts where nothing shows that it is about something else, and `load_state_dict` only in a file that can have
        such layers, and where the code names FP8: without FP8 the state of a layer is empty.
        """
        owner = ast.unparse(func.value).lower()
        layer = Symbol(*self.release.library.layer.rpartition(".")[::2])
        is_module = not any(word in owner for word in _NO_MODULES) and called <= _MODULES
        is_noted = is_module and layer.name and not self._quiet
        if is_noted and (func.attr == "set_extra_state" or self.project.loads_fp8(names.file)):
            state = Vendor(layer, (RESULT, "set_extra_state"))
            use = self._use(state, UseKind.CALL, node, names)
            self._keep_use(replace(use, positionals=(UNKNOWN,)), func)

    def _call_one(self, callee: Value, call: Call) -> Values:
        caller: Callable[..., Values] | None = getattr(self, f"_call_{type(callee).__name__.lower()}", None)
        return ANYTHING if caller is None else caller(callee, call)

    def _call_vendor(self, callee: Vendor, call: Call) -> Values:
        self._note_call(callee, call.node, call.names, unpack=call.unpack)
        return frozenset({Vendor(callee.symbol, (*callee.path, RESULT))})

    def _call_missing(self, callee: Missing, call: Call) -> Values:
        return self._in_missing(callee, Access("", call.node, call.names))  # a call of None raises

    def _call_vendormodule(self, callee: VendorModule, call: Call) -> Values:
        return self._call_vendor(Vendor(Symbol(*callee.path.rpartition(".")[::2])), call)

    def _call_method(self, callee: Method, call: Call) -> Values:
        return self._call_function(callee.function, call.with_first(callee.holder))

    def _call_instance(self, callee: Instance, call: Call) -> Values:
        members = self._member(callee, Access("forward", call.node, call.names, called=True))
        return either(*(self._call_one(one, call) for one in members))

    def _call_listing(self, callee: Listing, _: Call) -> Values:
        return frozenset({callee})  # `signature(f).parameters.keys()`

    def _call_const(self, callee: Const, call: Call) -> Values:
        return call_known(callee.value, call.attr, call.given)

    def _call_class(self, callee: Class, call: Call) -> Values:
        made: Values = frozenset({Instance(callee)})
        for one in callee.lineage:
            if isinstance(one, Vendor):
                self._note_call(one, call.node, call.names, unpack=call.unpack)
                return made
            for name in ("__init__", "__new__"):
                for function in one.members.get(name, frozenset()) if isinstance(one, Class) else ():
                    if isinstance(function, Function) and not bodies.hands_all_on(function.node):
                        returned = self._call_function(function, call.with_first(Instance(callee)))
                        return returned if name == "__new__" else made
        return made

    def _super(self, names: Names) -> Values:
        at: Names | None = names
        while at is not None and at.cls is None:
            at = at.outer
        return frozenset({Instance(at.cls, is_above=True)}) if at is not None and at.cls is not None else ANYTHING

    def _call_function(self, callee: Function, call: Call) -> Values:
        if isinstance(callee.node, ast.FunctionDef) and (handed := bodies.handed_on_to(callee.node)):
            found = self._quietly(handed, self._inside(callee))
            if found and all(isinstance(one, Vendor) for one in found):  # each call is one of what it stands for
                return either(*(self._call_one(one, call) for one in found))
        bound = self._bind_arguments(callee, call)
        made = [one for one in self._returns.get(callee.node, ()) if isinstance(one, Vendor)]
        by_argument = len(made) > 1 and any(isinstance(one, Const) for values in bound.values() for one in values)
        named = any(map(self.release.library.owns, _texts(*bound.values())))
        imports = named and not _IMPORTS.isdisjoint(_names_in(callee.node))
        is_open = len(self._reading) < _DEEPEST and self._steps < _STEPS
        by_argument |= any(self._tells(one) for values in bound.values() for one in values)
        if is_open and (by_argument or imports or self._minds_version(callee)):
            return forked(self._read_again(callee, bound, *((call.node, call.names) if imports else ())))
        known = self._parameters.setdefault(callee.node, {})
        for name, values in bound.items():
            told = frozenset(v for v in values if isinstance(v, Vendor | VendorModule | Class | Instance))
            if told:
                both = either(known.get(name, frozenset()), told)
                known[name] = both if len(both) == 1 else ANYTHING  # what differs from call to call is not followed
        if callee.node in self._returns or self._loading:
            return forked(self._returns.get(callee.node, ANYTHING))
        asked, returned = self._asked, forked(self._read_function(callee))
        self._asked = asked  # what the function reads of the release counts by what it returns
        return returned

    def _call_import(self, callee: Import, call: Call) -> Values:
        """What an object gives that imports when it is called; its use is noted where the call stands."""
        inner = self._inside(callee.function)
        inner.caught = frozenset({"Exception"})
        try:
            with self._noting_nothing():
                found = self._run_body(callee.function, inner)
        except Lacking as fault:
            found = frozenset({Missing(fault.symbol)})
        for one in found:
            if isinstance(one, Vendor | Missing):  # of several places, the last that was tried
                self._note(Vendor(one.symbol), UseKind.NAME, call.node, call.names, optional=not callee.insists)
        return found if not callee.insists else frozenset(v for v in found if not isinstance(v, Missing)) or ANYTHING

    def _read_again(self, function: Function, bound: dict[str, Values], *place: Any) -> Values:
        """What a function that reaches the version, or imports by texts at `place`, returns for these arguments."""
        known = sorted((n, v) for n, v in bound.items() if all(isinstance(o, Const) for o in v))
        key = (function.node, place and (place[0], self._quiet), *known)
        try:
            if key in self._again:
                return self._again[key]
        except TypeError:
            return ANYTHING
        self._again[key] = ANYTHING  # for a function that calls itself
        names = self._inside(function)
        names.names |= bound
        self._reading.append(function.node)
        self._steps += 1
        asked = self._asked
        with self._noting_nothing(*place):
            self._again[key] = self._run_body(function, names)
        self._asked = asked
        self._reading.pop()
        return self._again[key]

    def _bind_arguments(self, function: Function, call: Call) -> dict[str, Values]:
        arguments = function.node.args
        places = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        every = parameters_of(arguments)
        bound = {a.arg: constant(default.value) for a, default in every if isinstance(default, ast.Constant)}
        bound |= dict(zip(places, call.given, strict=False))
        for keyword in call.node.keywords:
            if keyword.arg is not None:
                bound[keyword.arg] = self._quietly(keyword.value, call.names)
        return bound

    def _minds_version(self, function: Function) -> bool:
        """Whether a function reads the version of Transformer Engine, itself or through names of the project."""
        node = function.node
        if node not in self._minding:
            self._minding[node] = False
            named = _names_in(node)
            called = (one for name in sorted(named) for one in self._of_name(ast.Name(name), function.names))
            self._minding[node] = not named.isdisjoint(_MINDS_VERSION) or any(
                self._tells(one) or (isinstance(one, Function) and self._minds_version(one)) for one in called
            )
        return self._minding[node]

    def _call_several(self, held: Several, call: Call) -> Values:
        pair = frozenset({Items((ANYTHING, held.each))})
        known = {"values": frozenset({held}), "items": frozenset({Several(pair)}), "get": held.each, "pop": held.each}
        return known.get(call.attr, ANYTHING)

    def _call_keywords(self, made: Keywords, call: Call) -> Values:
        match call.attr:
            case "values" | "items":
                return self._call_several(Several(either(*made.items.values())), call)
            case "update":
                self._fill(made, call)
            case "copy":
                return frozenset({Keywords(dict(made.items), made.is_open)})
            case "pop" | "get" | "setdefault":
                keys = [one.value for one in call.given[0] if isinstance(one, Const)] if call.given else []
                found = [made.items[key] for key in keys if key in made.items]
                if call.attr == "pop":
                    for key in keys or list(made.items):
                        made.items.pop(str(key), None)
                    made.is_open |= not keys
                    made.is_drained |= not keys
                if call.attr == "setdefault" and len(call.given) > 1:
                    made.items |= {key: call.given[1] for key in keys if isinstance(key, str) and key not in made.items}
                return either(*found, *call.given[1:2], *([] if found and not made.is_open else [ANYTHING]))
        return ANYTHING

    def _fill(self, made: Keywords, call: Call) -> None:
        """Put into a dictionary what a call of `dict` or of its `update` is given."""
        named = [(k.arg, self._quietly(k.value, call.names)) for k in call.node.keywords]
        for values in (*call.given, *(values for key, values in named if key is None)):
            self._merge(made, values)
        made.items |= {key: values for key, values in named if key}

    def _call_external(self, callee: External, call: Call) -> Values:
        match callee.path.removeprefix("builtins."), call.given:
            case ("getattr" | "hasattr" as look, [owners, key, *default]):
                return self._look_up(look, owners, key, default, call)
            case ("isinstance" | "issubclass", [_, kinds, *_]):
                for one in each_of(kinds):
                    if isinstance(one, Vendor):
                        self._note(one, UseKind.CLASS, call.node.args[1], call.names)
                return ANYTHING
            case ("dict", _):
                made = Keywords()
                self._fill(made, call)
                return frozenset({made})
            case (path, [target, *anchor]) if path.rpartition(".")[2] in _IMPORTS:
                anchor += [self._quietly(k.value, call.names) for k in call.node.keywords if k.arg == "package"]
                return self._import(_texts(target), _texts(*anchor), call, path.endswith("importorskip"))
            case (("functools.partial" | "partial"), [called, *_]):
                for one in called:
                    if isinstance(one, Vendor):
                        self._note_call(one, call.node, call.names, first=1, partial=True)
                return called
        known = self._call_about_release(callee.path.rpartition(".")[2], call) or container_of(callee.path, call.given)
        texts = _texts(*call.given)
        if known is None and self.release.library.names_version("_".join((callee.path.rpartition(".")[2], *texts))):
            return frozenset({UNTOLD}) if self._divides(call.given) else ANYTHING
        return known or call_external(callee.path, call.given)

    def _import(self, targets: list[str], packages: list[str], call: Call, skips: bool) -> Values:
        """What an import by a text gives; a name that begins with a dot lies below a package."""
        names = replace(call.names, caught=frozenset({"ImportError"})) if skips else call.names
        found = [f"{base}{text}" for text in targets for base in (packages if text.startswith(".") else [""])]
        for name in (name for name in found if "." in name and self.release.library.owns(name)):
            with suppress(*[Lacking][:skips]):  # without the module, the tests of the file are skipped
                self._note_name(Symbol(*name.rpartition(".")[::2]), call.node, names, "ModuleNotFoundError")
            self._load(name, names)
        return either(*map(self._of_text, found)) if found else ANYTHING

    def _divides(self, given: Iterable[Values]) -> bool:
        """Whether the versions that a check is given can tell the two releases apart; True where that is not known.

        A check of a version that both releases are newer than, or both older, gives the same under both.
        """
        texts = _texts(*given)
        with suppress(ValueError):
            low, high = sorted(map(Version, self.versions))
            return not any("." in text for text in texts) or any(low <= Version(text) <= high for text in texts)
        return True

    def _call_about_release(self, name: str, call: Call) -> Values | None:
        """What a function of Python gives by which a project asks what a release has; None for any other."""
        match name, call.given:
            case ("dir" | "vars" | "signature" | "getfullargspec", [owners]):
                return frozenset(Listing(one, of_call=name not in ("dir", "vars")) for one in owners)
            case ("version" | "get_distribution", [names, *_]):
                own = self.release.library.distributions
                is_own = all(isinstance(one, Const) and canonicalize_name(str(one.value)) in own for one in names)
                is_known = all(isinstance(one, Const) for one in names)
                return self._version if is_own else ANYTHING if is_known else frozenset({UNTOLD})
            case ("find_spec", [targets, *_]):
                dotted = _texts(targets)
                if all(map(self.release.library.owns, dotted)):
                    return either(*(NOTHING if self._of_text(one) == ANYTHING else constant(True) for one in dotted))
            case ("map", [callees, over]):
                items = [one.values for one in over if isinstance(one, Items)]
                if len(items) == len(over) == 1:
                    each = [replace(call, given=[value]) for value in items[0]]
                    found = (either(*(self._call_one(one, inner) for one in callees)) for inner in each)
                    return frozenset({Items(tuple(found))})
        return None

    def _of_text(self, dotted: str) -> Values:
        if self.release.library.owns(dotted):
            return frozenset({VendorModule(dotted)}) if self.release.module(dotted) is not None else ANYTHING
        file = self.project.find(dotted)
        return frozenset({ProjectModule(file) if file is not None else External(dotted)})

    def _look_up(self, look: str, owners: Values, key: Values, default: list[Values], call: Call) -> Values:
        """`hasattr` and `getattr`; of a name that is made when the code runs, its fixed part is known."""
        found: list[Values] = []
        texts = [one.value for one in key if isinstance(one, Const) and isinstance(one.value, str)]
        for owner in owners:
            for attr in texts or [_name_pattern(call.node.args[1])]:
                there = self._has(owner, attr)
                if look == "hasattr":
                    found.append(ANYTHING if there is None else constant(there))
                    self._asked += there is None and isinstance(owner, Vendor | VendorModule)
                    continue
                if isinstance(owner, VendorModule) and default:
                    self._note(Vendor(Symbol(owner.path, attr)), UseKind.NAME, call.node, call.names, optional=True)
                if there is not False or not default:
                    self._quiet += bool(default)
                    found.append(self._member(owner, Access(attr, call.node, call.names)))
                    self._quiet -= bool(default)
                if isinstance(owner, VendorModule) and there is False and default == [NOTHING]:
                    found.append(frozenset({Missing(Symbol(owner.path, attr))}))
                elif there is not True:
                    found += default
        return either(*found) if found else ANYTHING

    def _shape(self, value: Vendor) -> Shape:
        found = self.release.lookup(value.symbol.module, value.symbol.name)
        return shape_of(self.release, found, value.path) if isinstance(found, Found) else UNKNOWN_SHAPE

    def _refuses(self, use: Use) -> bool:
        """Whether the release at hand surely refuses a call."""
        value = Vendor(Symbol(*use.accessor.rpartition(".")[::2]), use.path)
        signature = signature_of(self.release, self._shape(value)) if use.kind is UseKind.CALL else None
        return signature is not None and not bind(signature, use).fits

    def _of_compare(self, node: ast.Compare, names: Names) -> Values:
        asked, sides = self._asked, [self._value(one, names) for one in (node.left, *node.comparators)]
        if not self._divides(sides):
            self._asked = asked
        match sides, node.ops:
            case [[keys, holders], [ast.In() | ast.NotIn() as op]] if any(isinstance(one, Listing) for one in holders):
                known = {self._holds(holder, key) for holder in holders for key in keys}
                self._asked += None in known
                return ANYTHING if None in known else frozenset(Const(one is isinstance(op, ast.In)) for one in known)
        return compare(sides, node.ops)

    def _holds(self, holder: Value, key: Value) -> bool | None:
        match holder, key:
            case Listing(owner=Vendor() as owner, of_call=True), Const(value=str(name)):
                signature = signature_of(self.release, self._shape(owner))
                known = signature is not None and signature.named(name) is not None
                return True if known else None if signature is None or signature.open_keywords else False
            case Listing(owner=owner, of_call=False), Const(value=str(name)):
                return self._has(owner, name)
        return None

    def _has(self, owner: Value, attr: str) -> bool | None:
        match owner:
            case VendorModule(path=path):
                if attr == "__version__":
                    return True
                if self.release.module(f"{path}.{attr}") is not None:
                    return self._is_loaded(f"{path}.{attr}")
                found = self.release.lookup(path, attr)
                return False if isinstance(found, Absent) else True if isinstance(found, Found) else None
            case Vendor(symbol=symbol, path=path):
                shape = self._shape(Vendor(symbol, (*path, attr)))
                return None if shape.what == "unknown" or shape.maybe else shape.what != "missing"
            case ProjectModule(file=file):
                return True if attr in self.module(file).names else None
        return None


def _texts(*given: Values) -> list[str]:
    """What arguments are, where that is known, as texts."""
    return [str(one.value) for values in given for one in values if isinstance(one, Const)]


def _name_pattern(node: ast.expr) -> str:
    """The name of an attribute with "{}" for what only running the code would tell."""
    if not isinstance(node, ast.JoinedStr):
        return "{}"
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


@once_per_node
def _names_in(node: ast.AST) -> frozenset[str]:
    """Names and attributes that a piece of code reads or binds."""
    return frozenset(
        one.attr if isinstance(one, ast.Attribute) else one.id
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute | ast.Name)
    )
