"""Cells that look at recipes say nothing of what they could not look at: not-run, and never a pass."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.probes import process
from tests.probes.fp8.planting import new_bench

CELLS = ("checkpoint", "graphs", "zones")


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("refused", [("delayed",), ("delayed", "current", "block")])
@pytest.mark.parametrize("cell", CELLS)
def test_recipes_that_are_refused_make_no_pass(
    monkeypatch: pytest.MonkeyPatch, cell: str, refused: tuple[str, ...]
) -> None:
    scope = importlib.import_module("megacpp_validate.bridge.fp8_scope")
    monkeypatch.setattr(scope, "why_recipe_is_refused", lambda recipe: "no" if recipe in refused else "")
    receipt = process.run_probe(new_bench(cell).order)
    assert receipt.outcome is Outcome.NOT_RUN
    assert all(recipe in receipt.reason for recipe in refused)


@pytest.mark.parametrize("cell", CELLS)
def test_without_transformer_engine_they_do_not_run(cell: str) -> None:
    receipt = process.run_probe(replace(new_bench(cell).order, requested="native"))
    assert receipt.outcome is Outcome.NOT_RUN
    assert "Transformer Engine only, which was not requested" in receipt.reason
