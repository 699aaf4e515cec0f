"""A container image by digest: what ran once is what runs again, whatever a tag points to by then.

Every process is a container of its own, with no network, as the user who asked, and with this package mounted
read-only. A container outlives the client that started it, so each has a name by which it is removed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ..evidence.receipt import hash_code
from ..process import Call, run_command
from .environment import NoEnvironment, hash_parts, list_variables, read_driver
from .interpreter import PACKAGE
from .plan import IMAGE_DIGEST
from .venv import run_tool

PINNED: Final = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}")
_DOOR: Final = "/opt/megacpp-validate"  # holds this package there, and nothing else
_HOME: Final = "/tmp"  # noqa: S108  the one place that any image lets any user write, and nobody else is in there
_PULL_S: Final = 3600.0  # an image of NVIDIA's is 12 GB
_QUICK_S: Final = 120.0
# Of the host's variables those that say how a stack shall run, and none that says where something lies on the host.
_PASSED: Final = (
    "CUBLAS", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES",
    "CUDNN_", "DG_JIT_USE", "MEGACPP_", "MKL_NUM_THREADS", "NCCL_", "NVIDIA_TF32", "NVTE_", "OMP_NUM_THREADS",
    "PYTHONHASHSEED", "PYTORCH_", "TORCHDYNAMO_", "TORCH_", "TRITON_",
)  # fmt: skip
_OF_THE_HOST: Final = re.compile(r".*(_DIR|_PATH|_HOME|_CACHE|_FOLDER)|MEGACPP_(ENVIRONMENTS|OVERLAYS|PYTHON|RECEIPTS)")
_PYTHON: Final = "python3"
_GPUS: Final = {True: ("--gpus", "all"), False: ()}
_NOT_STARTED: Final = 125  # Docker's own exit status where it starts no container


@dataclass(frozen=True)
class ContainerEnvironment:
    """An image that Docker has, and the Python in it.

    Attributes:
        docker: the client.
        image: repository and digest.
        image_id: of what the digest led to on this kind of machine.
        path: the image's own `PYTHONPATH`.
        variables: of the user, whole; the client needs its own of them.
        gpus: whether it sees the GPUs of the host.
        because: where it comes from.
    """

    docker: str
    image: str
    image_id: str
    path: str
    variables: Mapping[str, str] = field(repr=False)
    gpus: bool
    because: str

    @property
    def shown(self) -> str:
        """What a person may type to start its interpreter."""
        return shlex.join(("docker", "run", "--rm", "-it", *_GPUS[self.gpus], self.image, _PYTHON))

    @property
    def image_digest(self) -> str:
        """The digest alone, as receipts keep it."""
        return self.image.partition("@")[2]

    @cached_property
    def identity(self) -> str:
        """A hash over the image, the driver, the variables that reach it, and this project's files that run there."""
        passed = {name: self.variables[name] for name in self._passed()}
        return hash_parts((
            "container", self.image_digest, self.image_id, _PYTHON, str(self.gpus), "driver", read_driver(),
            "variables", *list_variables(passed), "package", hash_code(),
        ))  # fmt: skip

    def call(self, module: str, *arguments: str, shares: tuple[Path, ...] = ()) -> Call:
        """How a module is started: in a new container, which has a name of its own each time."""
        name = _new_name()
        # --init: as process 1 itself, the module would not die of its own SIGABRT.
        words = (
            self.docker, "run", "--rm", "--init", "--interactive", "--name", name, "--network", "none",
            "--hostname", "localhost", "--ipc", "host", "--workdir", _HOME,
            # Root too: an image's own user may not write what the user gave it.
            "--user", f"{os.getuid()}:{os.getgid()}", "--env", f"HOME={_HOME}",
            *_GPUS[self.gpus],
            *_mount(PACKAGE, f"{_DOOR}/{PACKAGE.name}", "readonly"),
            *(word for share in dict.fromkeys(shares) for word in _mount(share.absolute(), str(share.absolute()))),
            *(word for name in self._passed() for word in ("--env", name)),  # by name: the client has the value
            "--env", f"PYTHONPATH={os.pathsep.join(filter(None, (self.path, _DOOR)))}",
            "--env", f"{IMAGE_DIGEST}={self.image_digest}", "--env", "PYTHONDONTWRITEBYTECODE=1",
            self.image, _PYTHON, "-P", "-u", "-m", module, *arguments,
        )  # fmt: skip
        return Call(words, self.variables, (self.docker, "rm", "--force", name), not_started=(_NOT_STARTED,))

    def _passed(self) -> Iterator[str]:
        for name in sorted(self.variables):
            if name.startswith(_PASSED) and not _OF_THE_HOST.fullmatch(name) and name != IMAGE_DIGEST:
                yield name


