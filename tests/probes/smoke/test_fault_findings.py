"""What is read out of a run that has ended: which check spoke, and the place that it named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megacpp_validate.evidence.rounding import Depth
from megacpp_validate.probes.smoke.faults import (
    Planted,
    find_departure,
    find_other_bits,
    find_raised,
    find_silent_experts,
    read_faults,
)
from megacpp_validate.probes.smoke.runs import Run
from megacpp_validate.probes.smoke.trajectories import Reference, Trajectory
from megacpp_validate.training.sizes import read_size
from megacpp_validate.training.smoke.order import SmokeOrder

PARTS = ("embedding", "layers.0", "layers.1", "mtp", "norm", "head")


def new_seen(steps: int = 4) -> Trajectory:
    """A run of two layers in which all is well."""
    numbers = tuple(3.0 - step / 10 for step in range(steps))
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


def new_result(fault: str, *, steps: int = 2, ending: str = "died", words: str = "", **more: Any) -> Run:
    receipt = {
        "fault": fault, "steps": [{"step": step, "loss": 1.0, "grad_norm": "nan"} for step in range(steps)],
        "nonfinite": None, "resumed": None, "experts_without_gradient": [], "stream_norms": {}, "part_norms": {},
        **more,
    }  # fmt: skip
    return Run("run", SmokeOrder(), read_size("tiny"), ending, words, (receipt,), (1,))


def test_a_run_that_follows_says_nothing() -> None:
    assert find_departure(new_seen(), new_reference()) == []
    assert find_departure(new_seen().cut(0, 2), new_reference()) == []
    assert find_departure(new_seen().cut(0, 0), new_reference()) == []


def test_the_first_layer_that_differs_is_named() -> None:
    everywhere = dict.fromkeys(PARTS, 2.0)
    (found,) = find_departure(change(new_seen(), step=1, streams=("layers.1",), parts=everywhere), new_reference())
    assert found.named == {"step": 1, "module": "layers.1"}
    (found,) = find_departure(change(new_seen(), step=2, streams=("layers.0", "layers.1")), new_reference())
    assert found.named == {"step": 2, "module": "layers.0"}


def test_where_no_stream_differs_the_part_whose_gradients_do_most_is_named() -> None:
    (found,) = find_departure(change(new_seen(), step=0, parts={"head": 1.1, "mtp": 2.0, "norm": 0.9}), new_reference())
    assert found.named == {"step": 0, "module": "mtp"}


def test_what_is_not_finite_never_follows() -> None:
    (found,) = find_departure(change(new_seen(), step=3, parts={"norm": float("nan")}), new_reference())
    assert found.named == {"step": 3, "module": "norm"}


def test_other_bits_are_found_and_missing_steps_too() -> None:
    whole = new_seen()
    assert find_other_bits("resume", whole.cut(2, 2), whole) == []
    (found,) = find_other_bits("resume", change(whole, step=3, streams=("layers.1",)).cut(2, 2), whole)
    assert found.named == {"step": 3, "module": "layers.1"}
    (short,) = find_other_bits("resume", whole.cut(2, 1), whole)
    assert short.named == {"step": 2}
    (nothing,) = find_other_bits("resume", whole.cut(2, 0), whole)
    assert "0 steps" in nothing.words


RAISED = {
    "TokensNotConserved: tokens are not conserved: expert 2: the router of rank 1 gave it 64 row(s), rank 1 sent 63, "
    "rank 1 received 63; expert 1: the router of rank 1 gave it 9 row(s), rank 1 sent 8, rank 0 received 8. Likely "
    "cause: a dispatch": ("conservation", {"step": 2, "experts": [1, 2], "source": 1}),
    "TokensNotConserved: dispatch: rows of expert 3 from rank 1 to rank 1; rows of expert 0 from rank 1 to rank 0 and "
    "1 more are not what was sent. Likely cause: rows": (
        "conservation", {"step": 2, "stage": "dispatch", "experts": [0, 3], "source": 1},
    ),
    "ReplicaDiverged: layers.2.router.weight is not the same on all ranks, the first of 2: rank 1, 3 has other bits "
    "than the rest of [0, 1, 2, 3]. Likely cause: a router whose gradient": (
        "replicas", {"step": 2, "tensor": "layers.2.router.weight", "kind": "router", "ranks": [1, 3]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", RAISED)
def test_what_ranks_raised_is_read(fault: str) -> None:
    (found,) = find_raised(new_result(fault))
    assert (found.check, found.named) == RAISED[fault]
    assert "Likely cause" not in found.words


def test_a_value_that_is_no_number_is_named_by_the_watch() -> None:
    seen = {"step": 2, "rank": 1, "module": "layers.3", "tensor": "output rows", "order": 9, "words": "so"}
    (found,) = find_raised(new_result("NotFinite: step 2", nonfinite=seen))
    assert found.check == "watch"
    assert found.named == {"step": 2, "ranks": [1], "module": "layers.3", "tensor": "output rows"}


def test_a_rank_that_is_gone_is_named_by_the_launcher() -> None:
    words = (
        "a rank died, and the others were ended. At fault: rank 1.\n"
        "rank 0 was ended; last collective: broadcast #9 of ranks 0, 1 (inside)\n"
        "rank 1 ended by SIGKILL; last collective: all_reduce #8 of ranks 0, 1 (left)\n"
    )
    (found,) = find_raised(new_result("", words=words))
    assert found.check == "launcher"
    assert found.named == {"ending": "died", "ranks": [1], "collective": "all_reduce"}


def test_a_run_that_ended_well_raised_nothing() -> None:
    assert find_raised(new_result("", ending="done")) == []
    (silent,) = find_silent_experts(new_result("", ending="done", experts_without_gradient=["layers.2.up expert 3"]))
    assert silent.named == {"experts": ["layers.2.up expert 3"]}
    assert find_silent_experts(new_result("", ending="done")) == []


def test_numbers_that_are_none_are_read_as_such() -> None:
    assert new_result("").trajectory.grad_norms == (None, None)
    assert replace(new_result(""), receipts=()).trajectory.losses == ()


def test_the_faults_of_a_cell_are_read() -> None:
    assert read_faults("one=nan:2@train two=dies@save") == (
        Planted("one", "nan:2", "train"), Planted("two", "dies", "save"),
    )  # fmt: skip
