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
from megacpp_validate.errors import Exit
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.values import Cause
from megacpp_validate.report.describe.upgrade import (
    describe_release,
    describe_upgrade,
    describe_watch,
    mark_step,
    summarize_step,
)
from megacpp_validate.report.marks import Tone
from megacpp_validate.report.render.junit import render_junit
from megacpp_validate.report.render.markdown import render_markdown
from megacpp_validate.report.render.terminal import render_terminal
from tests.report.describe.canary_results import CASCADE, FIREWALL, PERMUTE

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
    grid = SupportGrid(modules=("attention",), rows=())
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

SENTENCES = [
    (BROKEN, "Breaks attention (environment: cuDNN); with it: native_block.", Tone.BAD),
    (LOST, "The evidence blames nothing; no evidence for: te2.17.1-h200-permute.", Tone.MISSING),
    (FIXED, "Breaks nothing; fixes: permute; still fails as before: attention.", Tone.GOOD),
    (NEW, "The evidence blames nothing; no receipt of te2.12.0 for: permute.", Tone.MISSING),
]


@pytest.mark.parametrize(("found", "sentence", "tone"), SENTENCES)
def test_a_step_in_a_sentence(found: StepResult, sentence: str, tone: Tone) -> None:
    assert (summarize_step(found), mark_step(found).tone) == (sentence, tone)


STACK = StackRun(stack="te2.17.1", environment="", folder="", problem="no such folder")
ENDS = [
    (upgrade(BROKEN, LOST), Exit.CLOSED, Tone.BAD),
    (upgrade(LOST), Exit.EVIDENCE_MISSING, Tone.MISSING),
    (upgrade(NEW), Exit.OPEN, Tone.GOOD),
    (upgrade(NEW, stacks=(STACK,)), Exit.EVIDENCE_MISSING, Tone.MISSING),
    (upgrade(stacks=(STACK,), unmade=True), Exit.NO_ENVIRONMENT, Tone.MISSING),
    (upgrade(BROKEN, stacks=(STACK,), unmade=True), Exit.CLOSED, Tone.BAD),
    (upgrade(NEW, firewall=FIREWALL), Exit.CLOSED, Tone.BAD),
    (upgrade(NEW, static=(PERMUTE,)), Exit.CLOSED, Tone.BAD),
    (upgrade(NEW, grid=SupportGrid(modules=(), rows=(), unreadable={"a.json": "cut"})), Exit.EVIDENCE_MISSING,
     Tone.MISSING),
]  # fmt: skip


@pytest.mark.parametrize(("result", "code", "tone"), ENDS)
def test_the_exit_code_and_the_mark_agree(result: UpgradeResult, code: Exit, tone: Tone) -> None:
    assert (result.exit, describe_upgrade(result).mark.tone) == (code, tone)


def test_every_tier_is_told_and_every_format_lists_what_was_judged() -> None:
    result = upgrade(BROKEN, LOST, static=(PERMUTE,), firewall=FIREWALL, stacks=(STACK,))
    document = describe_upgrade(result)
    text, junit = render_terminal(document), render_junit(document)
    for word in ("num_out_tokens", "undefined-symbol", "pin cuDNN", "no such folder", "attention raises in cuDNN"):
        assert word in text, word
        assert word in junit, word
    assert "native_block" in junit
    assert junit.count("<skipped") >= 2  # lost evidence and a case that was not run never look green


def test_the_words(catalog: Catalog, snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EVIDENCE)  # the width of a table is that of its names
    result = compare_receipts(catalog, [Path("te2.12.0"), Path("te2.17.1")], None)
    text = render_terminal(describe_upgrade(result.model_copy(update={"tool": "t", "seconds": {"gpu": 1.0}})))
    assert text == snapshot


def watched(*codes: int, **failed: str) -> WatchResult:
    rows = (
        JudgedRelease(version=f"2.2{at}.0", against="2.20.2", code=code, issue="issues/x.md")
        for at, code in enumerate(codes, start=1)
    )
    return WatchResult(
        tool="t", pinned="2.20.2", listed=31, judged=tuple(rows), failed=failed
    )  # fmt: skip


@pytest.mark.parametrize(
    ("result", "tone", "words"),
    [
        (watched(), Tone.GOOD, "0 new releases; breaks the bridge: none;"),
        (watched(0), Tone.GOOD, "1 new release; breaks the bridge: none;"),
        (watched(0, 1), Tone.BAD, "2 new releases; breaks the bridge: 2.22.0;"),
        (watched(0, te="no wheel"), Tone.MISSING, "without a verdict: 1;"),
    ],
)
def test_a_run_of_the_watch(result: WatchResult, tone: Tone, words: str) -> None:
    document = describe_watch(result)
    assert (document.mark.tone, words in document.summary) == (tone, True)


def test_the_issue_of_a_release(snapshot: SnapshotAssertion) -> None:
    result = UpgradeResult(tool="t", target="", tiers=("static", "firewall"), static=(CASCADE,), firewall=FIREWALL)
    needs = WheelRequirements(tool="t", te="2.21.0", cores=(), needs=(), unknown={"core": "no wheel"})
    document = describe_release(result, "2.21.0", needs)
    assert (document.title, document.mark.tone) == ("Transformer Engine 2.21.0 against 2.20.2", Tone.BAD)
    assert render_markdown(document) == snapshot
