"""The probe of amax groups: real ranks on the double of Transformer Engine, through Gloo; wrong groups are caught."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope, layer_watch
from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import amax_group as probe
from megacpp_validate.probes.fp8.amax_group import Place, check_groups, places, run_rank, start_ranks, wrong_amaxes
from megacpp_validate.selftest.double import use_te_double
from tests.probes.planting import failed, fp8_bench


def nothing() -> None:
    pass


def takes_any_group() -> None:
    fp8_scope.reduction_of = lambda owner: (owner, False) if owner is None else (None, False)
    layer_watch._check_group = lambda _: None


def region_forgets_its_owner() -> None:
    """It leaves the first layer to the one behind it, and takes the group of the scope."""
    plain = fp8_scope._te_regrouped
    fp8_scope._te_regrouped = lambda delayed, _, __, place: plain(delayed, torch.distributed.group.WORLD, True, place)
    fp8_scope._take_first = lambda: False


def rank_1_fails() -> None:
    def new_layer(self: Any, **_: Any) -> Any:
        return 1 / (1 - self.rank)

    probe._Rank.new_layer = new_layer  # type: ignore[method-assign]


def planted(plant: Callable[[], None], *given: Any) -> None:
    """A rank on the double, with a fault in it."""
    use_te_double()
    plant()
    run_rank(*given)


def run(world: int, plant: Callable[[], None]) -> Bench:
    bench = fp8_bench("amax_group")
    check_groups(bench, Place("gloo", ("cpu",) * world), partial(planted, plant))
    return bench


def test_the_owners_share_their_amax_and_each_plant_is_caught() -> None:
    bench = run(4, nothing)
    assert failed(bench) == set()
    names = {check.name.removeprefix("amax_group.").replace(".gloo4", "") for check in bench.checks}
    assert names == {
        *(f"{what}.rank{rank}" for what in ("ended", "owners", "nested-outer", "nested-inner") for rank in range(4)),
        "alone.caught", "other-pairs.caught", "everybody.caught", "nested-inner.caught",
        "refused.left-open", "refused.of-others", "refused.changed",
    }  # fmt: skip
    assert [(row.requested, row.claimed) for row in bench.backends] == [("nccl", "gloo")]
    assert "one rank a GPU" in bench.backends[0].reasons[0]


def of_ranks(*layers: str) -> set[str]:
    return {f"amax_group.{layer}.gloo2.rank{rank}" for layer in layers for rank in (0, 1)}


REFUSED = {f"amax_group.refused.gloo2.{name}" for name in ("left-open", "of-others", "changed")}


@pytest.mark.parametrize(("plant", "wanted"), [
    (takes_any_group, REFUSED | of_ranks("owners", "nested-outer")),
    pytest.param(
        region_forgets_its_owner,
        of_ranks("nested-inner", "nested-outer") | {"amax_group.nested-inner.gloo2.caught"}, marks=pytest.mark.thorough,
    ),
    (rank_1_fails, of_ranks("ended")),  # and nothing is judged
])  # fmt: skip
def test_a_fault_of_the_bridge_or_of_a_rank_is_caught(plant: Callable[[], None], wanted: set[str]) -> None:
    bench = run(2, plant)
    assert failed(bench) == wanted
    if plant is rank_1_fails:
        assert {check.name for check in bench.checks} == wanted
        assert "ZeroDivisionError" in bench.checks[1].detail


def ends(rank: int, how: str) -> None:
    if how == "dies" and rank == 1:
        os.kill(os.getpid(), 9)
    if how != "well":
        time.sleep(60 * (1 - rank))


@pytest.mark.parametrize(("how", "wanted"), [
    ("well", {}),
    ("dies", {0: "ended, because another rank failed", 1: "process 1 terminated with signal SIGKILL"}),
    ("hangs", {0: "not done after 20 s"}),
])  # fmt: skip
def test_how_ranks_end_is_told_and_none_is_left(how: str, wanted: dict[int, str]) -> None:
    began = time.monotonic()
    assert start_ranks(ends, 2, (how,), seconds=20.0) == wanted
    assert time.monotonic() - began < 50
    assert torch.multiprocessing.active_children() == []


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
        probe.probe(fp8_bench("amax_group"))
