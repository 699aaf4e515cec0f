"""Faults for copies of Transformer Engine: read strictly, fitting the real sources, and seen by checks that exist."""

from __future__ import annotations

import ast
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.planted import (
    SMOKE_FILE,
    Edit,
    EditDoesNotFit,
    PlantedFault,
    TeFault,
    read_fp8_faults,
    read_smoke_faults,
    read_te_faults,
)
from megacpp_validate.catalog.planted import TE_FILE as FILE
from megacpp_validate.catalog.policies import read_gate_policy
from megacpp_validate.evidence.values import Cause
from tests.catalog.refusals import at, faults_of

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
    "unknown cause": (ROW.replace('"numerics"', '"luck"'), "cause"),
    "no release": (ROW.replace('["2.20.2"]', "[]"), "releases"),
    "outside of the copy": (ROW.replace("pytorch/a.py", "../../evil.py"), "file"),
    "moved outside": (ROW.replace('old = "x"\nnew = "y"\n', 'rename = "../a.py"\n'), "rename"),
}


@pytest.fixture(scope="module")
def faults(catalog: Catalog) -> tuple[TeFault, ...]:
    return read_te_faults(catalog)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_refused_and_named(name: str, tmp_path: Path) -> None:
    text, says = WRONG[name]
    (tmp_path / FILE).write_text(text)
    faults = faults_of(lambda: read_te_faults(at(tmp_path)))
    assert any(fault.startswith(f"{FILE}: ") and says in fault for fault in faults)


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


@pytest.mark.parametrize("release", ["2.20.2", pytest.param("2.12.0", marks=pytest.mark.thorough)])
def test_every_edit_fits_the_real_sources_and_compiles(
    release: str, faults: tuple[TeFault, ...], catalog: Catalog, wheel_of: Callable[[str], Path]
) -> None:
    every: list[PlantedFault] = [*faults, *read_fp8_faults(catalog), *read_fp8_faults(catalog, held_out=True)]
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


def test_every_check_that_is_named_is_one_that_a_cell_makes(catalog: Catalog) -> None:
    made = read_gate_policy(catalog).choose("release", "h200").evidence
    for fault in (*read_fp8_faults(catalog), *read_fp8_faults(catalog, held_out=True)):
        for cell in fault.cells:
            raised = any(name.startswith("raised ") for name in fault.checks)
            assert raised or any(map(fault.wants, made[cell].checks)), f"{fault.id}: {cell} makes none of its checks"


PLAN = """
[[plan]]
id = "smoke_faults_one"
title = "one"
stands_on = ["imports"]
targets = ["cpu"]
ranks = 2
settings = { plan = "data=2" }
"""
SMOKE_ROW = """
[[fault]]
id = "first"
fault = "nan:2"
plan = "smoke_faults_one"
says = "It is wrong."
caught_by = "watch"
names = { step = 2, ranks = [1], module = "layers.3" }
"""


def test_a_cell_of_the_smoke_run_has_its_faults_among_its_settings(tmp_path: Path, catalog: Catalog) -> None:
    (tmp_path / SMOKE_FILE).write_text(PLAN + SMOKE_ROW + SMOKE_ROW.replace('"first"', '"next"') + 'way = "save"\n')
    known = read_smoke_faults(at(tmp_path))
    (cell,) = known.cells()
    assert cell.settings == {"plan": "data=2", "faults": "first=nan:2@train next=nan:2@save"}
    assert known.select(["next"]).cells()[0].settings["faults"] == "next=nan:2@save"
    assert known.select([]).cells() == ()
    shipped = read_smoke_faults(catalog)
    assert sum(fault.held_out for fault in shipped.faults) >= 5
