"""The policy of low precision in every form: what is wrong is told in each, and nothing is told by colour alone."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from megacpp_validate.evidence.release_gate import WaiverState
from megacpp_validate.gate.policy_result import (
    LowSeen,
    PolicyResult,
    PresetDecision,
    PresetOutcome,
    PresetRefusal,
    WaiverSeen,
    WaiverStanding,
)
from megacpp_validate.report.github.policy import render_policy_annotations
from megacpp_validate.report.html.policy import render_policy_html
from megacpp_validate.report.junit.policy import render_policy_junit
from megacpp_validate.report.machine import read_json, to_json
from megacpp_validate.report.markdown.policy import tell_policy
from megacpp_validate.report.terminal.policy import render_policy
from megacpp_validate.report.words.presets import mark_preset, mark_waiver
from tests.report.reading import Page, flat

TODAY = date(2026, 11, 21)
ALLOWED = PresetDecision(
    preset="production",
    today=TODAY,
    says="dense products",
    targets=("h200",),
    low=(LowSeen(("attention_mlp",), "delayed"), LowSeen(("shared_experts",), "delayed")),
    layers=12,
    bf16_first=1,
    bf16_last=2,
    outcome=PresetOutcome.ALLOWED,
    refusals=(),
)
REFUSAL = PresetRefusal(
    "routers", "FP8 in routers", "moe_router runs in delayed", "rounding changes the picks", "a paper", "leave it"
)
SECOND = replace(REFUSAL, found="mod_router runs in delayed")
REFUSED = replace(ALLOWED, preset="picks", outcome=PresetOutcome.REFUSED, refusals=(REFUSAL, SECOND))
HELD = WaiverSeen("somebody", "a trial", "https://example.org/1", date(2026, 12, 1), True)
WAIVED = replace(
    ALLOWED, preset="trial", outcome=PresetOutcome.WAIVED, refusals=(replace(REFUSAL, waiver=HELD),)
)  # fmt: skip
MISSED = replace(ALLOWED, preset="old", outcome=PresetOutcome.NOT_REFUSED, not_refused_by=("scan-heavy",))
BACK = replace(REFUSED, preset="older", outcome=PresetOutcome.ROLLED_BACK)
STALE = WaiverStanding(
    "routers", "picks", "nobody", "it was once", "https://example.org/2", date(2026, 1, 1), WaiverState.EXPIRED
)


def result(*presets: PresetDecision, waivers: tuple[WaiverStanding, ...] = ()) -> PolicyResult:
    return PolicyResult(tool="megacpp-validate 0", today=TODAY, rules=10, presets=presets, waivers=waivers)


def print_it(given: PolicyResult, *, width: int = 10_000) -> str:
    stream = io.StringIO()
    render_policy(given, console=Console(file=stream, width=width, _environ={}))
    return stream.getvalue()


TOLD: dict[str, Callable[[PolicyResult], str]] = {
    "terminal": lambda given: flat(print_it(given)),
    "markdown": lambda given: flat(html.unescape("\n".join(tell_policy(given)))),
    "html": lambda given: flat(Page(render_policy_html(given)).text),
    "junit": lambda given: flat("\n".join(" ".join([*element.attrib.values(), element.text or ""])
                                          for element in ET.fromstring(render_policy_junit(given)).iter())),
    "annotations": lambda given: flat(render_policy_annotations(given).replace("%0A", "\n").replace("%2C", ",")),
}  # fmt: skip
FORMS = pytest.mark.parametrize("tell", TOLD.values(), ids=TOLD)


@FORMS
def test_a_refusal_is_told_with_everything_that_is_known_of_it(tell: Callable[[PolicyResult], str]) -> None:
    said = tell(result(ALLOWED, REFUSED))
    assert "May not run: picks. Allowed: production." in said
    together = "FP8 in routers [routers]: moe_router runs in delayed; mod_router runs in delayed"
    for words in (together, "rounding changes the picks (a paper)", "leave it"):
        assert words in said


@FORMS
def test_a_waiver_is_told_with_its_owner_its_day_and_what_it_holds_off(tell: Callable[[PolicyResult], str]) -> None:
    said = tell(result(WAIVED))
    assert "FP8 in routers [routers]: moe_router" in said
    assert "of somebody, lets it through until 2026-12-01: a trial" in said
    assert "allowed by waiver" in said.lower()


@FORMS
def test_a_rule_that_no_longer_refuses_is_told(tell: Callable[[PolicyResult], str]) -> None:
    said = tell(result(MISSED))
    assert "The policy no longer refuses old." in said
    assert "the rule scan-heavy must refuse this preset and refuses nothing of it" in said


@FORMS
def test_an_expired_waiver_is_told(tell: Callable[[PolicyResult], str]) -> None:
    assert "routers for picks, of nobody: expired on 2026-01-01" in tell(result(REFUSED, waivers=(STALE,)))


@pytest.mark.parametrize(
    ("given", "level"),
    [(REFUSED, "error"), (MISSED, "error"), (WAIVED, "warning"), (BACK, "debug"), (ALLOWED, "debug")],
)
def test_annotations_are_as_loud_as_the_outcome(given: PresetDecision, level: str) -> None:
    first = render_policy_annotations(result(given)).splitlines()[0]
    assert first.startswith(f"::{level}")


@pytest.mark.parametrize(("given", "failures"), [(REFUSED, 1), (MISSED, 1), (WAIVED, 0), (BACK, 0), (ALLOWED, 0)])
def test_junit_fails_what_policy_and_matrix_disagree_on(given: PresetDecision, failures: int) -> None:
    root = ET.fromstring(render_policy_junit(result(given)))
    assert root.attrib["failures"] == str(failures)
    assert root.attrib["skipped"] == "0"


@pytest.mark.parametrize(("given", "tone"), [(REFUSED, "bad"), (MISSED, "bad"), (WAIVED, "risk"), (BACK, "good")])
def test_the_page_has_the_tone_of_the_answer(given: PresetDecision, tone: str) -> None:
    assert f'<p class="answer {tone}">' in render_policy_html(result(ALLOWED, given))


def test_marks_differ_in_symbol_and_word_not_in_colour_alone() -> None:
    marks = [mark_preset(replace(ALLOWED, outcome=outcome)) for outcome in PresetOutcome]
    assert len({mark.word for mark in marks}) == len(marks)
    tones = {mark.tone: {mark.symbol, mark.letter} for mark in marks}
    assert len({symbol for symbols in tones.values() for symbol in symbols}) == 2 * len(tones)
    waivers = [mark_waiver(replace(STALE, state=state)) for state in WaiverState]
    assert len({mark.symbol for mark in waivers}) == len(waivers)


def test_nothing_of_a_preset_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    evil = replace(ALLOWED, preset="x\x1b[31m", says="<script>alert(1)</script> | ::error::")
    assert "\x1b" not in print_it(result(evil))
    assert "<script>alert" not in render_policy_html(result(evil))
    assert "\n::error::" not in render_policy_annotations(result(evil))
    table = [line for line in tell_policy(result(evil)) if "alert" in line]
    assert all(line.replace("\\|", "").count("|") == 6 for line in table)


@pytest.mark.parametrize("width", [40, 100])
def test_a_terminal_is_not_overrun(width: int) -> None:
    said = print_it(result(ALLOWED, REFUSED, WAIVED, MISSED, waivers=(STALE,)), width=width)
    assert all(len(line) <= width or "://" in line for line in said.splitlines())
    assert re.search(r"^✗ picks refused", said, re.MULTILINE)


def test_json_gives_back_what_was_written() -> None:
    given = result(ALLOWED, REFUSED, WAIVED, MISSED, BACK, waivers=(STALE,))
    assert read_json(to_json(given)) == given
