"""What would be built: from which digest, with which arguments and labels; and what is refused before it is."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog, Target, matrix_folder
from megacpp_validate.catalog.images import Images, read_images
from megacpp_validate.images.pins import Pins, read_pins
from megacpp_validate.images.plan import find_images, plan_images, show_through
from megacpp_validate.images.plan_result import ImagePlan
from megacpp_validate.images.refusals import ImageRefused

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
    return plan_images(images, pins, targets, mirror=more.pop("mirror", ""), **more)


def test_every_target_is_planned(images: Images, pins: Pins, catalog: Catalog) -> None:
    plans = plan(images, pins, catalog, revision="1234", source="https://example.org")
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
    assert show_through("docker.io/library/debian", "") == "docker.io/library/debian"
    for wrong in ("https://mirror.invalid", "mirror invalid", "Mirror/"):
        with pytest.raises(ImageRefused, match=r"is no registry.*host\[:port\]"):
            show_through("docker.io/library/debian", wrong)


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
    for missing in (Pins(), Pins(tuple(replace(pin, index_digest="", platform_digests={}) for pin in pins.pins))):
        with pytest.raises(ImageRefused, match=r"has no digest for linux/amd64.*nox -s lock -- --only pins.*--base"):
            plan(images, missing, catalog, "h200")
    moved = Pins(tuple(replace(pin, tag="26.06-py3") for pin in pins.pins))  # the pin of another tag is no pin
    with pytest.raises(ImageRefused, match=r"26\.06-py3"):
        plan(images, moved, catalog, "h200")


def test_a_pin_that_is_neither_verified_nor_claimed_is_refused(images: Images, pins: Pins, catalog: Catalog) -> None:
    """A digest that somebody typed was planned, and would have been pulled."""
    for forged in ({"index_digest": DIGEST}, {"platform_digests": {"linux/arm64": DIGEST}}):
        planted = Pins(tuple(replace(pin, verified="", **forged) for pin in pins.pins))
        for target in ("h200", "gb10"):
            with pytest.raises(ImageRefused, match=rf"ngc-26\.07.*not verified.*not what the matrix claims.*{DIGEST}"):
                plan(images, planted, catalog, target)


def test_a_lock_older_than_the_matrix_is_refused(images: Images, pins: Pins, catalog: Catalog, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "containers", tmp_path / "containers")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    h200 = [target for target in catalog.targets if target.id == "h200"]
    assert plan_images(images, pins, h200, root=tmp_path, mirror="")
    text = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace('"griffe>=2.4,<3"', '"griffe>=2.5,<3"'))
    with pytest.raises(ImageRefused, match=r"h200\.txt is older than the matrix.*Next step: `nox -s lock`"):
        plan_images(images, pins, h200, root=tmp_path, mirror="")
    (tmp_path / "containers" / "locks" / "h200.txt").unlink()
    with pytest.raises(ImageRefused, match=r"there is no lock.*nox -s lock"):
        plan_images(images, pins, h200, root=tmp_path, mirror="")


def test_a_target_without_an_image(images: Images) -> None:
    assert [image.target for image in find_images(images, ())] == ["h200", "b200", "gb10", "cpu"]
    with pytest.raises(ImageRefused, match=r"no image for x100.*h200, b200, gb10, cpu"):
        find_images(images, ["x100", "h200"])
