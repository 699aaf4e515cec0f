"""Releases that are newer than the pin, each judged once by a run of the canary: what a cron job calls.

A release with an issue text is judged. So a run that dies half way leaves the rest to the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal

from packaging.version import Version
from pydantic import Field

from ..catalog.bridge import Catalog
from ..catalog.file import PACKAGE_ROOT
from ..errors import Exit, NoEnvironment, ToolError, exit_for
from ..evidence.receipt import Outcome, write_whole
from ..evidence.values import Frozen, Result
from .upgrade import CanaryOptions, Progress, UpgradeResult, plan_canary, run_upgrade


class JudgedRelease(Frozen):
    """One release that the canary judged against the pinned one: `OPEN` or `CLOSED`, with a file of its issue."""

    version: str
    code: int
    issue: str


class WatchResult(Result):
    """One run.

    Attributes:
        pinned: the release that is in production.
        listed: how many releases are on the index.
        judged: new releases, oldest first.
        failed: new releases without a verdict, each with the reason: the next run tries again.
    """

    schema_id: Literal["megacpp-validate/te-watch/3"] = "megacpp-validate/te-watch/3"
    pinned: str
    listed: int
    judged: tuple[JudgedRelease, ...] = ()
    failed: dict[str, str] = Field(default_factory=dict)

    @property
    def exit(self) -> Exit:
        """Closed where a new release breaks the bridge; not open where one has no verdict."""
        return exit_for(breaks=any(row.code == Exit.CLOSED for row in self.judged), lacks=bool(self.failed))


def run_watch(
    catalog: Catalog, folder: Path, listed: Sequence[str], render_issue: Callable[[UpgradeResult, str], str],
    progress: Progress,
) -> WatchResult:  # fmt: skip
    """Judge every release that is new, oldest first, and write an issue text for each.

    Args:
        folder: of issues/RELEASE.md.
        listed: the releases on the index.
        render_issue: the text of an issue: a result and the release that is judged.

    Raises:
        NoEnvironment: the index does not list the pinned release.
    """
    pinned = catalog.pinned.te
    judged: list[JudgedRelease] = []
    failed: dict[str, str] = {}
    for release in plan_watch(listed, {path.stem for path in folder.glob("issues/*.md")}, pinned):
        progress.note(f"{pinned} -> {release}")
        source = (PACKAGE_ROOT / "bridge",)  # else a project in the current folder is judged
        options = CanaryOptions((pinned, release), source, tiers="static,firewall")
        try:
            result = run_upgrade(catalog, plan_canary(catalog, options), options, progress)
        except ToolError as fault:
            failed[release] = str(fault)
            continue
        code, why = decide_release(result)
        if why:
            failed[release] = why
            continue
        issue = folder / "issues" / f"{release}.md"
        write_whole(issue, render_issue(result, release))
        judged.append(JudgedRelease(version=release, code=code, issue=str(issue)))
    return WatchResult(pinned=pinned, listed=len(listed), judged=tuple(judged), failed=failed)


def plan_watch(listed: Sequence[str], judged: Collection[str], pinned: str) -> tuple[str, ...]:
    """Releases to judge, oldest first: those newer than the pinned one, without those that were judged.

    Raises:
        NoEnvironment: the pinned release is not listed: an answer that is cut short would hide other releases too.
    """
    versions = {Version(name): name for name in listed}
    if Version(pinned) not in versions:
        raise NoEnvironment(
            f"The index lists {len(listed)} releases of Transformer Engine, and not the pinned {pinned}. Likely cause: "
            "a partial mirror, or an answer that was cut short. Next step: look at `pip config list`; nothing changed."
        )
    newer = sorted(version for version in versions if version > Version(pinned))
    return tuple(versions[version] for version in newer if versions[version] not in judged)


def decide_release(result: UpgradeResult) -> tuple[Exit, str]:
    """The verdict on a release, and why there is none where that is so.

    The firewall tier damages installs of earlier releases. Where it fails on those, the bridge or this host is at fault
    and no new release is to be blamed: the next run tries again.
    """
    cases = result.firewall.cases if result.firewall is not None else ()
    if any(step.breaks for step in result.static):
        return Exit.CLOSED, ""
    if other := [f"{case.case}: {case.outcome.value}" for case in cases if case.outcome is not Outcome.PASS]:
        return Exit.EVIDENCE_MISSING, f"the import firewall does not hold on earlier releases: {', '.join(other)}"
    return Exit.OPEN, ""
