"""Each thing that a layer may hold wrongly while it trains, planted in an honest record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from small_curves import make_candidate, make_pairs

from megacpp_validate.evidence.loss_curve import (
    CURVE_SCHEMA_ID,
    FIRST_CURVE_SCHEMA_ID,
    HistorySeen,
    LossCurve,
    QuantizerSeen,
)
from megacpp_validate.evidence.loss_gate import LossOutcome
from megacpp_validate.gate.loss import decide_loss
from megacpp_validate.gate.loss_observed import CASTS, check_observed

CASTS_OF = {"input": 1, "weight": 1, "gradient": 2}


def casts(recipe: str) -> tuple[QuantizerSeen, ...]:
    return tuple(
        QuantizerSeen(layer, tensor, CASTS[recipe][0], CASTS[recipe][column])
        for layer in ("layers.2.up", "lane.neck")
        for tensor, column in CASTS_OF.items()
    )


def honest(recipe: str = "delayed") -> LossCurve:
    rows = tuple(HistorySeen(step, 6, 0, 0, 2.0**-24) for step in (2, 25))
    curve = make_candidate(0, [2.0**-10] * 100)
    histories = rows if recipe == "delayed" else ()
    return replace(curve, recipe=recipe, quantizers=casts(recipe), histories=histories, schema_id=CURVE_SCHEMA_ID)


def failed(curve: LossCurve) -> list[str]:
    return [check.name for check in check_observed(curve) if not check.passed]


@pytest.mark.parametrize("recipe", CASTS)
def test_what_each_recipe_has_passes(recipe: str) -> None:
    checks = list(check_observed(honest(recipe)))
    assert all(check.passed for check in checks)
    assert len(checks) == (2 if recipe == "delayed" else 1)


def with_cast(tensor: str, **changes: str) -> Callable[[LossCurve], LossCurve]:
    def change(curve: LossCurve) -> LossCurve:
        rows = [replace(row, **changes) if row.tensor == tensor else row for row in curve.quantizers]
        return replace(curve, quantizers=tuple(rows))

    return change


def with_history(**changes: float) -> Callable[[LossCurve], LossCurve]:
    return lambda curve: replace(curve, histories=(curve.histories[0], replace(curve.histories[1], **changes)))


FAULTS: dict[str, tuple[Callable[[LossCurve], LossCurve], str]] = {
    "E4M3 gradients": (with_cast("gradient", format="e4m3"), "casts"),
    "E5M2 activations": (with_cast("input", format="e5m2"), "casts"),
    "another quantizer": (with_cast("weight", kind="Float8CurrentScalingQuantizer"), "casts"),
    "a tensor that is not cast": (lambda c: replace(c, quantizers=c.quantizers[1:]), "casts"),
    "no cast at all": (lambda c: replace(c, quantizers=()), "casts"),
    "a history that stands still": (with_history(not_rolled=1), "histories"),
    "no amax": (with_history(not_collected=1), "histories"),
    "a wrong scale": (with_history(scale_error=2.0**-20), "histories"),
    "nobody looked": (lambda c: replace(c, histories=()), "histories"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_fails_its_check(name: str) -> None:
    change, check = FAULTS[name]
    assert failed(change(honest())) == [f"observed.{check}.delayed.seed0"]


def test_one_wrong_cast_fails_curves_that_follow() -> None:
    bf16, fp8 = make_pairs()
    kept = {"quantizers": honest().quantizers, "histories": honest().histories, "schema_id": CURVE_SCHEMA_ID}
    seen = [replace(curve, **kept) for curve in fp8]
    assert decide_loss(bf16, seen).outcome is LossOutcome.PASS
    seen[1] = with_cast("gradient", format="e4m3")(seen[1])
    verdict = decide_loss(bf16, seen)
    assert [check.name for check in verdict.checks if not check.passed] == ["observed.casts.delayed.seed1"]


def test_files_from_before_such_records_are_judged_by_their_curves_alone() -> None:
    assert list(check_observed(replace(honest(), quantizers=(), schema_id=FIRST_CURVE_SCHEMA_ID))) == []
