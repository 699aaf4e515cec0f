"""Pins: a registry's word becomes one, what changed under a tag is refused, and who is down takes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from megacpp_validate.catalog.images import Images, read_images
from megacpp_validate.images.claims import check_claims
from megacpp_validate.images.lock_result import PinNews
from megacpp_validate.images.pinning import Pinned, check_pins, pin_bases
from megacpp_validate.images.pins import Pin, Pins, read_pins, render_pins
from megacpp_validate.images.refusals import ImageRefused, PinsDamaged
from megacpp_validate.images.registry import RegistryClient
from tests.images.lying_registry import LyingRegistry, digest_of, serve

TODAY = "2026-11-22"
NGC = "ngc-26.07"


@pytest.fixture(scope="module")
def images(catalog: Catalog) -> Images:
    """Those of the matrix, of whose bases nobody has said anything yet."""
    return read_images({target.id: target.machine for target in catalog.targets}).model_copy(update={"claim": []})


@pytest.fixture(scope="module")
def claimed(catalog: Catalog) -> Images:
    return read_images({target.id: target.machine for target in catalog.targets})


@pytest.fixture
def registry(images: Images) -> Iterator[LyingRegistry]:
    """A mirror that has every base of the matrix, under its tag."""
    with serve(LyingRegistry()) as one:
        for base in images.base:
            one.put_index(base.tag)
        yield one


def pin(images: Images, registry: LyingRegistry, pins: Pins, *accepted: str) -> dict[str, Pinned]:
    made = pin_bases(images, pins, RegistryClient({}), TODAY, frozenset(accepted), registry.host)
    return {one.line.base: one for one in made}


def as_pins(made: dict[str, Pinned]) -> Pins:
    return Pins(tuple(one.pin for one in made.values()))


def test_a_registry_s_word_is_dated(images: Images, registry: LyingRegistry) -> None:
    made = pin(images, registry, Pins())
    assert {one.line.news for one in made.values()} == {PinNews.NEW}
    ngc = made[NGC].pin
    assert ngc.index_digest == digest_of(registry.manifests["26.07-py3"])
    assert set(ngc.platform_digests) == {"linux/amd64", "linux/arm64"}
    assert ngc.verified == TODAY
    assert registry.host not in render_pins((ngc,))  # a mirror's name is nobody else's business
    assert "a mirror of nvcr.io" in ngc.how
    again = pin(images, registry, as_pins(made))
    assert {one.line.news for one in again.values()} == {PinNews.SAME}


@pytest.mark.parametrize("verified", [TODAY, ""])
def test_a_tag_that_moved_is_refused_with_both_digests(images: Images, registry: LyingRegistry, verified: str) -> None:
    before = pin(images, registry, Pins())
    old = replace(before[NGC].pin, verified=verified, source="#1")
    new, _ = registry.put_index("26.07-py3", salt="pushed again")
    one = pin(images, registry, Pins((old, before["debian-bookworm"].pin)))[NGC]
    assert one.line.news is PinNews.CHANGED
    assert old.index_digest in one.refusal
    assert new in one.refusal
    assert "--accept 26.07-py3" in one.refusal
    assert one.pin == old  # what would be written, if it were, is what was there
    taken = pin(images, registry, Pins((old,)), "26.07-py3")[NGC]
    assert (taken.line.news, taken.refusal, taken.pin.index_digest) == (PinNews.ACCEPTED, "", new)


def test_one_platform_that_moved_alone_is_seen(images: Images, registry: LyingRegistry) -> None:
    before = pin(images, registry, Pins())[NGC].pin
    planted = {**before.platform_digests, "linux/arm64": "sha256:" + "0" * 64}
    one = pin(images, registry, Pins((replace(before, platform_digests=planted),)))[NGC]
    assert "linux/arm64 sha256:000" in one.refusal


def test_an_index_where_one_image_was_pinned_is_another_image(images: Images, registry: LyingRegistry) -> None:
    old = Pin(NGC, "nvcr.io/nvidia/pytorch", "26.07-py3", "", {"linux/s390x": "sha256:" + "1" * 64}, TODAY)
    assert "another image now" in pin(images, registry, Pins((old,)))[NGC].refusal


def test_another_tag_of_the_matrix_is_no_change_under_a_tag(images: Images, registry: LyingRegistry) -> None:
    old = Pin(NGC, "nvcr.io/nvidia/pytorch", "26.06-py3", "sha256:" + "1" * 64, {}, TODAY)
    one = pin(images, registry, Pins((old,)))[NGC]
    assert (one.line.news, one.refusal) == (PinNews.NEW, "")


def test_who_is_down_takes_nothing(images: Images, registry: LyingRegistry) -> None:
    before = as_pins(pin(images, registry, Pins()))
    registry.code = 503
    kept = pin(images, registry, before)
    assert {one.line.news for one in kept.values()} == {PinNews.KEPT}
    assert as_pins(kept).pins == before.pins  # the day of the verification too
    assert all("HTTP 503" in one.line.silence for one in kept.values())  # and what happened this time is said
    unverified = Pins(tuple(replace(one, verified="", how="as others say", document="") for one in before.pins))
    assert as_pins(pin(images, registry, unverified)).pins == unverified.pins  # nor is it written anew every time


def test_a_mirror_that_has_some_of_it(images: Images, registry: LyingRegistry) -> None:
    before = as_pins(pin(images, registry, Pins()))
    del registry.manifests["26.07-py3"]
    made = pin(images, registry, before)
    assert [one.line.news for one in made.values()] == [PinNews.KEPT, PinNews.SAME]
    ours = images.model_copy(
        update={"base": [row.model_copy(update={"repository": f"{registry.host}/base"}) for row in images.base]}
    )
    with pytest.raises(ImageRefused, match=r"has no base/26\.07-py3.*withdrawn"):  # its own registry must have it
        pin_bases(ours, Pins(), RegistryClient({}), TODAY, frozenset(), "")


def test_what_others_say_is_taken_as_that(images: Images, claimed: Images, registry: LyingRegistry) -> None:
    registry.code = 503
    made = pin(claimed, registry, Pins())
    ngc = made[NGC].pin
    assert made[NGC].line.news is PinNews.CLAIMED
    assert (ngc.verified, ngc.digest_for("linux/arm64")) == ("", claimed.claim[0].digest)
    assert "did not answer" in ngc.how
    assert "#60579478594" in ngc.source
    assert pin(images, registry, Pins())[NGC].line.news is PinNews.MISSING


def test_what_a_registry_says_against_what_others_say(claimed: Images, registry: LyingRegistry) -> None:
    one = pin(claimed, registry, Pins())[NGC]
    assert one.line.news is PinNews.CHANGED
    assert claimed.claim[0].digest in one.refusal
    assert "is what others say (#60579478594" in one.refusal
    assert pin(claimed, registry, Pins(), NGC)[NGC].line.news is PinNews.ACCEPTED


def test_a_forged_pin_does_not_beat_the_claim(claimed: Images, registry: LyingRegistry) -> None:
    registry.code = 503
    good = as_pins(pin(claimed, registry, Pins()))
    assert check_claims(claimed, good) == ()
    ngc = good.find(NGC)
    assert ngc is not None
    other = "sha256:" + "f" * 64
    more = {**ngc.platform_digests, "linux/amd64": other}
    for forged in (replace(ngc, index_digest=other), replace(ngc, platform_digests=more)):
        pins = Pins((forged,))
        assert [NGC in words and other in words for words in check_claims(claimed, pins)] == [True]
        for accepted in ((), (NGC,)):  # nobody's word can be accepted while no registry answers
            one = pin(claimed, registry, pins, *accepted)[NGC]
            assert one.line.news is PinNews.CHANGED
            assert "is not what the matrix claims" in one.refusal
        assert check_claims(claimed, Pins((replace(forged, verified=TODAY),))) == ()
    registry.code = 0
    assert pin(claimed, registry, pins, NGC)[NGC].line.news is PinNews.ACCEPTED


def test_the_pins_that_are_committed(claimed: Images) -> None:
    file = matrix_folder().parent / "containers" / "pins.json"
    pins = read_pins(file)
    assert file.read_text() == render_pins(pins.pins), "containers/pins.json was edited by hand: run nox -s lock"
    assert {line.news for line in check_pins(claimed, pins)} == {PinNews.KEPT}
    assert {line.news for line in check_pins(claimed, Pins(pins.pins[1:]))} == {PinNews.KEPT, PinNews.MISSING}
    # A digest of which nothing says when it was verified is claimed, and says by whom.
    assert all(one.verified or (one.source and one.how) for one in pins.pins)


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "not json",
        '{"generated_by": "x", "pins": [], "pins": []}',
        '{"generated_by": "x", "pins": [{"base": "b", "tag": "t"}]}',
        '{"generated_by": "x", "pins": [{"base": "b", "repository": "r", "tag": "t", "index_digest": "sha256:12", '
        '"platform_digests": {}, "verified": "", "how": "", "source": ""}]}',
    ],
)
def test_a_file_that_was_edited_by_hand(tmp_path: Path, text: str) -> None:
    (tmp_path / "pins.json").write_text(text)
    with pytest.raises(ImageRefused, match=r"no file of pins.*Next step"):
        read_pins(tmp_path / "pins.json")
    assert read_pins(tmp_path / "none.json") == Pins()


def test_a_day_of_verification_needs_what_the_registry_gave(
    images: Images, registry: LyingRegistry, tmp_path: Path
) -> None:
    """A digest and a day can be typed in; what hashes to the digest, and names its platforms, comes from a registry."""
    good = pin(images, registry, Pins())[NGC].pin
    other, file = "sha256:" + "0" * 64, tmp_path / "pins.json"
    single = registry.manifests[registry.put_image("one")].decode()
    file.write_text(render_pins((good,)))
    assert read_pins(file, date(2026, 11, 21)).pins == (good,)
    for forged, says in (
        (replace(good, document=""), "does not show what the registry gave"),
        (replace(good, document="{}"), "does not show what the registry gave"),
        (replace(good, index_digest=other), "hashes to sha256:"),
        (replace(good, index_digest=other, document=single), "hashes to sha256:"),
        (replace(good, document=good.document + " "), "hashes to sha256:"),
        (replace(good, platform_digests={**good.platform_digests, "linux/arm64": other}), "image for linux/arm64"),
        (replace(good, platform_digests={}), "another image for every platform"),
        (replace(good, verified="2026-11-24"), "that day has not come yet"),
        (replace(good, verified="2026-11-31"), "there is no such day"),
    ):  # fmt: skip
        file.write_text(render_pins((forged,)))
        with pytest.raises(PinsDamaged, match=says):
            read_pins(file, date(2026, 11, 22))
    file.write_text(render_pins((good, good)))
    with pytest.raises(PinsDamaged, match=f"the base {NGC} is there 2 times"):
        read_pins(file)


def test_every_fault_of_a_file_is_named_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "pins.json"
    file.write_text('{"generated_by": "x", "pins": [{"base": "b", "platform_digests": {"linux/arm64": ""}}]}')
    with pytest.raises(PinsDamaged) as fault:
        read_pins(file)
    assert "pins.0.repository: Field required" in str(fault.value)
