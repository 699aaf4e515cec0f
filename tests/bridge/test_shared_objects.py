"""A library that is cut short is seen before it is loaded: to load it would end the process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megacpp_validate.bridge.shared_objects import find_cut_short, read_header
from tests.bridge.small_elf import elf


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "vendor_x"
    (made / "wheel_lib").mkdir(parents=True)
    (made / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return made


def test_a_header_says_machine_width_and_what_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(elf(machine=183, loaded=4096))
    header = read_header(tmp_path / "a.so")
    assert header is not None
    assert (header.machine, header.bits, header.needs) == ("aarch64", 64, 4096)


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"version https://git-lfs", elf(loaded=200)[:64], b"\x7fELF" + b"\xff" * 90]
)
def test_what_is_no_library_has_no_header_or_promises_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.so").write_bytes(data)
    header = read_header(tmp_path / "a.so")
    assert header is None or header.needs == 0
    assert read_header(tmp_path) is None
    assert read_header(tmp_path / "nothing.so") is None


@pytest.mark.parametrize("place", ["libvendor_x.so", "wheel_lib/libvendor_x.so", "../vendor_x_torch.cpython-312.so"])
def test_one_that_is_cut_short_is_named(package: Path, place: str) -> None:
    whole = package / "whole.so"
    whole.write_bytes(elf(loaded=4096))
    (package / "libvendor_x.so.debug").write_bytes(elf(loaded=4096, size=2048))  # what a build strips off
    assert find_cut_short("vendor_x") == ""
    (package / place).write_bytes(elf(loaded=4096, size=2048))
    assert Path(place).name in find_cut_short("vendor_x")
    assert "file too short: 2048 bytes of the 4096" in find_cut_short("vendor_x")


def test_a_copy_that_is_not_imported_is_not_looked_at(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "a.so").write_bytes(elf(loaded=4096, size=2048))
    first = tmp_path / "first" / "vendor_x"
    first.mkdir(parents=True)
    (first / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(first.parent), str(tmp_path), "/nonexistent"])
    assert find_cut_short("vendor_x") == ""


def test_libraries_that_are_in_use_here_are_whole() -> None:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    for file in map(Path, mapped):
        header = read_header(file)
        assert header is None or header.needs <= file.stat().st_size
