"""Step times and goodput as a picture: every peak and every phase is there, in words too."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree as ET

from megacpp_validate.evidence.training import TrainingRecord, TrainingStep
from megacpp_validate.report.drawings.step_times import draw_step_times

SVG = "{http://www.w3.org/2000/svg}"
PEAK = 611


def steps(number: int) -> tuple[TrainingStep, ...]:
    return tuple(TrainingStep(n, 3.0, 2.0, 1.0, 20.0 if n == 0 else 0.9 if n == PEAK else 0.5) for n in range(number))


RECORD = TrainingRecord(
    "plan", "scaled", "AEMR", 2_600_000_000, 4, {}, "bf16", {}, {}, 2.0, 3.5, steps(1000),
    4_000_000_000, {"start-up": 1_000_000_000, "data": 0, "step": 3_000_000_000}, 10, 1.0,
)  # fmt: skip


def texts(svg: str) -> list[str]:
    return ["".join(found.itertext()) for found in ET.fromstring(svg).iter(f"{SVG}text")]


def test_the_slowest_step_is_never_thinned_away_and_the_first_is_told() -> None:
    svg = draw_step_times(RECORD)
    (line,) = ET.fromstring(svg).iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    assert len(points) <= 300
    assert min(y for _, y in points) < sorted(y for _, y in points)[1]  # one peak above the rest
    assert any("step 0 took 20 s" in said for said in texts(svg))
    assert {"step 1", "step 999"} <= set(texts(svg))


def test_every_phase_has_a_bar_as_long_as_its_share() -> None:
    svg = draw_step_times(RECORD)
    bars = [float(bar.get("width", "0")) for bar in ET.fromstring(svg).iter(f"{SVG}rect") if bar.get("fill-opacity")]
    assert [round(bar / sum(bars), 3) for bar in bars] == [0.25, 0.75]
    assert {"start-up", "step", "1.00 s, 25.0%", "3.00 s, 75.0%"} <= set(texts(svg))
    assert "data" not in texts(svg)


def test_what_is_short_or_hostile_is_drawn_all_the_same() -> None:
    evil = replace(RECORD, model="<script>\x1b[31m", phases_ns={"<b>": 4_000_000_000})
    assert "<script>" not in draw_step_times(evil)
    assert "\x1b" not in draw_step_times(evil)
    for number in (0, 1, 2):
        ET.fromstring(draw_step_times(replace(RECORD, steps=steps(number))))
    ET.fromstring(draw_step_times(replace(RECORD, steps=(), whole_ns=0, phases_ns={})))
