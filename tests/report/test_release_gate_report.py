"""A decision of the release gate in every form: what closes it is told in each, and nothing of others is markup."""

from __future__ import annotations

import io
from datetime import date
from xml.etree import ElementTree as ET

from rich.console import Console

from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.release_gate import (
    CellVerdict,
    GateCulprit,
    GateDecision,
    GateRule,
    GateWaiver,
    WaiverState,
)
from megacpp_validate.evidence.values import Cause
from megacpp_validate.gate.release_asked import Reason
from megacpp_validate.report.github.release_gate import render_release_gate_annotations
from megacpp_validate.report.junit.release_gate import render_release_gate_junit
from megacpp_validate.report.markdown.release_gate import render_release_gate_markdown
from megacpp_validate.report.terminal.release_gate import render_release_gate
from megacpp_validate.report.words.gate import OF_ANOTHER, mark_cell_verdict, mark_gate, summarize_gate

HOSTILE = "<script>alert(1)</script>\x1b[31m ::error::x"


def cell(probe: str, **verdict: object) -> CellVerdict:
    known: dict[str, object] = {
        "cell": f"te2.17.1-h200-{probe}", "stack": "te2.17.1", "target": "h200", "probe": probe, "run": ".",
        "outcome": Outcome.PASS, "required": True, "receipt_sha256": "0" * 64,
    }  # fmt: skip
    return CellVerdict.model_validate(known | verdict)


GOOD = cell("imports", accepted=True, warnings=("two files of libcudnn.", "no baseline"))
RED = cell(
    "attention", outcome=Outcome.ERROR, closes=True, rules=(GateRule.OUTCOME,), reasons=("error: cuDNN Error. More.",)
)
UNDER = cell("layer_spec", outcome=Outcome.ERROR, closes=True, rules=(GateRule.OUTCOME,), reasons=("error: same",))
LOST = cell("permute", outcome=None, run="", closes=True, rules=(GateRule.MISSING,), reasons=("there is no receipt",))
WAIVED = cell(
    "expert_gemm", accepted=True, rules=(GateRule.SLOWER,), reasons=("slower than x 1.1",), waived_by="somebody"
)
EDITED = cell(
    HOSTILE, cell=HOSTILE, required=False, closes=True, run="old", rules=(GateRule.SIGNATURE,), reasons=(HOSTILE,)
)
FOREIGN = cell("attention", cell="te2.12.0-h200-attention", required=False, rules=(GateRule.STACK,), reasons=("other",))
CULPRIT = GateCulprit(
    module="attention", cause=Cause.ENVIRONMENT, component="cuDNN", cascades=("layer_spec",), summary="cuDNN answers.",
    next_step="pin nvidia-cudnn-cu13",
)  # fmt: skip
STALE = GateWaiver(
    cell=RED.cell, rule=GateRule.OUTCOME, owner="nobody", reason="once", link="https://example.org/1",
    expires=date(2026, 1, 1), state=WaiverState.EXPIRED,
)  # fmt: skip
CLOSED = GateDecision(
    tool="tool", release="te-upgrade", stack="te2.17.1", target="h200", open=False, exit_code=1,
    cells=(GOOD, RED, UNDER, LOST, WAIVED, EDITED, FOREIGN), missing=(LOST.cell,), waivers=(STALE,),
    culprits=(CULPRIT,), commit="a" * 40, signed_by="ci@team", rules_sha256="1" * 64, receipts_sha256="2" * 64,
    judged_at="2026-11-22T12:00:00+00:00",
)  # fmt: skip
OPEN = CLOSED.model_copy(
    update={"open": True, "exit_code": 0, "cells": (GOOD, WAIVED), "culprits": (), "missing": (), "waivers": ()}
)


def draw(decision: GateDecision, *, verbose: bool = False, encoding: str = "utf-8") -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)
    render_release_gate(decision, verbose=verbose, console=Console(file=stream, width=100, no_color=True))
    stream.seek(0)
    return stream.read()


def test_the_answer_names_who_closes_it_and_what_is_missing() -> None:
    said = summarize_gate(CLOSED)
    assert said.startswith("Closed by attention (cuDNN, environment): 2 of 5 required cells rejected;")
    assert "no evidence of te2.17.1-h200-permute" in said
    assert "1 other receipt in the way" in said
    assert summarize_gate(OPEN) == "Open: 2 required cells accepted, expert_gemm by waiver."


def test_nothing_is_told_by_colour_alone() -> None:
    lacking = CLOSED.model_copy(update={"exit_code": 4})
    gates = map(mark_gate, (OPEN, CLOSED, lacking))
    marks = [*gates, *map(mark_cell_verdict, (GOOD, RED, LOST, WAIVED, FOREIGN))]
    assert len({(mark.symbol, mark.word) for mark in marks}) == len(marks)


