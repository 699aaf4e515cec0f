"""The wheelhouse: every package of a lock as a file that its hashes name, for the Python and glibc of a target."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from ..locks import LockedPackage, read_image_lock
from ..refusals import ImageRefused
from .restore.reading import hash_file

_NO_WHEEL: Final = re.compile(r"No matching distribution found for ([A-Za-z0-9][\w.-]*)==")
# What pip says (-vv) of a source release that it sees and may not take: the index knows the project.
_SOURCE: Final = re.compile(r"No sources permitted for [^:\s]+: (\S+)")
_SOURCE_ENDS: Final = (".tar.gz", ".zip", ".tar.bz2", ".tar.xz", ".tgz")
_STATED: Final = re.compile(r"(?:^|&)sha256=([0-9a-f]{64})")
_LIMIT_S: Final = 60.0  # for a source release, of which the largest has some megabytes
_OLDEST_GLIBC: Final = 5  # of 2.x: manylinux1
_LEGACY: Final = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


@dataclass(frozen=True)
class Machine:
    """What wheels must fit.

    Attributes:
        python: minor version ("3.12").
        machine: "x86_64" or "aarch64".
        glibc: "2.39".
    """

    python: str
    machine: str
    glibc: str

    @property
    def platforms(self) -> list[str]:
        """Platform tags, newest first: pip takes each by its name alone."""
        newest = int(self.glibc.partition(".")[2])
        found = []
        for minor in range(newest, _OLDEST_GLIBC - 1, -1):
            found.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in _LEGACY:
                found.append(f"{_LEGACY[minor]}_{self.machine}")
        return [*found, f"linux_{self.machine}"]


def fetch_wheels(lock: Path, machine: Machine, folder: Path, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Fetch the wheels of a lock; those that are there already are hashed instead.

    Args:
        lock: file of a lock with hashes.
        machine: what they must fit.
        folder: where they go; what lies there and is of no lock is removed.
        variables: environment variables: pip's index, mirror and certificates are the user's own.

    Returns:
        Packages without a wheel, which are built from source.

    Raises:
        ImageRefused: the lock cannot be read, or the index does not give what it says, or has neither a wheel nor the
            source release of a package.
    """
    packages = read_image_lock(lock).packages
    folder.mkdir(parents=True, exist_ok=True)
    lacking: list[str] = []
    while len(lacking) < len(packages):
        wanted = {
            name: " ".join((f"{name}=={row.version}", *(f"--hash=sha256:{one}" for one in sorted(row.hashes))))
            for name, row in packages.items()
            if name not in lacking
        }
        code, said = _download([*wanted.values()], machine, folder, variables)
        if code == 0:
            break
        found = _NO_WHEEL.search(said)
        if found is None or found[1] in lacking or not _has_versions(said):
            raise ImageRefused(
                f"the wheels of {lock} cannot be fetched: {said[-900:].strip()}. Likely cause: the index is not "
                "reached, or gives another file than the lock says. Next step: `pip config list` says which index it "
                "is; where hashes differ, do not use what it gives, and run `nox -s lock` to see what changed."
            )
        asked = [wanted[found[1]]] if found[1] in wanted else []
        seen = _download(asked, machine, folder, variables, "-vv")[1] if asked else ""
        _require_source(found[1], packages.get(found[1]), seen, lock, variables)
        lacking.append(found[1])
    known = {one for row in packages.values() for one in row.hashes}
    for path in folder.iterdir():  # of another lock, or of a pip that was killed
        if hash_file(path, []) not in known:
            path.unlink()
    return tuple(lacking)


def _has_versions(said: str) -> bool:
    """Whether the index was there: it then says which versions it knows, and they are only no wheels for this."""
    return "connection" not in said.lower() and "retrying" not in said.lower()


