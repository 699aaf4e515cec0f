"""The CPU stack: torch and what the Python half of Transformer Engine imports, in one environment for every verb.

A verb that runs probes on the CPU takes `--python`, else this stack where `MEGACPP_CPU_STACK` names a folder for it
(the nox sessions do), else the interpreter that it runs in itself.
"""

from __future__ import annotations

import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Final

from filelock import FileLock

from ..errors import NoEnvironment
from ..evidence.whole_file import write_whole
from ..process import run_command

VARIABLE: Final = "MEGACPP_CPU_STACK"
_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_LOCK: Final = _CHECKOUT / "containers" / "locks" / "cpu.txt"
_LIMIT_S: Final = 3600.0  # a gigabyte over a slow line


def find_cpu_python(python: str = "") -> str:
    """The interpreter for probes on the CPU; makes the CPU stack where it is asked for and missing.

    Args:
        python: the value of `--python`, which counts before everything else.

    Raises:
        NoEnvironment: the stack cannot be made.
    """
    folder = os.environ.get(VARIABLE, "")
    return python or (str(make_cpu_stack(Path(folder))) if folder else sys.executable)


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
    groups = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    compiler = () if any(map(shutil.which, ("cc", "gcc", "clang"))) else groups["compiler"]
    wanted = (*groups["torch-cpu"], *compiler)
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
