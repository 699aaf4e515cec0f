"""What the static tier says: each finding, each clean module, and what a person need not look at."""

from __future__ import annotations

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.static.findings import ChangeKind, Impact
from megacpp_validate.report.describe.static import describe_static, describe_sweep
from megacpp_validate.report.marks import Tone
from tests.report.describe.canary_results import FOLLOWED, PERMUTE, RESULTS, bare, sweep
from tests.report.page import show_all

GUARD = bare(ChangeKind.GUARD_ADDED, Impact.RISK, new="a", call_sites=FOLLOWED.call_sites, after=FOLLOWED.after)
ALIKE = PERMUTE.model_copy(update={"findings": (GUARD, GUARD.model_copy(update={"new": "b"}))})
DOCUMENTS = {name: describe_static(result) for name, result in (RESULTS | {"alike": ALIKE}).items()}
DOCUMENTS |= {"verbose": describe_static(PERMUTE, verbose=True), "sweep": describe_sweep(sweep())}
TONES = {"autocast": Tone.RISK, "downgrade": Tone.GOOD, "empty": Tone.GOOD}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_a_pair_and_a_sweep_show(name: str, snapshot: SnapshotAssertion) -> None:
    assert DOCUMENTS[name].mark.tone is TONES.get(name, Tone.BAD)
    assert show_all(DOCUMENTS[name]) == snapshot
