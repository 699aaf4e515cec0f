"""Cells in container images: how a process is started in one, and what docker answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.environments.container import ContainerEnvironment, open_image
from megacpp_validate.environments.interpreter import PACKAGE, read_facts
from megacpp_validate.errors import NoEnvironment
from megacpp_validate.process import Processes

DIGEST = f"sha256:{'a' * 64}"
IMAGE = f"nvcr.io/nvidia/pytorch@{DIGEST}"
DOCKER = """#!/bin/sh
case "$*" in
"image inspect"*) exit 1;;
"pull"*broken*) echo 'manifest unknown' >&2; exit 1;;
run*) echo 'could not select device driver "" with capabilities: [[gpu]].' >&2; exit 125;;
esac
"""


def follows(words: tuple[str, ...], option: str) -> list[str]:
    return [words[place + 1] for place, word in enumerate(words) if word == option]


def test_how_a_module_is_started_in_an_image(tmp_path: Path) -> None:
    own = {"NVTE_DEBUG": "1", "LD_LIBRARY_PATH": "/host", "MEGACPP_JIT_ROOT": "/host", "TRITON_CACHE_DIR": "/host"}
    made = ContainerEnvironment(("docker", "run", IMAGE), own)
    call = made.call("megacpp_validate.probes", f"{tmp_path}/r.json", shares=(tmp_path, tmp_path))
    assert call.words[:2] == ("docker", "run")
    assert call.words[-5:] == ("-P", "-u", "-m", "megacpp_validate.probes", f"{tmp_path}/r.json")
    assert follows(call.words, IMAGE) == ["sh"]
    package = f"{PACKAGE}:/opt/megacpp-validate/{PACKAGE.name}:ro"
    assert follows(call.words, "--volume") == [package, f"{tmp_path}:{tmp_path}"]
    assert [name for name in follows(call.words, "--env") if "=" not in name] == ["NVTE_DEBUG"]
    assert call.cleanup == ("docker", "rm", "--force", *follows(call.words, "--name"))
    assert made.call("a").cleanup != made.call("a").cleanup  # each container has a name for itself


def test_what_changes_an_answer_changes_the_identity() -> None:
    made = ContainerEnvironment(("docker", "run", IMAGE), {"NVTE_DEBUG": "1"})
    other = replace(made, python=("docker", "run", f"other@sha256:{'b' * 64}"))
    assert len({made.identity, other.identity, replace(made, variables={"NVTE_DEBUG": "2"}).identity}) == 3
    assert replace(made, variables={"NVTE_DEBUG": "1", "LD_LIBRARY_PATH": "/host"}).identity == made.identity


def test_an_image_is_pulled_and_docker_says_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    made = open_image(IMAGE, variables)
    assert made.variables["MEGACPP_IMAGE_DIGEST"] == DIGEST
    with pytest.raises(NoEnvironment, match=r"could not select device driver"):
        read_facts(made, Processes())
    with pytest.raises(NoEnvironment, match=r"cannot provide the image broken@.*manifest unknown.*Next step"):
        open_image(f"broken@{DIGEST}", variables)
    with pytest.raises(NoEnvironment, match=r"cannot provide the image .*docker.*Next step"):
        open_image(IMAGE, {"PATH": str(tmp_path / "none")})
