"""Releases and bridges of a few lines, written to a folder and compared as the real ones are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

from megacpp_validate.canary.static.derive import BridgeFile, derive_surface
from megacpp_validate.canary.static.findings import ReleaseSource, StaticResult
from megacpp_validate.canary.static.release import Release
from megacpp_validate.canary.static.surface import Surface
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


def write_release(folder: Path, code: Sources) -> Release:
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
    return Release(ReleaseSource(version=str(folder), wheel="a folder", sha256=""), folder)


def write_bridge(folder: Path, code: str, accessors: str | None = None) -> Surface:
    """A bridge of two modules, `imports` and `user`.

    Args:
        folder: where to.
        code: the body of the user module; the accessors are known in it as `te`.
        accessors: `imports.py`; None makes an accessor for each `te.NAME` that imports NAME from
            `transformer_engine.pytorch`.
    """
    names = dict.fromkeys(re.findall(r"\bte\.(\w+)", code))
    plain = "\n".join(
        f"def {name}():\n    from transformer_engine.pytorch import {name}\n    return {name}" for name in names
    )
    folder.mkdir(parents=True, exist_ok=True)
    imports, user = folder / "imports.py", folder / "user.py"
    imports.write_text(plain if accessors is None else dedent(accessors))
    user.write_text(f"from . import imports as te\n{dedent(code)}")
    files = [BridgeFile("imports", imports, "imports.py"), BridgeFile("user", user, "user.py")]
    return derive_surface(files, ["imports", "user"])


def compare(folder: Path, old: Sources, new: Sources, bridge: str, accessors: str | None = None) -> StaticResult:
    """The static tier on two releases and a bridge given as text."""
    surface = write_bridge(folder / "bridge", bridge, accessors)
    return run_pair(
        write_release(folder / "old", old), write_release(folder / "new", new), surface, tool="test", verbose=True
    )


def said_by(result: StaticResult) -> set[str]:
    """Each finding as "module kind [parameter] impact"."""
    return {" ".join(filter(None, (f.module, f.kind, f.parameter, f.impact))) for f in result.findings}
