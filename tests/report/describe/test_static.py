"""What is said of every kind of change, and which findings a document shows."""

from __future__ import annotations

import re

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.static.findings import ChangeKind, Impact, StaticResult
from megacpp_validate.evidence.values import Cause
from megacpp_validate.report.describe.changes import KINDS, consequence, headline, headline_of_fault, next_step
from megacpp_validate.report.describe.static import describe_static, describe_sweep, summarize_static
from megacpp_validate.report.document import Document
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.terminal import render_terminal
from tests.report.describe.canary_results import (
    AUTOCAST,
    CASCADE,
    DOWNGRADE,
    EMPTY,
    EVERYTHING,
    FOLLOWED,
    PERMUTE,
    RESULTS,
    SWEEP,
    bare,
    every_finding,
)

UNFILLED = re.compile(r"[{}\[\]|]|``|  ")


def shown(document: Document, *, verbose: bool = False) -> str:
    return " ".join(render_terminal(document, verbose=verbose).split())


def test_every_kind_of_change_has_words() -> None:
    assert KINDS.keys() == set(ChangeKind)


@pytest.mark.parametrize("known", ["everything", "nothing"])
def test_no_template_is_left_open_whatever_is_known_of_a_finding(known: str) -> None:
    findings = every_finding() if known == "everything" else [bare(kind, one) for kind in ChangeKind for one in Impact]
    for finding in findings:
        for text in (headline(finding), consequence(finding), next_step(finding, "2.8.0"), next_step(finding)):
            assert text.strip(), finding
            assert not UNFILLED.search(text), text


@pytest.mark.parametrize("name", RESULTS)
def test_every_finding_is_a_case_and_every_clean_module_too(name: str) -> None:
    result = RESULTS[name]
    cases = describe_static(result).judged()
    assert [case.message for case in cases][: len(result.findings)] == [headline(one) for one in result.findings]
    assert {row.module for row in result.modules} <= {case.group for case in cases}
    for case, finding in zip(cases, result.findings, strict=False):
        place = next((f"{site.file}:{site.line}" for site in finding.call_sites), "None")
        assert (str(case.place), case.help) == (place, next_step(finding, result.old.version))


DOCUMENTS: dict[str, tuple[StaticResult, Tone, tuple[str, ...], tuple[str, ...]]] = {
    "a breakage": (PERMUTE, Tone.BAD, ("permute", "permutation.py:612", "bridge/permute.py:25"), ("symmetric_ar",)),
    "a cascade": (CASCADE, Tone.BAD, ("and with it", "ScaledDotProductAttention"), ()),
    "what is followed": (AUTOCAST, Tone.RISK, ("already follows 2 changes",), ("nothing to do",)),
    "a downgrade": (DOWNGRADE, Tone.GOOD, ("This is a downgrade: 2.15.0 is the newer release",), ()),
    "nothing": (EMPTY, Tone.GOOD, ("Nothing breaks: nothing changed",), ("verdict",)),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_shows_what_needs_a_look(name: str) -> None:
    result, tone, words, absent = DOCUMENTS[name]
    document = describe_static(result)
    text = shown(document)
    assert document.mark.tone is tone
    assert [word for word in words if word not in text] == []
    assert [word for word in absent if word in text] == []


def test_verbose_shows_every_finding_and_what_is_not_covered() -> None:
    text = shown(describe_static(EVERYTHING, verbose=True), verbose=True)
    for finding in EVERYTHING.findings:
        assert headline(finding) in text
        assert consequence(finding) in text
    assert all(change.replace("`", "") in text.replace("`", "") for change in EVERYTHING.changes_not_consumed)


def test_findings_of_one_kind_at_one_place_are_one_diagnostic() -> None:
    one = bare(ChangeKind.GUARD_ADDED, Impact.RISK, new="a", call_sites=FOLLOWED.call_sites, after=FOLLOWED.after)
    two = one.model_copy(update={"new": "b"})
    text = shown(describe_static(PERMUTE.model_copy(update={"findings": (one, two)})))
    assert text.count("satisfy the check before the call, or stay on 2.14.x") == 1
    assert ("`a`" in text, "`b`" in text) == (True, True)


def test_a_finding_of_a_module_without_a_row_is_not_hidden() -> None:
    result = PERMUTE.model_copy(update={"modules": ()})
    assert "permute" in summarize_static(result)
    assert describe_static(result).mark.tone is Tone.BAD


def test_a_sweep_is_a_grid_and_what_happened() -> None:
    document = describe_sweep(SWEEP)
    text = shown(document)
    assert document.mark.tone is Tone.BAD
    assert document.summary == (
        "Of 28 steps between releases 2 break the code; at risk: 1; releases that could not be read: 1."
    )
    assert [word for word in ("2.5.0", "ScaledDotProductAttention", "num_out_tokens") if word not in text] == []
    assert "No release" in describe_sweep(SWEEP, first_bad_in="permute").summary


def test_the_words(snapshot: SnapshotAssertion) -> None:
    rows = ((kind.value, name, getattr(KINDS[kind], name)) for kind in ChangeKind for name in KINDS[kind]._fields)
    lines = [" ".join(row) for row in rows]
    assert (
        "\n".join([*lines, render_terminal(describe_static(CASCADE)), render_terminal(describe_static(PERMUTE))])
        == snapshot
    )


def test_a_breaking_finding_is_never_waved_through() -> None:
    loud = FOLLOWED.model_copy(update={"impact": Impact.BREAKING})
    assert next_step(FOLLOWED, "2.8.0").startswith("nothing to do")
    assert "nothing to do" not in next_step(loud, "2.8.0")


@pytest.mark.parametrize("kind", [ChangeKind.PARAMETER_REMOVED, ChangeKind.PARAMETER_RENAMED])
def test_a_field_that_is_ignored_is_not_called_an_error(kind: ChangeKind) -> None:
    finding = bare(kind, Impact.BREAKING, parameter="x", cause=Cause.SILENT_FALLBACK)
    assert "silently ignored" in consequence(finding)
    assert "TypeError" in consequence(finding.model_copy(update={"cause": Cause.API}))


def test_a_fault_of_both_releases_is_not_called_a_change() -> None:
    finding = bare(ChangeKind.PARAMETER_REQUIRED, Impact.BREAKING, parameter="x")
    assert headline_of_fault(finding) == "`Thing` requires `x`"


def test_a_sweep_without_steps_is_no_success() -> None:
    document = describe_sweep(SWEEP.model_copy(update={"steps": ()}))
    assert document.mark.tone is Tone.MISSING
    assert [case.mark.tone for case in document.judged()] == [Tone.MISSING]  # the release that was not read
