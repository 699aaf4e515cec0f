"""What of Transformer Engine lies on the path of this process, found without importing any of it.

An install has three parts, each with a distribution of its own: the Python sources, the core library and the
torch extension. Which of them are there, from which release and where, is what explains most failed imports.
"""

from __future__ import annotations

import sys
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final, NamedTuple

SOURCES: Final = "transformer-engine"
CORES: Final = ("transformer-engine-cu12", "transformer-engine-cu13")
EXTENSION: Final = "transformer-engine-torch"


class Install(NamedTuple):
    """What of Transformer Engine lies on `sys.path`.

    versions: distribution name -> version, as the first match on the path says.
    copies: every folder on the path that holds a `transformer_engine` package, and every file that is a module of
        that name, in the order of the path.
    has_core, has_extension: whether the compiled halves were found beside a copy.
    unreadable: distributions whose metadata is there and cannot be read.
    """

    versions: dict[str, str]
    copies: tuple[str, ...]
    has_core: bool
    has_extension: bool
    unreadable: tuple[str, ...] = ()

    @property
    def core(self) -> str | None:
        """Name of the installed core library's distribution."""
        return next((name for name in CORES if name in self.versions), None)

    def say(self) -> str:
        """The install in one line."""
        parts = [f"{name} {version}" for name, version in self.versions.items()] or ["no distribution"]
        parts += [f"{name} (its metadata cannot be read)" for name in self.unreadable]
        where = ", ".join(self.copies) or "no folder of sys.path"
        return f"{', '.join(parts)}; sources in {where}"


def look_for_te() -> Install:
    """What of Transformer Engine lies on the path of this process. Imports nothing, never raises."""
    versions: dict[str, str] = {}
    unreadable: list[str] = []
    for name in (SOURCES, *CORES, EXTENSION):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        except Exception:  # bytes that are no text, no permission, whatever a damaged disk leaves
            unreadable.append(name)
            continue
        if isinstance(version, str):  # None where METADATA is gone, whatever the annotation says
            versions[name] = version
        else:
            unreadable.append(name)
    copies: list[str] = []
    libraries: set[str] = set()
    for entry in dict.fromkeys(sys.path):
        package = Path(entry or ".") / "transformer_engine"
        try:
            if not package.is_dir():
                copies += [str(file) for file in _modules_of(package) if file.is_file()]
                continue
            copies.append(str(package))
            for folder in (package.parent, package, package / "wheel_lib"):
                libraries.update(file.name for file in folder.glob("*transformer_engine*.so*"))
        except OSError:
            continue
    return Install(
        versions,
        tuple(copies),
        any(name.startswith("libtransformer_engine") for name in libraries),
        any(name.startswith("transformer_engine_torch") for name in libraries),
        tuple(unreadable),
    )


def _modules_of(package: Path) -> list[Path]:
    """Files that Python would import in place of a package."""
    return [package.with_name(f"{package.name}{suffix}") for suffix in (*EXTENSION_SUFFIXES, ".py", ".pyc")]
