"""Faults of the smoke run: read strictly, all that is wrong at once, and made into cells."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.planted import SMOKE_FILE as FILE
from megacpp_validate.catalog.planted import read_smoke_faults
from tests.catalog.refusals import faults_of

PLAN = """
[[plan]]
id = "smoke_faults_one"
title = "one"
stands_on = ["imports"]
targets = ["cpu"]
ranks = 2
settings = { plan = "data=2" }
"""
ROW = """
[[fault]]
id = "first"
fault = "nan:2"
plan = "smoke_faults_one"
says = "It is wrong."
caught_by = "watch"
names = { step = 2, ranks = [1], module = "layers.3" }
"""
WRONG = {
    "unknown key": (PLAN + ROW + 'colour = "red"\n', "Extra inputs"),
    "unknown plan": (
        PLAN + ROW + ROW.replace('"first"', '"next"').replace("faults_one", "faults_two"),
        "plan names 'smoke_faults_two'",
    ),
    "unknown target": (PLAN.replace('"cpu"', '"gpu"') + ROW, "targets names 'gpu'"),
    "unknown check": (PLAN + ROW.replace('"watch"', '"wach"'), "caught_by"),
    "unknown way": (PLAN + ROW + 'way = "fly"\n', "way"),
    "nothing named": (PLAN + ROW.replace('{ step = 2, ranks = [1], module = "layers.3" }', "{}"), "names"),
    "twice": (PLAN + ROW + ROW, "appears 2 times"),
    "a plan twice": (PLAN + PLAN + ROW, "appears 2 times"),
    "no step": (PLAN + ROW.replace("nan:2", "nan:"), "fault"),
    "no plan": ("plan = []\n" + ROW, "plan: List should have at least 1"),
    "no fault": ("fault = []\n" + PLAN, "fault: List should have at least 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_and_named(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    (tmp_path / FILE).write_text(text)
    faults = faults_of(lambda: read_smoke_faults(["cpu"], tmp_path))
    assert any(fault.startswith(f"{FILE}: ") and said in fault for fault in faults)


def test_all_that_is_wrong_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(PLAN.replace('"cpu"', '"gpu"') + ROW + ROW)
    assert len(faults_of(lambda: read_smoke_faults(["cpu"], tmp_path))) == 2


def test_a_cell_is_told_its_faults(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(PLAN + ROW + ROW.replace('"first"', '"next"') + 'way = "save"\n')
    known = read_smoke_faults(["cpu"], tmp_path)
    (cell,) = known.cells()
    assert cell.settings == {"plan": "data=2", "faults": "first=nan:2@train next=nan:2@save"}
    assert cell.code == "smoke.faults"
    assert known.select(["next"]).cells()[0].settings["faults"] == "next=nan:2@save"
    assert known.select([]).cells() == ()


def test_the_matrix_has_what_the_issue_asks_for(catalog: Catalog) -> None:
    known = read_smoke_faults(target.id for target in catalog.targets)
    wanted = {
        "experts-not-synchronised", "token-dropped", "experts-swapped", "norm-gradient-not-summed",
        "wrong-amax-group", "stale-checkpoint", "nan-in-one-rank",
    }  # fmt: skip
    assert wanted <= {fault.id for fault in known.faults}
    assert sum(fault.held_out for fault in known.faults) >= 5
    assert len({cell.id for cell in (*catalog.smoke, *known.cells())}) == len(catalog.smoke) + len(known.plans)
