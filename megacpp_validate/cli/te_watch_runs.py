"""The verb of the watch: ask the index, judge what is new through te-canary, keep it, write the issue texts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import typer
from packaging.version import InvalidVersion, Version

from ..canary.simple_index import IndexDown, read_index_settings, read_listed
from ..canary.watch import (
    IndexNotBelieved,
    choose_last_good,
    decide_release,
    find_gpu_fault,
    plan_gpu_steps,
    plan_watch,
    put_release,
)
from ..catalog import Catalog, matrix_folder
from ..catalog_pipelines import TeWatch, read_pipelines
from ..evidence.te_watch import Standing, WatchedRelease, WatchResult, WatchState
from ..evidence.upgrade import UpgradeResult
from ..evidence.whole_file import write_whole
from ..report.markdown_te_watch import render_issue, render_pinned, tell_watch
from ..report.terminal_te_watch import render_watch
from .app import TOOL, Exit, Format, errors, foreseen, refuse, refuse_full_disk
from .watch_folder import StateDamaged, WatchFolder, WatchTaken, read_upgrade
from .whole_telling import tell_whole

_LIMIT_S: Final = 1800.0  # of one release; both tiers take two minutes on two cores


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    state: Path
    gpu_results: Path | None
    matrix: Path | None


@dataclass(frozen=True)
class _Watch:
    """What every step of a run needs."""

    folder: WatchFolder
    rules: TeWatch
    catalog: Catalog
    matrix: Path | None
    now: str


@foreseen({
    IndexDown: Exit.NO_ENVIRONMENT,
    IndexNotBelieved: Exit.NO_ENVIRONMENT,
    StateDamaged: Exit.INFRASTRUCTURE,
    WatchTaken: Exit.INFRASTRUCTURE,
})  # fmt: skip
def run_watch(catalog: Catalog, asked: Asked, fmt: Format, output: Path | None) -> None:
    """Look, judge, write and tell; closed where something new breaks the bridge."""
    rules = read_pipelines([target.id for target in catalog.targets], asked.matrix).te_watch
    now = datetime.now(UTC).isoformat(timespec="seconds")
    watch = _Watch(WatchFolder(asked.state), rules, catalog, asked.matrix, now)
    try:
        with watch.folder.own():
            state = watch.folder.read_state(rules.distribution)
            result = _look(watch, state) if asked.gpu_results is None else _take_in(watch, state, asked.gpu_results)
    except OSError as fault:
        refuse_full_disk(asked.state, fault)
        refuse(
            f"what is known cannot be kept in {asked.state}: {fault.strerror or fault}. Likely cause: it is a file, or "
            "lies in a place that is not yours. Next step: give --state a folder that you can write.",
            Exit.WRONG_ARGUMENTS,
        )
    tell_whole(
        result,
        fmt,
        output,
        render=lambda console: render_watch(result, console=console),
        markdown=lambda: tell_watch(result),
    )
    raise typer.Exit(Exit.CLOSED if result.breaks else Exit.EVIDENCE_MISSING if result.lacks else Exit.OPEN)


def _look(watch: _Watch, known: WatchState | None) -> WatchResult:
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
    # Nothing is kept of what waits to be judged before it is: the state says no more than was done.
    state = plan.state
    changed = {row.version: row for row in plan.changed}
    files: list[str] = []
    waiting = {row.version for row in plan.judge}
    before = {row.version for row in known.releases if row.withdrawn} if known else set()
    watch.folder.write_state(_without(state, waiting))
    for row in plan.judge:
        done = _judge(watch, row, choose_last_good(state, pinned, row.version))
        files += _write_issue(watch, done)
        state, waiting = put_release(state, done), waiting - {row.version}
        watch.folder.write_state(_without(state, waiting))
        changed[row.version] = done
    for row in plan.changed:
        if row.standing is Standing.JUDGED:  # withdrawn since, or back again
            files += _write_issue(watch, row)
        elif Version(row.version) == Version(pinned) and (row.withdrawn or row.version in before):
            text = render_pinned(row, labels=tuple(watch.rules.labels)).as_file()
            files.append(str(watch.folder.write_issue(row.version, text)))
    order = [row.version for row in state.releases if row.version in changed]
    return WatchResult(
        tool=TOOL,
        index=settings.shown,
        asked_at=watch.now,
        pinned=pinned,
        changed=tuple(changed[name] for name in order),
        judged=tuple(row.version for row in plan.judge),
        issues=tuple(files),
        gpu=plan_gpu_steps(state, watch.rules.gpu_targets),
    )


def _without(state: WatchState, names: set[str]) -> WatchState:
    return state.model_copy(update={"releases": tuple(row for row in state.releases if row.version not in names)})


def _judge(watch: _Watch, row: WatchedRelease, against: str) -> WatchedRelease:
    """A release with its verdict, from an answer that a killed run has left or from te-canary itself."""
    errors.print(f"{against} -> {row.version}", markup=False)
    left = watch.folder.read_result(row.version)
    if left is not None and _answers(left, against, row.version, tuple(watch.rules.tiers)):
        code, words = decide_release(left, row.version)
        if not words:
            return _judged(row, against, code, "", watch.now)
    code, result, words = _run_canary(watch, against, row.version)
    if result is not None:
        write_whole(watch.folder.result_file(row.version), result[1])
        code, words = decide_release(result[0], row.version)
    else:
        words = f"te-canary ended with {code}: {words or 'it gave no answer'}"
    return _judged(row, against, code, words, watch.now)


def _judged(row: WatchedRelease, against: str, code: int, words: str, now: str) -> WatchedRelease:
    """With a reason it is not judged: it waits, and is tried again."""
    return row.model_copy(
        update={
            "standing": Standing.WAITING if words else Standing.JUDGED,
            "against": against,
            "code": code,
            "judged_at": now,
            "reason": words,
        }
    )


def _answers(result: UpgradeResult, old: str, new: str, tiers: tuple[str, ...]) -> bool:
    steps = [(step.old.version, step.new.version) for step in result.static]
    return result.tool == TOOL and set(tiers) <= set(result.tiers) and ("static" not in tiers or steps == [(old, new)])


def _run_canary(watch: _Watch, old: str, new: str) -> tuple[int, tuple[UpgradeResult, str] | None, str]:
    """The verb te-canary in a process of its own: its exit code, its answer, and its last words."""
    matrix = (watch.matrix or matrix_folder()).absolute()
    with tempfile.TemporaryDirectory(prefix="megacpp-te-watch-") as scratch:
        file = Path(scratch) / "result.json"
        command = [sys.executable, "-m", "megacpp_validate.cli", "te-canary", old, new]
        command += ["--tiers", ",".join(watch.rules.tiers), "--format", "json", "--output", str(file)]
        try:
            done = subprocess.run(
                [*command, "--matrix", str(matrix)], capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Exit.INFRASTRUCTURE, None, f"it was not there after {_LIMIT_S:.0f} s"
        if done.returncode == Exit.INTERRUPTED:
            raise KeyboardInterrupt
        result = read_upgrade(file)
        words = " ".join(done.stderr.split())[-600:]
        if result is None or not _answers(result, old, new, tuple(watch.rules.tiers)):
            code = done.returncode if done.returncode > Exit.CLOSED else Exit.INFRASTRUCTURE  # no answer, no verdict
            return code, None, words
        return done.returncode, (result, file.read_text(encoding="utf-8")), ""


def _write_issue(watch: _Watch, row: WatchedRelease) -> list[str]:
    """The issue text of a release that there is an answer on."""
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


def _take_in(watch: _Watch, known: WatchState | None, folder: Path) -> WatchResult:
    """Answers of the dynamic tier, put to what is known; what answers no step that was asked for is told and left."""
    if not folder.is_dir():
        refuse(
            f"there is no folder {folder}. Likely cause: a typing error, or no machine with a GPU told anything. Next "
            "step: give the folder of what `te-canary --tiers gpu --format json` wrote.",
            Exit.WRONG_ARGUMENTS,
        )
    state = known or WatchState(distribution=watch.rules.distribution)
    rows = {row.version: row for row in state.releases}
    changed: list[WatchedRelease] = []
    files: list[str] = []
    left: list[str] = []
    modules = [module.id for module in watch.catalog.modules]
    for file in sorted(folder.glob("*.json")):
        row, result = rows.get(_version_of(file)), read_upgrade(file)
        if row is None or row.standing is not Standing.JUDGED or result is None:
            left.append(f"{file.name} is no answer of the gpu tier on a release that was judged")
            continue
        if why := find_gpu_fault(result, row, tool=TOOL, targets=watch.rules.gpu_targets, modules=modules):
            left.append(f"{file.name} is no answer on {row.against} -> {row.version}: {why}")
            continue
        code = Exit.CLOSED if result.breaks else Exit.EVIDENCE_MISSING if result.lacks else Exit.OPEN
        write_whole(watch.folder.result_file(row.version, gpu=True), file.read_text(encoding="utf-8"))
        if code is Exit.EVIDENCE_MISSING:
            left.append(f"{file.name} lacks evidence: {row.version} is still to be run")
        done = row.model_copy(update={"gpu_code": None if code is Exit.EVIDENCE_MISSING else int(code)})
        state = put_release(state, done)
        files += _write_issue(watch, done)
        watch.folder.write_state(state)
        changed.append(done)
    return WatchResult(
        tool=TOOL,
        index="not asked",
        asked_at=watch.now,
        pinned=watch.catalog.pinned.te,
        changed=tuple(changed),
        judged=tuple(row.version for row in changed if row.gpu_code is not None),
        left=tuple(left),
        issues=tuple(files),
        gpu=plan_gpu_steps(state, watch.rules.gpu_targets),
    )


def _version_of(file: Path) -> str:
    try:
        return str(Version(file.stem))
    except InvalidVersion:
        return ""
