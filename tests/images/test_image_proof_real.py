"""The cpu image, built by a real engine, pushed, pulled by its digest and run; and images that the proof must refuse.

Run where there is an engine, a registry on this machine and a base: `eval "$(containers/docker_engine up)"`.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.images.build import BuildOrder, Told, build_image
from megacpp_validate.images.build_faults import BuildFailed
from megacpp_validate.images.build_result import ImageBuild
from megacpp_validate.images.build_settings import read_build_settings
from megacpp_validate.images.engine import Engine, NoEngine, find_engine
from megacpp_validate.images.pins import FILE, read_pins
from megacpp_validate.images.prove import prove_image
from tests.images.image_plans import ROOT, read_plans


@pytest.fixture(scope="module")
def base() -> str:
    named = os.environ.get("MEGACPP_BASE", "")
    if not named:
        pytest.skip("not-run: MEGACPP_BASE names no Debian base by digest")
    return named


@pytest.fixture(scope="module")
def registry(base: str) -> str:
    host = base.partition("/")[0]
    try:
        urllib.request.urlopen(f"http://{host}/v2/", timeout=5).close()
    except OSError as fault:
        pytest.skip(f"not-run: no registry answers at {host}: {fault}")
    return host


@pytest.fixture(scope="module")
def engine() -> Engine:
    try:
        return find_engine(os.environ)
    except NoEngine as fault:
        pytest.skip(f"not-run: {fault}")


def build(engine: Engine, catalog: Catalog, base: str, registry: str, folder: Path) -> ImageBuild:
    plan = read_plans(catalog, "cpu", own_base=base)[0]
    settings = read_build_settings(os.environ, has_bridge=engine.has_bridge)
    told = Told("test", read_pins(ROOT / FILE).hash, "")
    order = BuildOrder(plan, registry, "proof")
    return build_image(engine, order, settings, told, ROOT, folder / "build.log", lambda _: None)


@pytest.fixture(scope="module")
def built(
    engine: Engine, catalog: Catalog, base: str, registry: str, tmp_path_factory: pytest.TempPathFactory
) -> ImageBuild:
    return build(engine, catalog, base, registry, tmp_path_factory.mktemp("build"))


def test_the_image_does_what_it_is_for(engine: Engine, built: ImageBuild, tmp_path: Path) -> None:
    proof = prove_image(engine, built, tmp_path / "proof", "test")
    assert proof.holds, [one for one in proof.proofs if not one.holds]


def run_in(engine: Engine, *words: str) -> int:
    return subprocess.run([engine.docker, *words], capture_output=True, check=False, timeout=120).returncode


def test_docker_stop_ends_any_command_at_once(engine: Engine, built: ImageBuild) -> None:
    """Process 1 without handlers is deaf to it, and is killed after ten seconds with 137."""
    name = f"megacpp-test-{os.getpid()}"
    assert run_in(engine, "run", "--detach", "--network", "none", "--name", name, built.reference, "sleep", "60") == 0
    try:
        for _ in range(100):  # process 1 has started its child
            if run_in(engine, "exec", name, "sh", "-c", "grep -qs sleep /proc/[0-9]*/comm") == 0:
                break
        started = time.monotonic()
        assert run_in(engine, "stop", name) == 0
        assert time.monotonic() - started < 8
        ended = subprocess.run([engine.docker, "wait", name], capture_output=True, text=True, check=True)
        assert ended.stdout.strip() == "130"
    finally:
        run_in(engine, "rm", "--force", name)


def test_a_killed_run_leaves_no_word_of_the_one_before(engine: Engine, built: ImageBuild, tmp_path: Path) -> None:
    for name in ("doctor.run.json", "doctor.json"):
        (tmp_path / name).write_text('{"exit_code": 0}')
    name = f"megacpp-test-{os.getpid()}"
    mount = ("--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{tmp_path}:/receipts")
    assert (
        run_in(engine, "run", "--detach", "--network", "none", "--name", name, *mount, built.reference, "doctor") == 0
    )
    try:
        until = time.monotonic() + 60
        while (tmp_path / "doctor.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
        run_in(engine, "kill", name)
    finally:
        run_in(engine, "rm", "--force", name)
    assert not any(tmp_path.iterdir())


# What is done to an image that was good -> the proofs that no longer hold.
PLANTED = [
    ("USER 0\nRUN chmod 777 /etc\n", {"nothing of it can be written by whoever runs it"}),
    ("USER 0\nRUN rm -rf /opt/megacpp/releases/releases\nUSER 1000\n", {"static canary with no network"}),
    ("LABEL org.megacpp.lock.sha256=other\n", {"labels say what it was made from"}),
    (
        "ENTRYPOINT []\n",
        {
            "static canary with no network",
            "parity on the CPU with no network",
            "doctor",
            "a GPU session is refused in words",
            "an unknown session is refused in words",
            "a folder of receipts that is read-only is refused in words",
        },
    ),
]


@pytest.mark.parametrize(("lines", "red"), PLANTED)
def test_an_image_that_does_less_is_found_out(
    engine: Engine, built: ImageBuild, tmp_path: Path, lines: str, red: set[str]
) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {built.reference}\n{lines}")
    name = built.name.replace(":proof", ":planted")
    metadata = tmp_path / "metadata.json"
    done = engine.ask(
        "buildx", "build", "--network", "host", "--push", "--tag", name, "--metadata-file", str(metadata),
        str(tmp_path),
        limit_s=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    planted = replace(built, name=name, digest=json.loads(metadata.read_text())["containerimage.digest"])
    proof = prove_image(engine, planted, tmp_path / "proof", "test")
    engine.ask("image", "rm", "--force", name, planted.reference)
    assert {one.deed for one in proof.proofs if not one.holds} == red


def test_a_base_of_another_digest_is_refused(
    engine: Engine, catalog: Catalog, base: str, registry: str, tmp_path: Path
) -> None:
    wrong = f"{base.partition('@')[0]}@sha256:{'0' * 64}"
    with pytest.raises(BuildFailed, match="the registry answers another image than"):
        build(engine, catalog, wrong, registry, tmp_path)


def test_a_registry_that_is_down_is_told_as_that(
    engine: Engine, catalog: Catalog, base: str, registry: str, tmp_path: Path
) -> None:
    with pytest.raises(BuildFailed, match="was built and could not be pushed") as caught:
        build(engine, catalog, base, "127.0.0.1:9", tmp_path)
    engine.ask("image", "rm", "--force", "127.0.0.1:9/megacpp/cpu:proof")
    assert caught.value.infrastructure
