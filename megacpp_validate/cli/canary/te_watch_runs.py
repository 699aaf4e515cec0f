"""The verb of the watch: ask the index, judge what is new through te-canary, keep it, write the issue texts.

What a run learns is kept with a mark that it was not told yet, and the mark goes when it was: a run that dies half way,
or cannot write what it found, leaves it to the next one to tell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer
from packaging.version import Version

from ...canary.dynamic.watch import (
    IndexNotBelieved,
    WatchPlan,
    choose_last_good,
    plan_gpu_steps,
    plan_watch,
    put_release,
)
from ...canary.dynamic.watch_result import Standing, Untold, WatchedRelease, WatchResult, WatchState
from ...canary.static.simple_index import IndexDown, read_index_settings, read_listed
from ...catalog.bridge import Catalog
from ...catalog.pipelines import read_pipelines
from ...report.markdown.te_watch import tell_watch
from ...report.terminal.te_watch import render_watch
from ..app import TOOL, Exit, foreseen, refuse, refuse_full_disk
from ..told_options import PageFormat
from ..whole_telling import tell_whole
from .te_watch_canary import judge
from .te_watch_gpu import find_answers, take_in
from .te_watch_steps import Watch, mark_untold, write_issue, write_pinned_issue
from .watch_folder import StateDamaged, WatchFolder, WatchTaken


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    state: Path
    gpu_results: Path | None
    matrix: Path | None


@foreseen({
    IndexDown: Exit.NO_ENVIRONMENT,
    IndexNotBelieved: Exit.NO_ENVIRONMENT,
    StateDamaged: Exit.INFRASTRUCTURE,
    WatchTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_watch(catalog: Catalog, asked: Asked, fmt: PageFormat, output: Path | None) -> None:
    """Look, judge, write and tell; closed where something new breaks the bridge."""
    rules = read_pipelines([target.id for target in catalog.targets], asked.matrix).te_watch
    now = datetime.now(UTC).isoformat(timespec="seconds")
    watch = Watch(WatchFolder(asked.state), rules, catalog, asked.matrix, now)
    try:
        with watch.folder.own():
            known = watch.folder.read_state(rules.distribution)
            result, state = _look(watch, known) if asked.gpu_results is None else _take_in(watch, known, asked)
            tell_whole(
                result,
                fmt,
                output,
                render=lambda console: render_watch(result, console=console),
                markdown=lambda: tell_watch(result),
            )
            if state.told != state:
                watch.folder.write_state(state.told)
    except KeyboardInterrupt:
        refuse(
            f"interrupted: what was judged is kept in {asked.state}; the same command goes on from there.",
            Exit.INTERRUPTED,
        )
    except OSError as fault:
        refuse_full_disk(asked.state, fault)
        refuse(
            f"what is known cannot be kept in {asked.state}: {fault.strerror or fault}. Likely cause: it is a file, or "
            "lies in a place that is not yours. Next step: give --state a folder that you can write.",
            Exit.WRONG_ARGUMENTS,
        )
    raise typer.Exit(Exit.CLOSED if result.breaks else Exit.EVIDENCE_MISSING if result.lacks else Exit.OPEN)


def _look(watch: Watch, known: WatchState | None) -> tuple[WatchResult, WatchState]:
    """Ask the index; each release is kept as soon as it is judged, so that a run that is killed loses one at most."""
    settings = read_index_settings()
    listed = read_listed(watch.rules.distribution, settings)
    pinned = watch.catalog.pinned.te
    plan = plan_watch(
        listed,
        known,
        pinned=pinned,
        prereleases=watch.rules.prereleases,
        distribution=watch.rules.distribution,
        now=watch.now,
    )
    # What the index has done to a release is in its issue before it is known: whatever dies later, nobody asks again.
    files = _write_changes(watch, known, plan)
    # Nothing is kept of what waits to be judged before it is: the state says no more than was done.
    state = mark_untold(plan.state, {row.version for row in plan.changed})
    waiting = {row.version for row in plan.judge}
    watch.folder.write_state(_without(state, waiting))
    for row in plan.judge:
        done = judge(watch, row, choose_last_good(state, pinned, row.version))
        files += write_issue(watch, done)
        state, waiting = put_release(state, done), waiting - {row.version}
        watch.folder.write_state(_without(state, waiting))
    return _result(watch, state, index=settings.shown, issues=files), state


def _write_changes(watch: Watch, known: WatchState | None, plan: WatchPlan) -> list[str]:
    """Issue texts of releases that were judged before, and of the pinned one: withdrawn since, or back again."""
    before = {row.version for row in known.releases if row.withdrawn} if known else set()
    files: list[str] = []
    for row in plan.changed:
        if row.standing is Standing.JUDGED:
            files += write_issue(watch, row)
        elif Version(row.version) == Version(watch.catalog.pinned.te) and (row.withdrawn or row.version in before):
            files += write_pinned_issue(watch, row)
    return files


def _without(state: WatchState, names: set[str]) -> WatchState:
    return state.model_copy(update={"releases": tuple(row for row in state.releases if row.version not in names)})


def _take_in(watch: Watch, known: WatchState | None, asked: Asked) -> tuple[WatchResult, WatchState]:
    """Ask no index: take in what machines with a GPU have told."""
    assert asked.gpu_results is not None
    files = find_answers(asked.gpu_results)
    state = known or WatchState(distribution=watch.rules.distribution)
    state, changed, issues, left = take_in(watch, state, files)
    return _result(watch, state, index="", issues=issues, changed=changed, left=left), state


def _result(
    watch: Watch,
    state: WatchState,
    *,
    index: str,
    issues: Iterable[str],
    changed: Iterable[WatchedRelease] = (),
    left: Iterable[str] = (),
) -> WatchResult:
    """What is to be told: whatever is untold, of this run or of one before it, and what else has changed."""
    also = {row.version for row in changed}
    rows = [row for row in state.releases if row.untold or row.version in also]
    return WatchResult(
        tool=TOOL,
        index=index,
        asked_at=watch.now,
        pinned=watch.catalog.pinned.te,
        changed=tuple(row.told for row in rows),
        judged=tuple(row.version for row in rows if row.untold is Untold.VERDICT),
        left=tuple(left),
        issues=tuple(dict.fromkeys(issues)),
        gpu=plan_gpu_steps(state, watch.rules.gpu_targets),
    )
