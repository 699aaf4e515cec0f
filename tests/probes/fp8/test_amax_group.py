"""The probe of amax groups: real ranks on the double of Transformer Engine, through Gloo; wrong groups are caught."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import fp8_scope, layer_watch
from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import amax_group as probe
from megacpp_validate.probes.fp8.amax_group import Place, check_groups, places, run_rank, wrong_amaxes
from megacpp_validate.selftest.plant import use_te_double
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


def in_rank_1(fault: Callable[[], object]) -> None:
    plain = probe._Layer.draw

    def draw(self: Any, step: int) -> None:
        if self.rank == 1:
            fault()
        plain(self, step)

    probe._Layer.draw = draw  # type: ignore[method-assign]


def rank_1_fails() -> None:
    in_rank_1(lambda: 1 // 0)


def rank_1_dies() -> None:
    in_rank_1(lambda: os.kill(os.getpid(), 9))


def planted(plant: Callable[[], None], *given: Any) -> None:
    """A rank on the double, with a fault in it."""
    use_te_double()
    plant()
    run_rank(*given)


def run(world: int, plant: Callable[[], None]) -> Bench:
    bench = fp8_bench("amax_group")
    check_groups(bench, Place("gloo", ("cpu",) * world), partial(planted, plant))
    return bench


def test_the_owners_share_their_amax() -> None:
    bench = run(4, nothing)
    assert failed(bench) == set()
    names = {check.name.removeprefix("amax_group.").replace(".gloo4", "") for check in bench.checks}
    assert names == {
        *(f"{what}.rank{rank}" for what in ("ended", "owners", "nested-outer", "nested-inner") for rank in range(4)),
    }  # fmt: skip
    assert [(row.requested, row.claimed) for row in bench.backends] == [("nccl", "gloo")]
    assert "one rank a GPU" in bench.backends[0].reasons[0]


def of_ranks(*layers: str) -> set[str]:
    return {f"amax_group.{layer}.gloo2.rank{rank}" for layer in layers for rank in (0, 1)}


@pytest.mark.parametrize(("plant", "wanted", "said"), [
    (takes_any_group, of_ranks("owners", "nested-outer"), ""),
    pytest.param(
        region_forgets_its_owner,
        of_ranks("nested-inner", "nested-outer"), "",
        marks=pytest.mark.thorough,
    ),
    (rank_1_fails, of_ranks("ended"), "ZeroDivisionError"),  # and nothing is judged
    (rank_1_dies, of_ranks("ended"), "SIGKILL"),
])  # fmt: skip
def test_a_fault_of_the_bridge_or_of_a_rank_is_caught(plant: Callable[[], None], wanted: set[str], said: str) -> None:
    bench = run(2, plant)
    assert failed(bench) == wanted
    assert not said or {check.name for check in bench.checks} == wanted
    assert said in bench.checks[1].detail
    assert torch.multiprocessing.active_children() == []


SEEN: dict[str, Any] = {
    "amax": {"input": 2.0, "weight": 1.0, "gradient": 4.0},
    "remembered": {"input": 2.0, "weight": 1.0, "gradient": 4.0},
    "scale": {"input": 224.0, "weight": 448.0, "gradient": 14336.0},
}


@pytest.mark.parametrize(("what", "tensor", "value", "said"), [
    ("remembered", "input", 1.0, "rank 1, step 0, input: amax 1, its owners saw 2"),
    ("scale", "gradient", 57344 / 3.0, "rank 1, step 0, gradient: scale 19114.7"),
])  # fmt: skip
def test_what_a_rank_remembers_is_judged(what: str, tensor: str, value: float, said: str) -> None:
    wrong = deepcopy(SEEN)
    wrong[what][tensor] = value
    ranks = {0: {"owners": [SEEN]}, 1: {"owners": [wrong]}}
    assert wrong_amaxes(ranks, "owners", 0, ((0, 1),)) == []
    (found,) = wrong_amaxes(ranks, "owners", 1, ((0, 1),))
    assert found.startswith(said)


@pytest.mark.parametrize(("gpus", "wanted"), [
    (1, [("gloo", ["cuda:0"] * 4)]),
    (2, [("nccl", ["cuda:0", "cuda:1"]), ("gloo", ["cuda:0", "cuda:1", "cuda:0", "cuda:1"])]),
    (4, [("nccl", ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])]),
])  # fmt: skip
def test_where_ranks_run(gpus: int, wanted: list[tuple[str, list[str]]]) -> None:
    assert [(place.backend, list(place.devices)) for place in places(gpus)] == wanted


def test_it_is_not_run_on_a_cpu() -> None:
    with pytest.raises(CannotRun, match=r"GPU.*Next step"):
        probe.probe(fp8_bench("amax_group"))
