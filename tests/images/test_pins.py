"""Pins: what a registry answers, what changed under a tag and is refused, and registries that are down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from megacpp_validate.catalog.images import Images, read_images
from megacpp_validate.images.pins import (
    Pin,
    PinLine,
    PinNews,
    Pins,
    PinsDamaged,
    check_pins,
    pin_bases,
    read_pins,
    render_pins,
)
from megacpp_validate.images.tools import ImageRefused, NotInRegistry, RegistryLies
from tests.images.fake_tools import FakeRegistry, digest_of, install

TODAY, NGC = "2026-11-22", "ngc-26.07"
HOST = "mirror.invalid"
OTHER = "sha256:" + "0" * 64
Bases = dict[str, FakeRegistry]
Made = dict[str, tuple[Pin, PinLine]]


@pytest.fixture(scope="module")
def claimed(catalog: Catalog) -> Images:
    return read_images({target.id: target.machine for target in catalog.targets})


@pytest.fixture(scope="module")
def images(claimed: Images) -> Images:
    """Those of the matrix, of whose bases nobody claims anything."""
    return claimed.model_copy(update={"claim": []})


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return install(tmp_path / "bin", "docker", MEGACPP_REGISTRY_MIRROR=HOST)


@pytest.fixture
def bases(images: Images, variables: dict[str, str]) -> Bases:
    """A mirror that has every base of the matrix, under its tag."""
    root, found = Path(variables["FAKE_REGISTRY"]), {}
    for base in images.base:
        found[base.id] = FakeRegistry(root, f"{HOST}/{base.repository.partition('/')[2]}")
        found[base.id].put_index(base.tag)
    return found


def pin(images: Images, pins: Pins, variables: dict[str, str], *accepted: str) -> Made:
    return {line.base: (one, line) for one, line in pin_bases(images, pins, TODAY, frozenset(accepted), variables)}


def news(made: Made) -> set[PinNews]:
    return {line.news for _, line in made.values()}


def as_pins(made: Made) -> Pins:
    return Pins(pins=tuple(one for one, _ in made.values()))


def change(pin: Pin, **values: Any) -> Pin:
    return pin.model_copy(update=values)


def test_what_a_registry_answers_is_dated(images: Images, bases: Bases, variables: dict[str, str]) -> None:
    made = pin(images, Pins(), variables)
    assert news(made) == {PinNews.VERIFIED}
    ngc = made[NGC][0]
    assert ngc.index_digest == digest_of((bases[NGC].folder / "manifests/26.07-py3").read_bytes())
    assert (set(ngc.platform_digests), ngc.verified) == ({"linux/amd64", "linux/arm64"}, TODAY)
    assert HOST not in render_pins((ngc,))  # a mirror's name is nobody else's business
    assert as_pins(pin(images, as_pins(made), variables)) == as_pins(made)


@pytest.mark.parametrize("verified", [TODAY, ""])
def test_a_tag_that_moved_is_refused_with_both_digests(
    images: Images, bases: Bases, variables: dict[str, str], verified: str
) -> None:
    old = change(pin(images, Pins(), variables)[NGC][0], verified=verified, source="#1")
    new = bases[NGC].put_index("26.07-py3", salt="pushed again")
    one, line = pin(images, Pins(pins=(old,)), variables)[NGC]
    assert (line.news, one) == (PinNews.CHANGED, old)
    assert all(text in line.refusal for text in (old.index_digest, new, "--accept 26.07-py3"))
    one, line = pin(images, Pins(pins=(old,)), variables, "26.07-py3")[NGC]
    assert (line.news, line.refusal, line.before, one.index_digest) == (PinNews.VERIFIED, "", old.index_digest, new)


def test_what_else_is_another_image(images: Images, bases: Bases, variables: dict[str, str]) -> None:
    good = pin(images, Pins(), variables)[NGC][0]
    one_moved = change(good, platform_digests={**good.platform_digests, "linux/arm64": OTHER})
    single = change(good, index_digest="", platform_digests={"linux/s390x": OTHER})
    for old in (one_moved, single):
        assert "another image now" in pin(images, Pins(pins=(old,)), variables)[NGC][1].refusal
    other_tag = change(good, tag="26.06-py3", index_digest=OTHER)
    assert pin(images, Pins(pins=(other_tag,)), variables)[NGC][1].news is PinNews.VERIFIED


def test_a_registry_that_is_down_changes_nothing(
    images: Images, claimed: Images, bases: Bases, variables: dict[str, str]
) -> None:
    before = as_pins(pin(images, Pins(), variables))
    Path(variables["FAKE_REGISTRY"], "down").touch()
    kept = pin(images, before, variables)
    assert (news(kept), as_pins(kept).pins) == ({PinNews.KEPT}, before.pins)  # the day of the verification too
    assert all("connection refused" in line.how for _, line in kept.values())
    made, line = pin(claimed, Pins(), variables)[NGC]
    assert (line.news, made.verified) == (PinNews.CLAIMED, "")
    assert made.digest_for("linux/arm64") == claimed.claim[0].digest
    assert news(pin(images, Pins(), variables)) == {PinNews.MISSING}
    assert news(pin(images, Pins(), {**variables, "MEGACPP_DOCKER": "/nowhere", "PATH": "/nowhere"})) == {
        PinNews.MISSING
    }


def test_a_tag_that_is_gone(images: Images, bases: Bases, variables: dict[str, str]) -> None:
    before = as_pins(pin(images, Pins(), variables))
    (bases[NGC].folder / "manifests/26.07-py3").unlink()
    assert news(pin(images, before, variables)) == {PinNews.KEPT, PinNews.VERIFIED}
    with pytest.raises(
        NotInRegistry, match=r"has no nvcr.io/nvidia/pytorch:26\.07-py3"
    ):  # its own registry must have it
        pin(images, before, {**variables, "MEGACPP_REGISTRY_MIRROR": ""})


def test_a_registry_that_lies(images: Images, bases: Bases, variables: dict[str, str]) -> None:
    image = pin(images, Pins(), variables)[NGC][0].platform_digests["linux/amd64"]
    (bases[NGC].folder / "manifests" / image).write_bytes(b'{"schemaVersion": 2, "config": {}}')
    with pytest.raises(RegistryLies, match=f"for .*{image}"):
        pin(images, Pins(), variables)
    bases[NGC].put_manifest(b"<html>please log in</html>", "26.07-py3")
    with pytest.raises(RegistryLies, match="login page"):
        pin(images, Pins(), variables)
    bases[NGC].put_manifest({"schemaVersion": 2, "manifests": []}, "26.07-py3")
    with pytest.raises(ImageRefused, match="has no image for linux/amd64"):
        pin(images, Pins(), variables)


def test_an_image_of_one_platform(images: Images, bases: Bases, variables: dict[str, str], tmp_path: Path) -> None:
    deb = bases["debian-bookworm"]
    config = deb.put_blob(b'{"os": "linux", "architecture": "amd64"}')
    digest = deb.put_manifest({"schemaVersion": 2, "config": config, "layers": []}, "bookworm-slim")
    made = pin(images, Pins(), variables)["debian-bookworm"][0]
    assert (made.index_digest, made.platform_digests) == ("", {"linux/amd64": digest})
    (tmp_path / "pins.json").write_text(render_pins((made,)))
    assert read_pins(tmp_path / "pins.json").pins == (made,)


def test_a_forged_pin_does_not_beat_the_claim(claimed: Images, bases: Bases, variables: dict[str, str]) -> None:
    _, line = pin(claimed, Pins(), variables)[NGC]
    assert line.news is PinNews.CHANGED  # the registry gives another digest than the claim
    assert "is a claim of #60579478594" in line.refusal
    assert pin(claimed, Pins(), variables, NGC)[NGC][1].news is PinNews.VERIFIED
    Path(variables["FAKE_REGISTRY"], "down").touch()
    good = as_pins(pin(claimed, Pins(), variables))
    assert [line.refusal for line in check_pins(claimed, good)] == ["", ""]
    ngc, other = good.find(NGC), "sha256:" + "f" * 64
    assert ngc is not None
    for forged in (
        change(ngc, index_digest=other), change(ngc, platform_digests={**ngc.platform_digests, "linux/amd64": other})
    ):  # fmt: skip
        pins = Pins(pins=(forged,))
        assert [other in line.refusal for line in check_pins(claimed, pins)] == [True, False]
        for accepted in ((), (NGC,)):  # no digest can be accepted while no registry answers
            _, line = pin(claimed, pins, variables, *accepted)[NGC]
            assert (line.news, "is not what the matrix claims" in line.refusal) == (PinNews.CHANGED, True)


def test_the_pins_that_are_committed(claimed: Images) -> None:
    file = matrix_folder().parent / "containers" / "pins.json"
    pins = read_pins(file)
    assert file.read_text() == render_pins(pins.pins), "containers/pins.json was edited by hand: run nox -s lock"
    assert {line.news for line in check_pins(claimed, pins)} == {PinNews.KEPT}
    assert {line.news for line in check_pins(claimed, Pins(pins=pins.pins[1:]))} == {PinNews.KEPT, PinNews.MISSING}


ROW = '{"base": "b", "repository": "r", "tag": "t", "index_digest": "sha256:12", "platform_digests": {}}'


@pytest.mark.parametrize(
    "text",
    ["{}", "not json", "[" * 100_000, '{"generated_by": "x", "pins": [], "pins": []}',
     '{"generated_by": "x", "pins": [{"base": "b"}]}', f'{{"generated_by": "x", "pins": [{ROW}]}}'],
)  # fmt: skip
def test_a_file_that_was_edited_by_hand(tmp_path: Path, text: str) -> None:
    (tmp_path / "pins.json").write_text(text)
    with pytest.raises(PinsDamaged, match=r"not a valid file of pins.*Next step"):
        read_pins(tmp_path / "pins.json")
    assert read_pins(tmp_path / "none.json") == Pins()


def test_a_day_of_verification_needs_what_the_registry_gave(
    images: Images, bases: Bases, variables: dict[str, str], tmp_path: Path
) -> None:
    good, file = pin(images, Pins(), variables)[NGC][0], tmp_path / "pins.json"
    single = (bases[NGC].folder / "manifests" / good.platform_digests["linux/amd64"]).read_text()
    file.write_text(render_pins((good,)))
    assert read_pins(file).pins == (good,)
    for forged in (
        change(good, document=""), change(good, document="{}"), change(good, index_digest=OTHER),
        change(good, index_digest=OTHER, document=single), change(good, document=good.document + " "),
        change(good, index_digest=""), change(good, platform_digests={}),
        change(good, platform_digests={**good.platform_digests, "linux/arm64": OTHER}),
    ):  # fmt: skip
        file.write_text(render_pins((forged,)))
        with pytest.raises(PinsDamaged):
            read_pins(file)
    file.write_text(render_pins((good, good)))
    with pytest.raises(PinsDamaged, match=f"the base {NGC} is there twice"):
        read_pins(file)
