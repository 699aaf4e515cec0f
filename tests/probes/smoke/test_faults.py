"""What is read out of a run that has ended: which check spoke, and the place that it named."""

from __future__ import annotations

from typing import Any

import pytest

from megacpp_validate.evidence.loss_curve import Depth
from megacpp_validate.probes.smoke.faults import (
    Planted,
    find_departure,
    find_other_bits,
    find_raised,
    find_silent_experts,
    read_faults,
)
from megacpp_validate.probes.smoke.reproduce import Reference, Trajectory
from megacpp_validate.probes.smoke.runs import Run
from megacpp_validate.training.parallel.launch import RunEnd
from megacpp_validate.training.smoke.order import SmokeOrder

PARTS = ("embedding", "layers.0", "layers.1", "mtp", "norm", "head")


def new_seen() -> Trajectory:
    """Four steps of a run of two layers in which all is well."""
    numbers = tuple(3.0 - step / 10 for step in range(4))
    return Trajectory(
        numbers,
        numbers,
        {f"layers.{place}": list(numbers) for place in range(2)},
        {one: list(numbers) for one in PARTS},
    )


def new_reference() -> Reference:
    return Reference(new_seen(), (new_seen(), new_seen()), "fp64", Depth(3, 64, 256))


def change(
    seen: Trajectory, *, step: int, streams: tuple[str, ...] = (), parts: dict[str, float] | None = None
) -> Trajectory:
    """The same with everything behind a fault changed."""
    streamed = {name: list(values) for name, values in seen.streams.items()}
    parted = {name: list(values) for name, values in seen.parts.items()}
    for name in streams:
        streamed[name][step] *= 1.01
    for name, factor in (parts or {}).items():
        parted[name][step] *= factor
    losses, norms = list(seen.losses), list(seen.grad_norms)
    losses[step], norms[step] = 4.0, 4.0
    return Trajectory(tuple(losses), tuple(norms), streamed, parted, seen.first)


def new_result(fault: str, *, ending: str = "died", words: str = "", last: str = "", **more: Any) -> Run:
    receipt = {
        "fault": fault, "steps": [{"step": step, "loss": 1.0, "grad_norm": "nan"} for step in range(2)],
        "check": "", "where": {}, "experts_without_gradient": [], "stream_norms": {}, "part_norms": {}, **more,
    }  # fmt: skip
    rows = ({"rank": 0, "receipt": receipt, "last": ""}, {"rank": 1, "receipt": None, "last": last})
    return Run("run", SmokeOrder(), RunEnd(ending, (1,), words, rows, 1.0))


def test_a_run_that_follows_says_nothing() -> None:
    assert find_departure(new_seen(), new_reference()) == []
    assert find_departure(new_seen().cut(0, 2), new_reference()) == []
    assert find_departure(new_seen().cut(0, 0), new_reference()) == []


@pytest.mark.parametrize(
    ("step", "streams", "parts", "module"),
    [
        (1, ("layers.1",), dict.fromkeys(PARTS, 2.0), "layers.1"),  # the first layer that differs
        (2, ("layers.0", "layers.1"), {}, "layers.0"),
        (0, (), {"head": 1.1, "mtp": 2.0, "norm": 0.9}, "mtp"),  # without one, the part whose gradients do most
        (3, (), {"norm": float("nan")}, "norm"),
    ],
)
def test_where_a_run_departs_is_named(
    step: int, streams: tuple[str, ...], parts: dict[str, float], module: str
) -> None:
    (found,) = find_departure(change(new_seen(), step=step, streams=streams, parts=parts), new_reference())
    assert found.named == {"step": step, "module": module}


def test_other_bits_are_found_and_missing_steps_too() -> None:
    whole = new_seen()
    assert find_other_bits("resume", whole.cut(2, 2), whole) == []
    (found,) = find_other_bits("resume", change(whole, step=3, streams=("layers.1",)).cut(2, 2), whole)
    assert found.named == {"step": 3, "module": "layers.1"}
    (short,) = find_other_bits("resume", whole.cut(2, 1), whole)
    assert short.named == {"step": 2}
    (nothing,) = find_other_bits("resume", whole.cut(2, 0), whole)
    assert "0 steps" in nothing.words


def test_the_fault_of_a_rank_is_read_with_its_place() -> None:
    where = {"step": 2, "tensor": "layers.2.router.weight", "kind": "router", "ranks": [1, 3]}
    words = "ReplicaDiverged: layers.2.router.weight differs. Likely cause: a router"
    (found,) = find_raised(new_result(words, check="replicas", where=where))
    assert (found.check, found.named) == ("replicas", where)
    assert "Likely cause" not in found.words


def test_a_rank_that_is_gone_is_named_by_the_launcher() -> None:
    words = "a rank died, and the others were ended. At fault: rank 1.\nmore"
    (found,) = find_raised(new_result("", words=words, last="all_reduce #8 of ranks 0, 1 (left)"))
    assert (found.check, found.words) == ("launcher", words.partition("\n")[0])
    assert found.named == {"ending": "died", "ranks": [1], "collective": "all_reduce"}


def test_a_run_that_ended_well_raised_nothing() -> None:
    assert find_raised(new_result("", ending="done")) == []
    (silent,) = find_silent_experts(new_result("", ending="done", experts_without_gradient=["layers.2.up expert 3"]))
    assert silent.named == {"experts": ["layers.2.up expert 3"]}
    assert find_silent_experts(new_result("", ending="done")) == []


def test_the_faults_of_a_cell_are_read() -> None:
    assert read_faults("one=nan:2@train two=dies@save") == (
        Planted("one", "nan:2", "train"), Planted("two", "dies", "save"),
    )  # fmt: skip
