"""What a matrix selects, and what it would be: pure functions of the rows and the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments.matrix import MatrixOptions, MatrixRun, choose_cells, plan_matrix
from megacpp_validate.environments.slurm import Cluster
from megacpp_validate.environments.stacks import read_spec


def options(*targets: str, **more: Any) -> MatrixOptions:
    specs = tuple(read_spec(f"{name}=python:python3") for name in more.pop("environments", ()))
    return MatrixOptions(targets, receipts=Path("receipts"), specs=specs, **more)


def chosen(catalog: Catalog, *targets: str, **more: Any) -> list[str]:
    return [cell.cell for cell in choose_cells(catalog, options(*targets, **more))]


def test_what_is_selected(catalog: Catalog) -> None:
    cpu = chosen(catalog, "cpu")
    assert len(cpu) == 17
    assert cpu[:2] == ["native-cpu-imports", "native-cpu-attention"]
    assert [cell for cell in cpu if "fp8" in cell] == ["native-cpu-fp8_state"]
    h200 = chosen(catalog, "h200")
    assert {cell.split("-")[0] for cell in h200} == {catalog.pinned.id}
    assert any("fp8_" in cell for cell in h200)
    both = chosen(catalog, "cpu", "h200", stacks=("native", "te2.17.1"), probes=("attention",))
    assert both == ["native-cpu-attention", "native-h200-attention", "te2.17.1-h200-attention"]
    mine = chosen(catalog, "cpu", environments=("one", "two"), cells=("*-permute", "one-cpu-imports"))
    assert mine == ["one-cpu-imports", "one-cpu-permute", "two-cpu-permute"]
    ranks = {cell.row.id: cell.gpus for cell in choose_cells(catalog, options("h200"))}
    assert (ranks["attention"], ranks["smoke_scaled_bf16_4"]) == (1, 4)


def test_a_plan_has_the_options_of_each_job(catalog: Catalog) -> None:
    site = Cluster(target={"h200": {"partition": "big"}})
    named = options("cpu", "h200", probes=("imports", "smoke_scaled_bf16_4"), launcher="slurm", cluster=site)
    cells = {cell.cell: cell for cell in plan_matrix(catalog, named).cells}
    assert {"--partition=big", "--gres=gpu:4"} <= set(cells["te2.20.2-h200-smoke_scaled_bf16_4"].asks)
    assert not any(word.startswith(("--gres", "--partition")) for word in cells["native-cpu-imports"].asks)
    here = plan_matrix(catalog, options("cpu", probes=("imports",)))
    assert [cell.asks for cell in here.cells] == [()]


@pytest.mark.parametrize(
    ("outcomes", "unmade", "code"),
    [
        (("pass", "expected-unsupported"), False, 0), (("pass", "fail"), False, 1), (("not-run", "timeout"), True, 1),
        (("pass", "not-run"), False, 4), (("not-run",), True, 5), ((), False, 4),
    ],
)  # fmt: skip
def test_the_exit_code_of_a_run(outcomes: tuple[str, ...], unmade: bool, code: int) -> None:
    cell = {"cell": "a-cpu-b", "stack": "a", "target": "cpu", "probe": "b"}
    cells = [{**cell, "outcome": outcome} for outcome in outcomes]
    data = {"tool": "t", "launcher": "local", "folder": "f", "seconds": 1.0, "cells": cells, "unmade": unmade}
    assert MatrixRun.model_validate(data).exit == code
