"""What is said of steps between stacks, and of the tiers around them."""

from __future__ import annotations

from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from megacpp_validate.canary.dynamic.step import ModuleChange, StepResult
from megacpp_validate.canary.requirements import WheelRequirements
from megacpp_validate.canary.upgrade import UpgradeResult, compare_receipts
from megacpp_validate.canary.watch import JudgedRelease, WatchResult
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.diagnosis.blame import Change
from megacpp_validate.diagnosis.culprits import Culprit
from megacpp_validate.environments.host_session import SupportGrid
from megacpp_validate.environments.stacks import StackRun
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.values import Cause
from megacpp_validate.report.describe.upgrade import describe_release, describe_upgrade, describe_watch
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.markdown import render_markdown
from megacpp_validate.report.render.terminal import render_terminal
from tests.report.describe.canary_results import CASCADE, FIREWALL, PERMUTE
from tests.report.page import show_all

EVIDENCE = Path(__file__).resolve().parents[3] / "docs" / "evidence" / "h200"
CULPRIT = Culprit(
    module="attention", cause=Cause.ENVIRONMENT, component="cuDNN", signature="s", summary="attention raises in cuDNN",
    evidence=("RuntimeError: cudnn: bad graph",), entry_points=("DotProductAttention",), next_step="pin cuDNN",
    cascades=("native_block",),
)  # fmt: skip


def change(module: str, kind: Change, before: Outcome | None, after: Outcome | None, under: str = "") -> ModuleChange:
    return ModuleChange(module=module, before=before, after=after, change=kind, under=under)


def step(*modules: ModuleChange, **more: object) -> StepResult:
    values: dict[str, object] = {"modules": modules, **more}
    return StepResult(target="h200", before="te2.12.0", after="te2.17.1", **values)  # type: ignore[arg-type]


def upgrade(*steps: StepResult, **more: object) -> UpgradeResult:
    grid = SupportGrid(modules=("attention",), stacks={})
    values: dict[str, object] = {"tool": "t", "target": "h200", "tiers": ("gpu",), "grid": grid, "steps": steps, **more}
    return UpgradeResult(**values)  # type: ignore[arg-type]


GOOD, ERROR = Outcome.PASS, Outcome.ERROR
BROKEN = step(
    change("attention", Change.REGRESSED, GOOD, ERROR),
    change("native_block", Change.REGRESSED, GOOD, ERROR, "attention"),
    culprits=(CULPRIT,),
)
LOST = step(change("permute", Change.LOST, GOOD, None), lost={"te2.17.1-h200-permute": "there is no receipt"})
FIXED = step(change("permute", Change.FIXED, ERROR, GOOD), change("attention", Change.SAME_FAILURE, ERROR, ERROR))
NEW = step(change("permute", Change.NEW, None, GOOD))

STACK = StackRun(stack="te2.17.1", environment="", folder="", problem="no such folder")
UPGRADES = {
    "broken, and evidence lost": (upgrade(BROKEN, LOST), Tone.BAD),
    "lost": (upgrade(LOST), Tone.MISSING),
    "fixed": (upgrade(FIXED), Tone.GOOD),
    "new": (upgrade(NEW), Tone.GOOD),
    "a stack without receipts": (upgrade(NEW, stacks=(STACK,)), Tone.MISSING),
    "a stack that was not made": (upgrade(stacks=(STACK,), unmade=True), Tone.MISSING),
    "broken beside it": (upgrade(BROKEN, stacks=(STACK,), unmade=True), Tone.BAD),
    "every tier": (upgrade(NEW, static=(PERMUTE,), firewall=FIREWALL), Tone.BAD),
    "unreadable": (upgrade(NEW, grid=SupportGrid(modules=(), stacks={}, unreadable={"a.json": "cut"})), Tone.MISSING),
}


@pytest.mark.parametrize("name", UPGRADES)
def test_an_upgrade(name: str, snapshot: SnapshotAssertion) -> None:
    result, tone = UPGRADES[name]
    document = describe_upgrade(result)
    assert document.mark.tone is tone
    assert show_all(document) == snapshot


def test_the_words(catalog: Catalog, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EVIDENCE)  # the width of a table is that of its names
    result = compare_receipts(catalog, [Path("te2.12.0"), Path("te2.17.1")])
    text = render_terminal(describe_upgrade(result.model_copy(update={"tool": "t", "seconds": {"gpu": 1.0}})))
    assert text == snapshot


def watched(*codes: int, **failed: str) -> WatchResult:
    rows = (
        JudgedRelease(version=f"2.2{at}.0", code=code, issue="issues/x.md") for at, code in enumerate(codes, start=1)
    )
    return WatchResult(
        tool="t", pinned="2.20.2", listed=31, judged=tuple(rows), failed=failed
    )  # fmt: skip


def test_a_run_of_the_watch(snapshot: SnapshotAssertion) -> None:
    documents = [describe_watch(one) for one in (watched(), watched(0), watched(0, 1), watched(0, te="no wheel"))]
    assert [one.mark.tone for one in documents] == [Tone.GOOD, Tone.GOOD, Tone.BAD, Tone.MISSING]
    assert show_all(*documents) == snapshot


def test_the_issue_of_a_release(snapshot: SnapshotAssertion) -> None:
    result = UpgradeResult(tool="t", target="", tiers=("static", "firewall"), static=(CASCADE,), firewall=FIREWALL)
    needs = WheelRequirements(tool="t", te="2.21.0", needs=(), unknown={"core": "no wheel"})
    document = describe_release(result, "2.21.0", needs)
    assert (document.title, document.mark.tone) == ("Transformer Engine 2.21.0 against 2.20.2", Tone.BAD)
    assert render_markdown(document) == snapshot
