"""A rank that was killed is accused, and a part without a path of Transformer Engine leaves a valid receipt."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.evidence.receipt import Outcome, Receipt, receipt_text
from megacpp_validate.evidence.store import parse_receipt
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.smoke import resume
from megacpp_validate.probes.smoke.runs import Run, check_parts
from megacpp_validate.training.parallel.launch import RunEnd
from megacpp_validate.training.smoke.order import SmokeOrder


def new_bench() -> Bench:
    settings = {"size": "tiny", "plan": "data=2 expert_parallel=2"}
    return Bench(Order("smoke_resume", "s", Target("cpu", ""), "native", stands_on=("imports",), settings=settings))


@pytest.mark.parametrize(
    ("ending", "culprits", "passes"),
    [
        ("died", (1,), True),
        ("died", (0,), False),  # the wrong rank
        ("died", (0, 1), False),
        ("died", (), False),
        ("hung", (1,), False),
        ("done", (), False),
    ],
)
def test_the_rank_that_was_killed_is_accused(ending: str, culprits: tuple[int, ...], *, passes: bool) -> None:
    bench = new_bench()
    resume.check_killed(bench, Run("killed", SmokeOrder(), RunEnd(ending, culprits, "a rank died\nmore", (), 1.0)), 1)
    (check,) = bench.checks
    assert (check.name, check.passed) == ("killed.is-told", passes)
    assert "\n" not in check.detail


def test_a_part_that_has_no_path_of_te_under_a_plan_leaves_a_receipt_that_can_be_read() -> None:
    bench = new_bench()
    refusal = {"backend": "te", "code": "tensor-parallel", "reason": "the in-projection of M is split over ranks"}
    choice = {"observed": "native", "requested": "te", "refusals": [refusal]}
    rank = {"rank": 0, "choices": {"layers.2.in_projection": choice}}
    check_parts(bench, Run("plan", SmokeOrder(), RunEnd("done", (), "", ({"rank": 0, "receipt": rank},), 1.0)))
    made = Receipt(
        "s-cpu-smoke_resume", "s", "cpu", "smoke_resume", Outcome.PASS, "", "te", checks=tuple(bench.checks),
        backends=tuple(bench.backends),
    )  # fmt: skip
    assert parse_receipt(receipt_text(made).encode(), Path(f"{made.cell}.json")).backends[0].reasons == (
        "te: the in-projection of M is split over ranks",
    )
