"""The environment of a release, or of what a person wrote: found on the host, or made from a lock or an image."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, get_args

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ..catalog.bridge import Stack, matrix_folder
from ..errors import WrongArguments
from ..evidence.values import read_version
from .container import open_container
from .environment import Environment, NoEnvironment
from .interpreter import InterpreterEnvironment, host_interpreter, put_over
from .venv import make_venv

Way = Literal["overlay", "venv", "image", "python"]
VARIABLE: Final = "MEGACPP_OVERLAYS"
_PACKAGE: Final = "transformer_engine"
_EXTENSION: Final = "transformer_engine_torch"
_UNREADABLE: Final = f"the metadata of {_PACKAGE} there names no release, or more than one; install it again"
_FORM: Final = "NAME=overlay:DIR[:DIR...], NAME=venv:LOCK, NAME=image:REPOSITORY@sha256:... or NAME=python:PATH"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+]*")


@dataclass(frozen=True)
class Spec:
    """An environment that a person named.

    Attributes:
        name: what receipts and reports call it.
        way: how it is made usable.
        value: folders, a lock, an image or an interpreter.
    """

    name: str
    way: Way
    value: str


@dataclass(frozen=True)
class Means:
    """What environments are made with.

    Attributes:
        variables: environment variables of the user.
        python: interpreter that they stand on; the host's where it is empty.
        gpus: whether a container sees the GPUs of the host.
    """

    variables: Mapping[str, str]
    python: str = ""
    gpus: bool = True


def read_spec(text: str) -> Spec:
    """What a person wrote, as a value.

    Raises:
        WrongArguments: it has another form.
    """
    name, _, rest = text.partition("=")
    way, _, value = rest.partition(":")
    ways: dict[str, Way] = {known: known for known in get_args(Way)}
    if not _NAME.fullmatch(name) or way not in ways or not value:
        raise WrongArguments(
            f"{text!r} is not an environment. Next step: write {_FORM}; a name has letters, digits, '.', '_', '+'."
        )
    return Spec(name, ways[way], value)


def make_environment(spec: Spec, means: Means) -> Environment:
    """The environment that a person named.

    Raises:
        NoEnvironment: it cannot be made.
    """
    if spec.way == "image":
        return open_container(spec.value, means.variables, gpus=means.gpus)
    host = host_interpreter(means.variables, spec.value if spec.way == "python" else means.python)
    if spec.way == "venv":
        return make_venv(Path(spec.value), host)
    if spec.way == "overlay":
        return put_over(host, [Path(folder) for folder in spec.value.split(os.pathsep) if folder])
    return host


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


def find_environments(overlays: Sequence[Path], variables: Mapping[str, str], python: str = "") -> tuple[Found, ...]:
    """Every release that is usable here, oldest first; then what is not usable, each with its reason.

    A root is a site folder, or holds site folders: each with `transformer_engine` is a release, and all others with
    packages (FlashAttention, DeepGEMM, ...) stand behind every release, in the order of the roots and of their names.

    Args:
        overlays: roots; those of `MEGACPP_OVERLAYS` where none is given.
        variables: environment variables of the user.
        python: interpreter that they stand on; the host's where it is empty.

    Raises:
        NoEnvironment: there is no such interpreter, or it cannot be started.
    """
    named = [Path(entry) for entry in variables.get(VARIABLE, "").split(os.pathsep) if entry]
    host = host_interpreter(variables, python)
    every: list[Found] = []
    releases: list[Path] = []
    common: list[Path] = []
    for root in dict.fromkeys(root.absolute() for root in overlays or named):
        try:
            places = [root] if _is_site(root) else sorted(place for place in root.iterdir() if place.is_dir())
        except OSError as fault:
            every.append(Found("", str(root), None, f"the folder cannot be read: {fault.strerror or fault}"))
            continue
        with_te = [place for place in places if (place / _PACKAGE).is_dir()]
        without = [place for place in places if place not in with_te and _is_site(place)]
        if not with_te and not without:
            every.append(Found("", str(root), None, "it holds no packages, and no folders that hold some"))
        releases += with_te
        common += without
    overlaid = [_try_overlay(host, place, common) for place in releases]
    own = _read_release(host.about.path)
    mine = [] if own is None else [Found(own, host.shown, host if own else None, "" if own else _UNREADABLE)]
    return _sort([*overlaid, *mine, *every])


def _read_release(folders: Sequence[Path]) -> str | None:
    """The public version of the Transformer Engine that is found first in some folders.

    None where there is none; empty where its metadata is damaged, or names two releases.
    """
    for folder in folders:
        versions = set()
        for found in metadata.distributions(path=[str(folder)]):
            name = found.metadata["Name"] if found.metadata else None
            if name is not None and canonicalize_name(name) == "transformer-engine":
                versions.add(found.version)
        if versions:
            try:
                return Version(versions.pop()).public if len(versions) == 1 else ""
            except (InvalidVersion, TypeError):
                return ""
    return None


def _is_site(folder: Path) -> bool:
    """Whether packages lie in a folder itself: one that a packer keeps its archives in is none."""
    return any(next(folder.glob(pattern), None) for pattern in ("*.dist-info", "*/__init__.py", "*.pth"))


def _try_overlay(host: InterpreterEnvironment, place: Path, common: Sequence[Path]) -> Found:
    release = _read_release([place]) or ""
    # Of the torch extension, for which Python it is built.
    built = [*place.glob(f"{_EXTENSION}.*so"), *place.glob(f"{_PACKAGE}/wheel_lib/{_EXTENSION}.*so")]
    suffixes = {file.name.removeprefix(_EXTENSION) for file in built}
    reason = ""
    if not release:
        reason = _UNREADABLE
    elif not (place / _PACKAGE / "__init__.py").is_file():
        reason = f"{_PACKAGE} has no __init__.py; it was not unpacked to the end"
    elif suffixes and not suffixes & {host.about.suffix, ".abi3.so", ".so"}:
        reason = (
            f"its torch extension is built for {', '.join(sorted(suffixes))}, and {host.shown} loads "
            f"{host.about.suffix}. Next step: give the Python that it was built for with --python"
        )
    if reason:
        return Found(release, str(place), None, reason)
    because = f"Transformer Engine {release} of {place}"
    if common:
        because += f", with {', '.join(folder.name for folder in common)} of {common[0].parent}"
    try:
        return Found(release, str(place), put_over(host, (place, *common), because))
    except NoEnvironment as fault:
        return Found("", str(place), None, str(fault))


def _sort(every: Sequence[Found]) -> tuple[Found, ...]:
    """Usable ones by release, the first of each; then the others."""
    usable: dict[Version, Found] = {}
    others: list[Found] = []
    for found in every:
        if found.environment is None:
            others.append(found)
        elif (first := usable.setdefault(Version(found.release), found)) is not found:
            reason = f"{first.place} has the same release, and comes first"
            others.append(Found(found.release, found.place, None, reason))
    return (*(usable[version] for version in sorted(usable)), *others)


def resolve_environment(release: str, found: Sequence[Found], stacks: Sequence[Stack], means: Means) -> Environment:
    """The environment of a release: what the host has, else what a row of the matrix names.

    An overlay comes before the interpreter's own, as in `find_environments`. Of a row that names both, the image is
    taken where there is a docker: it pins what lies below Python, too.

    Args:
        release: of Transformer Engine.
        found: what the host has.
        stacks: rows of the matrix.
        means: what environments are made with.

    Raises:
        NoEnvironment: nothing provides it, or what does cannot be made.
    """
    for place in found:
        if place.environment is not None and is_same_release(place.release, release):
            return place.environment
    row = next((stack for stack in stacks if is_same_release(stack.te, release) and (stack.image or stack.lock)), None)
    if row is not None and row.image and (not row.lock or shutil.which("docker", path=means.variables.get("PATH"))):
        return make_environment(Spec(row.id, "image", row.image), means)
    if row is not None:
        return make_environment(Spec(row.id, "venv", str(matrix_folder().parent / row.lock)), means)
    usable = ", ".join(place.release for place in found if place.environment is not None) or "no release"
    # A folder of this very release that cannot be used is the likely answer.
    broken = [f"{place.place}: {place.reason}" for place in found if place.environment is None and place.reason]
    also = f" Not usable: {'; '.join(broken)}." if broken else ""
    raise NoEnvironment(
        f"there is no environment with Transformer Engine {release}; this host has {usable}.{also} Likely cause: it "
        f"is not installed here. Next step: `pip install --target DIR/te-{release}` and give DIR with --overlays or "
        f"{VARIABLE}, or add a lock or an image to its row of matrix/stacks.toml, or write {_FORM}."
    )


def is_same_release(one: str, other: str) -> bool:
    """Whether two texts name one release: 2.12 is 2.12.0, and a build of one is that one."""
    versions = [read_version(text) for text in (one, other)]
    public = {Version(version.public) for version in versions if version is not None}
    return None not in versions and len(public) == 1
