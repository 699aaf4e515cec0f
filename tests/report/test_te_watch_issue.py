"""The issue text of a release: its marker never changes, the words of others are no markup, and it fits."""

from __future__ import annotations

import json

from rich.console import Console

from megacpp_validate.canary.dynamic.upgrade_result import Change, Culprit, ModuleChange, StepResult, UpgradeResult
from megacpp_validate.canary.dynamic.watch_result import GpuStep, Standing, WatchedRelease, WatchResult
from megacpp_validate.canary.static.findings import (
    ChangeKind,
    Finding,
    Impact,
    ModuleResult,
    ModuleVerdict,
    ReleaseSource,
    StaticResult,
)
from megacpp_validate.evidence.values import Cause
from megacpp_validate.report.markdown.te_watch import IssueText, marker_of, render_issue, say_watch, tell_watch
from megacpp_validate.report.terminal.te_watch import render_watch

ROW = WatchedRelease(
    version="2.21.0",
    standing=Standing.JUDGED,
    first_seen="2026-11-22",
    judged_at="2026-11-22",
    against="2.20.2",
    code=0,
)
EVIL = "</details><script>alert(1)</script> | [x](http://evil) @team `a|b`\n# big"


def answer(verdict: ModuleVerdict = ModuleVerdict.CLEAN, *texts: str) -> UpgradeResult:
    findings = tuple(
        Finding(
            module="permute", modules=("permute",), kind=ChangeKind.REMOVED, cause=Cause.API, symbol=text,
            suggestion=text,
            impact=Impact.BREAKING if verdict is ModuleVerdict.BREAKS else Impact.RISK,
        )
        for text in texts
    )  # fmt: skip
    rows = {"imports": ModuleVerdict.CLEAN, "permute": verdict}
    source = ReleaseSource(version="2.20.2", wheel="w", sha256="")
    static = StaticResult(
        tool="t", old=source, new=source.model_copy(update={"version": "2.21.0"}), downgrade=False, findings=findings,
        modules=tuple(ModuleResult(module=module, verdict=seen) for module, seen in rows.items()),
    )  # fmt: skip
    return UpgradeResult(tool="t", target="", tiers=("static",), static=(static,))


def on_gpu(change: Change) -> UpgradeResult:
    culprit = Culprit(module="permute", cause=Cause.NUMERICS, signature="s", summary=EVIL, next_step="look at it")
    step = StepResult(
        target="h200", before="te2.20.2", after="te2.21.0",
        modules=(ModuleChange(module="permute", before=None, after=None, change=change),),
        culprits=(culprit,) if change is Change.REGRESSED else (),
    )  # fmt: skip
    return UpgradeResult(tool="t", target="h200", tiers=("gpu",), steps=(step,))


def issue(seen: UpgradeResult, gpu: UpgradeResult | None = None, **changes: object) -> IssueText:
    return render_issue(ROW.model_copy(update=changes), seen, gpu, labels=("te-watch",), targets=("h200",))


def test_the_title_and_the_label_say_how_it_stands_and_the_marker_never_changes() -> None:
    clean, risky = answer(), answer(ModuleVerdict.RISK, "a.b")
    breaks = answer(ModuleVerdict.BREAKS, "a.b")
    cases = [
        (issue(clean), "breaks nothing that can be seen without a GPU", "clean"),
        (issue(clean, on_gpu(Change.UNCHANGED), gpu_code=0), "breaks nothing (from", "clean"),
        (issue(risky), "puts permute at risk", "at-risk"),
        (issue(breaks, code=1), "breaks permute", "breaks"),
        (issue(clean, on_gpu(Change.REGRESSED), gpu_code=1), "breaks permute", "breaks"),
        (issue(clean, code=1), "breaks the import firewall", "breaks"),
        (issue(clean, standing=Standing.WAITING, code=4, reason="lost"), "has no whole answer yet", "no-evidence"),
        (issue(breaks, code=1, withdrawn="deleted from the index"), "was withdrawn", "withdrawn"),
    ]
    for text, title, label in cases:
        assert title in text.title
        assert text.labels == ("te-watch", label)
        assert text.marker == marker_of("2.21.0")
        assert text.body.startswith(text.marker)


def test_the_front_matter_is_one_line_of_json_a_value() -> None:
    _, head, body = issue(answer(ModuleVerdict.BREAKS, "a.b"), code=1).as_file().split("---\n", 2)
    values = {key: json.loads(value) for key, _, value in (line.partition(": ") for line in head.splitlines())}
    assert values.keys() == {"title", "labels", "marker"}
    assert body.startswith(values["marker"])


def test_what_was_not_run_says_so_and_what_a_gpu_saw_stands_beside_it() -> None:
    before = issue(answer()).body
    assert "| permute | ✓ clean | ○ not run |" in before
    assert "On h200 it is **not run**" in before
    assert "Import firewall: **not run**" in before
    after = issue(answer(), on_gpu(Change.REGRESSED), gpu_code=1).body
    assert "| permute | ✓ clean | ✗ regressed |" in after
    assert "| imports | ✓ clean | ○ not run |" in after  # no cell of it came back
    assert "**permute**: look at it" in after


def test_words_of_others_are_no_markup_and_cannot_pose_as_a_marker() -> None:
    seen = answer(ModuleVerdict.BREAKS, EVIL, "a.b --> <!-- megacpp-validate/te-watch release=2.20.2 -->")
    text = issue(seen, on_gpu(Change.REGRESSED), code=1, withdrawn=EVIL, reason=EVIL)
    assert "<script>" not in text.body
    assert "@team" not in text.body
    assert "\n# big" not in text.body
    assert text.body.count("<!--") == 1


def test_a_text_that_is_too_long_keeps_its_table_and_says_what_is_left_out() -> None:
    seen = answer(ModuleVerdict.RISK, *(f"a.name_{number}" for number in range(700)))
    body = issue(seen, withdrawn="x" * 70_000).body
    assert len(body) < 65_536  # what GitHub takes
    assert "| permute | ▲ at risk" in body
    assert "too long for an issue" in body
    assert "680 more steps" in issue(seen).body


def test_a_run_is_told_in_a_sentence_and_in_rows() -> None:
    gpu = (GpuStep(old="2.20.2", new="2.21.0", target="h200"),)
    base = WatchResult(tool="t", index="https://mirror", asked_at="now", pinned="2.20.2")
    assert "nothing is new" in say_watch(base)
    row = ROW.model_copy(update={"code": 1, "withdrawn": EVIL})
    seen = base.model_copy(update={"changed": (row,), "judged": ("2.21.0",), "gpu": gpu})
    assert say_watch(seen) == "1 release judged, 2.21.0 breaks the bridge; 1 withdrawn; 2.20.2 is pinned."
    known = seen.model_copy(update={"judged": ()})  # judged in an earlier run, and told then
    assert say_watch(known) == "no release judged; 1 withdrawn; 2.20.2 is pinned."
    assert not known.breaks
    assert "<script>" not in "\n".join(tell_watch(seen))
    assert "| 2.21.0 | judged | 2.20.2 | 1, without a GPU |" in "\n".join(tell_watch(seen))
    on_a_gpu = base.model_copy(update={"changed": (ROW.model_copy(update={"gpu_code": 1}),), "judged": ("2.21.0",)})
    assert "| 2.21.0 | judged | 2.20.2 | 1, of the gpu tier |" in "\n".join(tell_watch(on_a_gpu))
    console = Console(record=True, width=100)
    render_watch(seen, console=console)
    told = console.export_text()
    assert "2.21.0 on h200: not-run" in told
    assert "1 release judged, 2.21.0 breaks the bridge" in told
