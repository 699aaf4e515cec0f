"""What features are worth, in words: a row of each verdict, on a page and in a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from megacpp_validate.gate.ablation_result import (
    AblationResult,
    Change,
    FeatureAblation,
    LossChange,
    PartSeen,
    RunSeen,
    Verdict,
)
from megacpp_validate.report.markdown.ablation import render_ablation_page
from megacpp_validate.report.terminal.ablation import render_ablation
from megacpp_validate.report.words.ablation import HEADINGS, say_cells, say_states, say_verdict, summarize_ablation

HOSTILE = "<script>alert(1)</script> | `x` \x1b[31m [bold]"


def change(ratio: float, verdict: Verdict) -> Change:
    return Change(
        off=0.1, on=0.1 * ratio, ratio=ratio, low=ratio - 0.01, high=ratio + 0.01, repeats=1.001, verdict=verdict
    )


def row(feature: str, verdict: Verdict, **more: Any) -> FeatureAblation:
    said: dict[str, Any] = {
        "tool": "test", "feature": feature, "title": f"The feature {feature}", "plain": "not there", "source": "here",
        "size": "tiny", "seed": 0, "steps": 40, "pairs": 2, "ranks": 2, "device": "cpu", "base": "plain", "warm": 5,
        "off": {"forms": {"graphs": False}, "changes": {"mtp": True}, "precision": "fp32", "watch": False},
        "on": {"forms": {"graphs": True}, "changes": {"mtp": True}, "precision": "fp32", "watch": True},
        "verdict": verdict,
    }  # fmt: skip
    if verdict is not Verdict.NOT_JUDGED:
        said |= {
            "runs": (
                RunSeen(
                    arm="off", place=0, ending="done", model="tiny", pattern="AMEAR", parameters=1234567,
                    topology={"device": "cpu", "plan": {"data": 2}}, versions={"torch": "2"},
                    parts={"norm": PartSeen(requested="te", observed="native")},
                ),
            ),
            "step_time": change({Verdict.WIN: 0.9, Verdict.TAX: 1.1, Verdict.NOISE: 1.001}[verdict], verdict),
            "memory": change(0.5, Verdict.WIN),
            "loss": LossChange(
                off=3.0, on=3.1, difference=0.1, half=0.01, repeats=0.0, steps=10, changes=True, identical=False
            ),
        }  # fmt: skip
    return FeatureAblation(**{**said, **more})


@pytest.fixture
def result() -> AblationResult:
    rows = (
        row("quick", Verdict.WIN),
        row("slow", Verdict.TAX),
        row("same", Verdict.NOISE),
        row("gone", Verdict.NOT_JUDGED, reasons=("run 2 (on): it ended as died",)),
    )
    return AblationResult(tool="test", features=rows)


def draw(result: AblationResult) -> str:
    console = Console(file=io.StringIO(), width=160)
    render_ablation(result, console=console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_every_verdict_has_its_word_and_none_is_taken_for_good(result: AblationResult) -> None:
    assert summarize_ablation(result) == "win: quick; tax: slow; noise: same; not judged: gone."
    assert not result.holds
    said = [say_verdict(row) for row in result.features]
    assert said[0] == "a win: steps are shorter; saves memory; changes the loss"
    assert said[1].startswith("a tax: steps take longer")
    assert said[3] == "not judged: run 2 (on): it ended as died"
    assert say_cells(result.features[1]) == (
        "slow", "+10% [+9%, +11%]", "not seen", "-50% [-51%, -49%]", "+0.1 nats, beyond 0.01",
        "tax; saves memory; changes the loss",
    )  # fmt: skip


def test_the_page_and_the_terminal_tell_model_topology_state_and_backends(result: AblationResult) -> None:
    page, shown = render_ablation_page(result), draw(result)
    assert f"| {' | '.join(HEADINGS)} |" in page
    for text in (page, shown):
        told = " ".join(text.split())
        assert "tiny mtp=True, AMEAR, 1,234,567 parameters; 2 ranks on cpu, fp32" in told
        assert "cpu, data 2" in told
        assert "forms.graphs: False -" in told
        assert "native (asked for te): norm" in told
        assert "run 2 (on): it ended as died" in told
    assert say_states(result.features[0]) == ["forms.graphs: False -> True", "watch: False -> True"]


def test_words_of_others_are_shown_and_not_obeyed() -> None:
    hostile = row("gone", Verdict.NOT_JUDGED, title=HOSTILE, reasons=(HOSTILE,))
    result = AblationResult(tool="test", features=(hostile,))
    assert "<script" not in render_ablation_page(result)
    assert "\x1b[31m" not in draw(result)
