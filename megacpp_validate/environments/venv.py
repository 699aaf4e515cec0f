"""A virtual environment that uv makes from a lock with hashes: the same files on every host, or none.

It is kept by the hash of the lock, the interpreter, and those options of uv that choose among the files that a lock
allows. The user's `UV_*` variables (index, mirror, certificates, offline) pass through. The user's `PYTHONPATH` does
not: what lies there is in no lock.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from .build_cache import BuildCache, run_tool
from .environment import NoEnvironment
from .identity import hash_parts
from .interpreter import InterpreterEnvironment, package_door, show_package
from .plan import LOCK_HASH

_LIMIT_S: Final = 3600.0  # a stack with torch is gigabytes
_QUICK_S: Final = 120.0
_HASH: Final = re.compile(r"--hash[= ](sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128})(?=\s|$)")
_POINTS_ELSEWHERE: Final = re.compile(r"(-r|-c|-e|--requirements?|--constraints?|--editable)\b")
_CHOOSES_FILES: Final = ("UV_NO_BINARY", "UV_NO_BUILD", "UV_ONLY_BINARY", "UV_TORCH_BACKEND", "UV_PYTHON_PLATFORM")
_NOT_ITS_OWN: Final = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX"})
_MOST_NAMED: Final = 5


@dataclass(frozen=True)
class Lock:
    """A file of requirements, each with the hashes of the files that it allows; `hash` is the SHA-256 of its bytes."""

    file: Path
    hash: str


def read_lock(file: Path) -> Lock:
    """A lock, checked to pin every file that it leads to.

    Raises:
        NoEnvironment: it cannot be read, a requirement has no hash or no version, or it points to another file.
    """
    try:
        data = file.read_bytes()
        lines = list(_join_lines(data.decode()))
    except (OSError, UnicodeDecodeError) as fault:
        raise NoEnvironment(
            f"the lock {file} cannot be read: {fault}. Likely cause: a typing error. Next step: give the file that "
            "`uv pip compile --generate-hashes` writes."
        ) from fault
    faults = [f"line {number}: {words}" for number, line in lines if (words := _find_fault(line))]
    if all(line.startswith("-") for _, line in lines):
        faults.append("it names no package")
    if faults:
        more = f"; and {len(faults) - _MOST_NAMED} more" if len(faults) > _MOST_NAMED else ""
        raise NoEnvironment(
            f"{file} is no lock with hashes: {'; '.join(faults[:_MOST_NAMED])}{more}. Likely cause: it was compiled "
            "without hashes. Next step: make it again with `uv pip compile --generate-hashes`."
        )
    return Lock(file.absolute(), sha256(data).hexdigest())


def make_venv(lock: Lock, host: InterpreterEnvironment, cache: BuildCache) -> InterpreterEnvironment:
    """The virtual environment of a lock, made where it does not exist yet.

    Args:
        lock: what it has.
        host: the interpreter that it is made of, and the user's variables.
        cache: where it is kept.

    Raises:
        NoEnvironment: uv is missing, or cannot make it; the text has uv's last words.
    """
    uv, own = find_uv(host.variables), _own_variables(host.variables)
    # The interpreter's own path: a shim on PATH would choose by the working folder.
    (base, version), _ = host.ask("import json, sys; print(json.dumps([sys.executable, sys.version]))")
    options = [f"{name}={own[name]}" for name in sorted(own) if name.startswith(_CHOOSES_FILES)]
    key = hash_parts((lock.hash, base, version, platform.machine(), *options))[:32]
    name = re.sub(r"[^a-z0-9._-]", "-", f"venv-{lock.file.stem.lower()[:40]}-{key}")
    place = cache.build(name, lambda folder: _make(uv, folder, lock, base, own))
    variables = own | {
        "VIRTUAL_ENV": str(place),
        "PATH": os.pathsep.join([str(place / "bin"), own.get("PATH", os.defpath)]),
        "PYTHONPATH": str(show_package(package_door(cache.root))),
        LOCK_HASH: lock.hash,
    }
    python = (str(place / "bin" / "python"),)
    because = f"made by uv from {lock.file}, sha256 {lock.hash[:12]}; PYTHONPATH of the user is left out"
    return replace(host, python=python, variables=variables, because=because, folders=(), lock_hash=lock.hash)


def find_uv(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The words that start uv.

    Raises:
        NoEnvironment: uv is neither on PATH nor installed beside this tool.
    """
    if found := shutil.which("uv", path=variables.get("PATH")):
        return (found,)
    if find_spec("uv") is not None:
        return (sys.executable, "-m", "uv")
    raise NoEnvironment(
        "there is no uv, which makes an environment from a lock. Likely cause: it is not installed. Next step: "
        f"`{sys.executable} -m pip install uv`, or put it on PATH; a host with no network takes an overlay instead."
    )


def _make(uv: tuple[str, ...], folder: Path, lock: Lock, base: str, variables: Mapping[str, str]) -> None:
    """Make it in `folder`; its scripts find the interpreter beside them, because it is moved afterwards."""
    own = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", **variables}
    run_tool(
        [*uv, "venv", "--relocatable", "--no-project", "--allow-existing", "--python", base, str(folder)],
        own,
        deed=f"uv cannot make a virtual environment of {base}",
        cause="that Python lacks its standard library, or is too old",
        step="give another one with --python",
        limit_s=_QUICK_S,
    )
    python = str(folder / "bin" / "python")
    run_tool(
        [*uv, "pip", "sync", "--require-hashes", "--strict", "--python", python, str(lock.file)],
        own,
        deed=f"uv cannot install {lock.file}",
        cause="the index does not answer, lacks a file of the lock for this Python, or gives one with another hash",
        step="read uv's words; behind a mirror set UV_INDEX_URL, with a wheel folder UV_FIND_LINKS and UV_OFFLINE",
        limit_s=_LIMIT_S,
    )


def _own_variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in _NOT_ITS_OWN}


def _join_lines(text: str) -> Iterator[tuple[int, str]]:
    """The requirements and options of a file with the number of their first line, without comments."""
    first, parts = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = "" if line.lstrip().startswith("#") else re.sub(r"\s#.*", "", line).strip()
        first = first if parts else number
        if bare.endswith("\\"):
            parts.append(bare[:-1])
            continue
        if whole := " ".join([*parts, bare]).strip():
            yield first, whole
        parts = []


def _find_fault(line: str) -> str:
    """Why a line of a lock leaves open what is installed; empty where it does not."""
    shown = re.split(r"\s*;|\s--|\s@", line, maxsplit=1)[0]
    if _POINTS_ELSEWHERE.match(line):
        return f"{shown} leads out of the lock"
    if line.startswith("-"):
        return ""  # where files are looked for, and not which
    if not _HASH.search(line):
        return f"{shown} has no hash"
    return "" if "==" in shown or "@" in line.partition(";")[0] else f"{shown} has no one version"