def test_a_breakage_is_told_whatever_evidence_is_missing_beside_it() -> None:
    both = RED.model_copy(update={"rules": (GateRule.OUTCOME, GateRule.UNWATCHED), "reasons": ("error", "unseen")})
    decision = CLOSED.model_copy(update={"cells": (GOOD, both, LOST), "missing": (both.cell, LOST.cell)})
    assert mark_cell_verdict(both).word == "rejected"
    assert "1 of 3 required cells rejected; no evidence of te2.17.1-h200-permute." in summarize_gate(decision)
    held = both.model_copy(update={"waived_by": "somebody"})  # the breakage, so that the lack is what closes it
    old = both.model_copy(update={"rules": (GateRule.AGE, GateRule.OUTCOME)})  # and what is too old breaks nothing
    for cell in (held, old):
        lacking = decision.model_copy(
            update={"cells": (cell,), "missing": (cell.cell,), "exit_code": 4, "culprits": ()}
        )
        assert mark_cell_verdict(cell).word == "no evidence"
        assert summarize_gate(lacking) == f"Closed: no evidence of {cell.cell}."


def test_what_disowns_a_receipt_is_what_the_gate_says() -> None:
    assert {rule for rule in GateRule if Reason(rule, "").disowns} == OF_ANOTHER


def test_the_terminal_tells_all_of_it() -> None:
    said = draw(CLOSED)
    for word in (
        "✗ Closed by attention",
        "permute no evidence",
        "layer_spec rejected, by attention",
        "somebody answers",
        "pin nvidia-cudnn-cu13",
        "expired on 2026-01-01",
        "1 of another stack",
        "signed by ci@team",
        "old/<script>",
        "two files of libcudnn.",
    ):
        assert word in said, word
    assert "\x1b" not in said
    assert "More." not in said
    assert "More." in draw(CLOSED, verbose=True)
    assert "te2.12.0-h200-attention" in draw(CLOSED, verbose=True)


def test_a_waiver_in_vain_is_not_said_to_hold() -> None:
    vain = STALE.model_copy(update={"state": WaiverState.HOLDS, "expires": date(2027, 1, 1), "in_vain": True})
    decision = CLOSED.model_copy(update={"waivers": (vain,)})
    for said in (draw(decision), render_release_gate_markdown(decision), render_release_gate_annotations(decision)):
        assert "NaN, Inf and imports cannot be waived" in " ".join(said.split())
        assert "holds until" not in said


def test_a_log_in_ascii_gets_letters() -> None:
    assert "X Closed by attention" in draw(CLOSED, encoding="ascii")


def test_junit_is_red_where_the_gate_is_closed() -> None:
    root = ET.fromstring(render_release_gate_junit(CLOSED))
    assert {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "6", "failures": "2", "errors": "2", "skipped": "0",
    }  # fmt: skip
    kinds = {case.get("name"): next(iter(case)).tag for case in root.iter("testcase")}
    assert (kinds["attention"], kinds["permute"], kinds["imports"]) == ("failure", "error", "system-out")
    whole = ET.fromstring(render_release_gate_junit(OPEN))
    assert (whole.get("failures"), whole.get("errors")) == ("0", "0")


def test_annotations_have_an_error_for_each_culprit_and_escape_what_is_not_theirs() -> None:
    lines = render_release_gate_annotations(CLOSED).splitlines()
    errors = [line for line in lines if line.startswith("::error")]
    assert sum("attention (cuDNN%2C environment)" in line for line in errors) == 1
    assert not any("layer_spec%3A" in line for line in errors)  # it is told with its cause
    assert any("permute" in line and "no evidence" in line for line in errors)
    assert all(line.startswith("::") for line in lines)
    assert not any("\x1b" in line for line in lines)
    assert lines[-1].startswith("::error title=release gate")
    assert render_release_gate_annotations(OPEN).splitlines()[-1].startswith("::notice")


def test_markdown_has_a_row_a_cell_and_no_markup_of_others() -> None:
    said = render_release_gate_markdown(CLOSED)
    assert "<script>" not in said
    assert "\x1b" not in said
    assert said.startswith("## ✗ Release gate closed: te-upgrade of te2.17.1 on h200")
    assert "| ✗ rejected | te2.17.1-h200-attention | outcome: error: cuDNN Error. |" in said
    assert "### attention (cuDNN, environment)" in said
    assert "| ▲ waived, somebody answers | te2.17.1-h200-expert_gemm |" in said
