"""The picture of a loss verdict says in words what it shows, and needs no colour."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from megacpp_validate.evidence.receipt import Check, Part
from megacpp_validate.gate.loss_result import LossOutcome, LossVerdict, SeedSeries
from megacpp_validate.report.drawings.loss_curves import draw_loss_curves

SVG = "{http://www.w3.org/2000/svg}"
STEPS = tuple(range(4, 1000))
PEAK = 611


def series(seed: int, peak: float = 0.0) -> SeedSeries:
    gap = tuple(0.001 * seed + (peak if step == PEAK else 0.0) for step in STEPS)
    return SeedSeries(seed=seed, steps=STEPS, reference=tuple(3 - step / 1000 for step in STEPS), gap=gap)


FAILED = Check(
    "gap.settled.seed2", False, (Part("size", 0.5, 0.01, False, "why"),), "largest in the window that ends at step 611"
)
VERDICT = LossVerdict(
    recipe="delayed",
    outcome=LossOutcome.FAIL,
    checks=(Check("gap.tail", True, (Part("size", 0.0, 0.005, True, "why"),)), FAILED),
    window=5,
    bar=0.01,
    spread=0.02,
    series=(series(0), series(1), series(2, peak=0.5)),
)


def texts(svg: str) -> list[str]:
    return ["".join(found.itertext()) for found in ET.fromstring(svg).iter(f"{SVG}text")]


def lines(svg: str) -> dict[str, ET.Element]:
    return {found[0].text or "": found for found in ET.fromstring(svg).iter(f"{SVG}polyline")}


def test_the_answer_and_what_failed_stand_in_words() -> None:
    said = texts(draw_loss_curves(VERDICT))
    assert said[0] == "delayed: ✗ fail"
    assert said[1] == "gap.settled.seed2: 0.5, bound 0.01: largest in the window that ends at step 611"
    assert not any("gap.tail" in line for line in said)


def test_every_curve_the_gap_of_each_seed_and_the_bar_are_drawn_and_named() -> None:
    svg = draw_loss_curves(VERDICT)
    names = {f"{what}, seed {seed}" for seed in range(3) for what in ("BF16", "delayed", "gap")}
    assert set(lines(svg)) == names | {"no gap", "bar +0.0100", "bar -0.0100"}
    assert "bar ±0.0100, from step 504" in texts(svg)
    assert {"seed 0", "seed 1", "seed 2", "step 4", "step 999"} <= set(texts(svg))


def test_nothing_hangs_on_colour() -> None:
    svg = draw_loss_curves(VERDICT)
    assert set(re.findall(r'(?:stroke|fill)="([^"]*)"', svg)) == {"currentColor", "none"}
    drawn = lines(svg)
    assert len({drawn[f"gap, seed {seed}"].get("stroke-dasharray") for seed in range(3)}) == 3
    assert drawn["BF16, seed 0"].get("stroke-dasharray") != drawn["delayed, seed 0"].get("stroke-dasharray")


def test_a_peak_of_one_step_is_not_thinned_away_and_stays_in_the_frame() -> None:
    def highest(seed: int) -> float:
        points = (lines(draw_loss_curves(VERDICT))[f"gap, seed {seed}"].get("points") or "").split()
        return min(float(point.split(",")[1]) for point in points)

    assert highest(2) < highest(1) - 100
    frames = list(ET.fromstring(draw_loss_curves(VERDICT)).iter(f"{SVG}rect"))
    assert highest(2) > float(frames[1].get("y") or "nan")


def test_the_bar_is_drawn_where_it_lies_on_the_scale_of_the_gap() -> None:
    drawn = lines(draw_loss_curves(VERDICT))

    def height(name: str) -> float:
        return float((drawn[name].get("points") or "").split()[0].split(",")[1])

    assert height("bar +0.0100") < height("no gap") < height("bar -0.0100")
    assert height("no gap") - height("bar +0.0100") == pytest.approx(height("bar -0.0100") - height("no gap"), abs=0.2)


@pytest.mark.parametrize("outcome", LossOutcome)
def test_each_outcome_is_told_without_series_as_well(outcome: LossOutcome) -> None:
    refusals = ("the candidate lacks seed 3",) if outcome is LossOutcome.REFUSED else ()
    svg = draw_loss_curves(LossVerdict(recipe="block", outcome=outcome, refusals=refusals))
    assert outcome.value in texts(svg)[0]
    assert texts(svg)[1:] == list(refusals)
    assert not lines(svg)


def test_text_of_others_stays_text() -> None:
    hostile = "</svg><script>\x00\x1b[31m\u202e\ud800&"
    svg = draw_loss_curves(VERDICT.model_copy(update={"recipe": hostile}))
    assert not list(ET.fromstring(svg).iter(f"{SVG}script"))
    assert "<script" not in svg
    svg.encode("utf-8")


def test_each_half_has_the_bar_that_holds_there() -> None:
    svg = draw_loss_curves(VERDICT.model_copy(update={"early_bar": 0.02}))
    drawn = lines(svg)
    assert {"bar +0.0200", "bar -0.0200", "bar +0.0100", "bar -0.0100"} <= set(drawn)

    def ends(name: str) -> list[float]:
        return [float(point.split(",")[0]) for point in (drawn[name].get("points") or "").split()]

    assert ends("bar +0.0200")[1] <= ends("bar +0.0100")[0]
    assert ends("bar +0.0200")[0] < ends("bar +0.0200")[1]
    assert {"bar ±0.0200, from step 4", "bar ±0.0100, from step 504"} <= set(texts(svg))
