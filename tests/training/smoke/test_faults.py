"""Faults that are planted: each is refused, before any process starts, in a run that it has no place in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.catalog.planted import read_smoke_faults
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.smoke.faults import FaultCell, read_faults
from megacpp_validate.probes.smoke.runs import Runs
from megacpp_validate.training.smoke import faults
from megacpp_validate.training.smoke.faults import FAULTS, UnknownFault, refuse_fault
from megacpp_validate.training.smoke.order import SmokeOrder

EXPERTS: Final = {"world": 2, "data": 2, "expert_parallel": 2}
REPLICAS: Final = {"world": 2, "data": 2}
TENSOR: Final = {"world": 2, "tensor_parallel": 2}
# Fault -> what the run has, and the word of the step that would give it a place.
LACKING: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "experts-not-synchronised": ({"plan": EXPERTS}, "data above expert_parallel"),
    "norm-gradient-not-summed": ({"plan": TENSOR}, "sequence_parallel"),
    "token-dropped": ({"plan": REPLICAS, "changes": {"pattern": "AM"}}, "an E"),
    "rows-swapped": ({"plan": REPLICAS}, "expert_parallel"),
    "experts-swapped": ({"plan": {"world": 4, "data": 4, "expert_parallel": 4}}, "2 experts"),
    "weights-exchanged": ({"plan": EXPERTS, "changes": {"top_k": 1}}, "2 experts"),
    "expert-without-gradient": ({}, "several ranks"),
    "balance-not-shared": ({"plan": EXPERTS, "changes": {"aux_coefficient": 0.0}}, "aux_coefficient"),
    "wrong-sequences": ({"plan": TENSOR}, "data of 2"),
    "pass-lost": ({"plan": REPLICAS}, "accumulate"),
    "gradients-averaged": ({"plan": TENSOR}, "data of 2"),
    "block-gradient-lost": ({"plan": TENSOR}, "data of 2"),
    "mtp-counted-twice": ({"plan": REPLICAS}, "mtp"),
    "shard-not-updated": ({"plan": TENSOR}, "data of 2"),
    "learning-rate-apart": ({}, "several ranks"),
    "wrong-amax-group": ({"plan": REPLICAS, "precision": "current"}, "delayed"),
    "evaluation-moves-data": ({"plan": REPLICAS}, "validate_every"),
    "stale-checkpoint": ({"plan": REPLICAS}, "checkpoint_folder"),
    "nan": ({"steps": 2}, "3 steps"),
    "dies": ({"plan": REPLICAS, "steps": 2}, "3 steps"),
    "hangs": ({}, "several ranks"),
    "rope-reversed": ({}, "several ranks"),
    "router-drawn-apart": ({"plan": REPLICAS, "changes": {"pattern": "AM"}}, "an E"),
    "gradient-infinite": ({"changes": {"pattern": "A", "bf16_last": 0}}, "2 layers"),
    "expert-gradients-late": ({}, "several ranks"),
    "weight-bit-flipped": ({"plan": REPLICAS, "steps": 1}, "3 steps"),
    "moments-lost": ({"plan": REPLICAS}, "resume"),
    "data-from-the-start": ({"plan": REPLICAS}, "resume"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_without_a_place_is_refused(name: str) -> None:
    given, step = LACKING[name]
    with pytest.raises(UnknownFault, match="Next step") as refused:
        refuse_fault(SmokeOrder(**given, fault=name))
    assert step in str(refused.value)
    assert name in str(refused.value)


@pytest.mark.parametrize("text", ["nun", "nan:x", "nan:", "token-dropped:2", ":2"])
def test_a_fault_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UnknownFault, match="Next step"):
        refuse_fault(SmokeOrder(plan=EXPERTS, fault=text))


def test_a_rank_refuses_it_too() -> None:
    class Alone:
        order = SmokeOrder(fault="dies")

    with pytest.raises(UnknownFault, match="several ranks"):
        faults.plant("dies", Alone())  # type: ignore[arg-type]
    assert faults.plant("", Alone()) is None  # type: ignore[arg-type]


def test_no_fault_is_none() -> None:
    refuse_fault(SmokeOrder())


class GpuBench(Bench):
    """A bench of a target whose device is not here, for orders that are not run."""

    def __post_init__(self) -> None:
        self._device = "cpu" if self.order.target.id == "cpu" else "cuda"


def test_every_row_of_the_matrix_has_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = read_smoke_faults(target.id for target in read_catalog().targets)
    monkeypatch.setattr("megacpp_validate.probes.smoke.faults.make_reference", lambda *_: None)
    planted = set()
    for row in known.cells():
        target = Target(row.targets[0], "")
        order = Order(row.id, "native", target, "native", settings=dict(row.settings), code=row.code)
        bench = GpuBench(order)
        runs = Runs(bench, tmp_path)
        assert runs.plan.world == row.ranks
        cell = FaultCell(bench, runs)
        for one in read_faults(bench.setting("faults")):
            refuse_fault(cell.order_of(one))
            planted.add(one.fault.partition(":")[0])
    assert planted == set(FAULTS)
