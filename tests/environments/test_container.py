"""Container images by digest: how a module is started in one, and what Docker's client answers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.environments.container import ContainerEnvironment, open_container
from megacpp_validate.environments.environment import NoEnvironment
from megacpp_validate.environments.interpreter import PACKAGE

VARIABLE = "MEGACPP_TEST_IMAGE"
DIGEST = f"sha256:{'a' * 64}"
IMAGE = f"nvcr.io/nvidia/pytorch@{DIGEST}"


def made_by_hand(**variables: str) -> ContainerEnvironment:
    return ContainerEnvironment("/usr/bin/docker", IMAGE, "sha256:1", "/of/the/image", variables, gpus=True, because="")


def follows(words: tuple[str, ...], option: str) -> list[str]:
    return [words[place + 1] for place, word in enumerate(words) if word == option]


@pytest.mark.parametrize(
    "name", ["nvcr.io/nvidia/pytorch:26.09-py3", "nvcr.io/nvidia/pytorch", "a@sha256:123", f"a@sha256:{'A' * 64}", ""]
)
def test_an_image_that_is_not_pinned_is_refused(name: str) -> None:
    with pytest.raises(NoEnvironment, match=r"has no digest.*Next step.*@sha256"):
        open_container(name, os.environ, gpus=False)


def test_how_a_module_is_started_in_an_image(tmp_path: Path) -> None:
    made = made_by_hand(
        NVTE_DEBUG="1", HOME="/root", LD_LIBRARY_PATH="/host", CUDA_HOME="/host", TRITON_CACHE_DIR="/host"
    )
    call = made.call("megacpp_validate.probes", f"{tmp_path}/r.json", shares=(tmp_path, tmp_path))
    assert call.words[-7:] == (IMAGE, "python3", "-P", "-u", "-m", "megacpp_validate.probes", f"{tmp_path}/r.json")
    assert follows(call.words, "--gpus") == ["all"]
    assert follows(call.words, "--mount") == [
        f"type=bind,source={PACKAGE},target=/opt/megacpp-validate/megacpp_validate,readonly",
        f"type=bind,source={tmp_path},target={tmp_path}",
    ]
    passed = follows(call.words, "--env")
    assert "NVTE_DEBUG" in passed
    assert not {"LD_LIBRARY_PATH", "CUDA_HOME", "TRITON_CACHE_DIR", "PATH"} & set(passed)
    assert "PYTHONPATH=/of/the/image:/opt/megacpp-validate" in passed
    assert call.cleanup == ("/usr/bin/docker", "rm", "--force", *follows(call.words, "--name"))
    assert call.variables["LD_LIBRARY_PATH"] == "/host"  # the client runs on the host
    assert "--gpus" not in replace(made, gpus=False).call("probes").words


def test_what_changes_an_answer_changes_the_identity() -> None:
    made = made_by_hand(NVTE_DEBUG="1")
    others = [
        replace(made, image=f"other@sha256:{'b' * 64}"), replace(made, image_id="sha256:2"), replace(made, gpus=False),
        replace(made, variables={"NVTE_DEBUG": "2"}),
    ]  # fmt: skip
    assert len({made.identity, *(other.identity for other in others)}) == 5
    assert replace(made, variables={"NVTE_DEBUG": "1", "LD_LIBRARY_PATH": "/host"}).identity == made.identity


DOCKER = """#!/bin/sh
case "$*" in
"image inspect"*) echo "WARNING: [an option] is old"; echo '{"Id": "sha256:1", "Config": {"Env": ["PYTHONPATH=/a"]}}';;
"rm --force"*) echo "$3" >> "$REMOVED";;
*--gpus*) echo 'could not select device driver "" with capabilities: [[gpu]].' >&2; exit 125;;
run*) ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path) -> dict[str, str]:
    """Variables in which docker says what a test says."""
    place = tmp_path / "bin" / "docker"
    place.parent.mkdir()
    place.write_text(DOCKER)
    place.chmod(0o755)
    return {"PATH": f"{place.parent}:/usr/bin:/bin", "REMOVED": str(tmp_path / "removed")}


def test_a_warning_of_docker_is_no_answer_of_docker(docker: dict[str, str]) -> None:
    made = open_container(IMAGE, docker, gpus=False)
    assert (made.path, made.image_id) == ("/a", "sha256:1")
    assert made.call("a").not_started == (125,)


def test_an_engine_that_has_no_gpus_is_told_as_that(docker: dict[str, str], tmp_path: Path) -> None:
    """And what was started to find out is removed: a client that fails may leave its container."""
    with pytest.raises(NoEnvironment, match=r"could not select device driver.*NVIDIA Container Toolkit.*Next step"):
        open_container(IMAGE, docker, gpus=True)
    assert (tmp_path / "removed").read_text().startswith("megacpp-")
