"""Cells in a container image, pinned by digest.

Every process is a container of its own: without a network, as the user who started the tool, with this package mounted
read-only and with the folders that the process reads and writes. A container outlives a killed docker client, so each
has a name by which it is removed. A cell that hangs does not report where: docker's init passes no SIGABRT on.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import NoEnvironment
from ..evidence.receipt import hash_code
from ..process import Call, run_command
from .interpreter import PACKAGE, InterpreterEnvironment, list_variables, read_driver
from .plan import IMAGE_DIGEST

PINNED: Final = re.compile(r"[^\s@]+@sha256:[0-9a-f]{64}")
_HOME: Final = "/tmp"  # noqa: S108 - the container's own: any image lets any user write there
_PULL_S: Final = 3600.0  # an NGC image has 12 GB
# Of the variables that change what runs, those that name places of the host, or that Docker sets.
_OF_THE_HOST: Final = re.compile(r"LD_.*|PYTHON.*|NVIDIA_VISIBLE_DEVICES|.*_(DIR|PATH|HOME|CACHE)")
# The image may have a PYTHONPATH of its own, which comes first.
_START: Final = 'PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}/opt/megacpp-validate" exec python3 "$@"'


@dataclass(frozen=True)
class ContainerEnvironment(InterpreterEnvironment):
    """The python3 of an image, started by its entry point; `python` is the docker command without options."""

    def start(self, *words: str, shares: Sequence[Path] = ()) -> Call:
        """How Python is started in a new container, with some folders of the host at their own paths."""
        name = f"megacpp-{uuid.uuid4().hex}"
        mounts = {PACKAGE: f"/opt/megacpp-validate/{PACKAGE.name}:ro"} | {share: str(share) for share in shares}
        options = (
            # --init: as process 1, Python would not die of its own SIGABRT.
            "--rm", "--init", "--interactive", "--name", name, "--network", "none", "--hostname", "localhost",
            "--ipc", "host", "--user", f"{os.getuid()}:{os.getgid()}", "--workdir", _HOME, "--env", f"HOME={_HOME}",
            "--env", "PYTHONDONTWRITEBYTECODE=1", *(("--gpus", "all") if read_driver() else ()),
            *(word for source, target in mounts.items() for word in ("--volume", f"{source}:{target}")),
            *(word for variable in self._passed() for word in ("--env", variable)),
        )  # fmt: skip
        docker_run, image = self.python[:2], self.python[2]
        command = (*docker_run, *options, image, "sh", "-c", _START, "sh", "-P", *words)
        return Call(command, self.variables, cleanup=("docker", "rm", "--force", name))

    def _passed(self) -> dict[str, str]:
        names = [*(line.partition("=")[0] for line in list_variables(self.variables)), "OMP_NUM_THREADS"]
        kept = [name for name in names if name in self.variables and not _OF_THE_HOST.fullmatch(name)]
        return {name: self.variables[name] for name in kept}

    def _parts(self) -> Iterator[str]:
        yield from ("container", *self.python, "driver", read_driver(), "package", hash_code())
        yield from ("variables", *list_variables(self._passed()))


def open_image(image: str, variables: Mapping[str, str]) -> ContainerEnvironment:
    """An image that Docker has, or pulls now. Receipts of its cells carry its digest.

    Args:
        image: `REPOSITORY@sha256:DIGEST`.
        variables: environment variables of the user.

    Raises:
        NoEnvironment: no docker, or no such image.
    """
    own = {**variables, IMAGE_DIGEST: image.partition("@")[2]}
    for words in (("docker", "image", "inspect", image), ("docker", "pull", "--quiet", image)):
        ended = run_command(words, variables=variables, limit_s=_PULL_S)
        if ended.code == 0:
            return ContainerEnvironment(("docker", "run", image), own, f"the image {image}")
    raise NoEnvironment(
        f"docker cannot provide the image {image}: {ended.last_words}. Likely cause: docker is not installed or not "
        "running, or the registry does not answer, requires a login, or has no such digest. Next step: `docker pull` "
        "the image by hand; on a host without a network, `docker load` an archive of the image."
    )
