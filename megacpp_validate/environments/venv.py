"""Environments that this tool makes, once each: from a lock with hashes by uv, and the CPU stack by pip.

A virtual environment of a lock has the same files on every host, or does not exist. It is kept by the hash of the lock,
the interpreter, and those options of uv that choose among the files that a lock allows. The user's `UV_*` variables
(index, mirror, certificates, offline) pass through. The user's `PYTHONPATH` does not: what lies there is in no lock.

The CPU stack is torch and what the Python half of Transformer Engine imports, in one environment for every verb. A verb
that runs something on the CPU takes `--python`, else `MEGACPP_PYTHON`, else this stack where `MEGACPP_CPU_STACK` names
a folder for it (the nox sessions do), else the interpreter that the tool runs in.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from ..evidence.receipt import write_whole
from ..process import run_command
from .environment import VARIABLE, NoEnvironment, environments_folder, hash_parts
from .interpreter import VARIABLE as PYTHON_VARIABLE
from .interpreter import InterpreterEnvironment, show_package
from .plan import LOCK_HASH

CPU_VARIABLE: Final = "MEGACPP_CPU_STACK"
_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_CPU_LOCK: Final = _CHECKOUT / "containers" / "locks" / "cpu.txt"
_STAMP: Final = "installed"  # the last file that is written: an environment that has it is whole
_LIMIT_S: Final = 3600.0  # a stack with torch is gigabytes
_LONGEST_WAIT_S: Final = 7200.0  # another process makes the same: a stack with torch takes minutes on a slow disk
_CHOOSES_FILES: Final = ("UV_NO_BINARY", "UV_NO_BUILD", "UV_ONLY_BINARY", "UV_TORCH_BACKEND", "UV_PYTHON_PLATFORM")
_NOT_ITS_OWN: Final = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX"})


def make_once(folder: Path, state: str, make: Callable[[], object], waits_s: float = _LONGEST_WAIT_S) -> Path:
    """Make an environment in a folder, unless it was made there before for the same state.

    One that another process makes is waited for. What a process that was killed left is removed and made again.

    Args:
        folder: of the environment.
        state: what it is made of, as a text.
        make: makes it in that folder, which does not exist; raises `NoEnvironment`.
        waits_s: for another process.

    Raises:
        NoEnvironment: it cannot be made, or the folder cannot be written. Nothing is kept of a failure.
    """
    stamp = folder / _STAMP
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock", timeout=waits_s):
            if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == state):
                shutil.rmtree(folder, ignore_errors=True)
                try:
                    make()
                    write_whole(stamp, state)
                except BaseException:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
    except (OSError, Timeout) as fault:
        raise NoEnvironment(
            f"an environment cannot be made in {folder}: {fault}. Likely cause: the disk is full, the folder belongs "
            f"to another user, or another process has been making it for {waits_s:g} s. Next step: make room, end that "
            f"process, or name another folder in {VARIABLE}."
        ) from fault
    return folder


def run_tool(
    words: Sequence[str], variables: Mapping[str, str], *, deed: str, cause: str, step: str, limit_s: float,
    cleanup: Sequence[str] = (),
) -> str:  # fmt: skip
    """Run a tool that helps to make an environment; what it wrote.

    Args:
        words, variables: what is started, with which environment variables.
        deed, cause, step: of the error's text: "uv cannot ...", the likely cause, and the next step.
        limit_s: seconds that it may take.
        cleanup: a command that removes what outlives it, as in `Call`.

    Raises:
        NoEnvironment: it failed; the text has its last words.
    """
    try:
        ended = run_command(words, variables=variables, limit_s=limit_s, cleanup=cleanup)
        if ended.code == 0:
            return ended.words
        how = f"{f'exit status {ended.code}' if ended.how == 'exit' else ended.how}. Output: {ended.last_words}"
    except OSError as fault:
        how = str(fault)
    raise NoEnvironment(f"{deed} ({how}). Likely cause: {cause}. Next step: {step}.")


# --- from a lock, by uv ----------------------------------------------------------------------------------------------


def make_venv(lock: Path, host: InterpreterEnvironment) -> InterpreterEnvironment:
    """The virtual environment of a lock, made where it does not exist yet.

    Args:
        lock: a file of requirements, each with the hashes of the files that it allows; uv refuses any other.
        host: the interpreter that it is made of, and the user's variables.

    Raises:
        NoEnvironment: the lock cannot be read or leads to another file; uv is missing, or cannot make it; the text has
            uv's last words.
    """
    try:
        digest = sha256(lock.read_bytes()).hexdigest()
    except OSError as fault:
        raise NoEnvironment(
            f"the lock {lock} cannot be read: {fault}. Likely cause: a typing error. Next step: give the file that "
            "`uv pip compile --generate-hashes` writes."
        ) from fault
    uv = _find_uv(host.variables)
    own = {name: value for name, value in host.variables.items() if name not in _NOT_ITS_OWN}
    options = [f"{name}={own[name]}" for name in sorted(own) if name.startswith(_CHOOSES_FILES)]
    base, version = host.about.executable, host.about.version
    key = hash_parts((digest, base, version, platform.machine(), *options))[:32]
    place = environments_folder(own) / f"venv-{key}"
    python = str(place / "bin" / "python")

    def make() -> None:
        quiet = {"UV_PYTHON_DOWNLOADS": "never", "UV_NO_PROGRESS": "1", **own}
        for words in (
            ("venv", "--no-project", "--python", base, str(place)),
            ("pip", "sync", "--require-hashes", "--strict", "--python", python, str(lock)),
        ):
            run_tool(
                [*uv, *words], quiet, limit_s=_LIMIT_S, deed=f"uv cannot make an environment of {lock} with {base}",
                cause="the lock has no hashes (`uv pip compile --generate-hashes` writes them), the index does not "
                "answer, lacks a file of the lock for this Python, or gives one with another hash",
                step="read uv's words; behind a mirror set UV_INDEX_URL, with a wheel folder UV_FIND_LINKS and "
                "UV_OFFLINE",
            )  # fmt: skip

    make_once(place, key, make)
    variables = own | {
        "VIRTUAL_ENV": str(place),
        "PATH": os.pathsep.join([str(place / "bin"), own.get("PATH", os.defpath)]),
        "PYTHONPATH": str(show_package(own)),
        LOCK_HASH: digest,
    }
    because = f"made by uv from {lock.absolute()}, sha256 {digest[:12]}; PYTHONPATH of the user is left out"
    return replace(host, python=(python,), variables=variables, because=because, folders=(), lock_hash=digest)


def _find_uv(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The words that start uv; raises `NoEnvironment` where it is neither on PATH nor installed beside this tool."""
    if found := shutil.which("uv", path=variables.get("PATH")):
        return (found,)
    if find_spec("uv") is not None:
        return (sys.executable, "-m", "uv")
    raise NoEnvironment(
        "there is no uv, which makes an environment from a lock. Likely cause: it is not installed. Next step: "
        f"`{sys.executable} -m pip install uv`, or put it on PATH; a host with no network takes an overlay instead."
    )


