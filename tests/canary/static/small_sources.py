"""Releases and bridges of a few lines, written to a folder and compared as the real ones are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from megacpp_validate.canary.static.findings import ReleaseSource, StaticResult
from megacpp_validate.canary.static.project import Project, Source
from megacpp_validate.canary.static.release import Release
from megacpp_validate.canary.static.sweep import run_pair

PYTORCH = "transformer_engine/pytorch"
RECIPES = "transformer_engine/common/recipe"
Sources = str | Mapping[str, str]


class Case(NamedTuple):
    """Two releases, a bridge, and everything that must be said."""

    name: str
    old: Sources
    new: Sources
    bridge: str
    said: set[str]


def write_release(folder: Path, code: Sources, version: str = "") -> Release:
    """A release: `code` is its `pytorch/__init__.py`, or its files by path below `transformer_engine/`."""
    files = {"pytorch/__init__.py": code} if isinstance(code, str) else dict(code)
    for path in ("__init__.py", "pytorch/__init__.py", "common/__init__.py", "common/recipe/__init__.py"):
        files.setdefault(path, "")
    for path, text in files.items():
        file = folder / "transformer_engine" / path
        for package in (file.parent, *file.parent.parents):
            package.mkdir(parents=True, exist_ok=True)
            if package == folder / "transformer_engine":
                break
            (package / "__init__.py").touch()
        file.write_text(dedent(text))
    return Release(ReleaseSource(version=version or str(folder), wheel="a folder", sha256=""), folder)


def write_bridge(folder: Path, code: str, accessors: str | None = None) -> Source:
    """A bridge of two modules, `imports` and `user`.

    Args:
        folder: where to.
        code: the body of the user module. `te.NAME.require()` stands for NAME of `transformer_engine.pytorch`, and
            `te.NAME()` for the same, or None where a release lacks it.
        accessors: functions of `imports.py` that import NAME in another way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    imports, user = "", dedent(code)
    head = "from transformer_engine import pytorch as te"
    if accessors is None:
        user = re.sub(r"\bte\.(\w+)\(\)", r"getattr(te, '\1', None)", user)
        user = re.sub(r"\bte\.(\w+)\.require\(\)", r"te.\1", user)
    else:
        head = "from . import imports as te"
        imports = re.sub(r"^(?:@.*\n)?(?=def )", "@entry\n", dedent(accessors), flags=re.MULTILINE)
        imports = f"entry = object()\n{imports}"
    (folder / "__init__.py").touch()
    (folder / "imports.py").write_text(imports)
    (folder / "user.py").write_text(f"{head}\n{user}")
    return Source(Project([folder]), {"imports.py": "imports", "user.py": "user"}, ("imports", "user"))


def compare(folder: Path, old: Sources, new: Sources, bridge: str, accessors: str | None = None) -> StaticResult:
    """The static tier on two releases and a bridge given as text."""
    source = write_bridge(folder / "bridge", bridge, accessors)
    return run_pair(
        write_release(folder / "old", old), write_release(folder / "new", new), source, tool="test", verbose=True
    )


def said_by(result: StaticResult) -> set[str]:
    """Each finding as "module kind [parameter] impact"."""
    return {" ".join(filter(None, (f.module, f.kind, f.parameter, f.impact))) for f in result.findings}


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Files by their paths below a folder."""
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))


def compare_source(folder: Path, old: Sources, new: Sources, files: Mapping[str, str]) -> StaticResult:
    """The static tier on two releases and a source tree of any project, a row a file.

    Args:
        folder: where to.
        old, new: releases; their versions are 1.0 and 2.0.
        files: of the tree, by path.
    """
    write_files(folder / "tree", files)
    releases = [write_release(folder / version, code, version) for version, code in (("1.0", old), ("2.0", new))]
    return run_pair(*releases, Source(Project([folder / "tree"])), tool="test")
