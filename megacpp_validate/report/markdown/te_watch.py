"""The issue text of one release that the watch found: title, labels, marker, the blame, what to do next.

A release has one issue: whoever publishes the text looks for its marker, and changes the issue that has it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from packaging.version import Version

from ...canary.dynamic.upgrade_result import StepResult, UpgradeResult
from ...canary.dynamic.watch_result import Standing, WatchedRelease, WatchResult
from ...canary.static.findings import Impact, ModuleVerdict, StaticResult
from ..marks import mark_verdict
from ..summaries import count, summarize_firewall, summarize_static
from ..words.findings import next_step
from ..words.upgrade import mark_change, say_culprit, summarize_step
from .static_tier import render_step_summary
from .text import escape

_LARGEST: Final = 60_000  # characters; GitHub takes 65,536 of a body
_LONGEST_TITLE: Final = 200
_LONGEST_WORDS: Final = 500  # of others: the reason of a yank, what a process said
_MOST_STEPS: Final = 20


@dataclass(frozen=True)
class IssueText:
    """One issue: `marker` is the same for a release whatever is found out about it."""

    title: str
    labels: tuple[str, ...]
    marker: str
    body: str

    def as_file(self) -> str:
        """Front matter that is YAML and, value by value, JSON; then the body."""
        head = {"title": self.title, "labels": list(self.labels), "marker": self.marker}
        lines = [f"{name}: {json.dumps(value, ensure_ascii=True)}" for name, value in head.items()]
        return "\n".join(["---", *lines, "---", self.body])


def marker_of(release: str) -> str:
    """What tells the issue of a release from every other text."""
    return f"<!-- megacpp-validate/te-watch release={release} -->"


def render_issue(
    row: WatchedRelease,
    seen: UpgradeResult,
    gpu: UpgradeResult | None,
    *,
    labels: tuple[str, ...],
    targets: tuple[str, ...],
) -> IssueText:
    """The issue of a release.

    Args:
        row: what the watch knows of it.
        seen: the tiers that need no GPU.
        gpu: the dynamic tier; None before it has run.
        labels: that every issue has.
        targets: on which the dynamic tier is to run.
    """
    static = seen.static[0] if seen.static else None
    state = _state(row, static, gpu)
    title = f"Transformer Engine {row.version} {_say_state(row, state, static, gpu)} (from {row.against})"
    body = [marker_of(row.version), ""]
    if row.withdrawn:
        body += [f"**The index has withdrawn it: {_say(row.withdrawn)}.** What follows was found before.", ""]
    body += [f"**{escape(summarize_static(static) if static else 'There is no answer of the static tier.')}**", ""]
    body += [
        f"Judged against {escape(row.against)}, the last release that is known to be good, on {row.judged_at[:10]}.",
        "",
    ]
    body += [*_tell_blame(static, gpu, targets), "", "### Next steps", ""]
    body += [f"{number}. {step}" for number, step in enumerate(_next_steps(row, static, gpu, targets), start=1)]
    if seen.firewall is not None:
        laid = ", ".join(dict.fromkeys(case.release for case in seen.firewall.cases))
        body += [
            "",
            f"Import firewall, on damaged installs of {escape(laid)}: {escape(summarize_firewall(seen.firewall))}",
        ]
    else:
        body += ["", "Import firewall: **not run**."]
    if row.reason:
        body += ["", f"**No whole answer yet**: {_say(row.reason)}"]
    parts: list[UpgradeResult | StaticResult] = [*([static] if static else []), *([gpu] if gpu else [])]
    for part in parts:
        told = [
            "",
            "<details><summary>Everything that was found</summary>",
            "",
            render_step_summary(part),
            "</details>",
        ]
        if len("\n".join([*body, *told])) <= _LARGEST:
            body += told
        else:
            body += ["", "What was found is too long for an issue; the artifacts of the run have it."]
    return IssueText(_cut(title), (*labels, state), marker_of(row.version), "\n".join(body) + "\n")


def render_pinned(row: WatchedRelease, *, labels: tuple[str, ...]) -> IssueText:
    """The issue of the release that is in production, where nobody has judged it and the index does something to it."""
    gone = bool(row.withdrawn)
    state = "withdrawn" if gone else "clean"
    said = f"**The index has withdrawn it: {_say(row.withdrawn)}.**" if gone else "The index lists it as it was before."
    step = (
        "Choose a release to pin in its place (`pinned` in matrix/stacks.toml), judge it, and take this one out of "
        "every lock and every environment."
        if gone
        else "Close this issue, unless it was taken out of production in between."
    )
    title = f"Transformer Engine {row.version}, which is pinned, {'was withdrawn' if gone else 'is back on the index'}"
    body = [marker_of(row.version), "", said, "It is the release that is in production.", "", "### Next steps", ""]
    return IssueText(title, (*labels, state), marker_of(row.version), "\n".join([*body, f"1. {step}"]) + "\n")


def _state(row: WatchedRelease, static: StaticResult | None, gpu: UpgradeResult | None) -> str:
    if row.withdrawn:
        return "withdrawn"
    if (static is not None and static.breaks) or (gpu is not None and gpu.breaks) or row.code == 1:
        return "breaks"
    if static is None or row.standing is not Standing.JUDGED:
        return "no-evidence"
    return "at-risk" if any(module.verdict is ModuleVerdict.RISK for module in static.modules) else "clean"


def _say_state(row: WatchedRelease, state: str, static: StaticResult | None, gpu: UpgradeResult | None) -> str:
    if state == "withdrawn":
        return "was withdrawn"
    if state == "breaks":
        red = [module.module for module in static.modules if module.verdict is ModuleVerdict.BREAKS] if static else []
        red += [culprit.module for step in (gpu.steps if gpu else ()) for culprit in step.culprits]
        return f"breaks {', '.join(dict.fromkeys(red)) or 'the import firewall'}"
    if state == "at-risk" and static is not None:
        risk = [module.module for module in static.modules if module.verdict is ModuleVerdict.RISK]
        return f"puts {', '.join(risk)} at risk"
    return "breaks nothing that can be seen without a GPU" if state == "clean" and row.gpu_code is None else (
        "breaks nothing" if state == "clean" else "has no whole answer yet"
    )  # fmt: skip


def _tell_blame(static: StaticResult | None, gpu: UpgradeResult | None, targets: tuple[str, ...]) -> list[str]:
    """A row a bridge module: what its sources say, and what was seen on a GPU."""
    steps: tuple[StepResult, ...] = gpu.steps if gpu else ()
    columns = [step.target for step in steps] or list(targets)
    lines = [f"| bridge module | from the sources | {' | '.join(f'on {escape(name)}' for name in columns)} |"]
    lines.append("| --- |" + " --- |" * (1 + len(columns)))
    for row in static.modules if static else ():
        mark = mark_verdict(row.verdict)
        under = f", filed under {escape(row.under)}" if row.under else ""
        seen = [
            next((f"{mark_change(one).symbol} {escape(mark_change(one).word)}" for one in step.modules
                  if one.module == row.module), "○ not run")
            for step in steps
        ] or ["○ not run"] * len(columns)  # fmt: skip
        lines.append(f"| {escape(row.module)} | {mark.symbol} {mark.word}{under} | {' | '.join(seen)} |")
    for step in steps:
        lines += ["", f"On {escape(step.target)}: {escape(summarize_step(step))}"]
        lines += [f"- **{escape(say_culprit(culprit))}**: {_say(culprit.summary)}" for culprit in step.culprits]
    return lines


def _next_steps(
    row: WatchedRelease, static: StaticResult | None, gpu: UpgradeResult | None, targets: tuple[str, ...]
) -> list[str]:
    if row.withdrawn:
        return ["Take it out of every lock and every environment that has it; wait for the release that follows."]
    loud = [finding for finding in static.findings if finding.impact is Impact.BREAKING] if static else []
    quiet = (
        [finding for finding in static.findings if finding.impact is Impact.RISK and not finding.follows]
        if static
        else []
    )
    steps = [f"**{escape(one.module)}**: {_say(next_step(one, row.against))}" for one in [*loud, *quiet]]
    steps += [
        f"**{escape(culprit.module)}**: {_say(culprit.next_step)}"
        for step in (gpu.steps if gpu else ())
        for culprit in step.culprits
    ]
    steps = list(dict.fromkeys(steps))
    if len(steps) > _MOST_STEPS:
        steps[_MOST_STEPS:] = [f"{count(len(steps) - _MOST_STEPS, 'more step')}, which the artifacts of the run have."]
    if gpu is None:
        steps += [
            f"On {escape(target)} it is **not run**: a machine with that label takes it from the plan of the pipeline "
            f"`te_watch_gpu`; by hand `nox -s te_canary -- {escape(row.against)} {escape(row.version)} --tiers gpu "
            f"--target {escape(target)}`."
            for target in targets
        ]
    again = f"`nox -s te_canary -- {escape(row.against)} {escape(row.version)} --tiers static,firewall`"
    return [*steps, f"To see the same again: {again}."]


def _say(words: str) -> str:
    return escape(words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]}…")


def _cut(title: str) -> str:
    return title if len(title) <= _LONGEST_TITLE else f"{title[: _LONGEST_TITLE - 1]}…"


def tell_watch(result: WatchResult) -> list[str]:
    """One run of the watch in Markdown."""
    lines = [f"## Releases of Transformer Engine: {escape(say_watch(result))}"]
    if result.changed:
        lines += ["", "| release | standing | against | exit code | |", "|" + " --- |" * 5]
    for row in result.changed:
        said = _say(row.withdrawn or row.reason)
        cells = (escape(row.version), row.standing.value, escape(row.against), say_verdict(row), said)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [f"\n{step.new} on {step.target}: **not run** yet" for step in result.gpu]
    lines += [f"\n**left**: {_say(reason)}" for reason in result.left]
    return lines


def say_verdict(row: WatchedRelease) -> str:
    """The exit code of the last verdict on a release, and of which tiers it is; empty before there is one."""
    if row.gpu_code is not None:
        return f"{row.gpu_code}, of the gpu tier"
    return "" if row.code is None else f"{row.code}, without a GPU"


def say_watch(result: WatchResult) -> str:
    """The answer in a sentence: what this run judged, then what the index has done to others."""
    pinned = f"{result.pinned} is pinned"
    if any(row.withdrawn and Version(row.version) == Version(result.pinned) for row in result.changed):
        pinned += ", and the index has withdrawn it"
    left = f"; {count(len(result.left), 'answer')} left" if result.left else ""
    if not result.changed:
        return f"nothing is new since the last look{left}; {pinned}."
    bad = [row.version for row in result.judged_now if row.verdict == 1]
    verdict = f"{', '.join(bad)} breaks the bridge" if bad else "none of them breaks what can be seen"
    judged = len(result.judged_now)
    parts = [f"{count(judged, 'release')} judged, {verdict}" if judged else "no release judged"]
    withdrawn = sum(bool(row.withdrawn) for row in result.changed)
    parts += [f"{withdrawn} withdrawn"] if withdrawn else []
    waiting = sum(row.standing is Standing.WAITING for row in result.changed)
    parts += [f"{waiting} without an answer yet"] if waiting else []
    return f"{'; '.join(parts)}{left}; {pinned}."
