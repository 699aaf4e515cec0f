"""One file of the matrix: read in any usual encoding, refused as a whole, with every fault at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from megacpp_validate.catalog.file import Names, RequirementText, Row, VersionRange, read_rows
from tests.catalog.refusals import faults_of


class Part(Row):
    id: str
    size: int = 0
    on: Annotated[list[str], Names("part")] = Field(default_factory=list)
    needs: VersionRange = ""
    beside: RequirementText = ""


class Parts(Row):
    part: list[Part] = Field(min_length=1)


def read(folder: Path, text: str | bytes) -> Parts:
    (folder / "f.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_file(folder, "f.toml")


def read_file(folder: Path, name: str) -> Parts:
    (file,) = read_rows(folder, {name: Parts})
    assert isinstance(file, Parts)
    return file


GOOD = '[[part]]\nid = "one"\n[[part]]\nid = "two"\non = ["one"]\n'
WRONG = {
    "no toml": ("[[part]", ["f.toml: cannot be read"]),
    "no text": (b"\xff\xfe\x00", ["f.toml: cannot be read"]),
    "no rows": ("part = []\n", ["f.toml: part: "]),
    "no list": ('part = "one"\n', ["f.toml: part: "]),
    "unknown table": (GOOD + "[[prat]]\n", ["prat"]),
    "unknown key": (GOOD + "colour = 1\n", ["part.1.colour (two)"]),
    "no id": (GOOD + "[[part]]\n", ["part.2.id"]),
    "a double": (GOOD.replace("two", "one"), ["part 'one' appears 2 times"]),
    "a dangling name": (GOOD.replace('["one"]', '["own"]'), ["part.1.on (two)"]),
    "no range": (GOOD + 'needs = "2 or so"\n', ["part.1.needs (two)", "'2 or so'"]),
    "no requirement": (GOOD + 'beside = "cuda 13"\n', ["part.1.beside (two)", "cuda 13"]),
    "all of one kind": (GOOD + 'size = "big"\n[[part]]\non = "two"\n', ["part.1.size (two)", "part.2.on", "part.2.id"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_every_fault(name: str, tmp_path: Path) -> None:
    text, says = WRONG[name]
    faults = faults_of(lambda: read(tmp_path, text))
    assert all(any(words in fault for fault in faults) for words in says)
    assert all(fault.startswith("f.toml: ") for fault in faults)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    for name in ("none.toml", "folder.toml"):
        (fault,) = faults_of(lambda name=name: read_file(tmp_path, name))  # type: ignore[misc]
        assert fault.startswith(f"{name}: cannot be read")


def test_a_file_of_another_system_is_read(tmp_path: Path) -> None:
    for data in (b"\xef\xbb\xbf" + GOOD.encode(), GOOD.replace("\n", "\r\n").encode()):
        assert read(tmp_path, data) == read(tmp_path, GOOD)
