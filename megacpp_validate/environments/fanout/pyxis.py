"""A container image by digest where the scheduler makes the containers: Slurm's plugin pyxis, with enroot behind it.

It takes no Docker, neither here nor on the nodes: the batch job starts its cell as a step with `--container-image`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from ...process import Call
from ..container import IMAGE_DIGEST, require_digest
from ..environment import NoEnvironment
from ..identity import hash_parts, say_package, say_variables
from ..interpreter import PACKAGE

_OPTION: Final = "--container-image"
_DOOR: Final = "/opt/megacpp-validate"  # holds this package there, and nothing else
_NOT_STARTED: Final = 125  # as Docker says it
_LIMIT_S: Final = 60.0
# srun ends with 1 where the image cannot be pulled, as Python does where a probe raises. So what runs in the container
# leaves a mark first, and without one the step is told to be not started.
_OUTSIDE: Final = 'mark=$1; shift; "$@"; code=$?; [ -e "$mark" ] || exit 125; exit "$code"'
_INSIDE: Final = ': > "$1"; shift; PYTHONPATH="$1${PYTHONPATH:+:$PYTHONPATH}"; shift; export PYTHONPATH; exec "$@"'
_OF_THE_HOST: Final = ("PYTHON", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV")


@dataclass(frozen=True)
class PyxisEnvironment:
    """An image that the scheduler makes a container of.

    Attributes:
        image: repository and digest.
        python: interpreter in it.
        variables: of the user, without those that say where something lies on the host.
        because: where it comes from.
    """

    image: str
    python: str
    variables: Mapping[str, str] = field(repr=False)
    because: str = "an image that pyxis makes a container of"

    @property
    def shown(self) -> str:
        """What a person may type to start its interpreter."""
        return f"srun {_OPTION}={name_for_enroot(self.image)} {self.python}"

    @property
    def image_digest(self) -> str:
        """As receipts carry it."""
        return self.image.rpartition("@")[2]

    @cached_property
    def identity(self) -> str:
        """A hash over the image, the interpreter, the variables that change what runs, and what of us runs there."""
        parts = ("pyxis", self.image_digest, self.python, "variables", *say_variables(self.variables))
        return hash_parts((*parts, "package", *say_package(PACKAGE)))

    def call(self, module: str, *arguments: str, shares: tuple[Path, ...] = ()) -> Call:
        """How a module is started: as a step of the job that this process is in.

        Raises:
            OSError: a folder has a name that pyxis cannot be told.
        """
        mounts = [f"{PACKAGE}:{_DOOR}/{PACKAGE.name}:ro", *(f"{share}:{share}" for share in dict.fromkeys(shares))]
        if odd := [mount for mount in mounts if "," in mount or mount.count(":") > 2 or " " in mount]:
            raise OSError(f"pyxis cannot be told of {odd[0]!r}: a name has a space, a comma or a colon")
        mark = str(shares[0] / "started")
        cpus = self.variables.get("SLURM_CPUS_PER_TASK", "")  # srun does not take it from the job since Slurm 22.05
        words = (
            "sh", "-c", _OUTSIDE, "sh", mark,
            "srun", "--ntasks=1", "--nodes=1", "--kill-on-bad-exit=1", *([f"--cpus-per-task={cpus}"] if cpus else []),
            f"{_OPTION}={name_for_enroot(self.image)}", f"--container-mounts={','.join(mounts)}",
            "--container-workdir=/tmp", "--no-container-mount-home",
            "sh", "-c", _INSIDE, "sh", mark, _DOOR, self.python, "-P", "-u", "-m", module, *arguments,
        )  # fmt: skip
        variables = {**self.variables, IMAGE_DIGEST: self.image_digest, "PYTHONDONTWRITEBYTECODE": "1"}
        return Call(words, variables, not_started=(_NOT_STARTED,))


def open_pyxis(image: str, python: str, variables: Mapping[str, str]) -> PyxisEnvironment:
    """An image as an environment; nothing is pulled here.

    Raises:
        NoEnvironment: it has no digest.
    """
    require_digest(image)
    kept = {name: value for name, value in variables.items() if not name.startswith(_OF_THE_HOST)}
    return PyxisEnvironment(image, python, kept)


def name_for_enroot(image: str) -> str:
    """A pinned image in enroot's words, [REGISTRY#]IMAGE[:TAG]; enroot 3 knows no "@", and takes a digest as a tag."""
    name, _, digest = image.partition("@")
    first, _, rest = name.partition("/")
    # As Docker tells a registry from a user: by a dot, a port, or by being this host.
    at_registry = rest and ("." in first or ":" in first or first == "localhost")
    repository = rest if at_registry else name
    bare = repository.partition(":")[0]
    return f"{first}#{bare}:{digest}" if at_registry else f"{bare}:{digest}"


def has_pyxis(variables: Mapping[str, str]) -> bool:
    """Whether srun here lists the plugin's options."""
    srun = shutil.which("srun", path=variables.get("PATH", os.defpath))
    if srun is None:
        return False
    try:
        told = subprocess.run(
            [srun, "--help"], capture_output=True, text=True, timeout=_LIMIT_S, check=False, env=dict(variables)
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return _OPTION in told.stdout


def require_pyxis(variables: Mapping[str, str]) -> None:
    """Say so before anything is submitted where the plugin is demanded and not there.

    Raises:
        NoEnvironment: srun does not list it.
    """
    if not has_pyxis(variables):
        raise NoEnvironment(
            f"srun has no {_OPTION}. Likely cause: the plugin pyxis is not installed, or plugstack.conf does not name "
            'it. Next step: ask the administrator for it, or set containers = "none" and give an overlay or a lock.'
        )
