"""Which findings of the static tier a document shows."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.static.findings import ChangeKind, Impact, StaticResult
from megacpp_validate.report.describe.changes import headline, next_step
from megacpp_validate.report.describe.static import describe_static, describe_sweep
from megacpp_validate.report.document import Document
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.terminal import render_terminal
from tests.report.describe.canary_results import (
    AUTOCAST,
    CASCADE,
    DOWNGRADE,
    EMPTY,
    FOLLOWED,
    PERMUTE,
    RESULTS,
    bare,
    sweep,
)


def shown(document: Document, *, verbose: bool = False) -> str:
    return " ".join(render_terminal(document, verbose=verbose).split())


@pytest.mark.parametrize("name", RESULTS)
def test_every_finding_is_a_case_and_every_clean_module_too(name: str) -> None:
    result = RESULTS[name]
    document = describe_static(result, verbose=True)
    cases, text = document.judged(), shown(document, verbose=True)
    assert [case.message for case in cases][: len(result.findings)] == [headline(one) for one in result.findings]
    assert {row.module for row in result.modules} <= {case.group for case in cases}
    for case, finding in zip(cases, result.findings, strict=False):
        place = next((f"{site.file}:{site.line}" for site in finding.call_sites), "None")
        assert (str(case.place), case.help) == (place, next_step(finding, result.old.version))
        assert headline(finding) in text
    assert all(change in text for change in result.changes_not_consumed)


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


def test_findings_of_one_kind_at_one_place_are_one_diagnostic() -> None:
    one = bare(ChangeKind.GUARD_ADDED, Impact.RISK, new="a", call_sites=FOLLOWED.call_sites, after=FOLLOWED.after)
    two = one.model_copy(update={"new": "b"})
    text = shown(describe_static(PERMUTE.model_copy(update={"findings": (one, two)})))
    assert text.count("satisfy the check before the call, or stay on 2.14.x") == 1
    assert ("`a`" in text, "`b`" in text) == (True, True)


def test_a_sweep_is_a_grid_and_what_happened() -> None:
    document = describe_sweep(sweep())
    text = shown(document)
    assert document.mark.tone is Tone.BAD
    assert "Of 3 steps between releases 2 break the code; at risk: 1; releases that could not be read: 1." in text
    assert [word for word in ("2.5.0", "ScaledDotProductAttention", "num_out_tokens") if word not in text] == []


def test_the_words(snapshot: SnapshotAssertion) -> None:
    assert "\n\n".join(render_terminal(describe_static(one)) for one in (CASCADE, PERMUTE)) == snapshot
