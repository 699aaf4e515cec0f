"""Which source tree is judged without `--source`, and its rows: a file each, or the modules that its project names.

`[tool.megacpp-validate] modules = {name = ["path or glob", ...]}` in the pyproject.toml nearest to a source tree names
rows; paths are relative to that file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...catalog.file import PACKAGE_ROOT
from .library import TE, Library
from .project import Project, Source, SourceFile, SourceUnreadable

_TABLE: Final = "megacpp-validate"


class _Settings(BaseModel):
    """The table of a project; `modules`: row -> paths and globs."""

    model_config = ConfigDict(extra="forbid", strict=True)
    modules: dict[str, list[str]] = Field(default_factory=dict)


def choose_roots(given: Sequence[Path], here: Path, library: Library = TE) -> tuple[Path, ...]:
    """The folders to judge: those given, else the current project if it mentions Transformer Engine.

    Returns:
        None at all for the bridge of this project: in a checkout of this project, and where no Python file below `here`
        names Transformer Engine outside of comments. A home folder and `/` are no project: reading them takes minutes.
    """
    if given:
        return tuple(given)
    in_checkout = any((folder / PACKAGE_ROOT.name / "canary").is_dir() for folder in (here, *here.parents))
    if in_checkout or here in (Path(here.anchor), Path.home()):
        return ()
    try:
        project = Project([here], library=library)
    except SourceUnreadable:
        return ()
    return (here,) if any(map(project.uses, project.files.values())) else ()


def read_source(roots: Sequence[Path], library: Library = TE) -> Source:
    """A source tree of any project: a row a file, or a row a module that its pyproject.toml names.

    Files are shown relative to the current folder, where annotations look for them.

    Raises:
        SourceUnreadable: a folder or a table is wrong; the text names the file and the key.
    """
    here = Path.cwd()
    project = Project(roots, here, library)
    rows: dict[str, str] = {}
    known = {os.path.realpath(file.path): file for file in project.files.values()}
    for settings in dict.fromkeys(found for root in roots if (found := _find_settings(root)) is not None):
        for name, patterns in _read_modules(settings).items():
            for file in _find_members(settings, name, patterns, known):
                if rows.setdefault(file.shown, name) != name:
                    raise SourceUnreadable(
                        f"{settings}: {file.shown} belongs to the modules {rows[file.shown]!r} and {name!r}. Next "
                        "step: name each file in one module."
                    )
    is_here = [root.resolve() for root in roots] == [here.resolve()]
    title = f"the current project ({here.name})" if is_here else f"the source tree {', '.join(map(str, roots))}"
    return Source(project, rows, title=title)


def _find_settings(root: Path) -> Path | None:
    """The nearest pyproject.toml, up to the top of the repository."""
    start = root.absolute()
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file():
            return folder / "pyproject.toml"
        if (folder / ".git").exists():
            return None
    return None


def _read_modules(settings: Path) -> dict[str, list[str]]:
    try:
        data: Any = tomllib.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise SourceUnreadable(
            f"{settings} is no TOML: {fault}. Likely cause: an edit that is not finished. Next step: correct the file."
        ) from fault
    tool = data.get("tool")
    section = tool.get(_TABLE, {}) if isinstance(tool, dict) else {}
    try:
        return _Settings.model_validate(section).modules
    except ValidationError as fault:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc'])) or _TABLE}: {one['msg']}" for one in fault.errors())
        raise SourceUnreadable(
            f"{settings}: [tool.{_TABLE}] is wrong: {wrong}. Next step: write "
            'modules = {name = ["path or glob", ...]}.'
        ) from fault


def _find_members(
    settings: Path, name: str, patterns: Collection[str], known: dict[str, SourceFile]
) -> Iterator[SourceFile]:  # fmt: skip
    """Files of one module that are judged; a pattern that matches no Python file at all is refused."""
    for pattern in patterns:
        places = list(_expand(settings.parent, pattern))
        if not places:
            raise SourceUnreadable(
                f"{settings}: module {name!r}: no Python file matches {pattern!r}. Likely cause: a typing error; paths "
                "are relative to that pyproject.toml. Next step: correct the path."
            )
        yield from (known[place] for place in map(os.path.realpath, places) if place in known)


def _expand(folder: Path, pattern: str) -> Iterator[Path]:
    """Python files that a path or a glob names; a folder names every file below it."""
    plain = folder / pattern
    try:
        found = [plain] if plain.exists() else sorted(folder.glob(pattern))
    except (ValueError, NotImplementedError, OSError):  # an empty or an absolute pattern
        found = []
    for place in found:
        if place.is_dir():
            yield from place.rglob("*.py")
        elif place.suffix == ".py":
            yield place
