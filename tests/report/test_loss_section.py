"""The loss curves in a page: words first, nothing by colour alone, nothing obeyed of what a curve is called."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from megacpp_validate.evidence.receipt import Check, Part
from megacpp_validate.gate.loss_result import LossGateResult, LossOutcome, LossVerdict, SeedSeries
from megacpp_validate.report.loss_report import render_losses_annotations, render_losses_html, render_losses_junit
from megacpp_validate.report.loss_section import draw_loss_section
from megacpp_validate.report.markdown.loss import tell_losses
from tests.report.reading import Page, flat

STEPS = tuple(range(4, 200))
HELD = Check("gap.tail", True, (Part("size", 0.001, 0.005, True, "the spread of BF16"),))
OUT = Check("gap.settled.seed0", False, (Part("size", 0.5, 0.01, False, "the cap"),), "window that ends at step 111")


def verdict(
    outcome: LossOutcome, *checks: Check, recipe: str = "delayed", refusals: tuple[str, ...] = ()
) -> LossVerdict:
    series = SeedSeries(
        seed=0, steps=STEPS, reference=tuple(3 - step / 300 for step in STEPS), gap=(0.001,) * len(STEPS)
    )
    return LossVerdict(
        recipe=recipe,
        outcome=outcome,
        refusals=refusals,
        checks=checks,
        window=5,
        bar=0.01,
        spread=0.02,
        series=() if outcome is LossOutcome.REFUSED else (series,),
    )


PASS = verdict(LossOutcome.PASS, HELD)
FAIL = verdict(LossOutcome.FAIL, HELD, OUT, recipe="current")
REFUSED = verdict(LossOutcome.REFUSED, recipe="block", refusals=("other seeds",))


def test_every_verdict_is_a_figure_with_its_answer_its_picture_and_its_checks() -> None:
    page = str(draw_loss_section((PASS, FAIL, REFUSED)))
    tree = ET.fromstring(page)
    assert len(tree.findall("figure")) == 3
    assert page.count("<svg ") == 3
    words = flat(Page(page).text)
    assert "delayed follows BF16" in words
    assert "current does not follow BF16: gap.settled.seed0 out of bounds" in words
    assert "block cannot be compared with BF16: other seeds" in words
    assert "out: gap.settled.seed0" in words
    assert "window that ends at step 111" in words
    assert "All 2 checks" in words


def test_the_answer_is_not_told_by_colour_alone() -> None:
    tree = ET.fromstring(str(draw_loss_section((PASS, FAIL, REFUSED))))
    said = [flat("".join(caption.itertext())) for caption in tree.iter("figcaption")]
    assert [line[:9].strip() for line in said] == ["✓ pass de", "✗ fail cu", "○ not run"]
    assert not re.search(r"(stroke|fill)=\"(?!none|currentColor)", str(draw_loss_section((PASS, FAIL))))


def test_the_picture_can_be_reached_and_scrolled_without_a_mouse_and_says_what_it_is() -> None:
    tree = ET.fromstring(str(draw_loss_section((FAIL,))))
    (picture,) = tree.findall("figure/div")
    assert picture.attrib["tabindex"] == "0"
    assert picture.attrib["aria-label"] == "Loss curves of current and of BF16, and the gap between them"


@pytest.mark.parametrize("verdicts", [(), (PASS,)])
def test_a_verdict_that_is_missing_is_told(verdicts: tuple[LossVerdict, ...]) -> None:
    said = flat(Page(str(draw_loss_section(verdicts, "fp8_loss did not run: <no GPU>"))).text)
    assert "○ not run fp8_loss did not run: <no GPU>" in said


def test_where_nothing_was_trained_there_is_no_section() -> None:
    assert str(draw_loss_section(())) == ""


def test_nothing_of_a_name_is_obeyed() -> None:
    evil = verdict(
        LossOutcome.FAIL,
        Check('"><script>x</script>', False, (), "</li><script>y</script>\x1b"),
        recipe="<b onload=z>\u202e",
    )
    page = str(draw_loss_section((evil,), "<script>w</script>"))
    assert "<script" not in page
    assert "<b onload" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    ET.fromstring(page)


def test_a_page_of_a_folder_shows_the_same_figures_and_whose_they_are() -> None:
    cells = ("te2.12.0-h200-fp8_loss", "te2.20.2-h200-fp8_loss", "<b onload=z>\u202e")
    verdicts = tuple(PASS.model_copy(update={"of": cell}) for cell in cells)
    page = render_losses_html(LossGateResult(tool="tool", folder="<i>curves", verdicts=verdicts))
    words = flat(Page(page).text)
    assert page.count("<figure ") == 3
    for cell in cells[:2]:
        assert f"{cell}: delayed follows BF16" in words
        assert f'aria-label="Loss curves of {cell} delayed and of BF16' in page
    assert "<b onload" not in page
    assert "<i>curves" not in page
    assert "\u202e" not in page


@pytest.mark.parametrize("verdicts", [(), (PASS, FAIL, REFUSED)])
def test_a_folder_s_answer_is_told_in_every_form(verdicts: tuple[LossVerdict, ...]) -> None:
    result = LossGateResult(tool="tool", folder="curves", verdicts=verdicts)
    said = (
        ["current does not follow BF16", "block cannot be compared"] if verdicts else ["nothing is known of any recipe"]
    )
    for text in (
        Page(render_losses_html(result)).text,
        render_losses_junit(result),
        render_losses_annotations(result),
        "\n".join(tell_losses(result)),
    ):
        assert all(words in flat(text) for words in said)
