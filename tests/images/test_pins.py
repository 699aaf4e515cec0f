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
    find_digests,
    pin_bases,
    read_pins,
)
from megacpp_validate.images.tools import ImageRefused, RegistryLies
from tests.images.fake_tools import FakeRegistry, digest_of, install

TODAY, NGC, TAG = "2026-11-22", "ngc-26.07", "26.07-py3"
HOST = "mirror.invalid"
Bases = dict[str, FakeRegistry]


@pytest.fixture(scope="module")
def claimed(catalog: Catalog) -> Images:
    return read_images({target.id: target.machine for target in catalog.targets})


@pytest.fixture(scope="module")
def images(claimed: Images) -> Images:
    """Those of the matrix, without claims."""
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


def pin(images: Images, pins: Pins, variables: dict[str, str], *accepted: str) -> tuple[Pins, dict[str, PinLine]]:
    kept, lines = pin_bases(images, pins, TODAY, frozenset(accepted), variables)
    return kept, {line.base: line for line in lines}


def find(pins: Pins, base: str = NGC) -> Pin:
    return next(one for one in pins.pins if one.base == base)


def news(lines: dict[str, PinLine]) -> set[PinNews]:
    return {line.news for line in lines.values()}


def test_what_a_registry_answers_is_dated(images: Images, bases: Bases, variables: dict[str, str]) -> None:
    made, lines = pin(images, Pins(), variables)
    assert news(lines) == {PinNews.VERIFIED}
    digest = digest_of((bases[NGC].folder / "manifests" / TAG).read_bytes())
    assert (find(made).index_digest, find(made).verified) == (digest, TODAY)
    known = find_digests(images, images.find_base(NGC), made)
    assert (set(known.digests), known.get("linux/arm64")) == ({"", "linux/amd64", "linux/arm64"}, digest)
    assert HOST not in made.render()  # the file does not name the mirror
    assert pin(images, made, variables)[0] == made


def test_a_registry_that_is_down_changes_nothing(
    images: Images, claimed: Images, bases: Bases, variables: dict[str, str]
) -> None:
    before, _ = pin(images, Pins(), variables)
    Path(variables["FAKE_REGISTRY"], "down").touch()
    for tools in (variables, {**variables, "MEGACPP_DOCKER": "/nowhere", "PATH": "/nowhere"}):
        kept, lines = pin(images, before, tools)
        assert (news(lines), kept) == ({PinNews.KEPT}, before)  # the day of the verification too
        assert news(pin(claimed, Pins(), tools)[1]) == {PinNews.CLAIMED}
        assert news(pin(images, Pins(), tools)[1]) == {PinNews.MISSING}
    assert "connection refused" in pin(images, before, variables)[1][NGC].how


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        (None, ImageRefused, r"has no mirror.invalid/nvidia/pytorch:26\.07-py3"),
        (b"<html>please log in</html>", RegistryLies, "login page"),
        ({"schemaVersion": 2, "config": {}}, RegistryLies, "one platform"),
        ({"schemaVersion": 2, "manifests": []}, ImageRefused, "has no image for linux/amd64"),
    ],
)
def test_a_registry_that_lies(
    images: Images, bases: Bases, variables: dict[str, str], body: Any, kind: type[Exception], says: str
) -> None:
    (bases[NGC].folder / "manifests" / TAG).unlink()
    if body is not None:
        bases[NGC].put_manifest(body, TAG)
    with pytest.raises(kind, match=says):
        pin(images, Pins(), variables)


def test_the_pins_that_are_committed(claimed: Images) -> None:
    file = matrix_folder().parent / "containers" / "pins.json"
    pins = read_pins(file)
    assert file.read_text() == pins.render(), "containers/pins.json was edited by hand: run nox -s lock"
    assert {line.news for line in check_pins(claimed, pins)} == {PinNews.CLAIMED}


@pytest.mark.parametrize(
    "text",
    ["not json", '{"generated_by": "x", "pins": [{"base": "b"}]}'],
)  # fmt: skip
def test_a_file_that_was_edited_by_hand(tmp_path: Path, text: str) -> None:
    (tmp_path / "pins.json").write_text(text)
    with pytest.raises(PinsDamaged, match=r"not a valid file of pins.*Next step"):
        read_pins(tmp_path / "pins.json")
    assert read_pins(tmp_path / "none.json") == Pins()


@pytest.mark.parametrize(
    "change", [{"document": ""}, {"document": "{}"}, {"index_digest": "sha256:" + "0" * 64}, {"verified": ""}]
)
def test_a_digest_needs_what_the_registry_gave(
    images: Images, bases: Bases, variables: dict[str, str], tmp_path: Path, change: dict[str, str]
) -> None:
    good, file = find(pin(images, Pins(), variables)[0]), tmp_path / "pins.json"
    file.write_text(Pins(pins=(good,)).render())
    assert read_pins(file).pins == (good,)
    file.write_text(Pins(pins=(good.model_copy(update=change),)).render())
    with pytest.raises(PinsDamaged):
        read_pins(file)
