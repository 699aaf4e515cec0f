"""Which releases the watch judges: each once, whatever ends a run half way."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary import watch
from megacpp_validate.canary.firewall.run import FirewallCase, FirewallResult
from megacpp_validate.canary.upgrade import CanaryPlan, Progress, UpgradeResult
from megacpp_validate.canary.watch import WatchResult, decide_release, plan_watch, run_watch
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.errors import Exit, NoEnvironment, ToolError
from megacpp_validate.evidence.receipt import Outcome
from tests.report.describe.canary_results import GONE, static

LISTED = ("2.8.0", "2.20.2", "2.21.0", "2.22.0")


def result(*, breaks: bool = False, **firewall: Outcome) -> UpgradeResult:
    """What the canary says of a release; a firewall case is named by what was laid out."""
    cases = tuple(
        FirewallCase(case="absent", damage="", release=name.replace("_", ".").removeprefix("te"), compiled="none",
                     outcome=outcome)
        for name, outcome in firewall.items()
    )  # fmt: skip
    tier = FirewallResult(tool="t", python="", torch="", cases=cases) if cases else None
    step = static("2.20.2", "2.21.0", {}, (GONE,) if breaks else ())
    return UpgradeResult(tool="t", target="", tiers=("static", "firewall"), static=(step,), firewall=tier)


@pytest.mark.parametrize(
    ("found", "code", "word"),
    [
        (result(te2_8_0=Outcome.PASS), Exit.OPEN, ""),
        (result(breaks=True, te2_8_0=Outcome.FAIL), Exit.CLOSED, ""),
        (result(te2_8_0=Outcome.FAIL), Exit.EVIDENCE_MISSING, "absent: fail"),
        (result(te2_8_0=Outcome.NOT_RUN), Exit.EVIDENCE_MISSING, "absent: not-run"),
    ],
)
def test_the_verdict_on_a_release(found: UpgradeResult, code: Exit, word: str) -> None:
    decided, why = decide_release(found)
    assert (decided, bool(why), word in why) == (code, bool(word), True)


def test_releases_newer_than_the_pin_are_judged_oldest_first() -> None:
    assert plan_watch(["2.22.0", "2.8.1", *LISTED], {"2.22.0"}, "2.20.2") == ("2.21.0",)
    assert plan_watch(["2.21.0", "2.20.2.0", "2.9.0"], (), "2.20.2") == ("2.21.0",)  # 2.20.2.0 is 2.20.2
    with pytest.raises(NoEnvironment, match=r"not the pinned 2\.20\.2"):
        plan_watch(["2.8.0"], (), "2.20.2")


def test_each_new_release_is_judged_once_and_one_without_a_verdict_again(
    catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: dict[str, UpgradeResult | ToolError] = {"2.21.0": NoEnvironment("no index"), "2.22.0": result(breaks=True)}
    asked: list[str] = []

    def canary(_: Catalog, plan: CanaryPlan, *__: object, **___: object) -> UpgradeResult:
        asked.append(" ".join((*plan.tiers, *plan.releases)))
        answer = answers[plan.releases[1]]
        if isinstance(answer, ToolError):
            raise answer
        return answer

    def look() -> WatchResult:
        return run_watch(catalog, tmp_path, LISTED, lambda _, release: f"# {release}\n", Progress())

    monkeypatch.setattr(watch, "run_upgrade", canary)
    first = look()
    assert asked == ["static firewall 2.20.2 2.21.0", "static firewall 2.20.2 2.22.0"]
    assert [(row.version, row.code) for row in first.judged] == [("2.22.0", Exit.CLOSED)]
    assert (first.failed, first.exit) == ({"2.21.0": "no index"}, Exit.CLOSED)
    assert Path(first.judged[0].issue).read_text() == "# 2.22.0\n"
    assert look().exit == Exit.EVIDENCE_MISSING
    answers["2.21.0"] = result()
    assert ([row.version for row in look().judged], look().judged) == (["2.21.0"], ())
