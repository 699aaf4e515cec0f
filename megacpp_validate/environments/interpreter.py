"""An interpreter with a stack of its own, and how a process of this project is started in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parents[1]
VARIABLE: Final = "MEGACPP_PYTHON"


class NoEnvironment(RuntimeError):
    """A stack that cannot be made usable; the text says what happened, the likely cause and the next step."""


@dataclass(frozen=True)
class Environment:
    """How a process is started in a stack; the same for every way to make one.

    Attributes:
        python: the words that start the interpreter.
        variables: its environment variables, whole.
        because: why it is this one.
    """

    python: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    because: str = ""

    def command(self, module: str, *arguments: str) -> tuple[str, ...]:
        """The words that run a module of this project, off the working folder (-P) and unbuffered (-u)."""
        return (*self.python, "-P", "-u", "-m", module, *arguments)


def own_interpreter(variables: Mapping[str, str]) -> Environment:
    """The interpreter that runs this tool, with all that is installed there."""
    return Environment((sys.executable,), _with_package(variables, PACKAGE.parent), "the one that runs this tool")


def host_interpreter(variables: Mapping[str, str], door: Path, wanted: str = "") -> Environment:
    """The interpreter of the host, with the host's own stack: what a user would get who types `python3`.

    The tool itself may run in an environment of its own. So: what is wanted, else what `MEGACPP_PYTHON` says, else the
    tool's own interpreter where it has torch, else the first python3 on PATH that lies in no virtual environment of
    this tool, else its own.

    Args:
        variables: environment variables of the user.
        door: folder that may hold a link to the package, where the package cannot be reached alone.
        wanted: path or name of an interpreter.

    Raises:
        NoEnvironment: there is none where it is wanted from.
    """
    if asked := wanted or variables.get(VARIABLE, ""):
        found = shutil.which(asked, path=variables.get("PATH"))
        because = "--python" if wanted else VARIABLE
        if found is None:
            raise NoEnvironment(
                f"there is no interpreter {asked!r} ({because}). Likely cause: a typing error, or it is not on PATH. "
                "Next step: give the path of a Python that has torch."
            )
        return _foreign(found, variables, door, because)
    if find_spec("torch") is not None:
        return own_interpreter(variables)
    found = _first_on_path(variables.get("PATH", ""))
    if found is None:
        return own_interpreter(variables)
    return _foreign(found, variables, door, "the first python3 on PATH outside of this tool's own environment")


def _first_on_path(path: str) -> str | None:
    own = {os.path.realpath(sys.prefix), os.path.realpath(PACKAGE.parent / ".venv")}
    for folder in path.split(os.pathsep):
        found = shutil.which("python3", path=folder) if folder else None
        if found and os.path.realpath(Path(found).parents[1]) not in own:
            return found
    return None


def _foreign(python: str, variables: Mapping[str, str], door: Path, because: str) -> Environment:
    """An interpreter that shall see this package, and nothing else of the environment that the tool runs in."""
    # Not resolved: the link in a virtual environment's bin folder is what makes it that environment.
    python = str(Path(python).absolute())
    if python == sys.executable:
        return own_interpreter(variables)
    if (PACKAGE.parent / "pyproject.toml").is_file():  # a checkout: nothing but this project can be imported from it
        return Environment((python,), _with_package(variables, PACKAGE.parent), because)
    link = door / PACKAGE.name
    door.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(PACKAGE, target_is_directory=True)
    return Environment((python,), _with_package(variables, door), because)


def _with_package(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The user's variables, with the package behind what the user has on PYTHONPATH."""
    path = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**variables, "PYTHONPATH": os.pathsep.join([*path, str(folder)])}


def read_commit() -> str:
    """The commit of the checkout that the package lies in; empty where it is none, "-dirty" where files differ."""
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if not (PACKAGE.parent / ".git").exists():
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
