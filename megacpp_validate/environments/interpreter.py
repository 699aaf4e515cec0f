"""An interpreter with a stack of its own, and how a process of this project is started in it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ..process import Call
from .environment import NoEnvironment
from .identity import hash_parts, say_driver, say_files, say_package, say_site, say_variables

__all__ = (
    "PACKAGE", "VARIABLE", "Environment", "InterpreterEnvironment", "NoEnvironment", "host_interpreter",
    "own_interpreter", "read_commit",
)  # fmt: skip

PACKAGE: Final = Path(__file__).resolve().parents[1]
VARIABLE: Final = "MEGACPP_PYTHON"
_LIMIT_S: Final = 60.0
_ASK: Final = (
    "import json, sys, sysconfig; "
    "print(json.dumps([sys.version, sys.prefix, sysconfig.get_config_var('EXT_SUFFIX') or '', sys.path]))"
)


@dataclass(frozen=True)
class Answer:
    """What an interpreter says of itself.

    Attributes:
        version: `sys.version`.
        prefix: where it is installed; of a virtual environment, that.
        suffix: how the names of compiled extensions for it end, such as ".cpython-312-x86_64-linux-gnu.so".
        path: where it imports from, in order.
    """

    version: str
    prefix: str
    suffix: str
    path: tuple[Path, ...]


@dataclass(frozen=True)
class InterpreterEnvironment:
    """An interpreter and its variables: the host's, one with folders before its own, or that of a virtual environment.

    Attributes:
        python: the words that start the interpreter.
        variables: its environment variables, whole.
        because: where it comes from and why it is this one.
        folders: site folders that make it what it is; each of their files is part of the identity.
        lock_hash: of the lock that it was made from; empty where it was made by somebody else.
    """

    python: tuple[str, ...]
    variables: Mapping[str, str] = field(repr=False)
    because: str = ""
    folders: tuple[Path, ...] = ()
    lock_hash: str = ""

    @property
    def shown(self) -> str:
        """What a person may type to start it."""
        return shlex.join(self.python)

    def command(self, module: str, *arguments: str) -> tuple[str, ...]:
        """The words that run a module of this project, off the working folder (-P) and unbuffered (-u)."""
        return (*self.python, "-P", "-u", "-m", module, *arguments)

    def call(self, module: str, *arguments: str, shares: tuple[Path, ...] = ()) -> Call:  # noqa: ARG002
        """How a module is started; the folders in `shares` are there already."""
        return Call(self.command(module, *arguments), self.variables)

    @cached_property
    def identity(self) -> str:
        """A hash over the interpreter, what it has on its path, its variables, the driver, and what of us runs there.

        Raises:
            NoEnvironment: it cannot be started.
        """
        return hash_parts(tuple(self._parts()))

    def _parts(self) -> Iterator[str]:
        asked = self.asked
        binary = Path(os.path.realpath(shutil.which(self.python[0], path=self.variables.get("PATH")) or self.python[0]))
        yield from ("interpreter", asked.version, asked.prefix, str(binary), *self.python[1:])
        yield from ("lock", self.lock_hash, "driver", say_driver())
        yield from ("variables", *say_variables(self.variables))
        yield from ("package", *say_package(PACKAGE))
        for entry in asked.path:
            if entry in self.folders:
                yield from ("folder", str(entry), *say_files(entry))
            elif not _is_only_ours(entry):
                yield from ("site", str(entry), *say_site(entry))

    @cached_property
    def asked(self) -> Answer:
        """What it says of itself; asked once.

        Raises:
            NoEnvironment: it cannot be started.
        """
        words = [*self.python, "-P", "-c", _ASK]
        try:
            done = subprocess.run(
                words, env=dict(self.variables), capture_output=True, text=True, timeout=_LIMIT_S, check=True
            )
            version, prefix, suffix, path = json.loads(done.stdout.splitlines()[-1])
        except (OSError, subprocess.SubprocessError, ValueError, LookupError) as fault:
            said = " ".join(str(getattr(fault, "stderr", None) or fault).split())[-600:]
            raise NoEnvironment(
                f"{self.shown} does not say what it has on its path: {said}. Likely cause: a Python older than 3.11, "
                "or a damaged one. Next step: give another with --python."
            ) from fault
        return Answer(version, prefix, suffix, tuple(map(Path, path)))


Environment = InterpreterEnvironment  # the name of before; `environment.Environment` is the protocol


def package_door(cache: Path) -> Path:
    """A folder for the link to an installed package, the same one each time; nothing is made."""
    return cache / f"door-{hash_parts((str(PACKAGE),))[:12]}"


def show_package(door: Path) -> Path:
    """A folder from which this package can be imported, and nothing else: the checkout, or a door that is made.

    Raises:
        NoEnvironment: the door cannot be made.
    """
    if (PACKAGE.parent / "pyproject.toml").is_file():
        return PACKAGE.parent
    try:
        door.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # of an earlier session, or one beside this
            (door / PACKAGE.name).symlink_to(PACKAGE, target_is_directory=True)
    except OSError as fault:
        raise NoEnvironment(
            f"a link to this package cannot be made in {door}: {fault.strerror or fault}. Likely cause: that folder is "
            "not yours. Next step: name another one in MEGACPP_ENVIRONMENTS."
        ) from fault
    return door


def own_interpreter(variables: Mapping[str, str]) -> InterpreterEnvironment:
    """The interpreter that runs this tool, with all that is installed there."""
    return InterpreterEnvironment(
        (sys.executable,), _with_package(variables, PACKAGE.parent), "the one that runs this tool"
    )


def host_interpreter(variables: Mapping[str, str], door: Path, wanted: str = "") -> InterpreterEnvironment:
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


def _foreign(python: str, variables: Mapping[str, str], door: Path, because: str) -> InterpreterEnvironment:
    """An interpreter that shall see this package, and nothing else of the environment that the tool runs in."""
    # Not resolved: the link in a virtual environment's bin folder is what makes it that environment.
    python = str(Path(python).absolute())
    if python == sys.executable:
        return own_interpreter(variables)
    return InterpreterEnvironment((python,), _with_package(variables, show_package(door)), because)


def _is_only_ours(entry: Path) -> bool:
    """Whether a place on the path is there for this package alone: a checkout, or the door to an installed one.

    What of it runs is hashed by content, and a door lies in another folder each time.
    """
    ours = entry / PACKAGE.name
    return ours.is_dir() and ours.resolve() == PACKAGE and not any(entry.glob("*.dist-info"))


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
