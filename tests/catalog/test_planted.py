"""Faults for copies of Transformer Engine: read strictly, fitting the real sources, and seen by checks that exist."""

from __future__ import annotations

import ast
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import PACKAGE_ROOT, Catalog
from megacpp_validate.catalog.planted import (
    FP8_FILE,
    FP8_HELD_OUT,
    Edit,
    EditDoesNotFit,
    PlantedFault,
    TeFault,
    read_fp8_faults,
    read_te_faults,
)
from megacpp_validate.catalog.planted import TE_FILE as FILE
from megacpp_validate.evidence.values import Cause
from tests.catalog.refusals import faults_of

ROW = """
[[fault]]
id = "one"
module = "attention"
cause = "numerics"
releases = ["2.20.2"]
says = "It is wrong."
[[fault.edit]]
file = "pytorch/a.py"
old = "x"
new = "y"
"""
WRONG = {
    "unknown key": (ROW + 'colour = "red"\n', "Extra inputs"),
    "unknown module": (ROW.replace('"attention"', '"atention"'), "module names 'atention'"),
    "unknown cause": (ROW.replace('"numerics"', '"luck"'), "cause"),
    "no release": (ROW.replace('["2.20.2"]', "[]"), "releases"),
    "twice": (ROW + ROW, "appears 2 times"),
    "outside of the copy": (ROW.replace("pytorch/a.py", "../../evil.py"), "file"),
    "moved outside": (ROW.replace('old = "x"\nnew = "y"\n', 'rename = "../a.py"\n'), "rename"),
    "no text": ("[[fault]", "cannot be read"),
}


FP8_ROW = """
[[fault]]
id = "one"
releases = ["2.20.2"]
says = "It is wrong."
cells = ["fp8_delayed"]
checks = ["*.scale"]
green = "fp8_current"
[[fault.edit]]
file = "pytorch/a.py"
old = "x"
new = "y"
"""
CELLS = ("fp8_delayed", "fp8_current")
FP8_WRONG = {
    "unknown key": (FP8_ROW + 'colour = "red"\n', "Extra inputs"),
    "unknown cell": (FP8_ROW.replace('["fp8_delayed"]', '["fp8_dilated"]'), "cells names 'fp8_dilated'"),
    "unknown green": (FP8_ROW.replace('"fp8_current"', '"green"'), "green names 'green'"),
    "no check": (FP8_ROW.replace('["*.scale"]', "[]"), "checks"),
    "no cell": (FP8_ROW.replace('["fp8_delayed"]', "[]"), "cells"),
    "twice": (FP8_ROW + FP8_ROW, "appears 2 times"),
}


@pytest.fixture(scope="module")
def faults(catalog: Catalog) -> tuple[TeFault, ...]:
    return read_te_faults(module.id for module in catalog.modules)


@pytest.mark.parametrize("name", [*WRONG, *FP8_WRONG])
def test_a_wrong_row_is_refused_and_named(name: str, tmp_path: Path) -> None:
    for file, rows, read in (
        (FILE, WRONG, lambda: read_te_faults(["attention"], tmp_path)),
        (FP8_FILE, FP8_WRONG, lambda: read_fp8_faults(CELLS, tmp_path)),
    ):
        if name in rows:
            (tmp_path / file).write_text(rows[name][0])
            assert any(fault.startswith(f"{file}: ") and rows[name][1] in fault for fault in faults_of(read))


def test_a_right_row_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(ROW)
    (row,) = read_te_faults(["attention"], tmp_path)
    assert row.names == {"attention"}
    assert row.causes == {Cause.NUMERICS}
    assert row.edits_for("2.20.2") == tuple(row.edit)


def test_an_edit_wants_its_text_once() -> None:
    edit = Edit(file="a.py", old="x = 1\n", new="x = 2\n")
    assert edit.change("x = 1\ny\n") == "x = 2\ny\n"
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(EditDoesNotFit, match="Next step"):
            edit.change(text)


