"""What keeps a release from being imported at all, whatever surrounds it: read from its own code, nothing is run.

The top levels that importing `transformer_engine.pytorch` runs are walked in the order in which Python runs them. A
name or a module of the package that an import asks for and that is not there yet ends the walk as it would end the
import: a file that is not in the wheel, a name that was renamed at its home, a circle, a name that nothing binds.
What a `try` catches is caught here too, and what stands under a condition may or may not be run.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ...evidence.values import Cause, SourceLine
from .changes import Change
from .conditions import on_targets
from .findings import ChangeKind, Impact
from .import_names import bound_by, covers, exported_by, is_for_type_checkers, read_at_once, stored_by
from .import_time import ENTRY, absolute
from .release import Release
from .source_files import PACKAGE, why_no_python_reads

_EVERYWHERE = frozenset(
    {*dir(builtins), "__file__", "__path__", "__package__", "__spec__", "__loader__", "__annotations__", "__module__"}
    | {"__qualname__", "__builtins__"}
)


@dataclass(frozen=True)
class ImportFault:
    """Where the import ends, and why.

    Attributes:
        what: class of the exception and its text.
        about: the dotted name that it is about.
        condition: the condition under which the name is missing; "" where it always is.
        file, line: where.
    """

    what: str
    about: str
    condition: str
    file: str
    line: int


def compare_import_faults(old: Release, new: Release) -> Iterator[Change]:
    """What ends the import of the new release and not that of the old one."""
    before = {(fault.about, fault.condition) for fault in read_import_faults(old)}
    for fault in read_import_faults(new):
        if (fault.about, fault.condition) in before:
            continue
        readable = not fault.what.startswith("SyntaxError")
        yield Change(
            ChangeKind.IMPORT_REQUIREMENT_ADDED,
            Impact.BREAKING if readable and not fault.condition else Impact.RISK,
            Cause.API if readable else Cause.ENVIRONMENT,
            after=SourceLine(file=fault.file, line=fault.line),
            new=fault.what + (f" unless {fault.condition}" if fault.condition else ""),
        )


def compare_conditions(old: Release, new: Release, module: str, name: str) -> Iterator[Change]:
    """A name that a module now binds under a condition alone."""
    condition = _only_if(new, module, name)
    if condition and condition != _only_if(old, module, name):
        made = new.module(module)
        never = on_targets(condition) is False
        yield Change(
            ChangeKind.GUARD_ADDED,
            Impact.BREAKING if never else Impact.RISK,
            Cause.ENVIRONMENT,
            after=SourceLine(file=str(made.filepath), line=1) if made is not None else None,
            new=f"ImportError unless {condition}",
        )


def read_import_faults(release: Release) -> list[ImportFault]:
    """The fault that ends the import, if one does, and those that end it under a condition."""
    return [fault for fault in _walked(release) if fault.what]


def _only_if(release: Release, module: str, name: str) -> str:
    """The condition without which a module does not bind a name while it is imported; "" where there is none."""
    path = f"{module}.{name}"
    return next((fault.condition for fault in _walked(release) if not fault.what and fault.about == path), "")


def _walked(release: Release) -> list[ImportFault]:
    """Faults, and the names that are bound under a condition as faults that nobody has met."""

    def walk() -> list[dict[str, object]]:
        importing = _Import(release)
        faults = importing.faults()
        at_times = [
            ImportFault("", f"{made.path}.{name}", condition, made.file, 0)
            for made in importing.made.values()
            for name, condition in sorted(made.only_if.items())
        ]
        return [vars(fault) for fault in (*faults, *at_times)]

    if "import walk" not in release.memory:
        release.memory["import walk"] = [ImportFault(**item) for item in release.stored("import-walk", walk)]
    known: list[ImportFault] = release.memory["import walk"]
    return known


class _Broken(Exception):
    """The import ends here, as it would in Python."""

    def __init__(self, fault: ImportFault, kinds: frozenset[str]) -> None:
        super().__init__(fault.what)
        self.fault = fault
        self.kinds = kinds  # exception classes that catch it


@dataclass
class _Made:
    """A module while it is imported, and after.

    Attributes:
        names: what is bound so far.
        only_if: those of them that are bound under a condition -> it.
        is_open: it may have any name.
        broken: how its import ended.
    """

    path: str
    file: str
    package: str
    names: set[str] = field(default_factory=lambda: {"__name__", "__doc__", "__file__"})
    only_if: dict[str, str] = field(default_factory=dict)
    is_open: bool = False
    lazy_annotations: bool = False
    broken: _Broken | None = None


class _Import:
    """Walks the import of one release; `made` are the modules that it came to."""

    def __init__(self, release: Release) -> None:
        self._release = release
        self._files = set(release.files())
        self._at_times: list[ImportFault] = []
        self.made: dict[str, _Made] = {}

    def faults(self) -> list[ImportFault]:
        """Those that end the import for sure, then those that end it under a condition."""
        try:
            self._import(ENTRY)
        except _Broken as end:
            return [end.fault, *self._at_times]
        return self._at_times

    def _file_of(self, module: str) -> str | None:
        base = module.replace(".", "/")
        return next((f for f in (f"{base}/__init__.py", f"{base}.py") if f in self._files), None)

    def _import(self, path: str) -> _Made | None:
        """Run a module and those above it; None where there is no such file."""
        made = None
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            file = self._file_of(name)
            if file is None:
                return None
            made = self.made.get(name)
            if made is None:
                package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
                made = self.made[name] = _Made(name, file, package)
                self._run_module(made)
            if made.broken is not None:
                raise made.broken
        return made

    def _run_module(self, made: _Made) -> None:
        try:
            if said := self._release.why_unreadable(made.file):  # a newer Python may well read it
                no_python = why_no_python_reads(self._release, made.file)
                what = f"{made.path} is no Python: {no_python}" if no_python else f"SyntaxError: {made.path}: {said}"
                raise _Broken(ImportFault(what, made.path, "", made.file, 1), frozenset({"SyntaxError"}))
            tree = self._release.syntax(made.file)
            late, made.is_open = bound_by(self._release.text(made.file))
            made.names |= late
            try:
                self._run(tree.body, made, "")
            except RecursionError:  # an expression nested too deep for this walk
                made.is_open = True
        except _Broken as end:
            made.broken = end
            raise

    # --- statements ---------------------------------------------------------------------------------------

    def _run(self, body: Iterable[ast.stmt], made: _Made, condition: str) -> None:
        for node in body:
            match node:
                case ast.Import(names=names):
                    for alias in names:
                        self._import_plain(alias, node, made)
                        self._bind(made, {alias.asname or alias.name.partition(".")[0]}, condition)
                case ast.ImportFrom():
                    self._import_from(node, made, condition)
                case ast.Try():
                    self._try(node, made, condition)
                case ast.If(test=test, body=then, orelse=orelse):
                    self._read(node.test, made)
                    self._either(ast.unparse(test), [] if is_for_type_checkers(test) else then, orelse, made, condition)
                case ast.With(items=items, body=inner):
                    caught = any("suppress" in ast.unparse(item.context_expr) for item in items)
                    (self._perhaps if caught else self._run)(inner, made, condition)
                case ast.For(body=inner) | ast.While(body=inner):
                    self._bind(made, stored_by(node), condition)
                    self._perhaps(inner, made, condition)
                case _:
                    self._read(node, made)
                    self._bind(made, stored_by(node), condition)

    def _either(self, test: str, then: list[ast.stmt], orelse: list[ast.stmt], made: _Made, condition: str) -> None:
        """Both branches of a condition that only running would tell."""
        bound, asked = set(made.names), dict(made.only_if)
        ends: list[set[str]] = []
        for branch, holds in ((then, test), (orelse, f"not ({test})")):
            made.names, made.only_if = set(bound), dict(asked)
            self._perhaps(branch, made, _and(condition, holds))
            ends.append(made.names - bound)
        made.names, made.only_if = bound | ends[0] | ends[1], asked
        for name in ends[0] ^ ends[1]:
            made.only_if[name] = _and(condition, test if name in ends[0] else f"not ({test})")
        if condition:
            made.only_if |= dict.fromkeys(ends[0] & ends[1], condition)

    def _perhaps(self, body: list[ast.stmt], made: _Made, condition: str) -> None:
        """Run what may not be run: its end is not the end of the import."""
        try:
            self._run(body, made, condition)
        except _Broken:
            self._bind(made, set().union(*map(stored_by, body)) if body else set(), condition)

    def _try(self, node: ast.Try, made: _Made, condition: str) -> None:
        caught = node.handlers
        known = dict(made.only_if)
        made.names |= {handler.name for handler in caught if handler.name}
        try:
            self._run(node.body, made, condition)
            for handler in caught:  # they may be run where something outside of the package is missing
                self._perhaps(handler.body, made, condition)
            self._run(node.orelse, made, condition)
        except _Broken as end:
            handler_of = next((h for h in caught if covers(h, end.kinds)), None)
            if handler_of is None:
                raise
            self._run([s for s in handler_of.body if not isinstance(s, ast.Raise)], made, condition)
            if any(isinstance(s, ast.Raise) for s in handler_of.body):
                raise
        if not condition:  # what a `try` binds is bound, as far as this walk is concerned
            made.only_if = known
        self._run(node.finalbody, made, condition)

    # --- imports ------------------------------------------------------------------------------------------

    def _import_plain(self, alias: ast.alias, node: ast.stmt, made: _Made) -> None:
        if alias.name.partition(".")[0] == PACKAGE and self._import(alias.name) is None:
            raise self._missing_module(alias.name, node, made)

    def _import_from(self, node: ast.ImportFrom, made: _Made, condition: str) -> None:
        base = absolute(node.module or "", node.level, made.package)
        outside = base.partition(".")[0] != PACKAGE
        made.lazy_annotations = made.lazy_annotations or base == "__future__"
        source = None if outside else self._import(base)
        if source is None and not outside:
            raise self._missing_module(base, node, made)
        for alias in node.names:
            if alias.name == "*":
                made.is_open = made.is_open or source is None or source.is_open
                self._bind(made, self._starred(source) if source is not None else set(), condition)
                continue
            if source is not None:
                self._take(source, alias.name, node, made, condition)
            self._bind(made, {alias.asname or alias.name}, condition)

    def _starred(self, source: _Made) -> set[str]:
        """What `from source import *` takes."""
        if "__all__" not in source.names:
            return {name for name in source.names if not name.startswith("_")}
        listed = exported_by(self._release.syntax(source.file))
        return source.names if listed is None else source.names & listed

    def _take(self, source: _Made, name: str, node: ast.ImportFrom, made: _Made, condition: str) -> None:
        """One name of `from source import name`."""
        if name in source.names:
            asked = source.only_if.get(name, "")
            if asked and asked not in condition:
                what = f"ImportError: {source.path} has no {name}"
                self._at_times.append(ImportFault(what, f"{source.path}.{name}", asked, made.file, node.lineno))
            return
        if self._import(f"{source.path}.{name}") is not None or source.is_open or "__getattr__" in source.names:
            return
        later = source.broken is None and name in self._bound_in_the_end(source)
        why = f"in a circle, {source.path} has no {name} yet" if later else f"{source.path} has no {name}"
        fault = ImportFault(f"ImportError: {why}", f"{source.path}.{name}", "", made.file, node.lineno)
        raise _Broken(fault, frozenset({"ImportError"}))

    def _bound_in_the_end(self, source: _Made) -> set[str]:
        return stored_by(self._release.syntax(source.file))

    def _missing_module(self, module: str, node: ast.stmt, made: _Made) -> _Broken:
        what = f"ModuleNotFoundError: no {module} among the sources"
        fault = ImportFault(what, module, "", made.file, node.lineno)
        return _Broken(fault, frozenset({"ImportError", "ModuleNotFoundError"}))

    # --- names --------------------------------------------------------------------------------------------

    def _read(self, node: ast.AST, made: _Made) -> None:
        """Names that a statement reads when it is run must be bound."""
        if made.is_open:
            return
        for name in read_at_once(node, annotations=not made.lazy_annotations):
            if name.id not in made.names and name.id not in _EVERYWHERE:
                what = f"NameError: nothing binds {name.id} in {made.path}"
                fault = ImportFault(what, f"{made.path}.{name.id}", "", made.file, name.lineno)
                raise _Broken(fault, frozenset({"NameError"}))

    @staticmethod
    def _bind(made: _Made, names: set[str], condition: str) -> None:
        for name in names:
            if not condition:
                made.only_if.pop(name, None)
            elif name not in made.names or name in made.only_if:
                made.only_if[name] = condition
        made.names |= names


def _and(one: str, other: str) -> str:
    return f"{one} and {other}" if one else other
