"""Drawings name everything that they show, thin no peak away, and take any text and any number."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from megacpp_validate.evidence.receipt import TrainingStep
from megacpp_validate.gate.loss import LossOutcome, LossVerdict, SeedSeries
from megacpp_validate.report.curves import Line, draw_loss_curves, draw_panels, draw_training
from tests.report.sessions import record

SVG = "{http://www.w3.org/2000/svg}"
STEPS = tuple(range(4, 1000))
PEAK = 611


def series(seed: int, peak: float = 0.0) -> SeedSeries:
    gap = tuple(0.001 * seed + (peak if step == PEAK else 0.0) for step in STEPS)
    return SeedSeries(seed=seed, steps=STEPS, reference=tuple(3 - step / 1000 for step in STEPS), gap=gap)


SERIES = (series(0), series(1), series(2, peak=0.5))
VERDICT = LossVerdict(recipe="delayed", outcome=LossOutcome.FAIL, bar=0.01, early_bar=0.02, series=SERIES)


def texts(svg: str) -> list[str]:
    return ["".join(found.itertext()) for found in ET.fromstring(svg).iter(f"{SVG}text")]


def lines(svg: str) -> dict[str, ET.Element]:
    return {found[0].text or "": found for found in ET.fromstring(svg).iter(f"{SVG}polyline")}


def points(svg: str, name: str) -> list[tuple[float, float]]:
    pairs = (lines(svg)[name].get("points") or "").split()
    return [(float(x), float(y)) for x, _, y in (pair.partition(",") for pair in pairs)]


def test_every_curve_the_gap_of_each_seed_and_the_bars_are_drawn_and_named() -> None:
    svg = draw_loss_curves(VERDICT).svg
    names = {f"{what}, seed {seed}" for seed in range(3) for what in ("BF16", "delayed", "gap")}
    assert set(lines(svg)) == names | {"bar +0.0100", "bar -0.0100", "bar +0.0200", "bar -0.0200"}
    assert names | {"step 4", "step 999"} <= set(texts(svg))
    # Nothing is told by colour alone.
    assert set(re.findall(r'(?:stroke|fill)="([^"]*)"', svg)) == {"currentColor", "none"}
    assert len({lines(svg)[f"gap, seed {seed}"].get("stroke-dasharray") for seed in range(3)}) == 3


def test_a_peak_of_one_step_is_not_thinned_away() -> None:
    svg = draw_loss_curves(VERDICT).svg
    assert min(y for _, y in points(svg, "gap, seed 2")) < min(y for _, y in points(svg, "gap, seed 1")) - 100
    shown = points(draw_training(record()).svg, "seconds of each step")
    assert len(shown) <= 300
    assert min(y for _, y in shown) < sorted(y for _, y in shown)[1] - 50


@pytest.mark.parametrize("value", [None, 1e308, -1e308])
def test_no_number_stops_a_drawing(value: float | None) -> None:
    odd = replace(record(), steps=tuple(TrainingStep(n, value, 1e308, 1.0, 0.5) for n in range(3)))
    assert "nan" not in draw_training(odd).svg
    ET.fromstring(draw_loss_curves(LossVerdict(recipe="", outcome=LossOutcome.REFUSED)).svg)


def test_text_of_others_stays_text() -> None:
    hostile = "</svg><script>\x00\x1b[31m\u202e\ud800&"
    for svg in (
        draw_loss_curves(VERDICT.model_copy(update={"recipe": hostile})).svg,
        draw_training(replace(record(), model=hostile)).svg,
        draw_panels(hostile, {hostile: [Line(hostile, [(0, 1.0), (1, 2.0)])]}).svg,
    ):
        assert not list(ET.fromstring(svg).iter(f"{SVG}script"))
        svg.encode("utf-8")
