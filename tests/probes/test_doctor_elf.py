"""Compiled files against the libraries that are there: real ones, damaged ones, and renamed symbols."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from megacpp_validate.canary.firewall.damage import rename
from megacpp_validate.probes.doctor_elf import NotReadable, find_compiled, group_cuda, look_at, read_elf
from megacpp_validate.probes.fingerprint import read_mapped

LIBRARIES = Path(torch.__file__).parent / "lib"
C10 = LIBRARIES / "libc10.so"
EXTENSION = LIBRARIES / "libaoti_custom_ops.so"  # a small one that builds on torch
SMALL = (LIBRARIES / "libshm.so").read_bytes()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy that still finds torch's libraries, because they are mapped here."""
    return Path(shutil.copy(EXTENSION, tmp_path / "_C.so"))


@pytest.mark.parametrize("name", ["_ZN3c106Device8validateEv", "_ZNK3c105Error4whatEv", "_ZN3c109no_such_Ev"])
def test_defines_what_the_loader_finds_in_it(name: str) -> None:
    assert read_elf(C10).defines(name) is hasattr(ctypes.CDLL(str(C10)), name)


def test_an_extension_of_torch_finds_all_it_wants() -> None:
    elf = read_elf(EXTENSION)
    homes = [read_elf(file) for file in LIBRARIES.glob("lib*.so")]
    of_torch = [symbol.name for symbol in elf.wants if symbol.name.startswith(("_ZN3c10", "_ZNK3c10", "_ZN2at"))]
    assert len(of_torch) > 20
    assert all(any(home.defines(name) for home in homes) for name in of_torch)
    assert {"libtorch.so", "libc10.so"} <= set(elf.needed)
    assert {symbol.source for symbol in elf.wants} >= {"libstdc++.so.6", "libc.so.6"}
    assert LIBRARIES in elf.search


@pytest.mark.parametrize(
    "image", [b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(200), b"\x7fELF\x02\x01" + bytes(200), SMALL[:3000]]
)
def test_what_is_no_library_is_not_readable(tmp_path: Path, image: bytes) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(image)
    with pytest.raises(NotReadable):
        read_elf(file)
    assert look_at(file, read_mapped()).problem


def test_a_file_as_it_was_shipped_wants_nothing(copy: Path) -> None:
    look = look_at(copy, read_mapped())
    assert (look.problem, look.not_found, look.wanted, look.loaded) == ("", (), (), False)


def test_a_symbol_that_this_torch_does_not_have_is_reported(copy: Path) -> None:
    old, new = rename(copy, r"_ZN3c10\w+", "Q")
    (wanted,) = look_at(copy, read_mapped()).wanted
    assert wanted.symbol == new
    assert wanted.lazy is any(symbol.lazy for symbol in read_elf(EXTENSION).wants)
    assert old not in {symbol.name for symbol in read_elf(copy).wants}


def test_a_library_that_is_nowhere_is_reported_and_its_symbols_are_not(copy: Path) -> None:
    _, new = rename(copy, r"libtorch(?:_cpu)?\.so", "99")
    look = look_at(copy, ())
    assert new in look.not_found
    assert look.wanted == ()


def test_what_a_neighbour_in_its_package_defines_is_there(copy: Path) -> None:
    """Transformer Engine's torch extension names no core library: that is loaded before it, or nothing is."""
    neighbour = Path(shutil.copy(C10, copy.with_name("libneighbour.so")))
    mapped = [file for file in read_mapped() if file.name != "libc10.so"]
    assert look_at(copy, mapped).not_found == ("libc10.so",)
    look = look_at(copy, mapped, [neighbour])
    assert (look.not_found, look.wanted) == ((), ())


@pytest.mark.parametrize(
    ("name", "tag"),
    [("_C.cpython-312-x86_64-linux-gnu.so", "cpython-312-x86_64-linux-gnu"), ("_C.abi3.so", "abi3"), ("_C.so", ""),
     ("libfoo.12.so", "")],
)  # fmt: skip
def test_the_python_of_a_file_is_read_off_its_name(copy: Path, name: str, tag: str) -> None:
    assert look_at(copy.rename(copy.with_name(name)), ()).tag == tag


def test_compiled_files_and_libraries_are_found_with_their_versions(tmp_path: Path) -> None:
    for name in ("a.so", "deep/b.so.12", "c.so.txt", "d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert [file.name for file in find_compiled([tmp_path])] == ["a.so", "b.so.12"]
    files = ["/a/libcudnn.so.9", "/b/libcudnn.so.9.14.0", "/b/libcudnn_graph.so.9", "/c/libfoo.so"]
    assert group_cuda(map(Path, files)) == {
        "libcudnn": ("/a/libcudnn.so.9", "/b/libcudnn.so.9.14.0"), "libcudnn_graph": ("/b/libcudnn_graph.so.9",),
    }  # fmt: skip
