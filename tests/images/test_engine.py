"""What an engine says when a build fails, as it was really said, and what that is told as."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.errors import Exit, NoEnvironment
from megacpp_validate.images.engine import (
    Engine,
    explain_build,
    find_engine,
    read_build_settings,
    read_step,
    render_pip_conf,
    require_platform,
)  # fmt: skip
from megacpp_validate.images.plan import ImagePlan
from megacpp_validate.images.tools import ImageRefused
from tests.images.test_plan import read_plans

NAME = "127.0.0.1:5000/megacpp/cpu:0.1.0"


@pytest.fixture(scope="module")
def plan(catalog: Catalog) -> ImagePlan:
    return read_plans(catalog, "cpu")[0]


# Lines of Docker Engine 28.5.2 with buildx 0.29.1, on 2026-11-22.
SAID = [
    (
        "ERROR: failed to solve: mount callback failed on /d/containerd: failed to write compressed diff: failed to "
        "copy: write /d/ingest/data: no space left on device",
        "127.0.0.1:5000/megacpp/cpu:0.1.0 is not set.*the disk is full",
        True,
    ),
    (
        "#10 20.1 ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device",
        "the disk is full",
        True,
    ),
    (
        "ERROR: failed to solve: 127.0.0.1:5000/base@sha256:0000: failed to resolve source metadata for "
        "127.0.0.1:5000/base@sha256:0000: 127.0.0.1:5000/base@sha256:0000: not found",
        "the registry has another image than the pin",
        False,
    ),
    (
        "ERROR: failed to solve: failed to resolve source metadata for docker.io/debian: failed to "
        'do request: Head "https://registry-1.docker.io/v2/": dial tcp: lookup registry-1.docker.io: no such host',
        "does not answer.*MEGACPP_REGISTRY_MIRROR",
        True,
    ),
    (
        'ERROR: failed to solve: failed to push 127.0.0.1:5999/cpu:0.1.0: failed to do request: Head "h": dial '
        "tcp 127.0.0.1:5999: connect: connection refused",
        "reuses everything that was built",
        True,
    ),
    (
        'ERROR: failed to solve: failed to prepare extraction snapshot "extract-335552923": parent snapshot '
        "sha256:10cbdc30516069df090044d68ac9eb656df40138cf6c585a3e123deaeeea521e does not exist: not found",
        "share a layer.*the same command again",
        True,
    ),
    (
        "ERROR: failed to solve: failed to resolve source metadata for nvcr.io/nvidia/pytorch: unexpected status from "
        "HEAD request to https://nvcr.io/v2/: 401 Unauthorized",
        "docker login",
        False,
    ),
]


@pytest.mark.parametrize(("line", "told", "infrastructure"), SAID)
def test_what_is_known_is_told(plan: ImagePlan, line: str, told: str, infrastructure: bool) -> None:
    fault = explain_build(plan, NAME, ["#1 [internal] load", line], Path("cpu.log"))
    with pytest.raises(type(fault), match=told):
        raise fault
    assert fault.exit is (Exit.INFRASTRUCTURE if infrastructure else Exit.NO_ENVIRONMENT)
    assert "Likely cause" in str(fault)
    assert "Next step" in str(fault)


def test_what_is_not_known_is_shown_as_the_step_said_it(plan: ImagePlan) -> None:
    lines = [
        "#9 [packages 2/2] RUN bash /steps/packages.sh",
        "------",
        " > [packages 2/2] RUN bash /steps/packages.sh:",
        "2.345 ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
        "2.345     numpy==2.4.6 from https://files/numpy.whl:",
        "------",
        "ERROR: failed to solve",
    ]
    fault = explain_build(plan, NAME, lines, Path("cpu.log"))
    assert "DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. numpy==2.4.6 from https://files/numpy.whl:" in str(
        fault
    )
    assert fault.exit is Exit.NO_ENVIRONMENT


def test_steps_are_read_as_they_end() -> None:
    lines = (
        "#5 [internal] load build definition from Dockerfile", "#5 DONE 0.0s",
        "#8 [cpu system 2/2] RUN --mount=type=bind,target=/steps/system.sh     bash /steps/system.sh",
        "#9 [cpu te-without 1/1] WORKDIR /built", "#9 CACHED", "#8 CACHED",
        "#10 [cpu packages 2/2] RUN bash /steps/packages.sh", "#10 1.2 some words DONE 9.9s", "#10 DONE 31.6s",
        "#18 [cpu] exporting to image", "#18 exporting layers 40.1s done", "#18 DONE 44.6s",
    )  # fmt: skip
    running: dict[str, str] = {}
    steps = [step for line in lines if (step := read_step(line, running))]
    assert [(step.name, step.seconds, step.cached) for step in steps] == [
        ("system", 0.0, True), ("packages", 31.6, False), ("exporting", 44.6, False),
    ]  # fmt: skip


def test_another_architecture_is_told_before_anything_is_pulled(catalog: Catalog) -> None:
    engine = Engine("docker", {}, "28", "0.29", ("linux/amd64",), has_bridge=False)
    with pytest.raises(
        NoEnvironment, match=r"image for gb10 is linux/arm64, and this engine builds linux/amd64.*Next step"
    ):
        require_platform(engine, read_plans(catalog, "gb10")[0])


def test_no_client_and_no_engine_say_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(NoEnvironment, match=r"docker is missing.*containers/docker_engine up"):
        find_engine({"PATH": str(tmp_path)})
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\necho ' '\nexit 1\n")
    client.chmod(0o755)
    with pytest.raises(
        NoEnvironment, match=r"cannot reach a Docker Engine with buildx.*Cannot connect.*containers/docker_engine up"
    ):
        find_engine({"PATH": f"{tmp_path}:/bin:/usr/bin"})


# --- what a host lends ------------------------------------------------------------------------------------------------


def test_pip_is_told_where_packages_come_from_and_nothing_else() -> None:
    said = (
        "global.index-url='https://old/simple'\n"
        "global.extra-index-url='file:///opt/a https://mirror/simple'\n"
        "global.cert='/etc/ssl/ca.crt'\n"
        "global.find-links='/opt/wheels'\n"
        ":env:.index-url='https://user:p@new/simple'\n"
        "no setting at all\n"
    )
    assert render_pip_conf(said) == (
        "[global]\nextra-index-url = https://mirror/simple\nindex-url = https://user:p@new/simple\n"
    )


def test_wheels_and_certificates_of_the_host(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("certificates")
    variables = {"PIP_FIND_LINKS": str(tmp_path), "PIP_CERT": str(bundle), "PATH": "/usr/bin:/bin"}
    settings = read_build_settings(variables, has_bridge=False)
    assert (settings.wheels, settings.ca_bundle, settings.network) == (tmp_path, bundle, "host")
    assert read_build_settings({"PATH": "/bin"}, has_bridge=True).network == ""


def test_a_setting_that_names_nothing_is_refused() -> None:
    with pytest.raises(ImageRefused, match="names a path that does not exist"):
        read_build_settings({"MEGACPP_BUILD_WHEELS": "/nowhere", "PATH": "/bin"}, has_bridge=True)
