"""Pins: a registry's word becomes one, what changed under a tag is refused, and who is down changes nothing."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from megacpp_validate.catalog.images import Images, read_images
from megacpp_validate.images.pins import (
    Pin,
    Pinned,
    PinNews,
    Pins,
    PinsDamaged,
    check_claims,
    check_pins,
    pin_bases,
    read_pins,
    render_pins,
)  # fmt: skip
from megacpp_validate.images.tools import ImageRefused, NotInRegistry, RegistryLies
from tests.images.fake_tools import FakeRegistry, digest_of, install

TODAY, NGC = "2026-11-22", "ngc-26.07"
HOST = "mirror.invalid"


@pytest.fixture(scope="module")
def claimed(catalog: Catalog) -> Images:
    return read_images({target.id: target.machine for target in catalog.targets})


@pytest.fixture(scope="module")
def images(claimed: Images) -> Images:
    """Those of the matrix, of whose bases nobody claims anything."""
    return claimed.model_copy(update={"claim": []})


@pytest.fixture
def variables(tmp_path: Path) -> dict[str, str]:
    return install(tmp_path / "bin", "docker", "oras", MEGACPP_REGISTRY_MIRROR=HOST)


@pytest.fixture
def bases(images: Images, variables: dict[str, str]) -> dict[str, FakeRegistry]:
    """A mirror that has every base of the matrix, under its tag."""
    root, found = Path(variables["FAKE_REGISTRY"]), {}
    for base in images.base:
        found[base.id] = FakeRegistry(root, f"{HOST}/{base.repository.partition('/')[2]}")
        found[base.id].put_index(base.tag)
    return found


def pin(images: Images, pins: Pins, variables: dict[str, str], *accepted: str) -> dict[str, Pinned]:
    return {one.line.base: one for one in pin_bases(images, pins, TODAY, frozenset(accepted), variables)}


def as_pins(made: dict[str, Pinned]) -> Pins:
    return Pins(pins=tuple(one.pin for one in made.values()))


def change(pin: Pin, **values: Any) -> Pin:
    return pin.model_copy(update=values)


def test_a_registry_s_word_is_dated(images: Images, bases: dict[str, FakeRegistry], variables: dict[str, str]) -> None:
    made = pin(images, Pins(), variables)
    assert {one.line.news for one in made.values()} == {PinNews.NEW}
    ngc = made[NGC].pin
    assert ngc.index_digest == digest_of((bases[NGC].folder / "manifests/26.07-py3").read_bytes())
    assert (set(ngc.platform_digests), ngc.verified) == ({"linux/amd64", "linux/arm64"}, TODAY)
    assert HOST not in render_pins((ngc,))  # a mirror's name is nobody else's business
    assert {one.line.news for one in pin(images, as_pins(made), variables).values()} == {PinNews.SAME}


@pytest.mark.parametrize("verified", [TODAY, ""])
def test_a_tag_that_moved_is_refused_with_both_digests(
    images: Images, bases: dict[str, FakeRegistry], variables: dict[str, str], verified: str
) -> None:
    old = change(pin(images, Pins(), variables)[NGC].pin, verified=verified, source="#1")
    new = bases[NGC].put_index("26.07-py3", salt="pushed again")
    one = pin(images, Pins(pins=(old,)), variables)[NGC]
    assert (one.line.news, one.pin) == (PinNews.CHANGED, old)
    assert all(text in one.refusal for text in (old.index_digest, new, "--accept 26.07-py3"))
    taken = pin(images, Pins(pins=(old,)), variables, "26.07-py3")[NGC]
    assert (taken.line.news, taken.refusal, taken.pin.index_digest) == (PinNews.ACCEPTED, "", new)


def test_what_else_is_another_image(images: Images, bases: dict[str, FakeRegistry], variables: dict[str, str]) -> None:
    good = pin(images, Pins(), variables)[NGC].pin
    other = "sha256:" + "0" * 64
    one_moved = change(good, platform_digests={**good.platform_digests, "linux/arm64": other})
    single = change(good, index_digest="", platform_digests={"linux/s390x": other})
    for old in (one_moved, single):
        assert "another image now" in pin(images, Pins(pins=(old,)), variables)[NGC].refusal
    other_tag = change(good, tag="26.06-py3", index_digest=other)
    assert pin(images, Pins(pins=(other_tag,)), variables)[NGC].line.news is PinNews.NEW


def test_a_registry_that_is_down_changes_nothing(
    images: Images, claimed: Images, bases: dict[str, FakeRegistry], variables: dict[str, str]
) -> None:
    before = as_pins(pin(images, Pins(), variables))
    Path(variables["FAKE_REGISTRY"], "down").touch()
    kept = pin(images, before, variables)
    assert {one.line.news for one in kept.values()} == {PinNews.KEPT}
    assert as_pins(kept).pins == before.pins  # the day of the verification too
    assert all("connection refused" in one.line.silence for one in kept.values())
    made = pin(claimed, Pins(), variables)[NGC]
    assert (made.line.news, made.pin.verified) == (PinNews.CLAIMED, "")
    assert made.pin.digest_for("linux/arm64") == claimed.claim[0].digest
    assert pin(images, Pins(), variables)[NGC].line.news is PinNews.MISSING
    missing = pin(images, Pins(), {**variables, "MEGACPP_DOCKER": "/nowhere", "PATH": "/nowhere"})
    assert missing[NGC].line.news is PinNews.MISSING


def test_a_tag_that_is_gone(images: Images, bases: dict[str, FakeRegistry], variables: dict[str, str]) -> None:
    before = as_pins(pin(images, Pins(), variables))
    (bases[NGC].folder / "manifests/26.07-py3").unlink()
    assert [one.line.news for one in pin(images, before, variables).values()] == [PinNews.KEPT, PinNews.SAME]
    with pytest.raises(
        NotInRegistry, match=r"has no nvcr.io/nvidia/pytorch:26\.07-py3"
    ):  # its own registry must have it
        pin(images, before, {**variables, "MEGACPP_REGISTRY_MIRROR": ""})


def test_a_registry_that_lies(images: Images, bases: dict[str, FakeRegistry], variables: dict[str, str]) -> None:
    image = pin(images, Pins(), variables)[NGC].pin.platform_digests["linux/amd64"]
    (bases[NGC].folder / "manifests" / image).write_bytes(b'{"schemaVersion": 2, "config": {}}')
    with pytest.raises(RegistryLies, match=f"for {image}"):
        pin(images, Pins(), variables)
    bases[NGC].put_manifest(b"<html>please log in</html>", "26.07-py3")
    with pytest.raises(RegistryLies, match="login page"):
        pin(images, Pins(), variables)
    bases[NGC].put_manifest({"schemaVersion": 2, "manifests": []}, "26.07-py3")
    with pytest.raises(ImageRefused, match="has no image for linux/amd64"):
        pin(images, Pins(), variables)


def test_an_image_of_one_platform(images: Images, bases: dict[str, FakeRegistry], variables: dict[str, str]) -> None:
    deb = bases["debian-bookworm"]
    config = deb.put_blob(b'{"os": "linux", "architecture": "amd64"}')
    digest = deb.put_manifest({"schemaVersion": 2, "config": config, "layers": []}, "bookworm-slim")
    made = pin(images, Pins(), variables)["debian-bookworm"].pin
    assert (made.index_digest, made.platform_digests) == ("", {"linux/amd64": digest})


def test_a_forged_pin_does_not_beat_the_claim(
    claimed: Images, bases: dict[str, FakeRegistry], variables: dict[str, str]
) -> None:
    one = pin(claimed, Pins(), variables)[NGC]
    assert one.line.news is PinNews.CHANGED  # the registry says otherwise than the claim
    assert "is what others say (#60579478594" in one.refusal
    assert pin(claimed, Pins(), variables, NGC)[NGC].line.news is PinNews.ACCEPTED
    down = Path(variables["FAKE_REGISTRY"], "down")
    down.touch()
    good = as_pins(pin(claimed, Pins(), variables))
    assert check_claims(claimed, good) == ()
    ngc, other = good.find(NGC), "sha256:" + "f" * 64
    assert ngc is not None
    for forged in (
        change(ngc, index_digest=other), change(ngc, platform_digests={**ngc.platform_digests, "linux/amd64": other})
    ):  # fmt: skip
        pins = Pins(pins=(forged,))
        assert [other in words for words in check_claims(claimed, pins)] == [True]
        for accepted in ((), (NGC,)):  # nobody's word can be accepted while no registry answers
            one = pin(claimed, pins, variables, *accepted)[NGC]
            assert (one.line.news, "is not what the matrix claims" in one.refusal) == (PinNews.CHANGED, True)


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
    with pytest.raises(PinsDamaged, match=r"no file of pins.*Next step"):
        read_pins(tmp_path / "pins.json")
    assert read_pins(tmp_path / "none.json") == Pins()


def test_a_day_of_verification_needs_what_the_registry_gave(
    images: Images, bases: dict[str, FakeRegistry], variables: dict[str, str], tmp_path: Path
) -> None:
    good = pin(images, Pins(), variables)[NGC].pin
    other, file = "sha256:" + "0" * 64, tmp_path / "pins.json"
    image = good.platform_digests["linux/amd64"]
    single = (bases[NGC].folder / "manifests" / image).read_text()
    file.write_text(render_pins((good,)))
    assert read_pins(file, date(2026, 11, 21)).pins == (good,)
    for forged, says in (
        (change(good, document=""), "does not show what the registry gave"),
        (change(good, document="{}"), "does not show what the registry gave"),
        (change(good, index_digest=other), "hashes to sha256:"),
        (change(good, index_digest=other, document=single), "hashes to sha256:"),
        (change(good, document=good.document + " "), "hashes to sha256:"),
        (change(good, platform_digests={**good.platform_digests, "linux/arm64": other}), "image for linux/arm64"),
        (change(good, platform_digests={}), "another image for every platform"),
        (change(good, verified="2026-11-24"), "that day has not come yet"),
        (change(good, verified="2026-11-31"), "there is no such day"),
    ):
        file.write_text(render_pins((forged,)))
        with pytest.raises(PinsDamaged, match=says):
            read_pins(file, date(2026, 11, 22))
    file.write_text(render_pins((good, good)))
    with pytest.raises(PinsDamaged, match=f"the base {NGC} is there 2 times"):
        read_pins(file)
