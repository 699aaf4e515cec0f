"""A source tree of any project: which of its files use Transformer Engine, parsed and found by their dotted names.

Nothing of the project is imported or executed. A file that is no Python is named and left out; the rest is judged.
"""

from __future__ import annotations

import ast
import os
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from ...errors import NothingSelected, WrongArguments
from .library import TE, Library
from .source_files import decoded, imports_in

_SKIPPED: Final = frozenset({"build", "dist", "node_modules", "site-packages", "__pycache__", "venv"})
_LARGEST: Final = 4_000_000  # bytes; no person wrote a longer file


class SourceUnused(NothingSelected):
    """A source tree that uses nothing of Transformer Engine: there is nothing to judge."""


class SourceUnreadable(WrongArguments):
    """A source tree that cannot be judged; the text says why and what to do."""


@dataclass(frozen=True)
class SourceFile:
    """One Python file.

    Attributes:
        path: on disk.
        shown: relative to the folder that was given, with "/".
        module: dotted name, from the outermost folder that has an `__init__.py`.
        is_package: it is an `__init__.py`.
    """

    path: Path
    shown: str
    module: str
    is_package: bool

    def absolute(self, level: int, module: str) -> str:
        """The dotted name behind `from ...module import`, with `level` dots."""
        if not level:
            return module
        parts = self.module.split(".")
        kept = parts[: len(parts) - level + self.is_package]
        return ".".join([*kept, *([module] if module else [])])


class Project:
    """The Python files below some folders.

    Args:
        roots: folders, or single files.
        shown_from: files below this absolute folder are shown relative to it, others to their root.
        library: whose uses are read.

    Raises:
        SourceUnreadable: a root does not exist, or there is no Python file.
    """

    def __init__(self, roots: Sequence[Path], shown_from: Path | None = None, library: Library = TE) -> None:
        self.library = library
        self._used = re.compile(rf"^[^#\n]*\b{library.package.replace('_', '[_-]')}", re.MULTILINE)
        self.unreadable: dict[str, str] = {}
        self.files: dict[str, SourceFile] = {}
        self._trees: dict[str, ast.Module | None] = {}
        self._texts: dict[str, str] = {}
        self._tops = {_top(root if root.is_dir() else root.parent).name for root in roots}
        for root in roots:
            if not root.exists():
                raise SourceUnreadable(f"there is no {root}. Likely cause: a typing error. Next step: check --source.")
            for path in sorted(_python_files(root)):
                file = _describe(path, root if root.is_dir() else root.parent, shown_from)
                self.files.setdefault(file.module, file)
        if not self.files:
            shown = ", ".join(map(str, roots))
            raise SourceUnreadable(f"no Python file is in {shown}. Next step: give the folder of the source tree.")

    @cached_property
    def using(self) -> tuple[SourceFile, ...]:
        """Files that mention Transformer Engine, in the order of their names."""
        return tuple(f for _, f in sorted(self.files.items()) if self.mentions(f) and self.tree(f) is not None)

    @cached_property
    def names_fp8(self) -> bool:
        """Whether a file that uses Transformer Engine names FP8 or its stateful recipe."""
        return any(re.search("fp8|DelayedScaling", self.text(file), re.IGNORECASE) for file in self.using)

    def near(self, exported: Collection[str]) -> tuple[SourceFile, ...]:
        """Files that do not, and import one of these names from the project all the same, or set extra states."""
        if not exported:
            return ()
        words = "|".join(map(re.escape, sorted(exported)))
        named = rf"from\s[^#\n]+\simport\s(?:\([^)]*|[^\n]*)\b(?:{words})\b|from\s[^#\n]*\b(?:{words})\simport\s\*"
        pattern = re.compile(rf"^\s*(?:{named})", re.MULTILINE)
        others = [f for _, f in sorted(self.files.items()) if not self.mentions(f)]
        found = (f for f in others if pattern.search(self.text(f)) or ".set_extra_state(" in self.text(f))
        return tuple(f for f in found if self.tree(f) is not None)

    def uses(self, file: SourceFile) -> bool:
        """Whether a file names Transformer Engine outside of comments."""
        return self._used.search(self.text(file)) is not None

    def loads_fp8(self, file: SourceFile) -> bool:
        """Whether a file can load the FP8 state of layers of Transformer Engine.

        The project names FP8, and the file imports the package, or a file that does, or sets the states of layers.
        """
        named = imports_in(self.text(file), file.absolute(1, ""))
        places = (*named, *(f"{file.module.rpartition('.')[0]}.{name}" for name in named))  # a script's own folder, too
        taken = (found for name in places if (found := self.find(name)) and self.mentions(found))
        named |= {name for one in taken for name in imports_in(self.text(one), one.absolute(1, ""))}
        is_near = any(map(self.library.owns, named))
        return self.names_fp8 and (is_near or ".set_extra_state(" in self.text(file))

    def mentions(self, file: SourceFile) -> bool:
        """Whether a file itself names Transformer Engine."""
        return any(name in self.text(file) for name in (self.library.package, self.library.distributions[0]))

    def find(self, dotted: str) -> SourceFile | None:
        """The file of a module by its dotted name, from any folder of the tree on (`src/`, a repository's root)."""
        top, _, below = dotted.partition(".")  # `--source megatron` of a package without an `__init__.py`
        return self.files.get(dotted) or self._by_end.get(dotted) or self.files.get(below if top in self._tops else "")

    @cached_property
    def _by_end(self) -> dict[str, SourceFile | None]:
        """Files by every end of their names; None for an end that several share."""
        found: dict[str, SourceFile | None] = {}
        for module, file in self.files.items():
            parts = module.split(".")
            for start in range(1, len(parts)):
                end = ".".join(parts[start:])
                found[end] = None if end in found else file
        return found

    def tree(self, file: SourceFile) -> ast.Module | None:
        """The syntax tree; None for a file that is no Python."""
        text = self.text(file)
        if file.module not in self._trees:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # invalid escapes of the project
                    self._trees[file.module] = ast.parse(text, file.shown)
            except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
                self.leave_out(file, fault)
        return self._trees[file.module]

    def text(self, file: SourceFile) -> str:
        """The text of a file; of one in another encoding than it says, what can be read of it."""
        if file.module not in self._texts:
            raw = b""
            try:
                raw = file.path.read_bytes()
                self._texts[file.module] = decoded(raw)
            except (OSError, SyntaxError, ValueError) as fault:
                self._texts[file.module] = raw.decode("latin-1")
                self.leave_out(file, fault)
        return self._texts[file.module]

    def leave_out(self, file: SourceFile, fault: Exception) -> None:
        """Do without a file; `unreadable` names it if it uses Transformer Engine, or if its text is not known."""
        self._trees.setdefault(file.module, None)
        if self.uses(file) or isinstance(fault, OSError):
            self.unreadable[file.shown] = f"{type(fault).__name__}: {fault}".rstrip(": ")


