"""Reads what importing a library requires: libraries, checks that must pass, names of its own.

Read from the code that runs when its first root is imported: the top level of every module that it
imports in turn, and the functions of the package that those top levels call.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from importlib.util import resolve_name

from ...evidence.values import Cause, SourceLine
from . import bodies
from .conditions import can_fire
from .findings import Change, ChangeKind, Impact
from .lazy_names import lazy_branch
from .reach import bound_names
from .release import Absent, Found, Release
from .surface import Symbol, argument_of
from .syntax_nodes import stored_by, walk

# What torch itself has asked for since 2.1 (`Requires-Dist` of its wheels) is there wherever torch is.
_WITH_TORCH = frozenset({"filelock", "fsspec", "jinja2", "networkx", "sympy", "typing_extensions"})
_GIVEN = frozenset({"torch", "__future__", *sys.stdlib_module_names}) | _WITH_TORCH
_COVERS = "ImportError|ModuleNotFoundError|Exception"  # handlers after which an import that fails does no harm
_NOT_RUN = "TYPE_CHECKING|__name__"  # tests of branches that importing does not run
_CALL_DEPTH = 2
# Private, but there in torch 2.1 already, the least that Transformer Engine 2 takes.
_OLD_PRIVATE = frozenset(
    {"torch._C", "torch._dynamo", "torch._prims_common", "torch._utils", "torch.distributed._tensor"}
)
_SURROUNDINGS = re.compile(
    r"version|install|avail|found|environ|getenv|cud|nccl|driver|capab|torch|triton|path|device", re.IGNORECASE
)


@dataclass(frozen=True)
class Requirement:
    """Something that has to hold for the import to succeed.

    Attributes:
        what: "library", "check" or "own" (a name or a module of the package itself that is not there).
        text: name of the library, the condition under which the check raises, or the exception.
        condition: the tests under which it is asked for at all; "" for always.
        file, line: where.
    """

    what: str
    text: str
    condition: str
    file: str
    line: int


def compare_import_time(old: Release, new: Release) -> Iterator[Change]:
    """Requirements of the import that the old release did not have."""
    before = read_requirements(old)
    added = [r for r in read_requirements(new) if not any(_same(r, known) for known in before)]
    groups: dict[tuple[str, str, str], list[Requirement]] = {}
    for requirement in added:  # checks of one file are one change: they were written together
        key = "" if requirement.what == "check" else requirement.text
        groups.setdefault((requirement.file, requirement.what, key), []).append(requirement)
    for (file, what, key), group in groups.items():
        is_library, is_own = what == "library", what == "own"
        texts = [f"import {key}" if is_library else r.text for r in group]
        conditions = {r.condition for r in group} - {""}
        about_us = what != "check" or any(_SURROUNDINGS.search(f"{r.text} {r.condition}") for r in group)
        impact = Impact.RISK if about_us else Impact.HARMLESS  # else it checks itself, as any release does
        yield Change(
            ChangeKind.IMPORT_REQUIREMENT_ADDED,
            Impact.BREAKING if is_own and not conditions else impact,
            Cause.API if is_own else Cause.ENVIRONMENT,
            parameter=key if is_library else "",
            after=SourceLine(file=file, line=group[0].line),
            new="; ".join(texts[:3]) + (f"; and {len(texts) - 3} more" if len(texts) > 3 else ""),
            suggestion=f"only if {' or '.join(sorted(conditions))}" if key and conditions else "",
        )


def read_requirements(release: Release) -> list[Requirement]:
    """Everything that importing the first root of the library asks for, in the order of the files."""
    stored = release.stored("import-time", lambda: [vars(r) for r in _Walk(release).requirements()])
    return [Requirement(**item) for item in stored]


def deprecated_modules(release: Release, symbol: Symbol) -> str:
    """The notice with which importing the symbol, or its module, is deprecated; empty if it is not."""
    module = release.module(symbol.module)
    if module is None:
        return ""
    tree = release.syntax(str(module.filepath))
    branch = lazy_branch(tree, symbol.name)
    for node in (*tree.body, *(branch.body if branch is not None else ())):
        match node:
            case ast.Expr(value=ast.Call(func=func)) if ast.unparse(func).endswith(
                "warn"
            ) and "Deprecat" in ast.unparse(node):
                return bodies.text_of(node)
    return ""


def _same(one: Requirement, other: Requirement) -> bool:
    if one.what != other.what:
        return False
    if one.text == other.text:
        return not (other.condition and not one.condition)  # what was asked for at times is now asked for always
    if one.what != "check":  # under a test a library is named by its module, else by its package
        return one.what == "library" and not other.condition and one.text.startswith(f"{other.text}.")
    numbers = [c for c in one.text if c.isdigit()] == [c for c in other.text if c.isdigit()]
    return numbers and SequenceMatcher(None, one.text, other.text).ratio() > 0.85


class _Walk:
    """Follows an import through the package."""

    def __init__(self, release: Release) -> None:
        self._release = release
        self._seen: set[str] = set()
        self._found: dict[tuple[str, str], Requirement] = {}

    def requirements(self) -> list[Requirement]:
        """Every requirement, those asked for always before those asked for at times."""
        self._module(self._release.library.roots[0])
        return sorted(self._found.values(), key=lambda r: (r.what, r.text))

    def _module(self, path: str) -> None:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):  # importing a.b.c runs a, a.b and a.b.c
            name = ".".join(parts[:end])
            file = self._release.file_of(name)
            if name in self._seen or file is None:
                continue
            self._seen.add(name)
            tree = self._release.syntax(file)
            if why := self._release.why_unreadable(file):  # a newer Python may well read it
                self._add(Requirement("check", f"SyntaxError: {name}: {why}", "", file, 1))
            self._top_level(tree.body, _Place(file, name, tree), "")

    def _top_level(self, body: Iterable[ast.stmt], place: _Place, condition: str) -> None:
        for node in body:
            match node:
                case ast.Import(names=names):
                    for alias in names:
                        self._imported(alias.name, (), node, place, condition)
                case ast.ImportFrom(module=module, names=names, level=level):
                    base = resolve_name("." * level + (module or ""), place.package)
                    self._imported(base, tuple(a.name for a in names), node, place, condition)
                case ast.Try(body=inner, handlers=handlers, orelse=orelse):
                    caught = " or ".join(ast.unparse(h.type) if h.type else "" for h in handlers)
                    covered = re.search(_COVERS, caught) or not all(h.type for h in handlers)
                    self._top_level(inner, replace(place, tried=True), "optional" if covered else condition)
                    self._top_level(orelse, place, _both(condition, _when_nothing_failed(inner[0], caught)))
                case ast.If(test=test, body=then, orelse=orelse) if not re.search(_NOT_RUN, ast.unparse(test)):
                    self._top_level(then, place, _both(condition, ast.unparse(test)))
                    self._top_level(orelse, place, _both(condition, f"not ({ast.unparse(test)})"))
                case ast.With(body=inner):
                    self._top_level(inner, place, condition)
                case ast.Assert() | ast.Raise():
                    if (guard := bodies.guard_of(node, ())) is not None:
                        self._check(guard, place, condition)
                case ast.Expr(value=ast.Call() as call) | ast.Assign(value=ast.Call() as call):
                    self._called(call, place, condition, _CALL_DEPTH)

    def _imported(self, module: str, names: tuple[str, ...], node: ast.stmt, place: _Place, condition: str) -> None:
        top = module.partition(".")[0]
        library = self._release.library
        if condition == "optional" or (library.owns(module) and library.is_opaque(module)):
            return
        if library.owns(module):
            for missing in self._missing(module, names):
                self._add(Requirement("own", missing, condition, place.file, node.lineno))
            for name in (module, *(f"{module}.{name}" for name in names)):
                self._module(name)
        elif top == "torch" and module not in _OLD_PRIVATE and any(part.startswith("_") for part in module.split(".")):
            self._add(Requirement("library", module, condition, place.file, node.lineno))  # private: it comes and goes
        elif top and top not in _GIVEN:
            self._add(Requirement("library", module if condition else top, condition, place.file, node.lineno))

    def _missing(self, module: str, names: Iterable[str]) -> Iterator[str]:
        """What an import asks of the package itself in vain, as the exception says it."""
        file = self._release.file_of(module)
        if file is None:
            yield f"ModuleNotFoundError: no {module} among the sources"
            return
        for name in set(names) - {"*"} - stored_by(self._release.syntax(file)):
            if self._release.file_of(f"{module}.{name}") is None and self._release.lookup(module, name) == Absent():
                yield f"ImportError: {module} has no {name}"

    def _called(self, call: ast.Call, place: _Place, condition: str, depth: int) -> None:
        """Checks in a function of the package that runs while importing."""
        if depth == 0 or condition == "optional" or not isinstance(call.func, ast.Name):
            return
        holder = self._release.module(place.module)
        symbol = self._release.in_scope(holder, call.func.id) if holder is not None else None
        found = self._release.node_of(symbol.obj) if isinstance(symbol, Found) else None
        is_lazy = any("lazy" in ast.unparse(d) for d in getattr(found, "decorator_list", ()))
        if is_lazy or not isinstance(symbol, Found) or not isinstance(found, ast.FunctionDef):
            return
        file = str(symbol.obj.filepath)
        where = _Place(file, symbol.obj.module.path, self._release.syntax(file))
        given = {name: argument_of(value, {}) for name, value in bound_names(call, found).items()}
        for guard in bodies.guards(found):
            if can_fire(guard.enclosing, lambda _: given) is not False:
                self._check(guard, replace(where, inside=found.name), condition)
        is_sure = not place.tried
        for node in found.body:
            match node:
                case ast.Expr(value=ast.Call() as inner) | ast.Assign(value=ast.Call() as inner):
                    self._called(inner, where, condition, depth - 1)
                case ast.Import() | ast.ImportFrom() if is_sure:
                    self._top_level([node], where, condition)
            is_sure = is_sure and not any(isinstance(inner, ast.Return) for inner in walk(node))

    def _check(self, guard: bodies.Guard, place: _Place, condition: str) -> None:
        if condition != "optional" and guard.kind != "warn":
            otherwise = "nothing before it returned" if guard.tests or place.inside else "this line is reached"
            said = guard.said or ("" if place.inside else condition)  # at the top level, what the line stands under
            text = f"{guard.exception} if {_with_constants(said, place.tree) or otherwise}"
            self._add(Requirement("check", text, condition, place.file, guard.line))

    def _add(self, requirement: Requirement) -> None:
        key = (requirement.what, requirement.text)
        known = self._found.get(key)
        if known is None or (known.condition and not requirement.condition):
            self._found[key] = requirement


@dataclass(frozen=True)
class _Place:
    file: str
    module: str
    tree: ast.Module
    inside: str = ""  # the function, where it is not the top level
    tried: bool = False  # something is caught there

    @property
    def package(self) -> str:
        return self.module if self.file.endswith("__init__.py") else self.module.rpartition(".")[0]


def _with_constants(condition: str, tree: ast.Module) -> str:
    """A condition with the module's own constants put in: what counts is the version, not the name of it."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper():
            name = node.targets[0].id
            if name in condition and isinstance(node.value, ast.Constant | ast.Tuple):
                condition = re.sub(rf"\b{name}\b", f"{name} {ast.unparse(node.value)}", condition)
    return condition


def _when_nothing_failed(tried: ast.stmt, caught: str) -> str:
    """The condition of a `try ... else`: for a version that is asked for, that the distribution is installed."""
    named = [n.value for n in walk(tried) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    if "PackageNotFound" in caught and len(named) == 1:
        return f"{named[0]} is installed"
    return f"no {caught} from `{ast.unparse(tried)[:80]}`"


def _both(one: str, other: str) -> str:
    if one == "optional":
        return one  # whatever lies inside may fail without harm
    return f"{one} and {other}" if one else other