def open_container(image: str, variables: Mapping[str, str], *, gpus: bool) -> ContainerEnvironment:
    """An image made ready: pulled where Docker does not have it, and its Python found.

    Args:
        image: `REPOSITORY@sha256:DIGEST`.
        variables: environment variables of the user.
        gpus: whether its processes see the GPUs.

    Raises:
        NoEnvironment: no digest, no Docker, no such image, no GPUs for it, or no Python of 3.11 or newer in it.
    """
    if not PINNED.fullmatch(image):
        raise NoEnvironment(
            f"the image {image!r} has no digest, so its content may change. Next step: give it as "
            f"REPOSITORY@sha256:...; `docker buildx imagetools inspect {image.partition('@')[0]}` prints the digest."
        )
    docker = shutil.which("docker", path=variables.get("PATH"))
    if docker is None:
        raise NoEnvironment(
            f"there is no docker, which the image {image} needs. Likely cause: it is not installed, or not on PATH. "
            "Next step: install Docker Engine, or take an overlay or a lock instead."
        )
    inspect = (docker, "image", "inspect", "--format", "{{json .}}", image)
    if run_command(inspect, variables=variables, limit_s=_QUICK_S).code:
        run_tool(
            (docker, "pull", "--quiet", image), variables, limit_s=_PULL_S, deed=f"docker cannot pull {image}",
            cause="the engine does not run, the registry does not answer or wants a login, or it has no such digest",
            step="`docker pull` it by hand; on a host with no network `docker load` it from an archive",
        )  # fmt: skip
    # A warning of Docker's stands on a line of its own.
    lines = run_command(inspect, variables=variables, limit_s=_QUICK_S).words.splitlines()
    found: dict[str, Any] = json.loads(next((line for line in lines if line.startswith("{")), "{}"))
    own = dict(entry.partition("=")[::2] for entry in (found.get("Config") or {}).get("Env") or ())
    path, because = own.get("PYTHONPATH", ""), f"the image {image}, with {_PYTHON}"
    made = ContainerEnvironment(docker, image, str(found.get("Id", "")), path, variables, gpus, because)
    name = _new_name()
    # Its entry point runs first, as it does for every process.
    run_tool(
        (docker, "run", "--rm", "--init", *_GPUS[gpus], "--name", name, "--network", "none", "--hostname", "localhost",
         image, _PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"),
        variables, limit_s=_QUICK_S, deed=f"no Python can be started in {image}",
        cause="the image has no python3 of 3.11 or newer, is for another processor, or has an entry point that does "
        "not run its arguments; or Docker has no GPU for it, because it does not know the NVIDIA Container Toolkit",
        step='choose an image with Python 3.11 or newer whose entry point ends in `exec "$@"`; for a GPU install the '
        "toolkit, and `nvidia-ctk runtime configure --runtime=docker`",
        cleanup=(docker, "rm", "--force", name),
    )  # fmt: skip
    return made


def _new_name() -> str:
    """Of a container: by it, it is removed."""
    return f"megacpp-{uuid.uuid4().hex}"


def _mount(source: Path, target: str, *options: str) -> tuple[str, str]:
    """A folder of the host in the container. Docker reads it as a row of CSV, so a comma in a name is quoted."""
    row = io.StringIO()
    csv.writer(row, lineterminator="").writerow(("type=bind", f"source={source}", f"target={target}", *options))
    return "--mount", row.getvalue()
