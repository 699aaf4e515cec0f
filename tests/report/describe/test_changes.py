"""The words about every kind of change."""

from __future__ import annotations

import re

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.static.findings import ChangeKind, Impact
from megacpp_validate.report.describe.changes import KINDS, headline, next_step
from tests.report.describe.canary_results import FOLLOWED, bare, every_finding

UNFILLED = re.compile(r"[{}\[\]|]|``|  ")


@pytest.mark.parametrize("known", ["everything", "nothing"])
def test_no_template_is_left_open_whatever_is_known_of_a_finding(known: str) -> None:
    assert KINDS.keys() == set(ChangeKind)
    findings = every_finding() if known == "everything" else [bare(kind, one) for kind in ChangeKind for one in Impact]
    for finding in findings:
        for text in (headline(finding), next_step(finding, "2.8.0"), next_step(finding)):
            assert text.strip(), finding
            assert not UNFILLED.search(text), text


def test_the_words(snapshot: SnapshotAssertion) -> None:
    shown = [one for one in every_finding() if one.impact is Impact.BREAKING]
    assert "\n".join(f"{one.kind.value}: {headline(one)}; {next_step(one, '2.1.0')}" for one in shown) == snapshot


def test_a_breaking_finding_is_never_waved_through() -> None:
    loud = FOLLOWED.model_copy(update={"impact": Impact.BREAKING})
    assert next_step(FOLLOWED, "2.8.0").startswith("nothing to do")
    assert "nothing to do" not in next_step(loud, "2.8.0")
