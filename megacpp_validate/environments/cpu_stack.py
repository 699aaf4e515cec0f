"""The CPU stack: torch and what the Python half of Transformer Engine imports, in one environment for every verb.

A verb that runs something on the CPU takes `--python`, else `MEGACPP_PYTHON`, else this stack where `MEGACPP_CPU_STACK`
names a folder for it (the nox sessions do), else the interpreter that the tool runs in.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from filelock import FileLock

from ..errors import NoEnvironment
from ..evidence.whole_file import write_whole
from ..process import run_command
from .interpreter import VARIABLE as PYTHON_VARIABLE
from .plan import LOCK_HASH

VARIABLE: Final = "MEGACPP_CPU_STACK"
_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_LOCK: Final = _CHECKOUT / "containers" / "locks" / "cpu.txt"
_LIMIT_S: Final = 3600.0  # a gigabyte over a slow line


def find_cpu_python(python: str = "") -> str:
    """The value of `--python` for what runs on the CPU; makes the CPU stack where it is asked for and missing.

    Receipts of a process that is started afterwards carry the hash of the stack's lock.

    Args:
        python: `--python` as the user gave it, which counts before everything else.

    Returns:
        A path; empty where the usual search for an interpreter decides.

    Raises:
        NoEnvironment: the stack cannot be made.
    """
    folder = os.environ.get(VARIABLE, "")
    if python or not folder or os.environ.get(PYTHON_VARIABLE):
        return python
    found = make_cpu_stack(Path(folder))
    os.environ.setdefault(LOCK_HASH, sha256(_LOCK.read_bytes()).hexdigest())
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

    Raises:
        NoEnvironment: there is no checkout to take the lock from, or the installation fails.
    """
    if not _LOCK.is_file():
        raise NoEnvironment(
            f"There is no {_LOCK}, so the CPU stack cannot be made. Likely cause: the tool runs from a wheel. Next "
            "step: name an interpreter that has torch with --python."
        )
    project = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["dependency-groups"]
    shared = [line for line in project["project"]["dependencies"] if line.startswith(("packaging", "pydantic"))]
    compiler = () if any(map(shutil.which, ("cc", "gcc", "clang"))) else groups["compiler"]
    wanted = (*groups["torch-cpu"], *shared, *compiler)
    state = "\n".join((sys.version, *wanted, _LOCK.read_text(encoding="utf-8")))
    python, stamp = folder / "bin" / "python", folder / "installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if stamp.is_file() and stamp.read_text(encoding="utf-8") == state:
            return python
        sys.stderr.write(f"making the CPU stack in {folder}, once: torch is 200 MB to download\n")
        _run(sys.executable, "-m", "venv", "--clear", str(folder))
        _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", str(_LOCK), *wanted)
        write_whole(stamp, state)
    return python


def _run(*words: str) -> None:
    ended = run_command(words, limit_s=_LIMIT_S)
    if ended.code != 0:
        raise NoEnvironment(
            f"The CPU stack cannot be made: {' '.join(words[:4])} failed: {ended.words[-600:].strip()}. Likely cause: "
            "no network, or an index that lacks a package. Next step: set PIP_INDEX_URL, or name an interpreter that "
            "has torch with --python."
        )
