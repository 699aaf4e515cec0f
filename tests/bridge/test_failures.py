"""Facts of a failed import: bounded, printable, as JSON; a library that is cut short is found before the import."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megacpp_validate.bridge.vendor import (
    Install,
    bytes_needed,
    find_cut_short,
    look_for_te,
    read_failure,
    text_of,
)
from tests.bridge.small_elf import elf


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "vendor_x"
    (made / "wheel_lib").mkdir(parents=True)
    (made / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return made


@pytest.mark.parametrize("place", ["libvendor_x.so", "wheel_lib/libvendor_x.so", "../vendor_x_torch.cpython-312.so"])
def test_one_that_is_cut_short_is_named(package: Path, place: str) -> None:
    (package / "whole.so").write_bytes(elf(machine=183, loaded=4096))
    (package / "later.so").write_bytes(elf(loaded=4096, offset=512))
    assert [bytes_needed(package / name) for name in ("whole.so", "later.so")] == [4096, 4608]
    (package / "later.so").unlink()
    (package / "libvendor_x.so.debug").write_bytes(elf(loaded=4096, size=2048))  # what a build strips off
    assert find_cut_short("vendor_x") == ""
    (package / place).write_bytes(elf(loaded=4096, size=2048))
    assert Path(place).name in find_cut_short("vendor_x")
    assert "file too short: 2048 bytes of the 4096" in find_cut_short("vendor_x")


class Odd(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (ValueError(), "no text"),
        (ValueError("two\nlines\tand a tab"), "two lines and a tab"),
        (ValueError("\x1b[31mred \udc80 \x00"), "\\x1b[31mred \\udc80 \\x00"),
        (Odd(), "its text cannot be made"),
    ],
)
def test_it_is_one_line_that_any_stream_takes(fault: BaseException, text: str) -> None:
    assert text_of(fault) == text
    text_of(fault).encode("ascii")


def test_the_facts_are_json_with_what_rules_ask_for() -> None:
    try:
        raise AttributeError("no x", name="x", obj=json)
    except AttributeError as fault:
        other = PermissionError(13, "Permission denied", "/s/x.py")
        fault.__cause__ = other
        facts = json.loads(json.dumps(read_failure(fault)))
    first, second = facts["raised"]
    assert (first["kinds"][0], first["name"], first["owner"], first["file"]) == (
        "AttributeError",
        "x",
        "json",
        json.__file__,
    )
    assert second["kinds"][:2] == ["PermissionError", "OSError"]
    assert (second["number"], second["file"]) == (13, "/s/x.py")
    assert facts["handled"] == []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of distributions, in which Transformer Engine has its sources."""
    (tmp_path / "transformer_engine" / "wheel_lib").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def write(site: Path, name: str, data: bytes = b"") -> None:
    folder = site / f"{name}-2.20.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(data or f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.20.2\n".encode())


def test_parts_copies_and_libraries_are_found(site: Path) -> None:
    for name in ("transformer_engine", "transformer_engine_cu13", "transformer_engine_torch"):
        write(site, name)
    package = site / "transformer_engine"
    for name in ("libtransformer_engine.so", "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so"):
        (package / "wheel_lib" / name).touch()
    whole = dict.fromkeys(("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"), "2.20.2")
    install = look_for_te()
    assert install == Install(whole, (str(package),), True, True, has_record=False)
    assert str(package) in install.describe()


def test_metadata_that_cannot_be_read_is_told_apart(site: Path) -> None:
    write(site, "transformer_engine", b"\xff\xfe\x00")
    write(site, "transformer_engine_torch")
    assert look_for_te().unreadable == ("transformer-engine",)
    assert "metadata cannot be read" in look_for_te().describe()