# --- the CPU stack ---------------------------------------------------------------------------------------------------


def find_cpu_python(python: str = "") -> str:
    """The value of `--python` for what runs on the CPU; makes the CPU stack where it is named and missing.

    Receipts of a process that is started afterwards carry the hash of the stack's lock.

    Args:
        python: `--python` as the user gave it, which counts before everything else.

    Returns:
        A path; empty where the usual search for an interpreter decides.

    Raises:
        NoEnvironment: the stack cannot be made.
    """
    folder = os.environ.get(CPU_VARIABLE, "")
    if python or not folder or os.environ.get(PYTHON_VARIABLE):
        return python
    found = make_cpu_stack(Path(folder))
    os.environ.setdefault(LOCK_HASH, sha256(_CPU_LOCK.read_bytes()).hexdigest())
    return str(found)


@cache
def find_torch_python() -> str:
    """The interpreter that imports torch on the CPU: the tool's own where torch is there, else that of the CPU stack.

    Raises:
        NoEnvironment: the stack cannot be made.
    """
    return sys.executable if find_spec("torch") else find_cpu_python() or sys.executable


def make_cpu_stack(folder: Path) -> Path:
    """Install the CPU stack at locked versions, once; again when the lock or pyproject.toml has changed.

    Returns:
        Its interpreter.

    Raises:
        NoEnvironment: there is no checkout to take the lock from, or the installation fails.
    """
    if not _CPU_LOCK.is_file():
        raise NoEnvironment(
            f"There is no {_CPU_LOCK}, so the CPU stack cannot be made. Likely cause: the tool runs from a wheel. Next "
            "step: name an interpreter that has torch with --python."
        )
    project = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["dependency-groups"]
    shared = [line for line in project["project"]["dependencies"] if line.startswith(("packaging", "pydantic"))]
    compiler = () if any(map(shutil.which, ("cc", "gcc", "clang"))) else groups["compiler"]
    wanted = (*groups["torch-cpu"], *shared, *compiler)
    python = folder / "bin" / "python"
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(_CPU_LOCK))

    def make() -> None:
        sys.stderr.write(f"making the CPU stack in {folder}, once: torch is 200 MB to download\n")
        for words in ((sys.executable, "-m", "venv", str(folder)), (*pip, *wanted)):
            run_tool(
                words, os.environ, limit_s=_LIMIT_S, deed=f"The CPU stack cannot be made: {' '.join(words[:4])} failed",
                cause="no network, or an index that lacks a package",
                step="set PIP_INDEX_URL, or name an interpreter that has torch with --python",
            )  # fmt: skip

    make_once(folder, "\n".join((sys.version, *wanted, _CPU_LOCK.read_text(encoding="utf-8"))), make)
    return python
