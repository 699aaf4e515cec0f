"""Releases that are newer than the pin, each judged once by a run of the canary: what a cron job calls.

A release with an issue text is judged. So a run that dies half way leaves the rest to the next run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from filelock import FileLock, Timeout
from packaging.version import Version
from pydantic import Field, ValidationError

from ..catalog.bridge import Catalog, matrix_folder
from ..catalog.file import PACKAGE_ROOT
from ..errors import Exit, InfrastructureFailed, NoEnvironment, exit_for
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen
from ..process import run_command
from .dynamic.upgrade_result import UpgradeResult
from .firewall.result import FirewallOutcome

TIERS: Final = "static,firewall"
_LIMIT_S: Final = 1800.0  # of one release; both tiers take two minutes on two cores


class JudgedRelease(Frozen):
    """One release that the canary judged.

    Attributes:
        against: the pinned release at that time.
        code: exit code: `OPEN` or `CLOSED`.
        judged_at: ISO 8601 in UTC.
        issue: file of the issue text.
    """

    version: str
    against: str
    code: int
    judged_at: str
    issue: str


class WatchResult(Frozen):
    """One run.

    Attributes:
        pinned: the release that is in production.
        listed: how many releases are on the index.
        judged: new releases, oldest first.
        failed: new releases without a verdict, each with the reason: the next run tries again.
    """

    schema_id: Literal["megacpp-validate/te-watch/2"] = "megacpp-validate/te-watch/2"
    tool: str
    asked_at: str
    pinned: str
    listed: int
    judged: tuple[JudgedRelease, ...] = ()
    failed: dict[str, str] = Field(default_factory=dict)

    @property
    def exit(self) -> Exit:
        """Closed where a new release breaks the bridge; not open where one has no verdict."""
        return exit_for(breaks=any(row.code == Exit.CLOSED for row in self.judged), lacks=bool(self.failed))


def run_watch(
    catalog: Catalog,
    folder: Path,
    list_releases: Callable[[], Sequence[str]],
    render_issue: Callable[[UpgradeResult, str], str],
    *,
    tool: str,
    matrix: Path | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> WatchResult:
    """Judge every release that is new, oldest first, and write an issue text for each.

    Args:
        folder: of issues/RELEASE.md.
        list_releases: the releases on the index.
        render_issue: the text of an issue: a result and the release that is judged.
        note: called with each step as it starts.

    Raises:
        InfrastructureFailed: another run holds the folder.
        NoEnvironment: the index does not answer, or does not list the pinned release.
    """
    now, pinned = datetime.now(UTC).isoformat(timespec="seconds"), catalog.pinned.te
    judged: list[JudgedRelease] = []
    failed: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / "lock", timeout=0):
            listed = list_releases()
            for release in plan_watch(listed, {path.stem for path in folder.glob("issues/*.md")}, pinned):
                note(f"{pinned} -> {release}")
                result, why = _run_canary(pinned, release, matrix or matrix_folder())
                code, why = decide_release(result, release) if result is not None else (Exit.INFRASTRUCTURE, why)
                if result is None or why:
                    failed[release] = why
                    continue
                issue = folder / "issues" / f"{release}.md"
                write_whole(issue, render_issue(result, release))
                judged.append(
                    JudgedRelease(version=release, against=pinned, code=code, judged_at=now, issue=str(issue))
                )
    except Timeout as fault:
        raise InfrastructureFailed(
            f"Another run of the watch holds {folder}. Likely cause: the last one still runs. Next step: wait for its "
            "end, or give --state another folder."
        ) from fault
    return WatchResult(
        tool=tool, asked_at=now, pinned=pinned, listed=len(listed), judged=tuple(judged), failed=failed
    )  # fmt: skip


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


def decide_release(result: UpgradeResult, release: str) -> tuple[Exit, str]:
    """The verdict on a release, and why there is none where that is so.

    The firewall tier damages installs of earlier releases. Where it fails on those, the bridge or this host is at fault
    and no new release is to be blamed: the next run tries again.
    """
    cases = result.firewall.cases if result.firewall is not None else ()
    failed = [case for case in cases if case.outcome is FirewallOutcome.FAIL]
    if any(step.breaks for step in result.static) or any(case.release == release for case in failed):
        return Exit.CLOSED, ""
    if failed:
        names = ", ".join(f"{case.case} ({case.release})" for case in failed)
        return Exit.EVIDENCE_MISSING, f"the import firewall fails on installs of other releases: {names}"
    if lost := [case.case for case in cases if case.outcome is FirewallOutcome.NOT_RUN]:
        return Exit.EVIDENCE_MISSING, f"the import firewall did not run {', '.join(lost)}"
    return Exit.OPEN, ""


def _run_canary(old: str, new: str, matrix: Path) -> tuple[UpgradeResult | None, str]:
    """The verb te-canary in a process of its own: its answer, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="megacpp-te-watch-") as scratch:
        file = Path(scratch, "result.json")
        command = [sys.executable, "-m", "megacpp_validate.cli", "te-canary", old, new, "--tiers", TIERS]
        command += ["--source", str(PACKAGE_ROOT / "bridge")]  # else a project in the current folder is judged
        command += ["--format", "json", "--output", str(file), "--matrix", str(matrix.absolute())]
        ended = run_command(
            command, limit_s=_LIMIT_S, variables={**os.environ, "TMPDIR": scratch}
        )  # nothing of a killed process stays in /tmp
        if ended.code == Exit.INTERRUPTED:
            raise KeyboardInterrupt
        try:
            return UpgradeResult.model_validate_json(file.read_bytes()), ""
        except (OSError, ValidationError):
            return None, f"te-canary ended ({ended.how}, exit status {ended.code}): {ended.last_words}"
