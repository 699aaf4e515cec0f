"""The ELF reader against real libraries, and against files that are damaged."""

from __future__ import annotations

import ctypes
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacpp_validate.canary.firewall.damage import rename
from megacpp_validate.probes.doctor_elf import Elf, NotReadable

LIBRARIES = Path(torch.__file__).parent / "lib"
C10 = LIBRARIES / "libc10.so"
EXTENSION = LIBRARIES / "libaoti_custom_ops.so"  # a small one that builds on torch
NAMES = (
    "_ZN3c106Device8validateEv",
    "_ZNK3c105Error4whatEv",
    "_ZTVN3c1010TensorImplE",
    "_ZN3c109no_such_Ev",
    "malloc",
    "",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library", ["libc10.so", "libtorch_cpu.so"])
def test_defines_what_the_loader_finds_in_it(library: str, name: str) -> None:
    handle = ctypes.CDLL(str(LIBRARIES / library))
    with Elf(LIBRARIES / library) as elf:
        if elf.defines(name):
            assert getattr(handle, name) is not None
        else:  # the loader looks into what it needs, too
            needed = [LIBRARIES / one for one in elf.needed if (LIBRARIES / one).is_file()]
            elsewhere = any(Elf(one).defines(name) for one in needed)
            assert elsewhere or name in ("malloc", "") or not hasattr(handle, name)


def test_an_extension_of_torch_finds_all_it_wants() -> None:
    with Elf(EXTENSION) as elf:
        assert {"libtorch.so", "libc10.so"} <= set(elf.needed)
        of_torch = [symbol for symbol in elf.wants() if symbol.name.startswith(("_ZN3c10", "_ZNK3c10", "_ZN2at"))]
        homes = [Elf(file) for file in LIBRARIES.glob("lib*.so")]
        assert len(of_torch) > 20
        assert not [symbol for symbol in of_torch if not any(home.defines(symbol.name) for home in homes)]
        assert {symbol.source for symbol in elf.wants()} >= {"libstdc++.so.6", "libc.so.6"}


def test_a_renamed_symbol_is_wanted_under_its_new_name(tmp_path: Path) -> None:
    copy = tmp_path / "lib.so"
    copy.write_bytes(EXTENSION.read_bytes())
    old, new = rename(copy, r"_ZN3c10\w+", "Q")
    with Elf(copy) as elf:
        names = {symbol.name for symbol in elf.wants()}
    assert new in names
    assert old not in names
    assert not Elf(C10).defines(new)


def test_a_library_bound_at_once_has_no_lazy_symbol() -> None:
    """torch's own `_C` module asks for it or not; whichever, the old and the new way of asking agree with the flags."""
    for file in (EXTENSION, C10):
        with Elf(file) as elf:
            flags = (elf._tags.get(24), elf._tags.get(30, [0])[0] & 8, elf._tags.get(0x6FFFFFFB, [0])[0] & 1)
            assert any(symbol.lazy for symbol in elf.wants()) == (not any(flags))


def test_the_search_path_starts_where_the_file_lies() -> None:
    with Elf(EXTENSION) as elf:
        assert LIBRARIES in elf.search


@pytest.mark.parametrize(
    "image", [b"", b"\x7fELF", b"not a library", b"\x7fELF\x01\x01" + bytes(200), b"\x7fELF\x02\x01" + bytes(200)]
)
def test_what_is_no_library_is_said_so(tmp_path: Path, image: bytes) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(image)
    with pytest.raises(NotReadable), Elf(file) as elf:
        list(elf.wants())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cut=st.integers(64, 20_000), places=st.lists(st.integers(16, 6000), max_size=6), value=st.integers(0, 255))
def test_a_damaged_library_never_does_worse_than_to_be_unreadable(cut: int, places: list[int], value: int) -> None:
    image = bytearray(_SMALL[:cut])
    for place in places:
        if place < len(image):
            image[place] = value
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(image)
        file.flush()
        with suppress(NotReadable), Elf(Path(file.name)) as elf:
            list(elf.wants())
            elf.defines("_ZN3c105ErrorD1Ev")
            _ = elf.needed, elf.search, elf.soname


_SMALL = (LIBRARIES / "libshm.so").read_bytes()
