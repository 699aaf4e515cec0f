"""Planted faults: the table has every row of the matrix, and each is planted where it belongs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.catalog.planted import read_smoke_faults
from megacpp_validate.probes.smoke.faults import WAYS, read_faults
from megacpp_validate.training.smoke.faults import FAULTS, plant


def test_every_fault_of_the_matrix_is_in_the_table_and_the_other_way_round() -> None:
    known = read_smoke_faults(read_catalog())
    planted = [one for row in known.cells() for one in read_faults(row.settings["faults"])]
    assert {one.fault.partition(":")[0] for one in planted} == set(FAULTS)
    assert {one.way for one in planted} <= set(WAYS)


@pytest.mark.parametrize(("rank", "here"), [(0, False), (1, True)])
def test_a_fault_of_one_rank_is_planted_on_the_last(rank: int, *, here: bool) -> None:
    step = object()
    trainer: Any = SimpleNamespace(
        rank=SimpleNamespace(rank=rank), plan=SimpleNamespace(world=2), read_as=rank, step=step
    )
    plant("wrong-sequences", trainer)
    assert trainer.read_as == 0
    plant("dies:7", trainer)
    assert (trainer.step is not step) == here
