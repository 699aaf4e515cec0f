"""The Docker Engine of a host: whether there is one that builds, and what runs through its client."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

_QUICK_S: Final = 60.0
_UP_S: Final = 900.0  # packages of 420 MB, and a base of Debian made from its packages
_HOW_TO_GET_ONE: Final = (
    'On a Debian machine as root, `eval "$(containers/docker_engine up)"` brings up an engine with a registry, in a '
    "folder of its own; elsewhere install Docker Engine 26.1 or newer with buildx"
)
_MACHINES: Final = {"x86_64": "linux/amd64", "aarch64": "linux/arm64", "amd64": "linux/amd64", "arm64": "linux/arm64"}


class NoEngine(RuntimeError):
    """There is no engine that could build; the text says what is missing and how to get it."""


@dataclass(frozen=True)
class Engine:
    """An engine that answers.

    Attributes:
        docker: its client.
        version, buildx: versions.
        platforms: that it can build and run; its own first.
        has_bridge: whether it has a network of its own for builds.
    """

    docker: str
    variables: Mapping[str, str] = field(repr=False)
    version: str
    buildx: str
    platforms: tuple[str, ...]
    has_bridge: bool

    def ask(
        self, *words: str, limit_s: float = _QUICK_S, folder: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the client to its end; its exit code is for the caller."""
        return run_client(self.docker, words, self.variables, limit_s, folder)

    def stream(self, words: Sequence[str], folder: Path, log: Path, tell: Callable[[str], None]) -> int:
        """Run the client and tell each line of what it says, which goes to a log as well; its exit code.

        Whoever interrupts this ends the client, and with it the build.
        """
        command = [self.docker, *words]
        with (
            log.open("w", encoding="utf-8") as kept,
            subprocess.Popen(
                command,
                cwd=folder,
                env=dict(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as process,
        ):
            try:
                for line in process.stdout or ():
                    kept.write(line)
                    tell(line.rstrip("\n"))
            except BaseException:
                process.terminate()
                raise
        return process.returncode


def find_engine(variables: Mapping[str, str]) -> Engine:
    """The engine that the client of this host talks to.

    Raises:
        NoEngine: no client, no answer, or no buildx.
    """
    docker = shutil.which("docker", path=variables.get("PATH"))
    if docker is None:
        raise NoEngine(
            f"there is no Docker client on PATH. Likely cause: none is installed. Next step: {_HOW_TO_GET_ONE}."
        )
    info = run_client(docker, ("info", "--format", "{{json .}}"), variables, _QUICK_S)
    facts = _read_facts(info.stdout)
    if info.returncode or not facts.get("ServerVersion"):
        said = _last_words(info.stderr) or "; ".join(facts.get("ServerErrors") or ()) or "nothing"
        raise NoEngine(
            f"no Docker Engine answers {docker}: {said}. Likely cause: it does not run, is not yours, or DOCKER_HOST "
            f"is of another one. Next step: start it, or: {_HOW_TO_GET_ONE}."
        )
    buildx = run_client(docker, ("buildx", "version"), variables, _QUICK_S)
    if buildx.returncode:
        raise NoEngine(
            f"the Docker client has no buildx: {_last_words(buildx.stderr)}. Next step: install docker-buildx, or: "
            f"{_HOW_TO_GET_ONE}."
        )
    bridges = run_client(docker, ("network", "ls", "--quiet", "--filter", "driver=bridge"), variables, _QUICK_S)
    return Engine(
        docker=docker,
        variables=variables,
        version=str(facts["ServerVersion"]),
        buildx=buildx.stdout.split()[1] if len(buildx.stdout.split()) > 1 else buildx.stdout.strip(),
        platforms=tuple(_list_platforms(docker, variables, str(facts.get("Architecture", "")))),
        has_bridge=bool(bridges.stdout.strip()),
    )


def bring_up(root: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with an engine, a registry and a base of this machine's own: `containers/docker_engine up`.

    Raises:
        NoEngine: it cannot be brought up here; the script says why.
    """
    script = 'words=$("$0" up) && eval "$words" && env -0'
    command = ["bash", "-c", script, str(root / "containers/docker_engine")]
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True, check=False, timeout=_UP_S)
    if done.returncode:
        raise NoEngine(done.stderr.strip().rpartition("docker_engine: ")[2][-600:] or "containers/docker_engine failed")
    return dict(word.partition("=")[::2] for word in done.stdout.split("\0") if word)


def run_client(
    docker: str, words: Sequence[str], variables: Mapping[str, str], limit_s: float, folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the client; one that does not come back in time is an answer too, with the code 124."""
    command = [docker, *words]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=dict(variables),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer in {limit_s:g} s")


def _list_platforms(docker: str, variables: Mapping[str, str], machine: str) -> Iterator[str]:
    """The engine's own, then what its builder can emulate."""
    own = _MACHINES.get(machine, f"linux/{machine}")
    yield own
    done = run_client(docker, ("buildx", "inspect"), variables, _QUICK_S)
    for line in done.stdout.splitlines():
        if line.strip().startswith("Platforms:"):
            for name in line.partition(":")[2].replace("*", "").split(","):
                if name.strip() and not name.strip().startswith(own):  # "linux/amd64/v3" is one of its own
                    yield name.strip()


def _read_facts(text: str) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else ""