def _python_files(root: Path) -> Iterator[Path]:
    """Python files below a folder; links to folders are not followed, so that no loop is."""
    if root.is_file():
        yield root
        return
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED and not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file() and path.stat().st_size <= _LARGEST:
                yield path


def _top(root: Path) -> Path:
    """The folder that the names of modules below a root are relative to."""
    folder = Path(os.path.abspath(root))  # noqa: PTH100 - `resolve` would follow links, `absolute` keeps ".."
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return folder


def _describe(path: Path, root: Path, shown_from: Path | None) -> SourceFile:
    place = Path(os.path.abspath(path))  # noqa: PTH100 - `resolve` would follow links, `absolute` keeps ".."
    is_below = shown_from is not None and place.is_relative_to(shown_from)
    shown = (place.relative_to(shown_from) if is_below and shown_from else path.relative_to(root)).as_posix()
    is_package = path.name == "__init__.py"
    parts = place.relative_to(_top(root)).with_suffix("").parts
    return SourceFile(path, shown, ".".join(parts[:-1] if is_package else parts), is_package)


@dataclass(frozen=True)
class Source:
    """What is judged, and under which names.

    Attributes:
        project: its files.
        rows: file, as shown -> row of the verdict; a file without a row has one of its own.
        order: rows in dependency order; empty for that of the imports.
        shown_below: put before the names of files in reports.
        title: what the answer calls it; empty for the bridge of this project.
    """

    project: Project
    rows: Mapping[str, str] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    shown_below: str = ""
    title: str = ""

    def row_of(self, file: SourceFile) -> str:
        """The row that a file belongs to."""
        return self.rows.get(file.shown, file.shown)
