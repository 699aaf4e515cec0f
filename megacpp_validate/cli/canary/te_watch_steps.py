"""What every step of the watch needs, and the issue texts that it writes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ...canary.dynamic.watch_result import Untold, WatchedRelease, WatchState
from ...catalog.bridge import Catalog
from ...catalog.pipelines import TeWatch
from ...report.markdown.te_watch import render_issue, render_pinned
from .watch_folder import WatchFolder


@dataclass(frozen=True)
class Watch:
    """What every step of a run needs."""

    folder: WatchFolder
    rules: TeWatch
    catalog: Catalog
    matrix: Path | None
    now: str


def write_issue(watch: Watch, row: WatchedRelease) -> list[str]:
    """The issue text of a release that there is an answer on; its file, none without one."""
    seen = watch.folder.read_result(row.version)
    if seen is None:
        return []
    issue = render_issue(
        row,
        seen,
        watch.folder.read_result(row.version, gpu=True),
        labels=tuple(watch.rules.labels),
        targets=tuple(watch.rules.gpu_targets),
    )
    return [str(watch.folder.write_issue(row.version, issue.as_file()))]


def write_pinned_issue(watch: Watch, row: WatchedRelease) -> list[str]:
    """The issue text of the pinned release, which the index has withdrawn or taken back."""
    text = render_pinned(row, labels=tuple(watch.rules.labels)).as_file()
    return [str(watch.folder.write_issue(row.version, text))]


def mark_untold(state: WatchState, names: Collection[str]) -> WatchState:
    """The state in which something of these is to be told yet; a verdict that is untold stays one."""
    rows = (
        row.model_copy(update={"untold": row.untold or Untold.LOOK}) if row.version in names else row
        for row in state.releases
    )
    return state.model_copy(update={"releases": tuple(rows)})
