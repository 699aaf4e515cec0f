"""The CPU stack: torch and what the Python half of Transformer Engine imports, in one environment for every verb.

A verb that runs something on the CPU takes `--python`, else `MEGACPP_PYTHON`, else this stack where `MEGACPP_CPU_STACK`
names a folder for it (the nox sessions do), else the interpreter that the tool runs in.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from filelock import FileLock

from ..errors import NoEnvironment
from ..evidence.receipt import write_whole
from ..process import run_command
from .interpreter import VARIABLE, InterpreterEnvironment, host_interpreter
from .plan import LOCK_HASH

CPU_VARIABLE: Final = "MEGACPP_CPU_STACK"
_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_CPU_LOCK: Final = _CHECKOUT / "containers" / "locks" / "cpu.txt"
_STAMP: Final = "installed"  # written last: a folder that has it is whole
_TRITON: Final = "triton; sys_platform == 'linux'"  # for `prewarm --compile-only`; torch without CUDA brings none
_LIMIT_S: Final = 3600.0  # torch is 200 MB


def cpu_interpreter(variables: Mapping[str, str], wanted: str = "") -> InterpreterEnvironment:
    """The interpreter for what runs on the CPU; makes the CPU stack where it is named and missing.

    Receipts of that stack carry the hash of its lock.

    Args:
        variables: environment variables of the user.
        wanted: `--python` as the user gave it, which counts before everything else.

    Raises:
        NoEnvironment: the stack cannot be made, or the interpreter that is named does not exist.
    """
    folder = variables.get(CPU_VARIABLE, "")
    if wanted or not folder or variables.get(VARIABLE):
        return host_interpreter(variables, wanted)
    python = make_cpu_stack(Path(folder))
    return host_interpreter({LOCK_HASH: sha256(_CPU_LOCK.read_bytes()).hexdigest(), **variables}, str(python))


@cache
def find_torch_python() -> str:
    """The interpreter that imports torch on the CPU: the tool's own where it can, `MEGACPP_PYTHON`, or the CPU stack's.

    Raises:
        NoEnvironment: the stack cannot be made.
    """
    if find_spec("torch"):
        return sys.executable
    if python := os.environ.get(VARIABLE):
        return python
    folder = os.environ.get(CPU_VARIABLE)
    return str(make_cpu_stack(Path(folder))) if folder else sys.executable


def make_cpu_stack(folder: Path) -> Path:
    """Install the CPU stack at locked versions, once; again when the lock or pyproject.toml has changed.

    A process that finds another one making the stack waits for it. What a killed process left is removed.

    Returns:
        Its interpreter.

    Raises:
        NoEnvironment: there is no checkout to take the lock from, or the installation fails.
        OSError: the folder cannot be written.
    """
    if not _CPU_LOCK.is_file():
        raise NoEnvironment(
            f"There is no {_CPU_LOCK}, so the CPU stack cannot be made. Likely cause: the tool runs from a wheel. Next "
            "step: name an interpreter that has torch with --python."
        )
    wanted = _list_cpu_requirements()
    state = "\n".join((sys.version, *wanted, _CPU_LOCK.read_text(encoding="utf-8")))
    stamp = folder / _STAMP
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (stamp.is_file() and stamp.read_text(encoding="utf-8") == state):
            shutil.rmtree(folder, ignore_errors=True)
            _install_cpu_stack(folder, wanted)
            write_whole(stamp, state)
    return folder / "bin" / "python"


def _list_cpu_requirements() -> tuple[str, ...]:
    """What pyproject.toml asks for, and a compiler where the host has none."""
    project = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["dependency-groups"]
    shared = [line for line in project["project"]["dependencies"] if line.startswith(("packaging", "pydantic"))]
    compiler = () if any(map(shutil.which, ("cc", "gcc", "clang"))) else groups["compiler"]
    return (*groups["torch-cpu"], _TRITON, *shared, *compiler)


def _install_cpu_stack(folder: Path, wanted: Sequence[str]) -> None:
    sys.stderr.write(f"making the CPU stack in {folder}, once: torch is 200 MB to download\n")
    pip = (str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for words in ((sys.executable, "-m", "venv", str(folder)), (*pip, "-c", str(_CPU_LOCK), *wanted)):
        ended = run_command(words, limit_s=_LIMIT_S)
        if ended.code != 0:
            raise NoEnvironment(
                f"The CPU stack cannot be made: {' '.join(words[:4])} failed ({ended.how}): {ended.last_words}. Likely "
                "cause: no network, or an index that lacks a package. Next step: set PIP_INDEX_URL, or name an "
                "interpreter that has torch with --python."
            )
