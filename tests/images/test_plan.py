"""What would be built: from which digest, with which arguments and labels; what is refused; the bake file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog, Target, matrix_folder
from megacpp_validate.catalog.images import Images, read_images
from megacpp_validate.images.build import lint_house
from megacpp_validate.images.pins import FILE, Pins, read_pins
from megacpp_validate.images.plan import (
    BAKE_FILE,
    DOCKERFILE,
    BuildSettings,
    ImagePlan,
    ImageRows,
    find_images,
    name_image,
    plan_bake,
    plan_images,
)  # fmt: skip
from megacpp_validate.images.tools import ImageRefused, use_mirror
from megacpp_validate.jitcache.layout import cache_variables

ROOT = matrix_folder().parent
DIGEST = "sha256:" + "c" * 64


@pytest.fixture(scope="module")
def images(catalog: Catalog) -> Images:
    return read_images({target.id: target.machine for target in catalog.targets})


@pytest.fixture(scope="module")
def pins() -> Pins:
    return read_pins(ROOT / "containers" / "pins.json")


def plan(images: Images, pins: Pins, catalog: Catalog, *names: str, **more: str) -> tuple[ImagePlan, ...]:
    targets: list[Target] = [target for target in catalog.targets if target.id in names or not names]
    return plan_images(images, pins, targets, root=ROOT, **more)


def _with(pins: Pins, **values: object) -> Pins:
    return Pins(pins=tuple(pin.model_copy(update=values) for pin in pins.pins))


def test_every_target_is_planned(images: Images, pins: Pins, catalog: Catalog) -> None:
    plans = plan(images, pins, catalog, revision="1234")
    assert [one.target for one in plans] == ["h200", "b200", "gb10", "cpu"]
    assert [one.cache_arch for one in plans] == ["sm_90a", "sm_100a", "sm_121a", "cpu"]
    for one in plans:
        pin = pins.find(one.base)
        assert pin
        name, _, digest = one.reference.partition("@")
        assert (name, digest) == (f"{pin.repository}:{pin.tag}", pin.digest_for(one.platform))
        assert one.arguments["BASE_IMAGE"] == one.pulled == one.reference
        assert bool(one.verified) != bool(one.unverified)
        assert one.labels["org.opencontainers.image.base.digest"] == digest
        assert one.labels["org.opencontainers.image.base.name"] == name
        assert one.labels["org.opencontainers.image.revision"] == "1234"
        assert one.labels["org.megacpp.lock.sha256"] == one.lock_hash == one.arguments["LOCK_HASH"]
        assert one.labels["org.megacpp.pins.sha256"] == pins.hash
        assert one.arch.rstrip("a") in (one.cache_arch.rstrip("a"), "")
        assert all(len(one.arguments[f"{name.upper().replace('-', '_')}_COMMIT"]) == 40 for name in one.sources)
    assert {one.target for one in plans if "flash-attention-3" in one.sources} == {"h200"}
    assert {one.target for one in plans if "deep-gemm" in one.sources} == {"h200", "b200"}


def test_what_a_target_can_do_is_in_its_image(images: Images, pins: Pins, catalog: Catalog) -> None:
    plans = {one.target: one for one in plan(images, pins, catalog)}
    for target in catalog.targets:
        one = plans[target.id]
        assert ("fa3" in target.attention) == ("flash-attention-3" in one.sources)
        assert ("fa4" in target.attention) == ("fa4" in one.arguments["JIT_LIBRARIES"].split())
        assert target.deep_gemm == ("deep-gemm" in one.sources)
        assert bool(target.arch) == bool(one.arguments["TE_VERSION"])
        # A build of it that fetches a wheel which no lock knows of is none that is pinned.
        if target.arch:
            assert "NVTE_PYTORCH_FORCE_BUILD=TRUE" in one.arguments["TRANSFORMER_ENGINE_TORCH_VARIABLES"]


def test_a_mirror_stands_in_and_the_digest_stays(images: Images, pins: Pins, catalog: Catalog) -> None:
    (one,) = plan(images, pins, catalog, "h200", mirror="mirror.invalid:5000/ngc")
    assert one.pulled == one.reference.replace("nvcr.io/", "mirror.invalid:5000/ngc/")
    assert one.arguments["BASE_IMAGE"] == one.pulled
    assert "mirror.invalid" not in " ".join(one.labels.values())
    assert use_mirror("docker.io/library/debian", "") == "docker.io/library/debian"
    for wrong in ("https://mirror.invalid", "mirror invalid", "Mirror/"):
        with pytest.raises(ImageRefused, match=r"is no registry.*host\[:port\]"):
            use_mirror("docker.io/library/debian", wrong)


def test_a_base_of_one_s_own(images: Images, pins: Pins, catalog: Catalog) -> None:
    (one,) = plan(images, pins, catalog, "cpu", own_base=f"127.0.0.1:5000/base@{DIGEST}")
    assert (one.base, one.verified) == ("own", "")
    assert one.arguments["BASE_IMAGE"] == f"127.0.0.1:5000/base@{DIGEST}"
    assert one.labels["org.opencontainers.image.base.name"] == "127.0.0.1:5000/base"
    assert one.labels["org.opencontainers.image.base.digest"] == DIGEST
    for wrong in ("127.0.0.1:5000/base:bookworm", "base", f"base@{DIGEST[:-1]}"):
        with pytest.raises(ImageRefused, match=r"not pinned by a digest.*Next step"):
            plan(images, pins, catalog, "cpu", own_base=wrong)
    with pytest.raises(ImageRefused, match=r"one base was given for 4 images.*Next step"):
        plan(images, pins, catalog, own_base=f"base@{DIGEST}")


def test_a_base_without_a_digest_is_refused(images: Images, pins: Pins, catalog: Catalog) -> None:
    for missing in (Pins(), _with(pins, index_digest="", platform_digests={})):
        with pytest.raises(ImageRefused, match=r"has no digest for linux/amd64.*nox -s lock -- --only pins.*--base"):
            plan(images, missing, catalog, "h200")
    moved = _with(pins, tag="26.06-py3")  # the pin of another tag is no pin
    with pytest.raises(ImageRefused, match=r"26\.06-py3"):
        plan(images, moved, catalog, "h200")


def test_a_pin_that_is_neither_verified_nor_claimed_is_refused(images: Images, pins: Pins, catalog: Catalog) -> None:
    """A digest that somebody typed was planned, and would have been pulled."""
    for forged in ({"index_digest": DIGEST}, {"platform_digests": {"linux/arm64": DIGEST}}):
        planted = _with(pins, verified="", **forged)
        for target in ("h200", "gb10"):
            with pytest.raises(ImageRefused, match=rf"ngc-26\.07.*not verified.*not what the matrix claims.*{DIGEST}"):
                plan(images, planted, catalog, target)


def test_a_lock_older_than_the_matrix_is_refused(images: Images, pins: Pins, catalog: Catalog, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "containers", tmp_path / "containers")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    h200 = [target for target in catalog.targets if target.id == "h200"]
    assert plan_images(images, pins, h200, root=tmp_path)
    text = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace('"griffe>=2.4,<3"', '"griffe>=2.5,<3"'))
    with pytest.raises(ImageRefused, match=r"h200\.txt is older than the matrix.*Next step: `nox -s lock`"):
        plan_images(images, pins, h200, root=tmp_path)
    (tmp_path / "containers" / "locks" / "h200.txt").unlink()
    with pytest.raises(ImageRefused, match=r"there is no lock.*nox -s lock"):
        plan_images(images, pins, h200, root=tmp_path)


def test_a_target_without_an_image(images: Images) -> None:
    assert [image.target for image in find_images(images, ())] == ["h200", "b200", "gb10", "cpu"]
    with pytest.raises(ImageRefused, match=r"no image for x100.*h200, b200, gb10, cpu"):
        find_images(images, ["x100", "h200"])


RECIPE = (ROOT / DOCKERFILE).read_text()
OWN_BASE = f"127.0.0.1:5000/base@sha256:{'a' * 64}"


def read_plans(catalog: Catalog, *targets: str, **how: str) -> tuple[ImagePlan, ...]:
    rows = [row for row in catalog.targets if not targets or row.id in targets]
    images = read_images({target.id: target.machine for target in catalog.targets})
    return plan_images(images, read_pins(ROOT / FILE), rows, root=ROOT, **how)


@pytest.fixture(scope="module")
def plans(catalog: Catalog) -> tuple[ImagePlan, ...]:
    return read_plans(catalog)


def test_the_committed_file_is_what_the_matrix_gives() -> None:
    text = ImageRows(None, "a test", {}).render_bake()
    assert (ROOT / BAKE_FILE).read_text() == text, "run `nox -s images -- --write-bake`"
    assert json.loads(text)["//"].startswith("Generated by")
    for target in json.loads(text)["target"].values():  # bases by digest, and nothing of a host or a commit
        assert re.search(r"@sha256:[0-9a-f]{64}$", target["args"]["BASE_IMAGE"])
        assert not {"secret", "network"} & target.keys()
        assert "org.opencontainers.image.revision" not in target["labels"]


def test_every_target_of_the_matrix_is_in_it(plans: tuple[ImagePlan, ...], catalog: Catalog) -> None:
    assert set(plan_bake(plans)["target"]) == {target.id for target in catalog.targets}


def test_every_argument_is_one_that_the_recipe_takes(plans: tuple[ImagePlan, ...]) -> None:
    taken = set(re.findall(r"^ARG (\w+)", RECIPE, re.MULTILINE))
    for target in plan_bake(plans)["target"].values():
        assert set(target["args"]) <= taken
        assert all(stage in RECIPE for name, stage in target["args"].items() if stage.endswith("-build"))


def test_what_the_recipe_takes_comes_from_somewhere(plans: tuple[ImagePlan, ...]) -> None:
    """An argument that nobody gives keeps its default for ever, whatever the matrix says."""
    taken = set(re.findall(r"^ARG (\w+)", RECIPE, re.MULTILINE))
    lent = BuildSettings(jobs="4")
    given = {name for target in plan_bake(plans, lent)["target"].values() for name in target["args"]}
    assert taken <= given


def test_steps_of_the_matrix_choose_the_stages(plans: tuple[ImagePlan, ...]) -> None:
    targets = plan_bake(plans)["target"]
    stages = {
        name: sorted(value for value in row["args"].values() if value.endswith("-build"))
        for name, row in targets.items()
    }
    assert stages["h200"] == ["deep-gemm-build", "flash-attention-3-build", "jit-build", "te-build"]
    assert stages["gb10"] == ["jit-build", "te-build"]
    assert stages["cpu"] == []


def test_sources_are_at_their_commits(plans: tuple[ImagePlan, ...]) -> None:
    for name, address in plan_bake(plans)["target"]["h200"]["contexts"].items():
        assert re.fullmatch(r"https://\S+\.git#[0-9a-f]{40}", address), name


def test_what_a_host_lends_stays_outside_of_arguments_and_labels(catalog: Catalog, tmp_path: Path) -> None:
    plans = read_plans(catalog, "cpu", own_base=OWN_BASE)
    settings = BuildSettings(
        wheels=tmp_path, network="host", pip_conf="[global]\nindex-url = https://user:secret@index\n"
    )
    target = plan_bake(plans, settings)["target"]["cpu"]
    assert target["contexts"] == {"wheels": str(tmp_path)}
    assert target["network"] == "host"
    assert "user:secret" not in json.dumps(target)
    assert target["args"]["BASE_IMAGE"] == OWN_BASE


def test_a_clone_takes_the_place_of_a_repository(plans: tuple[ImagePlan, ...], tmp_path: Path) -> None:
    settings = BuildSettings(sources={"deep-gemm": tmp_path})
    targets = plan_bake(plans, settings)["target"]
    assert targets["h200"]["contexts"]["deep-gemm-source"] == str(tmp_path)
    assert "deep-gemm-source" not in targets["gb10"].get("contexts", {})


@pytest.mark.parametrize(
    ("given", "name"),
    [(("cpu",), "megacpp/cpu:0.1.0"), (("h200", "r.example:5000/team/", "x"), "r.example:5000/team/megacpp/h200:x")],
)
def test_names(given: tuple[str, ...], name: str) -> None:
    assert name_image(*given) == name


def test_bake_prints_it_without_a_daemon() -> None:
    docker = shutil.which("docker")
    if docker is None:
        pytest.skip("not-run: there is no Docker client")
    if subprocess.run([docker, "buildx", "version"], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("not-run: the Docker client has no buildx")
    asked = [docker, "buildx", "bake", "--file", BAKE_FILE, "--print", "all"]
    variables = {**os.environ, "DOCKER_HOST": "unix:///nowhere"}
    done = subprocess.run(asked, cwd=ROOT, env=variables, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)["target"]) == {"h200", "b200", "gb10", "cpu"}


def test_the_caches_of_the_image_are_where_the_layout_says(plans: tuple[ImagePlan, ...]) -> None:
    said = dict(re.findall(r"^(?:ENV|   ) (\w+)=(\S+)", RECIPE, re.MULTILINE))
    for plan in plans:
        for name, value in cache_variables("/opt/megacpp/jit", plan.cache_arch, nvrtc=False).items():
            assert said[name].replace("${CACHE_ARCH}", plan.cache_arch) == value, name


# --- the recipe itself ------------------------------------------------------------------------------------------------


def copy_recipe(folder: Path) -> Path:
    shutil.copytree(ROOT / "containers", folder / "containers")
    return folder


def test_the_recipe_keeps_the_house_rules(plans: tuple[ImagePlan, ...]) -> None:
    assert lint_house(ROOT, plans).faults == ()


def test_a_syntax_line_is_found(plans: tuple[ImagePlan, ...], tmp_path: Path) -> None:
    root = copy_recipe(tmp_path)
    (root / DOCKERFILE).write_text("# syntax = docker/dockerfile:1.9\n" + RECIPE)
    assert "syntax line" in lint_house(root, plans).faults[0]


def test_a_step_without_a_script_or_a_line_is_found(plans: tuple[ImagePlan, ...], tmp_path: Path) -> None:
    root = copy_recipe(tmp_path)
    (root / "containers/steps/te.sh").unlink()
    (root / DOCKERFILE).write_text(RECIPE.replace("bash /steps/jit.sh", "true"))
    faults = lint_house(root, plans).faults
    assert any("te.sh is a step of h200, and there is no such file" in fault for fault in faults)
    assert any("jit.sh is a step of h200, and containers/Dockerfile does not run it" in fault for fault in faults)


def test_only_what_is_named_reaches_a_build() -> None:
    """A context with a virtual environment or an evidence folder in it would be sent to the engine at every build."""
    lines = (ROOT / "containers/Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {rule for rule in rules if rule.startswith("!")} == {
        "!containers/steps", "!containers/locks", "!matrix", "!megacpp_validate",
    }  # fmt: skip


def test_every_release_of_the_matrix_is_in_the_image(catalog: Catalog) -> None:
    lines = (ROOT / "containers/locks/releases.txt").read_text().splitlines()
    found = re.findall(r"^transformer-engine==(\S+) --hash=sha256:[0-9a-f]{64}$", "\n".join(lines), re.MULTILINE)
    assert found == [stack.te for stack in catalog.stacks]


def test_their_hashes_are_those_of_the_index(wheel_of: Callable[[str], Path]) -> None:
    text = (ROOT / "containers/locks/releases.txt").read_text()
    for version, hashed in re.findall(r"^transformer-engine==(\S+) --hash=sha256:(\w+)$", text, re.MULTILINE):
        assert sha256(wheel_of(version).read_bytes()).hexdigest() == hashed, version
