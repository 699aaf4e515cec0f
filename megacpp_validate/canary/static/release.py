"""The Python sources of one release, loaded by griffe and looked up as an import statement would.

Loading a release takes a second or two, so the tree is kept beside the wheel's hash as griffe's own JSON. Function
bodies are not part of that tree; they are read from the wheel when a comparison asks for them.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version as distribution_version
from itertools import accumulate
from pathlib import Path
from typing import Any

import griffe

from ...errors import NoEnvironment
from ...evidence.receipt import write_whole
from ...evidence.values import SourceLine
from .findings import ReleaseSource
from .lazy_names import lazy_target
from .library import TE, Library
from .recipes import ConstructedDataclasses
from .source_files import SourceFiles, imports_in, why_not_loaded
from .syntax_nodes import statements_below, stored_by

_OF_BINARY = r"\b(?:tex|{})\.(\w+)"
_LAZY = re.compile(r"(^|\.)(lazy_loader|attach)$|^lazy_loader\.")
_IMPORTS_ANY = re.compile(r"^(?:def )?__getattr__\b|import_module|__import__|pkgutil|lazy_loader", re.MULTILINE)

logging.getLogger("griffe").setLevel(logging.CRITICAL)  # its remarks on TE's docstrings are not ours to show


class ReleaseUnreadable(NoEnvironment):
    """The sources of a release cannot be read; the text says what is wrong and what to do."""


@dataclass(frozen=True)
class Found:
    """A definition, and whether its name reaches it through an assignment that hides its signature."""

    obj: griffe.Object
    wrapped: bool = False


@dataclass(frozen=True)
class Absent:
    """There is no such name."""


@dataclass(frozen=True)
class Opaque:
    """The name may exist, but only running the code would tell."""


Lookup = Found | Absent | Opaque


class Release:
    """One release of a library.

    Args:
        source: version, wheel name and hash.
        wheel: the wheel, or a folder that holds the package.
        cache: folder for the loaded tree; None loads it anew.
        library: whose release it is.
    """

    def __init__(self, source: ReleaseSource, wheel: Path, cache: Path | None = None, library: Library = TE) -> None:
        self.source, self.library = source, library
        self.version = source.version
        self._wheel = wheel
        self._files = SourceFiles(wheel, library.package)
        self._cache = cache
        self.memory: dict[str, Any] = {}  # what a comparison has worked out about this release
        self._modules: dict[str, griffe.Module | None] = {}
        self._syntax: dict[str, ast.Module] = {}
        self._unreadable: dict[str, str] = {}
        self._nodes: dict[str, dict[tuple[str, int], ast.AST]] = {}

    @property
    def is_read(self) -> bool:
        """Whether the tree is kept already, so that reading it costs little."""
        stored = self._stored_tree()
        return stored is not None and stored.is_file()

    @cached_property
    def tree(self) -> griffe.Module:
        """The package as griffe sees it, aliases resolved."""
        stored = self._stored_tree()
        if stored and (text := _read_sealed(stored)):
            return _attach(griffe.Module.from_json(text))
        module, text = self._load()
        if stored:
            _keep(stored, text)
        return module

    def lookup(self, module: str, name: str) -> Lookup:
        """What `from module import name` gives."""
        return self._lookup(module, name, set())

    def in_scope(self, holder: griffe.Module, dotted: str, seen: set[tuple[str, str]] | None = None) -> Lookup:
        """What a dotted name means in a module's own code."""
        first, *rest = dotted.split(".")
        found = self._lookup(holder.path, first, seen if seen is not None else set())
        for name in rest:
            if not isinstance(found, Found):
                return found
            found = self._lookup(found.obj.path, name, set())
        return found

    def bases(self, cls: griffe.Class) -> tuple[list[griffe.Class], bool]:
        """Base classes of a class in the order of lookup, and whether every one lies in the package."""
        bases: list[griffe.Class] = []
        complete = True
        for base in cls.bases:
            found = self.in_scope(cls.module, str(base))
            if isinstance(found, Found) and isinstance(found.obj, griffe.Class) and found.obj is not cls:
                deeper, whole = self.bases(found.obj)
                bases += [found.obj, *deeper]
                complete = complete and whole
            else:
                complete = complete and str(base) in {"object", "ABC", "Enum", "IntEnum", "NamedTuple"}
        return bases, complete

    def module(self, path: str) -> griffe.Module | None:
        """A module of the package by its dotted path."""
        if path not in self._modules:  # asked for at each step of each lookup
            owner, _, name = path.rpartition(".")
            holder = self.module(owner) if "." in path else None
            found = self.tree if "." not in path else None if holder is None else holder.members.get(name)
            self._modules[path] = found if isinstance(found, griffe.Module) else None
        return self._modules[path]

    def gives_module(self, package: str, name: str) -> bool:
        """Whether a name of a package is its module: `from .driver import driver` puts another thing there (Triton)."""
        holder = self.module(package)
        if holder is None or self.module(f"{package}.{name}") is None:
            return False
        imports = (node for node in self.syntax(str(holder.filepath)).body if isinstance(node, ast.ImportFrom))
        own = {(1, name), (0, f"{package}.{name}")}
        return not any((node.level, node.module) in own and name in stored_by(node) for node in imports)

    def may_load(self, module: str) -> bool:
        """Whether importing the library may load a module of it: a file imports that one, or what a text names."""
        return module in self._imported or f"{module.rpartition('.')[0]}.*" in self._imported

    @cached_property
    def _imported(self) -> frozenset[str]:
        """Modules that the files of the package import anywhere, names taken from modules among them."""
        found = set[str]()
        for file in self.files():
            package, text = file.rpartition("/")[0].replace("/", "."), self.text(file)
            found |= imports_in(text, package) | ({f"{package}.*"} if _IMPORTS_ANY.search(text) else set())
        return frozenset(part for one in found for part in accumulate(one.split("."), "{}.{}".format))

    def modules(self) -> Iterator[griffe.Module]:
        """Every module of the package."""
        waiting = [self.tree]
        while waiting:
            module = waiting.pop()
            yield module
            waiting += [m for m in module.members.values() if isinstance(m, griffe.Module)]

    def where(self, obj: griffe.Object) -> SourceLine:
        """The file, relative to the wheel's root, and the line of a definition."""
        return SourceLine(file=str(obj.filepath), line=max(obj.lineno or 0, 0))

    def node_of(self, obj: griffe.Object) -> ast.AST | None:
        """The syntax tree of a definition; None where griffe made it up (a synthesised constructor)."""
        return self._definitions(str(obj.filepath)).get((obj.name, obj.lineno or 0))

    def _definitions(self, file: str) -> dict[tuple[str, int], ast.AST]:
        """Definitions of a file by name and line; griffe counts from the first decorator, Python from `def`."""
        if file not in self._nodes:
            found: dict[tuple[str, int], ast.AST] = {}
            for node in statements_below(self.syntax(file)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    for line in {node.lineno, *(decorator.lineno for decorator in node.decorator_list)}:
                        found.setdefault((node.name, line), node)
            self._nodes[file] = found
        return self._nodes[file]

    def syntax(self, file: str) -> ast.Module:
        """The syntax tree of a file, by its path relative to the wheel's root."""
        if file not in self._syntax:
            try:
                self._syntax[file] = ast.parse(self.text(file))
            except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
                self._syntax[file], self._unreadable[file] = ast.Module([], []), str(fault) or type(fault).__name__
        return self._syntax[file]

    def why_unreadable(self, file: str) -> str:
        """Why a file is no Python for this interpreter; empty where it is. Its syntax tree is then empty."""
        self.syntax(file)
        return self._unreadable.get(file, "")

    def text(self, file: str) -> str:
        """The text of a file."""
        return self._files.text(file)

    def files(self) -> list[str]:
        """Every Python file of the package, relative to the wheel's root."""
        return self._files.names

    def file_of(self, module: str) -> str | None:
        """The file of a module, relative to the wheel's root."""
        base, files = module.replace(".", "/"), self.memory.setdefault("files", frozenset(self.files()))
        return next((file for file in (f"{base}/__init__.py", f"{base}.py") if file in files), None)

    def stored(self, name: str, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """Facts about the release that `make` reads from its sources, kept beside the tree."""
        tree = self._stored_tree()
        path = tree.with_suffix(f".{name}.json") if tree else None
        if path and (text := _read_sealed(path)):
            known: list[dict[str, Any]] = json.loads(text)
            return known
        facts = make()
        if path:
            _keep(path, json.dumps(facts))
        return facts

    def _stored_tree(self) -> Path | None:
        return self._cache / f"{self.source.sha256}-{_reader_hash()}.json" if self._cache else None

    def _load(self) -> tuple[griffe.Module, str]:
        roots = self.library.roots
        with self._files.laid_out() as folder, without_garbage_collection():
            extensions = griffe.load_extensions(ConstructedDataclasses())
            loader = griffe.GriffeLoader(
                search_paths=[folder], allow_inspection=False, extensions=extensions, docstring_parser=None
            )
            try:
                loader.load(roots[0], submodules=True, find_stubs_package=False)  # with the whole package around it
                for root in roots[1:]:
                    loader.modules_collection.get_member(root)
            except (ImportError, griffe.LoadingError, KeyError) as fault:
                shown = str(self._wheel) if self._wheel.is_dir() else self.source.wheel
                raise ReleaseUnreadable(why_not_loaded(shown, folder, roots, fault)) from fault
            loader.resolve_aliases(implicit=True, external=False)
            module = loader.modules_collection[self.library.package]
            text = module.as_json(full=False).replace(f"{json.dumps(str(folder))[1:-1]}/", "")
        return _attach(griffe.Module.from_json(text)), text

    def _lookup(self, module: str, name: str, seen: set[tuple[str, str]]) -> Lookup:
        if (module, name) in seen:
            return Opaque()
        seen.add((module, name))
        if not self.library.owns(module) or self.library.is_opaque(module):
            return Opaque()
        holder = self.module(module)
        if holder is None:
            return self._lookup_in_class(module, name, seen)
        member = holder.members.get(name)
        if member is None or (isinstance(member, griffe.Alias) and not member.runtime):
            # not there, or under TYPE_CHECKING only
            return self._lookup_lazy(holder, name, seen)
        if isinstance(member, griffe.Alias):
            target = self.module(member.target_path)
            owner, _, last = member.target_path.rpartition(".")
            return Found(target) if target is not None else self._lookup(owner, last, seen)
        if isinstance(member, griffe.Module) and not self.gives_module(module, name):
            return self._lookup(member.path, name, seen)
        if isinstance(member, griffe.Attribute):
            return self._lookup_assigned(holder, member, seen)
        return Found(member)

    def takes_binary_names(self, module: griffe.Module) -> bool:
        """Whether a module has `from transformer_engine_torch import *`: no wheel says what that binary holds."""
        return any(f"{one.replace('.', '/')}/*" in module.members for one in self.library.opaque)

    @cached_property
    def names_of_binary(self) -> frozenset[str]:
        """Names that the package's own Python takes from the binary: it surely has those."""
        taken = re.compile(_OF_BINARY.format("|".join(map(re.escape, self.library.opaque))))
        texts = [text for text in map(self.text, self.files()) if any(one in text for one in self.library.opaque)]
        return frozenset(name for text in texts for name in taken.findall(text))

    def _lookup_in_class(self, path: str, name: str, seen: set[tuple[str, str]]) -> Lookup:
        if (file := self.file_of(path)) is not None and self.why_unreadable(file):
            return Opaque()
        owner, _, last = path.rpartition(".")
        if not owner or self.module(owner) is None:
            return Absent()
        found = self._lookup(owner, last, seen)
        if isinstance(found, Found) and name in found.obj.members:
            member = found.obj.members[name]
            if isinstance(member, griffe.Object):
                return Found(member)
        return Absent()

    def _lookup_lazy(self, holder: griffe.Module, name: str, seen: set[tuple[str, str]]) -> Lookup:
        if "__getattr__" not in holder.members and not any(
            isinstance(m, griffe.Alias) and _LAZY.search(m.target_path) for m in holder.members.values()
        ):
            return Opaque() if self.takes_binary_names(holder) and name not in holder.members else Absent()
        target = lazy_target(self.syntax(str(holder.filepath)), holder.path, name)
        if target is None:
            return Opaque()  # its `__getattr__` makes names that cannot be read
        if target == "":
            return Absent()
        return self._lookup(*target.rpartition(".")[::2], seen)

    def _lookup_assigned(self, holder: griffe.Module, member: griffe.Attribute, seen: set[tuple[str, str]]) -> Lookup:
        """`name = other` is the other; `name = wrap(other)` is something that only running would tell."""
        value = member.value
        if isinstance(value, griffe.ExprName | griffe.ExprAttribute):
            found = self.in_scope(holder, str(value), seen)
            return found if isinstance(found, Found) else Found(member, wrapped=True)
        return Found(member, wrapped=isinstance(value, griffe.ExprCall))


@cache
def _reader_hash() -> str:
    """What the stored facts depend on besides the wheel: griffe, and the code of this package that reads them."""
    digest = hashlib.sha256(distribution_version("griffe").encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _attach(module: griffe.Module) -> griffe.Module:
    """Give a tree that was read from JSON the collection in which its aliases are looked up."""
    collection = griffe.ModulesCollection()
    collection[module.path] = module
    module._modules_collection = collection
    return module


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Reading a release makes a million live objects and no garbage; looking for it doubles the time."""
    was_on = gc.isenabled()
    gc.disable()
    if was_on:
        gc.unfreeze()
    try:
        yield
    finally:
        if was_on:
            gc.freeze()  # the next collection would walk all of it: a second at the end of a short process
            gc.enable()


def _read_sealed(path: Path) -> str:
    """What `_keep` wrote; empty where it is not there, is not as it was written, or was kept of another release."""
    with suppress(OSError, ValueError):
        seal, _, text = path.read_text(encoding="utf-8").partition("\n")
        if seal == hashlib.sha256((path.name + text).encode()).hexdigest():
            return text
    return ""


def _keep(path: Path, text: str) -> None:
    """Keep what can be made again; a cache that cannot be written costs time, not the answer."""
    with suppress(OSError):
        write_whole(path, f"{hashlib.sha256((path.name + text).encode()).hexdigest()}\n{text}")
        release, _, reader = path.name.partition("-")
        for old in path.parent.glob(f"{release}-*"):
            if not old.name.startswith(reader.partition(".")[0], len(release) + 1):
                old.unlink()  # written by an earlier version of the code that reads releases
