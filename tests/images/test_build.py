"""What an engine prints when a build fails, and how that is explained; what a host lends; the linted recipe."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.canary.static.sources import Sources
from megacpp_validate.catalog.bridge import matrix_folder, read_catalog
from megacpp_validate.errors import EvidenceMissing, Exit, NoEnvironment
from megacpp_validate.images.build import (
    Engine,
    ImageClosed,
    ImageOptions,
    build_all,
    explain_build,
    find_engine,
    plan_all,
    plan_build,
    render_pip_conf,
)
from megacpp_validate.images.plan import DOCKERFILE, ImagePlan, ImageRows, run_fits
from megacpp_validate.images.tools import ImageRefused, find_program, read_pip_settings
from tests.canary.static.small_index import UNREACHABLE, use_index, write_wheel
from tests.images.test_plan import read_plans

NAME, ROOT = "127.0.0.1:5000/megacpp/cpu:0.1.0", matrix_folder().parent
STEPS = ROOT / "containers/steps"


@pytest.fixture(scope="module")
def plan() -> ImagePlan:
    return read_plans("cpu")[0]


# Lines of Docker Engine 28.5.2 with buildx 0.29.1, on 2026-11-22.
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("failed to copy: write /d/ingest/data: no space left on device", Exit.INFRASTRUCTURE),
        ('failed to do request: Head "https://h/v2/": dial tcp: lookup h: no such host', Exit.INFRASTRUCTURE),
        ("failed to resolve source metadata for 127.0.0.1:5000/base@sha256:0000: not found", Exit.NO_ENVIRONMENT),
        ("fatal: unable to access 'https://h/x.git/': Could not resolve host: h", Exit.INFRASTRUCTURE),
        ("ERROR: failed to receive status: rpc error: code = Unavailable desc = EOF", Exit.INFRASTRUCTURE),
        ("2.345 ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", Exit.NO_ENVIRONMENT),
    ],
)
def test_the_end_of_a_failed_build_is_shown(plan: ImagePlan, line: str, code: Exit) -> None:
    quote = ["Dockerfile:40", *["  40 | >>> RUN bash /steps/packages.sh"] * 12, "ERROR: failed to solve"]
    fault = explain_build(plan, NAME, ["#1 [internal] load", line, *quote], Path("cpu.log"))
    assert (line in str(fault), f"{NAME} is not set" in str(fault), fault.exit) == (True, True, code)
    assert ">>>" not in str(fault), "the recipe hides what the step printed"


def test_no_client_and_no_engine_say_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(NoEnvironment, match=r"docker is missing.*Next step"):
        find_engine({"PATH": str(tmp_path)})
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\necho ' '\nexit 1\n")
    client.chmod(0o755)
    with pytest.raises(NoEnvironment, match=r"Cannot connect.*containers/docker_engine up"):
        find_engine({"PATH": f"{tmp_path}:/bin:/usr/bin"})


@pytest.mark.parametrize(
    ("commit", "unknown", "code"),
    [
        ("203b9b3dba39d5d08dffb49c09aa622984dff07d", 4, Exit.CLOSED),  # of 2025-08: CUDA 12.8 alone
        ("0" * 40, 7, Exit.EVIDENCE_MISSING),
        ("", 4, Exit.EVIDENCE_MISSING),  # ranges that are asked of numpy, onnx, pip and protobuf of the base
    ],
)
def test_a_pin_whose_build_refuses_the_base_is_refused_before_anything_is_pulled(
    commit: str, unknown: int, code: Exit, tmp_path: Path
) -> None:
    rows = ImageRows(read_catalog(), {"PATH": str(tmp_path)})
    pinned, *others = rows.images.source
    source = [pinned.model_copy(update={"commit": commit or pinned.commit}), *others]
    vars(rows)["images"] = rows.images.model_copy(update={"source": source})
    plans = plan_all(rows, ImageOptions(("h200",)))
    assert plans.exit is run_fits(rows, None, (), "h200").exit is code
    assert (len(plans.refused), len(plans.unknown)) == (code is Exit.CLOSED, unknown)
    for allow, fault in ((False, EvidenceMissing), (True, NoEnvironment)):
        with pytest.raises(ImageClosed if code is Exit.CLOSED else fault, match=r"FileNot|--allow|docker is missing"):
            list(build_all(rows, ImageOptions(("h200",), allow_unknown=allow), print))


# --- what a host lends ------------------------------------------------------------------------------------------------


def test_what_a_host_lends_stays_outside_of_arguments_and_labels(plan: ImagePlan, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("certificates")
    (tmp_path / "pip.ini").write_text("[global]\nindex-url = https://user:secret@index/simple\ntimeout = 60\n")
    variables = {
        "PIP_FIND_LINKS": str(tmp_path), "PIP_CERT": str(tmp_path / "ca.crt"), "PATH": "/usr/bin:/bin",
        "PIP_CONFIG_FILE": str(tmp_path / "pip.ini"), "MEGACPP_BUILD_JOBS": "4", "MEGACPP_BUILD_NETWORK": "host",
    }  # fmt: skip
    engine = Engine("docker", variables, "28", "0.29")
    words = plan_build(plan, NAME, engine, tmp_path, push=True)
    text = (tmp_path / "bake.json").read_text()
    target = json.loads(text)["target"]["cpu"]
    assert (target["contexts"], target["network"], target["args"]["JOBS"]) == ({"wheels": str(tmp_path)}, "host", "4")
    assert target["output"] == [f"type=image,name={NAME},push=true,oci-mediatypes=true"]
    assert "tags" not in target, "a build that fails sets none"
    assert [one.partition(",")[0] for one in target["secret"]] == ["id=ca_bundle", "id=pip_conf"]
    assert "secret@index" not in text
    conf = tmp_path / "pip.conf"
    assert ("user:secret@index" in conf.read_text(), conf.stat().st_mode & 0o777) == (True, 0o600)
    assert {f"fs.read={tmp_path}", "network.host"} <= set(words)
    settings = read_pip_settings(variables)
    assert (settings["find-links"], settings["timeout"]) == ([str(tmp_path)], ["60"]), "a variable and a file"
    assert "find-links" not in render_pip_conf(settings), "a folder of the host means nothing in a build"
    bridged = Engine("docker", {"PATH": "/bin"}, "28", "0.29")
    assert "network.host" not in plan_build(plan, NAME, bridged, tmp_path)
    wrong = Engine("docker", {"MEGACPP_BUILD_APT_SOURCES": "/nowhere"}, "28", "0.29")
    with pytest.raises(ImageRefused, match="/nowhere does not exist"):
        plan_build(plan, NAME, wrong, tmp_path)


# --- the recipe -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hadolint", ["--no-color", DOCKERFILE]),
        ("shellcheck", ["-x", "-P", "SCRIPTDIR", "-s", "bash", *map(str, sorted(STEPS.glob("*.sh")))]),
        ("shellcheck", ["-x", "containers/docker_engine", "containers/image_proof"]),
    ],
)
def test_linters_find_nothing(name: str, words: list[str]) -> None:
    program = find_program(name, {})
    if program is None:
        pytest.skip(f"not-run: there is no {name}")
    done = subprocess.run([program, *words], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_step_is_a_script_that_the_recipe_runs_and_a_change_builds_anew() -> None:
    recipe = (ROOT / DOCKERFILE).read_text()
    assert not re.search("^# *syntax *=", recipe, re.MULTILINE), "a syntax line fetches a frontend from a registry"
    for step in {step for plan in read_plans() for step in plan.steps}:
        assert (STEPS / f"{step}.sh").is_file()
        assert f"bash /steps/{step}.sh" in recipe
    # Whatever the recipe may see is among the paths of the workflow, so that a change builds the images anew.
    workflow = (ROOT / ".github/workflows/images.yml").read_text().partition("workflow_dispatch")[0]
    seen = re.findall(r"^!([^/\n]+)", (ROOT / f"{DOCKERFILE}.dockerignore").read_text(), re.MULTILINE)
    assert {"containers/**", "pyproject.toml", *(f"{one}/**" for one in seen)} <= {*re.findall(r"- (\S+)", workflow)}


def test_the_steps_put_releases_where_the_canary_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts as they are, with folders of this test in place of an image's: no second account of the layout."""
    digest = sha256(write_wheel(tmp_path / "wheels", "2.9.0").read_bytes()).hexdigest()
    (tmp_path / "releases.txt").write_text(f"# a lock\ntransformer-engine==2.9.0 --hash=sha256:{digest}\n")
    use_index(monkeypatch, UNREACHABLE)
    for name in ("settings", "releases", "keep_releases"):
        text = (STEPS / f"{name}.sh").read_text().replace("$venv/bin/python", sys.executable)
        text = re.sub(r"/(opt/megacpp|lock|fetched)\b|(?=/wheels )", str(tmp_path), text)
        (tmp_path / f"{name}.sh").write_text(text.replace("/context", str(ROOT)))
    subprocess.run(["bash", "-ec", f"cd {tmp_path}; bash releases.sh; bash keep_releases.sh"], check=True, timeout=120)
    assert Sources(tmp_path / "releases").release("2.9.0").source.sha256 == digest  # with no index, as above
