"""The one environment of a release, or of what a person wrote: found on the host, or made from a lock or an image."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from packaging.version import InvalidVersion, Version

from ..catalog.bridge import Stack, matrix_folder
from ..errors import WrongArguments
from .build_cache import open_cache
from .container import open_container
from .environment import Environment, NoEnvironment
from .installed import VARIABLE, Found, open_host
from .interpreter import put_over
from .venv import make_venv, read_lock

Way = Literal["overlay", "venv", "image", "python"]
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
        door: folder for a link to this package; one in the user's cache where it is None.
    """

    variables: Mapping[str, str]
    python: str = ""
    gpus: bool = True
    door: Path | None = None


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
            f"{text!r} is no environment. Next step: write {_FORM}; a name has letters, digits, '.', '_', '+'."
        )
    return Spec(name, ways[way], value)


def make_environment(spec: Spec, means: Means) -> Environment:
    """The environment that a person named.

    Raises:
        NoEnvironment: it cannot be made.
    """
    variables = means.variables
    match spec.way:
        case "image":
            return open_container(spec.value, variables, gpus=means.gpus)
        case "python":
            return open_host(variables, spec.value, means.door)
        case "venv":
            lock = read_lock(Path(spec.value))
            return make_venv(lock, open_host(variables, means.python, means.door), open_cache(variables))
        case "overlay":
            folders = [Path(folder) for folder in spec.value.split(os.pathsep) if folder]
            return put_over(open_host(variables, means.python, means.door), folders)


def resolve_environment(
    release: str, found: Sequence[Found], stacks: Sequence[Stack], means: Means, root: Path | None = None
) -> Environment:
    """The environment of a release: what the host has, else what a row of the matrix names.

    An overlay comes before the interpreter's own, as in `find_environments`. Of a row that names both, the image is
    taken where there is a docker: it pins what lies below Python, too.

    Args:
        release: of Transformer Engine.
        found: what the host has.
        stacks: rows of the matrix.
        means: what environments are made with.
        root: folder that the locks of the rows are relative to; where `matrix/` lies, if None.

    Raises:
        NoEnvironment: nothing provides it, or what does cannot be made.
    """
    for place in found:
        if place.environment is not None and is_same_release(place.release, release):
            return place.environment
    row = next((stack for stack in stacks if is_same_release(stack.te, release) and (stack.image or stack.lock)), None)
    if row is None:
        raise NoEnvironment(_explain_none(release, found))
    if row.image and (not row.lock or shutil.which("docker", path=means.variables.get("PATH"))):
        return make_environment(Spec(row.id, "image", row.image), means)
    return make_environment(Spec(row.id, "venv", str((root or matrix_folder().parent) / row.lock)), means)


def is_same_release(one: str, other: str) -> bool:
    """Whether two texts name one release: 2.12 is 2.12.0, and a build of one is that one."""
    try:
        return Version(Version(one).public) == Version(Version(other).public)
    except InvalidVersion:
        return False


def _explain_none(release: str, found: Sequence[Found]) -> str:
    usable = ", ".join(place.release for place in found if place.environment is not None) or "no release"
    # A folder of this very release that cannot be used is the likely answer.
    broken = [f"{place.place}: {place.reason}" for place in found if place.environment is None and place.reason]
    also = f" Not usable: {'; '.join(broken)}." if broken else ""
    return (
        f"there is no environment with Transformer Engine {release}; this host has {usable}.{also} Likely cause: it "
        f"is not installed here. Next step: `pip install --target DIR/te-{release}` and give DIR with --overlays or "
        f"{VARIABLE}, or add a lock or an image to its row of matrix/stacks.toml, or write {_FORM}."
    )
