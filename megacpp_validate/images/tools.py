"""The programs that images are made with, and what `docker buildx imagetools inspect` reads of a registry."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import Exit, InfrastructureFailed, NoEnvironment, ToolError, WrongArguments
from ..process import Ended, run_command

MIRROR: Final = "MEGACPP_REGISTRY_MIRROR"
TARGET_LABEL: Final = "org.megacpp.target"
LOCK_LABEL: Final = "org.megacpp.lock.sha256"
BASE_LABEL: Final = "org.opencontainers.image.base.digest"

_QUICK_S: Final = 120.0
_LOOPBACK: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
_REFERENCE: Final = re.compile(r"([a-z0-9.-]+(?::\d+)?/[a-z0-9._/-]+?)(:[\w.-]+)?@(sha256:[0-9a-f]{64})")


class ImageRefused(WrongArguments):
    """The matrix or the caller names an image that cannot be planned, pinned, built or bundled."""


class RegistryLies(ToolError):
    """A registry returns bytes that do not match the digest."""

    exit = Exit.CLOSED


class RegistryUnreachable(InfrastructureFailed):
    """A registry does not answer, or refuses the caller."""


def find_program(name: str, variables: Mapping[str, str]) -> str | None:
    """The file of a program on PATH, else beside this interpreter, where wheels put it."""
    places = filter(None, (variables.get("PATH"), str(Path(sys.executable).parent)))
    return shutil.which(name, path=os.pathsep.join(places))


def require_program(name: str, variables: Mapping[str, str]) -> str:
    """The file of a program, as `find_program`.

    Raises:
        NoEnvironment: the program is missing.
    """
    if found := find_program(name, variables):
        return found
    raise NoEnvironment(
        f"{name} is missing. Likely cause: {name} is not installed, or not on PATH. Next step: install {name} "
        "(docs/supply_chain.md), or put its folder on PATH."
    )


def call(words: Sequence[str], variables: Mapping[str, str], *, limit_s: float = _QUICK_S, **more: Any) -> Ended:
    """Run a program to its end, output and errors apart; the caller judges its exit code."""
    return run_command(words, limit_s=limit_s, variables=variables, apart=True, **more)


def read_pip_settings(variables: Mapping[str, str]) -> dict[str, list[str]]:
    """Words of each setting that `pip config list` prints ("global.index-url='https://...'").

    A variable wins over a file.
    """
    done = call([sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"], variables)
    found: dict[str, list[str]] = {}
    lines = [line for line in done.words.splitlines() if re.match(r"(global|install|:env:)\.\S+?=['\"]", line)]
    for line in sorted(lines, key=lambda line: line.startswith(":env:.")):
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = str(ast.literal_eval(value)).split()
    return found


def is_plain_http(repository: str) -> bool:
    """Whether a registry is reached without TLS, as one on this machine is."""
    return bool(_LOOPBACK.fullmatch(repository.partition("/")[0]))


def use_mirror(repository: str, mirror: str) -> str:
    """The repository under the registry that replaces its own: "HOST[:PORT][/PREFIX]/PATH"."""
    return f"{mirror.rstrip('/')}/{repository.partition('/')[2]}" if mirror else repository


def split_reference(reference: str) -> tuple[str, str]:
    """Repository and digest of "HOST/REPOSITORY[:TAG]@sha256:DIGEST".

    Raises:
        ImageRefused: the reference has no digest, or names no registry.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise ImageRefused(
            f"the image {reference!r} names no registry, or has no digest, so its content may change. Next step: write "
            "HOST/REPOSITORY@sha256:DIGEST; `docker buildx imagetools inspect` prints the digest."
        )
    return found[1], found[3]


def locate_image(reference: str, variables: Mapping[str, str]) -> str:
    """The same without a tag, in the mirror where there is one. Raises as `split_reference`."""
    (repository, digest), mirror = split_reference(reference), variables.get(MIRROR, "")
    own = is_plain_http(repository) or repository.startswith(f"{mirror.rstrip('/')}/")
    return f"{repository if own else use_mirror(repository, mirror)}@{digest}"


def _inspect(shown: str, variables: Mapping[str, str], form: str) -> Any:
    """What `imagetools inspect` prints of "REPOSITORY:TAG" or "REPOSITORY@DIGEST", as JSON; it needs no engine.

    Raises:
        ImageRefused: no such tag.
        RegistryLies: no such digest, or bytes that do not hash to it.
        RegistryUnreachable: no answer, or a refusal.
    """
    docker = find_program("docker", variables) or "docker"
    done = call([docker, "buildx", "imagetools", "inspect", "--format", form, shown], variables)
    if not done.code:
        return json.loads(done.words)
    if done.code != 127 and re.search("not found|unexpected digest", done.last_words):  # seen: buildx 0.13, 0.29
        raise (RegistryLies if "@" in shown else ImageRefused)(
            f"the registry has no {shown}, or returns other bytes: {done.last_words}. Likely cause: the image was "
            "never pushed there, was removed, or was damaged. Next step: give a tag or digest that the registry has."
        )
    host = shown.partition("/")[0]
    raise RegistryUnreachable(
        f"docker cannot read {shown} from its registry: {done.last_words}. Likely cause: docker buildx is absent, or "
        f"{host} is down, is not reached from this network or requires a login. Next step: `docker buildx version`, "
        f"then `docker login {host}`, or name a mirror in {MIRROR}."
    )


def read_digest(shown: str, variables: Mapping[str, str]) -> str:
    """The digest of "REPOSITORY:TAG" now. Raises as `read_image`."""
    return str(_inspect(shown, variables, "{{json .Manifest.Digest}}"))


@dataclass(frozen=True)
class PushedImage:
    """An image in a registry.

    Attributes:
        platform: "linux/amd64".
        provenance: SLSA predicate that buildx attached; empty for none.
    """

    platform: str
    labels: Mapping[str, str]
    provenance: Mapping[str, Any]


def read_image(shown: str, variables: Mapping[str, str]) -> PushedImage:
    """Read configuration and provenance of "REPOSITORY@DIGEST"; layers are not fetched.

    Raises:
        RegistryLies: no such digest, or bytes that do not hash to it.
        RegistryUnreachable: no answer, or a refusal.
    """
    body = _inspect(shown, variables, '{"image": {{json .Image}}, "provenance": {{json .Provenance}}}')
    image, provenance = body["image"], body["provenance"] or {}
    if "os" not in image:  # rows by platform, of which an image of this project has one
        ((name, image),) = image.items()
        provenance = provenance.get(name) or {}
    labels = (image.get("config") or {}).get("Labels") or {}
    return PushedImage(f"{image['os']}/{image['architecture']}", labels, provenance.get("SLSA") or {})
