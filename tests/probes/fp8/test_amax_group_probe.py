"""The probe of amax groups: real ranks on the double of Transformer Engine, through Gloo; wrong groups are caught."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import amax_group as probe
from megacpp_validate.probes.fp8.amax_group import Place, check_groups, places, wrong_amaxes
from tests.probes.fp8.ownership_bench import failed, new_bench

ON_THE_DOUBLE = (
    "from megacpp_validate.selftest.double import use_te_double\nuse_te_double()\n"
    "from megacpp_validate.probes.fp8.amax_rank import main\n"
)


def run(world: int, before: str = "") -> Bench:
    bench = new_bench("amax_group")
    command = [sys.executable, "-c", f"{ON_THE_DOUBLE}{before}\nmain()"]
    check_groups(bench, Place("gloo", ("cpu",) * world), command)
    return bench


@pytest.fixture(scope="module")
def four() -> Bench:
    return run(4)


def test_the_owners_share_their_amax_and_each_plant_is_caught(four: Bench) -> None:
    assert failed(four) == set()
    names = {check.name.removeprefix("amax_group.").replace(".gloo4", "") for check in four.checks}
    assert names == {
        *(f"{what}.rank{rank}" for what in ("ended", "owners", "nested-outer", "nested-inner") for rank in range(4)),
        "alone.caught", "other-pairs.caught", "everybody.caught", "nested-inner.caught",
        "refused.left-open", "refused.of-others", "refused.changed",
    }  # fmt: skip
    assert [(row.requested, row.claimed) for row in four.backends] == [("nccl", "gloo")]
    assert "one rank a GPU" in four.backends[0].reasons[0]


def test_a_bridge_that_takes_any_group_is_caught() -> None:
    before = (
        "from megacpp_validate.bridge import fp8_scope, layer_watch\n"
        "fp8_scope.reduction_of = lambda owner: (owner, False) if owner is None else (None, False)\n"
        "layer_watch._check_group = lambda _: None"
    )
    found = failed(run(2, before))
    refused = {f"amax_group.refused.gloo2.{name}" for name in ("left-open", "of-others", "changed")}
    assert found == refused | {
        f"amax_group.{layer}.gloo2.rank{rank}" for layer in ("owners", "nested-outer") for rank in (0, 1)
    }


@pytest.mark.thorough
def test_a_region_that_moves_histories_or_forgets_its_owner_is_caught() -> None:
    """Planted: a region that leaves the first layer to the one behind it, and takes the group of the scope."""
    before = (
        "import torch\nfrom megacpp_validate.bridge import fp8_scope\nplain = fp8_scope._te_regrouped\n"
        "world = lambda delayed, _, __, place: plain(delayed, torch.distributed.group.WORLD, True, place)\n"
        "fp8_scope._te_regrouped = world\n"
        "fp8_scope._take_first = lambda: False"
    )
    bench = run(2, before)
    assert failed(bench) == {
        *(f"amax_group.nested-{layer}.gloo2.rank{rank}" for layer in ("inner", "outer") for rank in (0, 1)),
        "amax_group.nested-inner.gloo2.caught",
    }
    said = {check.name: check.detail for check in bench.checks}
    assert "gradient: amax 0" in said["amax_group.nested-outer.gloo2.rank0"]


def test_a_rank_that_fails_is_told_and_nothing_is_judged() -> None:
    bench = run(2, "import json, io\nfrom megacpp_validate.probes.fp8 import amax_rank\n"
                   "amax_rank._new_layer = lambda order: 1 / 0 if order.rank == 1 else None")  # fmt: skip
    assert "amax_group.ended.gloo2.rank1" in failed(bench)
    said = next(check.detail for check in bench.checks if check.name == "amax_group.ended.gloo2.rank1")
    assert said.startswith("rank 1 of 2 on cpu, gloo: exit code 1")
    assert "ZeroDivisionError" in said
    assert not any("owners" in check.name for check in bench.checks)


def told(change: Callable[[list[dict[str, Any]]], None] | None = None) -> dict[int, Any]:
    """What two ranks tell that do it right, one step; and what is changed of what rank 1 tells."""
    ranks = {}
    for rank in (0, 1):
        amax = {"input": 2.0 + rank, "weight": 1.0 + rank, "gradient": 4.0 - rank}
        largest = {"input": 3.0, "weight": 2.0, "gradient": 4.0}
        scale = {"input": 448 / 3.0, "weight": 224.0, "gradient": 57344 / 4.0}
        ranks[rank] = {"steps": {"owners": [{"amax": amax, "remembered": largest, "scale": scale}]}}
    made: dict[int, Any] = json.loads(json.dumps(ranks), object_hook=_with_numbers)
    if change is not None:
        change(made[1]["steps"]["owners"])
    return made


def _with_numbers(row: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdigit() else key: value for key, value in row.items()}


@pytest.mark.parametrize(("change", "said"), [
    (lambda steps: steps[0]["remembered"].update(input=2.0), "rank 1, step 0, input: amax 2, its owners saw 3"),
    (lambda steps: steps[0]["scale"].update(gradient=57344 / 3.0), "rank 1, step 0, gradient: scale 19114.7"),
    (lambda steps: steps[0]["scale"].update(weight=1.0), "rank 1, step 0, weight: scale 1, of its owners 224"),
])  # fmt: skip
def test_what_a_rank_remembers_is_judged(change: Callable[[Any], None], said: str) -> None:
    assert wrong_amaxes(told(), "owners", 1, ((0, 1),)) == []
    found = wrong_amaxes(told(change), "owners", 1, ((0, 1),))
    assert len(found) == 1
    assert found[0].startswith(said)
    assert wrong_amaxes(told(change), "owners", 0, ((0, 1),)) == []


@pytest.mark.parametrize(("gpus", "wanted"), [
    (1, [("gloo", ["cuda:0"] * 4)]),
    (2, [("nccl", ["cuda:0", "cuda:1"]), ("gloo", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"])]),
    (3, [("nccl", ["cuda:0", "cuda:1"]), ("gloo", ["cuda:0", "cuda:1", "cuda:2", "cuda:0"])]),
    (4, [("nccl", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])]),
    (8, [("nccl", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])]),
])  # fmt: skip
def test_where_ranks_run(gpus: int, wanted: list[tuple[str, list[str]]]) -> None:
    assert [(place.backend, list(place.devices)) for place in places(gpus)] == wanted


def test_it_is_not_run_on_a_cpu() -> None:
    with pytest.raises(CannotRun, match=r"GPU.*Next step"):
        probe.probe(new_bench("amax_group"))


def test_the_rank_program_is_there() -> None:
    assert Path(probe.__file__).with_name("amax_rank.py").exists()
    assert probe.RANK_PROGRAM.endswith("fp8.amax_rank")
