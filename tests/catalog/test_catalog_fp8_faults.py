"""Faults of the low-precision stack: read strictly, fitting the real sources, and named after checks that there are."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import PACKAGE_ROOT, Catalog, MatrixInvalid
from megacpp_validate.catalog.fp8_faults import FILE, HELD_OUT, Fp8Fault, read_fp8_faults
from megacpp_validate.catalog.te_faults import Edit

ROW = """
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
WRONG = {
    "unknown key": (ROW + 'colour = "red"\n', "Extra inputs"),
    "unknown cell": (ROW.replace('["fp8_delayed"]', '["fp8_dilated"]'), "names 'fp8_dilated', which is no cell"),
    "unknown green": (ROW.replace('"fp8_current"', '"green"'), "names 'green', which is no cell"),
    "red and green": (ROW.replace('"fp8_current"', '"fp8_delayed"'), "names a cell twice"),
    "no check": (ROW.replace('["*.scale"]', "[]"), "checks"),
    "no cell": (ROW.replace('["fp8_delayed"]', "[]"), "cells"),
    "twice": (ROW + ROW, "is there more than once"),
    "nothing changed": (ROW.replace('"y"', '"x"'), "old and new are the same"),
    "no text": ("[[fault]", "cannot be read"),
}


@pytest.fixture(scope="module")
def faults(catalog: Catalog) -> tuple[Fp8Fault, ...]:
    cells = [cell.id for cell in catalog.fp8]
    return (*read_fp8_faults(cells), *read_fp8_faults(cells, held_out=True))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_refused_and_named(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    (tmp_path / FILE).write_text(text)
    with pytest.raises(MatrixInvalid) as refused:
        read_fp8_faults(CELLS, tmp_path)
    assert said in str(refused.value)
    assert FILE in str(refused.value)
    assert "Next step" in str(refused.value)


def test_a_right_row_is_read(tmp_path: Path) -> None:
    (tmp_path / HELD_OUT).write_text(ROW)
    (row,) = read_fp8_faults(CELLS, tmp_path, held_out=True)
    assert row.quick
    assert row.wants("state.spike.input.scale")
    assert not row.wants("state.spike.input.history")


def test_there_are_enough_of_them(catalog: Catalog) -> None:
    cells = [cell.id for cell in catalog.fp8]
    written, held = read_fp8_faults(cells), read_fp8_faults(cells, held_out=True)
    assert len(written) >= 35
    assert len(held) >= 12
    assert not {row.id for row in written} & {row.id for row in held}
    assert all(row.id.startswith("held-") for row in held)


@pytest.mark.parametrize("release", ["2.20.2", "2.12.0"])
def test_every_edit_fits_the_real_sources_and_compiles(
    release: str, faults: tuple[Fp8Fault, ...], wheel_of: Callable[[str], Path]
) -> None:
    with zipfile.ZipFile(wheel_of(release)) as wheel:
        planted = [fault for fault in faults if release in fault.releases]
        assert len(planted) >= 40
        for fault in planted:
            changed: dict[str, str] = {}
            for edit in fault.edits_for(release):
                before = changed.get(edit.file) or wheel.read(f"transformer_engine/{edit.file}").decode()
                changed[edit.file] = edit.change(before)
                assert _code(edit), f"{fault.id}: only comments differ"
            for file, text in changed.items():
                ast.parse(text, file)


def _code(edit: Edit) -> bool:
    """Whether more than comments differ."""
    old, new = (
        [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
        for text in (edit.old, edit.new)
    )
    return old != new


def test_every_check_that_is_named_can_be_made(faults: tuple[Fp8Fault, ...], catalog: Catalog) -> None:
    """Words of a name stand in a text of a probe that must see it, or of what it takes from the room that it is in."""
    code = {cell.id: cell.code for cell in catalog.fp8}
    for fault in faults:
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
