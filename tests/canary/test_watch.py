"""Which releases the watch judges: each once, whatever ends a run half way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from megacpp_validate.canary import watch
from megacpp_validate.canary.dynamic.upgrade_result import UpgradeResult
from megacpp_validate.canary.firewall.result import FirewallCase, FirewallOutcome, FirewallResult
from megacpp_validate.canary.watch import WatchResult, decide_release, plan_watch, run_watch
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.errors import Exit, InfrastructureFailed, NoEnvironment
from tests.canary.static.small_index import PACKAGE, use_index, write_index
from tests.command_line import make_run
from tests.report.describe.canary_results import GONE, static

LISTED = ("2.8.0", "2.20.2", "2.21.0", "2.22.0")


def result(*, breaks: bool = False, **firewall: FirewallOutcome) -> UpgradeResult:
    """What the canary says of a release; a firewall case is named by what was laid out."""
    cases = tuple(
        FirewallCase(case="absent", damage="", release=name.replace("_", ".").removeprefix("te"), compiled="none",
                     outcome=outcome)
        for name, outcome in firewall.items()
    )  # fmt: skip
    tier = FirewallResult(tool="t", python="", torch="", cases=cases) if cases else None
    step = static("2.20.2", "2.21.0", {}, (GONE,) if breaks else ())
    return UpgradeResult(tool="t", target="", tiers=("static", "firewall"), static=(step,), firewall=tier)


DECISIONS = {
    "nothing breaks": (result(te2_8_0=FirewallOutcome.PASS), Exit.OPEN, ""),
    "its sources break": (result(breaks=True, te2_8_0=FirewallOutcome.FAIL), Exit.CLOSED, ""),
    "its own install breaks": (result(te2_21_0=FirewallOutcome.FAIL), Exit.CLOSED, ""),
    "another install breaks": (result(te2_8_0=FirewallOutcome.FAIL), Exit.EVIDENCE_MISSING, "absent (2.8.0)"),
    "a case was not run": (result(te2_8_0=FirewallOutcome.NOT_RUN), Exit.EVIDENCE_MISSING, "did not run absent"),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_the_verdict_on_a_release(name: str) -> None:
    found, code, word = DECISIONS[name]
    decided, why = decide_release(found, "2.21.0")
    assert (decided, bool(why)) == (code, bool(word))
    assert word in why


def test_releases_newer_than_the_pin_are_judged_oldest_first() -> None:
    assert plan_watch(["2.22.0", "2.8.1", *LISTED], {"2.22.0"}, "2.20.2") == ("2.21.0",)
    assert plan_watch(["2.21.0", "2.20.2.0", "2.9.0"], (), "2.20.2") == ("2.21.0",)  # 2.20.2.0 is 2.20.2
    with pytest.raises(NoEnvironment, match=r"not the pinned 2\.20\.2"):
        plan_watch(["2.8.0"], (), "2.20.2")


Canary = Callable[[str, str, Path], tuple[UpgradeResult | None, str]]


@pytest.fixture
def look(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., WatchResult]:
    """One run of the watch in a folder, with a canary that says what a test says."""

    def run(canary: Canary, *listed: str) -> WatchResult:
        monkeypatch.setattr(watch, "_run_canary", canary)
        names = listed or LISTED
        return run_watch(catalog, tmp_path, lambda: names, lambda _, release: f"# {release}\n", tool="t")

    return run


def test_each_release_that_is_newer_than_the_pin_is_judged_once(
    look: Callable[..., WatchResult], tmp_path: Path
) -> None:
    asked: list[str] = []

    def canary(old: str, new: str, _: Path) -> tuple[UpgradeResult | None, str]:
        asked.append(f"{old} {new}")
        return result(breaks=new == "2.22.0"), ""

    first = look(canary)
    assert asked == ["2.20.2 2.21.0", "2.20.2 2.22.0"]
    assert [(row.version, row.code) for row in first.judged] == [("2.21.0", Exit.OPEN), ("2.22.0", Exit.CLOSED)]
    assert first.exit == Exit.CLOSED
    assert [Path(row.issue).read_text() for row in first.judged] == ["# 2.21.0\n", "# 2.22.0\n"]
    again = look(canary)
    assert (again.judged, again.exit, len(asked)) == ((), Exit.OPEN, 2)


def test_a_run_that_dies_keeps_what_it_judged_and_one_without_a_verdict_is_tried_again(
    look: Callable[..., WatchResult],
) -> None:
    def dies(_: str, new: str, __: Path) -> tuple[UpgradeResult | None, str]:
        if new == "2.22.0":
            raise KeyboardInterrupt
        return result(), ""

    with pytest.raises(KeyboardInterrupt):
        look(dies)
    failed = look(lambda *_: (None, "te-canary ended (signal 9)"))
    assert (failed.judged, failed.failed, failed.exit) == (
        (), {"2.22.0": "te-canary ended (signal 9)"}, Exit.EVIDENCE_MISSING,
    )  # fmt: skip
    assert [row.version for row in look(lambda *_: (result(), "")).judged] == ["2.22.0"]


def test_a_folder_that_another_run_holds_ends_the_run(look: Callable[..., WatchResult], tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock"), pytest.raises(InfrastructureFailed, match="Another run"):
        look(lambda *_: (result(), ""))


def test_the_verb_judges_a_release_of_an_index_by_the_real_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The firewall tier cannot lay out these releases: so there is no whole answer, and nothing is judged."""
    use_index(monkeypatch, write_index(tmp_path / "index", {"2.20.2": PACKAGE, "2.21.0": PACKAGE}))
    monkeypatch.setenv("MEGACPP_CACHE_DIR", str(tmp_path / "cache"))
    said = make_run(capfd, monkeypatch)("te-watch", "--state", tmp_path / "state", "--format", "json")
    assert said.code == Exit.EVIDENCE_MISSING, said.err
    assert list(json.loads(said.out)["failed"]) == ["2.21.0"]
