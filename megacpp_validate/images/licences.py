"""Licences of what is inside an image: of Debian's packages, of Python's, and of what was built from source.

Debian: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/ in /usr/share/doc/PACKAGE/copyright, and
where a file is in the older free form, the licences of /usr/share/common-licenses that it leads to. Python:
`License-Expression`, else `License`, else the classifiers (see
https://packaging.python.org/specifications/core-metadata/). What says nothing is told as unknown; nothing is guessed
from texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from email.parser import BytesHeaderParser
from typing import Any, Final

from packaging.utils import canonicalize_name

from .contents import Contents
from .layers import read_files
from .sbom import Package
from .source_licences import SOURCES

UNKNOWN: Final = "unknown"
_STATUS: Final = "var/lib/dpkg/status"
_COPYRIGHT: Final = re.compile(r"usr/share/doc/([^/]+)/copyright")
_METADATA: Final = re.compile(r"(.*/)?[^/]+(\.dist-info/METADATA|\.egg-info/PKG-INFO)")
_FORMAT: Final = b"packaging-manuals/copyright-format"
_LICENCE_LINE: Final = re.compile(r"^License:[ \t]*(\S[^\n]*)$", re.MULTILINE)
_COMMON: Final = re.compile(r"/usr/share/common-licenses/([A-Za-z][\w.+-]*[\w+])")
_CLASSIFIER: Final = re.compile(r"^License :: (?:OSI Approved :: )?(.+)$")
_LONGEST: Final = 80  # characters: what is longer is a text, and no name


@dataclass(frozen=True)
class Licensed:
    """A package and its licences.

    Attributes:
        kind: "deb", "pypi", "source", or another type of the SBOM.
        name: canonical.
        version: or the commit of a source.
        licences: as its own files name them; `UNKNOWN` alone where they do not.
        said_by: the file or the record that says so.
    """

    kind: str
    name: str
    version: str
    licences: tuple[str, ...]
    said_by: str

    @property
    def known(self) -> bool:
        """Whether something says its licence."""
        return self.licences != (UNKNOWN,)


def is_telling(path: str) -> bool:
    """Whether a file of an image says what is installed or under which licence."""
    return bool(path == _STATUS or _COPYRIGHT.fullmatch(path) or _METADATA.fullmatch(path))


def list_licences(
    contents: Contents, layers: Sequence[str], packages: Iterable[Package], sources: Mapping[str, str]
) -> tuple[Licensed, ...]:
    """Every package of an image with its licences: those that its own files tell of, and what the SBOM has besides.

    Args:
        contents, layers: repository and digests of the layers, lowest first.
        packages: of the SBOM.
        sources: row of images.toml -> commit that was built.

    Raises:
        RegistryUnreachable, RegistryLies: as `read_files`.
    """
    files = read_files(contents, layers, is_telling)
    found = [*_read_debian(files), *_read_python(files), *_say_sources(sources)]
    known = {(one.kind, one.name) for one in found}
    for package in packages:
        name = canonical(package.kind, package.name)
        if (package.kind, name) not in known:
            said = (package.licence or UNKNOWN,)
            found.append(Licensed(package.kind, name, package.version, said, "SBOM"))
            known.add((package.kind, name))
    return tuple(sorted(found, key=lambda one: (one.kind, one.name, one.version)))


def canonical(kind: str, name: str) -> str:
    """A name as it is compared."""
    return str(canonicalize_name(name)) if kind == "pypi" else name


def _read_debian(files: Mapping[str, bytes]) -> Iterable[Licensed]:
    for paragraph in files.get(_STATUS, b"").split(b"\n\n"):
        row = BytesHeaderParser().parsebytes(paragraph.strip() + b"\n")
        name = row["Package"]
        if name and " installed" in str(row["Status"]):
            path = f"usr/share/doc/{name}/copyright"
            licences = read_copyright(files.get(path, b""))
            yield Licensed(
                "deb", name, str(row["Version"]), licences or (UNKNOWN,), path if path in files else "no file"
            )


def read_copyright(text: bytes) -> tuple[str, ...]:
    """The licences that a Debian copyright file names; none where it names none."""
    words = text.decode(errors="replace")
    found = _LICENCE_LINE.findall(words) if _FORMAT in text[:400] else _COMMON.findall(words)
    return tuple(sorted({one.strip() for one in found if len(one) <= _LONGEST}))


def _read_python(files: Mapping[str, bytes]) -> Iterable[Licensed]:
    for path, text in files.items():
        if _METADATA.fullmatch(path):
            row = BytesHeaderParser().parsebytes(text)
            if row["Name"]:
                licences = _read_metadata(row) or (UNKNOWN,)
                yield Licensed("pypi", str(canonicalize_name(row["Name"])), str(row["Version"]), licences, path)


def _read_metadata(row: Any) -> tuple[str, ...]:
    for key, most in (("License-Expression", None), ("License", _LONGEST)):  # an expression is no text, at any length
        said = " ".join(str(row[key] or "").split())
        if said and said.upper() != "UNKNOWN" and len(said[:most]) == len(said):
            return (said,)
    found = (_CLASSIFIER.match(line) for line in row.get_all("Classifier", []))
    return tuple(sorted({one[1] for one in found if one and one[1] != "OSI Approved"}))


def _say_sources(sources: Mapping[str, str]) -> Iterable[Licensed]:
    rows = {row.source: row for row in SOURCES}
    for name, commit in sources.items():
        row = rows.get(name)
        yield Licensed("source", name, commit, (row.licence if row else UNKNOWN,), row.says if row else "no record")
        for brought, licence in row.brings if row else ():
            yield Licensed("source", f"{name}/{brought}", "as its submodule", (licence,), row.says if row else "")


def write_licences(rows: Sequence[Licensed]) -> bytes:
    """As JSON, a package a row."""
    return (json.dumps({"packages": [asdict(row) for row in rows]}, indent=1, sort_keys=True) + "\n").encode()


def read_licences(body: Any) -> tuple[Licensed, ...]:
    """What `write_licences` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        return tuple(Licensed(**{**row, "licences": tuple(row["licences"])}) for row in body["packages"])
    except (KeyError, TypeError) as fault:
        raise ValueError(f"it is no list of licences: {fault!r}") from fault