def test_every_module_has_five_faults_and_every_class_is_there(faults: tuple[TeFault, ...], catalog: Catalog) -> None:
    count = Counter(fault.module for fault in faults if "2.20.2" in fault.releases)
    assert set(count) == {module.id for module in catalog.modules}
    assert min(count.values()) >= 5
    # What lies between modules is nobody's: it is planted in the smoke run (matrix/smoke_faults.toml).
    assert {fault.cause for fault in faults} == set(Cause) - {Cause.BOUNDARY}
    timed = {fault.id for fault in faults if fault.times}
    # Two of this class are seen without a clock: one never ends, and one keeps memory.
    untimed = {"held-expert-backward-hangs", "held-expert-activations-kept"}
    assert timed == {fault.id for fault in faults if fault.cause is Cause.PERFORMANCE} - untimed


def test_a_right_row_of_fp8_is_read(tmp_path: Path) -> None:
    (tmp_path / FP8_HELD_OUT).write_text(FP8_ROW)
    (row,) = read_fp8_faults(CELLS, tmp_path, held_out=True)
    assert row.quick
    assert row.wants("state.spike.input.scale")
    assert not row.wants("state.spike.input.history")


def test_there_are_enough_of_fp8(catalog: Catalog) -> None:
    cells = [cell.id for cell in catalog.fp8]
    written, held = read_fp8_faults(cells), read_fp8_faults(cells, held_out=True)
    assert len(written) >= 35
    assert len(held) >= 12
    assert not {row.id for row in written} & {row.id for row in held}
    assert all(row.id.startswith("held-") for row in held)


@pytest.mark.parametrize("release", ["2.20.2", pytest.param("2.12.0", marks=pytest.mark.thorough)])
def test_every_edit_fits_the_real_sources_and_compiles(
    release: str, faults: tuple[TeFault, ...], catalog: Catalog, wheel_of: Callable[[str], Path]
) -> None:
    cells = [cell.id for cell in catalog.fp8]
    every: list[PlantedFault] = [*faults, *read_fp8_faults(cells), *read_fp8_faults(cells, held_out=True)]
    with zipfile.ZipFile(wheel_of(release)) as wheel:
        names = set(wheel.namelist())
        planted = [fault for fault in every if release in fault.releases]
        assert len(planted) >= 60
        for fault in planted:
            changed: dict[str, str] = {}
            for edit in fault.edits_for(release):
                assert f"transformer_engine/{edit.file}" in names, fault.id
                before = changed.get(edit.file) or wheel.read(f"transformer_engine/{edit.file}").decode()
                if edit.delete or edit.rename:
                    assert f"transformer_engine/{edit.rename}" not in names, fault.id
                    continue
                changed[edit.file] = edit.change(before)
                assert _code(edit.old) != _code(edit.new + edit.append), f"{fault.id}: only comments differ"
            for file, text in changed.items():
                ast.parse(text, file)


def _code(text: str) -> list[str]:
    """Lines without what is only a comment."""
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]


def test_every_check_that_is_named_can_be_made(catalog: Catalog) -> None:
    """Words of a name stand in a text of a probe that must see it, or of what it takes from the room that it is in."""
    code = {cell.id: cell.code for cell in catalog.fp8}
    cells = list(code)
    for fault in (*read_fp8_faults(cells), *read_fp8_faults(cells, held_out=True)):
        words = {pattern: set(re.findall(r"[a-z0-9]+", pattern)) for pattern in fault.checks}
        words |= {pattern: set() for pattern in fault.checks if pattern.startswith("raised ")}
        there = {cell: _words_of(code[cell]) for cell in fault.cells}
        for pattern, wanted in words.items():
            assert any(wanted <= found for found in there.values()), f"{fault.id}: no probe of it makes {pattern}"
        for cell, found in there.items():
            assert any(wanted <= found for wanted in words.values()), f"{fault.id}: {cell} makes none of its checks"


@cache
def _words_of(code: str) -> frozenset[str]:
    room = PACKAGE_ROOT / "probes"
    found: set[str] = set()
    for file in _reached(room, room / f"{code.replace('.', '/')}.py", set()):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"[a-z0-9]+", node.value))
    return frozenset(found)


def _reached(room: Path, file: Path, seen: set[Path]) -> Iterator[Path]:
    """The file, and those below `probes` that it imports, directly or not."""
    if file in seen or not file.is_file():
        return
    seen.add(file)
    yield file
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and 0 < node.level <= len(file.relative_to(room).parts):
            base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for place in (base.with_suffix(".py"), *(base / f"{name.name}.py" for name in node.names)):
                yield from _reached(room, place, seen)
