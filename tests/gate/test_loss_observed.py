"""Each thing that a layer may hold wrongly while it trains, planted in an honest record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.gate.loss import decide_loss
from megacpp_validate.gate.loss_observed import CASTS, Held, check_observed, hold
from megacpp_validate.gate.loss_result import LossOutcome
from tests.gate.small_curves import LAYERS, PARTS, STEPS, UNIT, as_recipe, make_candidate, make_casts, make_pairs

Change = Callable[[LossCurve], LossCurve]


def honest(recipe: str = "delayed") -> LossCurve:
    return as_recipe(make_candidate(0, [UNIT] * STEPS), recipe)


def failed(curve: LossCurve, held: Held | None = None) -> list[str]:
    return [check.name for check in check_observed(curve, held or hold([curve])) if not check.passed]


@pytest.mark.parametrize("recipe", CASTS)
def test_what_each_recipe_has_passes(recipe: str) -> None:
    checks = list(check_observed(honest(recipe), hold([honest(one) for one in CASTS])))
    assert all(check.passed for check in checks)
    assert len(checks) == (3 if recipe == "delayed" else 2)


def with_cast(tensor: str, **changes: str) -> Change:
    def change(curve: LossCurve) -> LossCurve:
        rows = [replace(row, **changes) if row.tensor == tensor else row for row in curve.quantizers]
        return replace(curve, quantizers=tuple(rows))

    return change


def with_history(**changes: float) -> Change:
    return lambda curve: replace(
        curve, histories=(curve.histories[0], replace(curve.histories[1], **changes), *curve.histories[2:])
    )


def without_layers(*layers: str) -> Change:
    """The casts and the histories of these layers are gone: they ran in BF16."""

    def change(curve: LossCurve) -> LossCurve:
        kept = tuple(row for row in curve.quantizers if row.layer not in layers)
        return replace(
            curve, quantizers=kept, histories=tuple(replace(row, tensors=len(kept)) for row in curve.histories)
        )

    return change


def cast_too(layer: str) -> Change:
    """One layer more casts, as the others do."""

    def change(curve: LossCurve) -> LossCurve:
        more = [replace(row, layer=layer) for row in curve.quantizers if row.layer == LAYERS[0]]
        rows = (*curve.quantizers, *more)
        return replace(
            curve, quantizers=rows, histories=tuple(replace(row, tensors=len(rows)) for row in curve.histories)
        )

    return change


def without_part(part: str) -> Change:
    return lambda c: replace(c, part_norms={name: norms for name, norms in c.part_norms.items() if name != part})


FAULTS: dict[str, tuple[Change, set[str]]] = {
    "E4M3 gradients": (with_cast("gradient", format="e4m3"), {"casts"}),
    "E5M2 activations": (with_cast("input", format="e5m2"), {"casts"}),
    "another quantizer": (with_cast("weight", kind="Float8CurrentScalingQuantizer"), {"casts"}),
    "a tensor that is not cast": (lambda c: replace(c, quantizers=c.quantizers[1:]), {"casts"}),
    "no cast at all": (lambda c: replace(c, quantizers=()), {"casts", "layers"}),
    "a part that never casts": (without_layers("lane.neck"), {"layers"}),
    "one layer alone": (without_layers(*LAYERS[1:]), {"layers"}),
    "a cast in the BF16 zone": (cast_too("hybrid.layers.4.mixer"), {"layers"}),
    "a head that casts": (cast_too("hybrid.head"), {"layers"}),
    "no parts on record": (lambda c: replace(c, part_norms={}), {"layers"}),
    "a part that is not on record": (without_part("layers.2"), {"layers"}),
    "no lane on record": (without_part("lane"), {"layers"}),
    "a history that stands still": (with_history(not_rolled=1), {"histories"}),
    "no amax": (with_history(not_collected=1), {"histories"}),
    "a wrong scale": (with_history(scale_error=2.0**-20), {"histories"}),
    "fewer histories than casts": (with_history(tensors=len(make_casts("delayed")) - 1), {"histories"}),
    "a scale error below 0": (with_history(scale_error=-1.0), {"histories"}),
    "less than no history": (with_history(not_rolled=-1), {"histories"}),
    "a step that is none": (with_history(step=5000), {"histories"}),
    "looked at early alone": (lambda c: replace(c, histories=c.histories[:2]), {"histories"}),
    "nobody looked": (lambda c: replace(c, histories=()), {"histories"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_fails_its_check(name: str) -> None:
    change, checks = FAULTS[name]
    assert set(failed(change(honest()))) == {f"observed.{check}.delayed.seed0" for check in checks}


@pytest.mark.parametrize("recipe", CASTS)
@pytest.mark.parametrize("other", CASTS)
def test_a_run_under_the_name_of_another_recipe_fails(recipe: str, other: str) -> None:
    relabelled = replace(honest(recipe), recipe=other)
    assert (f"observed.casts.{other}.seed0" in failed(relabelled)) is (recipe != other)


def test_a_recipe_whose_casts_are_not_known_fails_here_too() -> None:
    assert failed(replace(honest("current"), recipe="fp8")) == ["observed.casts.fp8.seed0"]


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_layer_that_casts_with_another_seed_or_recipe_must_cast(recipe: str) -> None:
    curve = without_layers("hybrid.layers.2.down")(honest(recipe))
    assert failed(curve) == []  # its part still casts: `up` does
    said = {name.split(".")[1] for name in failed(curve, hold([curve, honest("current")]))}
    assert said == {"layers"}
    (check,) = [check for check in check_observed(curve, hold([curve, honest("current")])) if not check.passed]
    assert "hybrid.layers.2.down does not cast its gradient, and does with another seed or recipe" in check.detail


def test_histories_that_another_seed_has_must_be_there() -> None:
    more = with_history(tensors=99)(honest())
    assert failed(honest(), hold([honest(), more])) == ["observed.histories.delayed.seed0"]


def test_one_layer_less_in_one_seed_fails_curves_that_follow() -> None:
    bf16, fp8 = make_pairs()
    assert decide_loss(bf16, fp8).outcome is LossOutcome.PASS
    fp8[1] = without_layers("hybrid.layers.2.down")(fp8[1])
    verdict = decide_loss(bf16, fp8)
    assert verdict.outcome is LossOutcome.FAIL
    assert [check.name for check in verdict.checks if not check.passed] == [
        "observed.layers.delayed.seed1", "observed.histories.delayed.seed1",
    ]  # fmt: skip


def test_a_layer_less_in_every_seed_fails_beside_a_recipe_that_has_it() -> None:
    bf16, fp8 = make_pairs()
    current = [as_recipe(curve, "current") for curve in fp8]
    fewer = [without_layers("hybrid.layers.2.down")(curve) for curve in fp8]
    assert decide_loss(bf16, fp8, current).outcome is LossOutcome.PASS
    verdict = decide_loss(bf16, fewer, current)
    assert {check.name for check in verdict.checks if not check.passed} == {
        f"observed.layers.delayed.seed{seed}" for seed in range(3)
    }


def test_one_wrong_cast_fails_curves_that_follow() -> None:
    bf16, fp8 = make_pairs()
    fp8[1] = with_cast("gradient", format="e4m3")(fp8[1])
    verdict = decide_loss(bf16, fp8)
    assert [check.name for check in verdict.checks if not check.passed] == ["observed.casts.delayed.seed1"]


def test_the_small_curves_have_a_cast_in_each_part_in_low_precision() -> None:
    parts = {layer.removeprefix("hybrid.") for layer in LAYERS}
    assert {part for part in PARTS if any(name.startswith(f"{part}.") for name in parts)} == {
        "layers.1", "layers.2", "layers.3", "lane",
    }  # fmt: skip


def test_a_cast_in_the_bf16_zone_is_the_fault_of_its_own_recipe() -> None:
    bf16, fp8 = make_pairs()
    current = [as_recipe(curve, "current") for curve in fp8]
    strayed = [cast_too("hybrid.layers.4.mixer")(curve) for curve in fp8]
    assert decide_loss(bf16, current, strayed).outcome is LossOutcome.PASS
    assert decide_loss(bf16, strayed, current).outcome is LossOutcome.FAIL