def _require_source(
    name: str, row: LockedPackage | None, said: str, lock: Path, variables: Mapping[str, str] | None = None
) -> None:
    """That there is something to build from, and that it is what the lock has.

    An index that gives hashes apart from its links (PEP 691) tells none in pip's words: the file itself is asked then.
    Where it is not given to this process, because it wants a login, pip compares it where it is built.

    Raises:
        ImageRefused: the index has no source release of the version, or another one.
    """
    links = _find_sources(name, row.version, said) if row is not None else []
    if row is None or not links:
        raise ImageRefused(
            f"the index has neither a wheel of {name} for this target nor its source release, which {lock} "
            "has. Likely cause: it is not the index that the lock was made from: it answers 404, or mirrors a part "
            "of it. Next step: `pip config list` says which index it is; take the one that the lock was made from."
        )
    found = [_hash_of(link) or _fetch_hash(link, variables or {}) for link in links]
    if all(one and one not in row.hashes for one in found):
        raise ImageRefused(
            f"the index has another source release of {name} than {lock}: sha256 {', '.join(found)}. Likely cause: "
            "another index than the lock was made from, or the file was changed there. Next step: do not build from "
            "it; `nox -s lock` shows what changed."
        )


def _find_sources(name: str, version: str, said: str) -> list[str]:
    """Links to the source release of a version that pip saw, and may not take."""
    links = []
    for link in _SOURCE.findall(said):
        file = unquote(urlsplit(link).path).rpartition("/")[2]
        stems = [file[: -len(end)] for end in _SOURCE_ENDS if file.endswith(end)]
        if any(_plain(stem) == _plain(f"{name}-{version}") for stem in stems):
            links.append(link)
    return links


def _hash_of(link: str) -> str:
    """SHA-256 of what a link leads to, from its fragment or from the file on this disk; empty where neither says it."""
    parts = urlsplit(link)
    if stated := _STATED.search(parts.fragment):
        return stated[1]
    path = Path(unquote(parts.path))
    return hash_file(path, []) if parts.scheme == "file" and path.is_file() else ""


def _fetch_hash(link: str, variables: Mapping[str, str]) -> str:
    """SHA-256 of what an index gives for a link, by the certificates that pip is told of; empty where it gives none."""
    address = link.partition("#")[0]
    if urlsplit(address).scheme not in ("http", "https"):
        return ""
    own = {**os.environ, **variables}
    cert = next((own[name] for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE") if own.get(name)), None)
    until, hashed = time.monotonic() + _LIMIT_S, sha256()
    try:
        context = ssl.create_default_context(cafile=cert) if address.startswith("https:") else None
        with urllib.request.urlopen(address, timeout=_LIMIT_S, context=context) as answer:  # noqa: S310 - looked at above
            size = int(answer.headers.get("Content-Length") or 0)
            while part := answer.read1(2**20):
                hashed.update(part)
                size -= len(part)
                if time.monotonic() > until:
                    return ""
    except (OSError, ValueError, http.client.HTTPException):
        return ""
    return "" if size > 0 else hashed.hexdigest()


def _plain(text: str) -> str:
    """As PEP 503 compares names; of a version it leaves enough to tell it from another."""
    return re.sub(r"[-_.]+", "-", text).lower()


def _download(
    wanted: list[str], machine: Machine, folder: Path, variables: Mapping[str, str], loud: str = "--quiet"
) -> tuple[int, str]:
    """The exit code of pip, and what it says where it fails; all that it says where it is to be loud."""
    version = machine.python.replace(".", "")
    with tempfile.TemporaryDirectory(prefix="megacpp-wheels-") as room:
        file = Path(room, "lock.txt")
        file.write_text("\n".join(wanted) + "\n", encoding="utf-8")
        words = [
            sys.executable, "-m", "pip", "download", loud, "--disable-pip-version-check", "--no-input",
            "--require-hashes", "--no-deps", "--only-binary", ":all:", "--implementation", "cp",
            "--python-version", version, "--abi", f"cp{version}", "--abi", "abi3", "--abi", "none",
            *(word for name in machine.platforms for word in ("--platform", name)),
            "--dest", str(folder), "--requirement", str(file),
        ]  # fmt: skip
        done = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if loud != "--quiet":
        return done.returncode, done.stdout + done.stderr
    return done.returncode, done.stderr or done.stdout or f"exit status {done.returncode}"
