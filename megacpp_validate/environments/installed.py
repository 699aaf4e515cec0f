"""Every release of Transformer Engine that this host has: in overlay folders, and in the interpreter itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from .build_cache import open_cache
from .environment import NoEnvironment
from .interpreter import InterpreterEnvironment, host_interpreter, package_door, put_over

VARIABLE: Final = "MEGACPP_OVERLAYS"
_PACKAGE: Final = "transformer_engine"
_DISTRIBUTION: Final = "transformer-engine"
_EXTENSION: Final = "transformer_engine_torch"


@dataclass(frozen=True)
class Found:
    """A place that has Transformer Engine, or was named as one.

    Attributes:
        release: public version, such as "2.20.2"; empty where it cannot be read.
        place: the folder, or the interpreter.
        environment: how it is used; None where it cannot be.
        reason: why it is not used; empty where it is.
    """

    release: str
    place: str
    environment: InterpreterEnvironment | None
    reason: str = ""


@dataclass(frozen=True)
class _Folders:
    """What lies in the roots."""

    releases: tuple[Path, ...]
    common: tuple[Path, ...]
    faults: tuple[Found, ...]


def find_environments(
    overlays: Sequence[Path], variables: Mapping[str, str], python: str = "", door: Path | None = None
) -> tuple[Found, ...]:
    """Every release that is usable here, oldest first; then what is not usable, each with its reason.

    A root is a site folder, or holds site folders: each with `transformer_engine` is a release, and all others with
    packages (FlashAttention, DeepGEMM, ...) stand behind every release, in the order of the roots and of their names.

    Args:
        overlays: roots; those of `MEGACPP_OVERLAYS` where none is given.
        variables: environment variables of the user.
        python: interpreter that they stand on; the host's where it is empty.
        door: folder for a link to this package; one in the user's cache where it is None.

    Raises:
        NoEnvironment: there is no such interpreter, or it cannot be started.
    """
    roots = tuple(overlays) or read_roots(variables)
    host = open_host(variables, python, door)
    folders = _read_roots(roots)
    found = [_try_overlay(host, place, folders.common) for place in folders.releases]
    own = _try_own(host)
    return _sort([*found, *([own] if own else []), *folders.faults])


def read_roots(variables: Mapping[str, str]) -> tuple[Path, ...]:
    """The roots that `MEGACPP_OVERLAYS` names."""
    return tuple(Path(entry) for entry in variables.get(VARIABLE, "").split(os.pathsep) if entry)


def open_host(variables: Mapping[str, str], python: str, door: Path | None = None) -> InterpreterEnvironment:
    """The interpreter that overlays and virtual environments stand on.

    Raises:
        NoEnvironment: there is none where it is wanted from.
    """
    return host_interpreter(variables, door or package_door(open_cache(variables).root), python)


def read_release(folders: Sequence[Path]) -> str:
    """The public version of the Transformer Engine that is found first in some folders; empty where there is none.

    Raises:
        NoEnvironment: its metadata is damaged, or says two things.
    """
    for folder in folders:
        versions = set(_versions(folder))
        if len(versions) > 1:
            raise NoEnvironment(
                f"{folder} says that it holds the releases {', '.join(sorted(map(str, versions)))}. Likely cause: one "
                "was unpacked over another. Next step: empty the folder, and unpack one."
            )
        if versions:
            return versions.pop().public
    return ""


def _versions(folder: Path) -> Iterator[Version]:
    for found in metadata.distributions(path=[str(folder)]):
        name = found.metadata["Name"] if found.metadata else None
        if name is None or canonicalize_name(name) != _DISTRIBUTION:
            continue
        try:
            yield Version(found.version)
        except (InvalidVersion, TypeError) as fault:
            raise NoEnvironment(
                f"the metadata of Transformer Engine in {folder} names no version ({fault}). Likely cause: it was not "
                "unpacked to the end. Next step: install it again."
            ) from fault


def _read_roots(roots: Sequence[Path]) -> _Folders:
    releases: list[Path] = []
    common: list[Path] = []
    faults: list[Found] = []
    for root in dict.fromkeys(root.absolute() for root in roots):
        try:
            every = [root] if _is_site(root) else sorted(place for place in root.iterdir() if place.is_dir())
        except OSError as fault:
            faults.append(Found("", str(root), None, f"the folder cannot be read: {fault.strerror or fault}"))
            continue
        with_te = [place for place in every if (place / _PACKAGE).is_dir()]
        without = [place for place in every if place not in with_te and _is_site(place)]
        if not with_te and not without:
            faults.append(Found("", str(root), None, "it holds no packages, and no folders that hold some"))
        releases += with_te
        common += without
    return _Folders(tuple(releases), tuple(common), tuple(faults))


def _is_site(folder: Path) -> bool:
    """Whether packages lie in a folder itself: one that a packer keeps its archives in is none."""
    return any(next(folder.glob(pattern), None) for pattern in ("*.dist-info", "*/__init__.py", "*.pth"))


def _try_overlay(host: InterpreterEnvironment, place: Path, common: Sequence[Path]) -> Found:
    try:
        release = read_release([place])
        if not release:
            return Found("", str(place), None, f"{_PACKAGE} lies there without the metadata that names its release")
        if not (place / _PACKAGE / "__init__.py").is_file():
            return Found(release, str(place), None, f"{_PACKAGE} has no __init__.py; it was not unpacked to the end")
        if reason := _why_not_loaded(host, place):
            return Found(release, str(place), None, reason)
        because = f"Transformer Engine {release} of {place}"
        if common:
            because += f", with {', '.join(folder.name for folder in common)} of {common[0].parent}"
        return Found(release, str(place), put_over(host, (place, *common), because))
    except NoEnvironment as fault:
        return Found("", str(place), None, str(fault))


def _why_not_loaded(host: InterpreterEnvironment, place: Path) -> str:
    """Why the torch extension that lies there is none for this interpreter; empty where one is, or none lies there."""
    found = [*place.glob(f"{_EXTENSION}.*so"), *place.glob(f"{_PACKAGE}/wheel_lib/{_EXTENSION}.*so")]
    suffixes = {file.name.removeprefix(_EXTENSION) for file in found}
    if not suffixes or suffixes & {host.about.suffix, ".abi3.so", ".so"}:
        return ""
    return (
        f"its torch extension is built for {', '.join(sorted(suffixes))}, and {host.shown} loads {host.about.suffix}. "
        "Next step: give the Python that it was built for with --python"
    )


def _try_own(host: InterpreterEnvironment) -> Found | None:
    """What the interpreter has by itself, what the user put on `PYTHONPATH` included; None where it has none."""
    try:
        release = read_release(host.about.path)
    except NoEnvironment as fault:
        return Found("", host.shown, None, str(fault))
    return Found(release, host.shown, host) if release else None


def _sort(every: Sequence[Found]) -> tuple[Found, ...]:
    """Usable ones by release, the first of each; then the others."""
    usable: dict[Version, Found] = {}
    others: list[Found] = []
    for found in every:
        if found.environment is None:
            others.append(found)
        elif (first := usable.setdefault(Version(found.release), found)) is not found:
            others.append(
                Found(found.release, found.place, None, f"{first.place} has the same release, and comes first")
            )
    return (*(usable[version] for version in sorted(usable)), *others)
