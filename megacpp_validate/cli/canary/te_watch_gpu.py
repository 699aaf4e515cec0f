"""Answers of the dynamic tier, put to what the watch knows; what answers nothing that was asked is told and left."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ...canary.dynamic.upgrade_result import UpgradeResult
from ...canary.dynamic.watch import find_gpu_fault, put_release
from ...canary.dynamic.watch_result import Standing, Untold, WatchedRelease, WatchState
from ...evidence.whole_file import write_whole
from ..app import TOOL, Exit, refuse
from .te_watch_steps import Watch, write_issue
from .watch_folder import read_upgrade


def find_answers(folder: Path) -> Sequence[Path]:
    """The files that machines with a GPU have told; one at least."""
    if not folder.is_dir():
        refuse(
            f"there is no folder {folder}. Likely cause: a typing error, or no machine with a GPU told anything. Next "
            "step: give the folder of what `te-canary --tiers gpu --format json` wrote.",
            Exit.WRONG_ARGUMENTS,
        )
    files = sorted(folder.glob("*.json"))
    if not files:
        refuse(
            f"there is no answer in {folder}: no RELEASE.json. Likely cause: no machine with a GPU told anything, or "
            "its files lie in a folder below. Next step: give the folder that the files themselves lie in.",
            Exit.NOTHING_SELECTED,
        )
    return files


def take_in(
    watch: Watch, state: WatchState, files: Sequence[Path]
) -> tuple[WatchState, list[WatchedRelease], list[str], list[str]]:
    """Every answer; each verdict is kept as soon as its issue text is written.

    Returns:
        The state, releases with something new, issue files, and answers that gave no verdict, each with why.
    """
    changed: dict[str, WatchedRelease] = {}
    issues: list[str] = []
    left: list[str] = []
    for file in files:
        row, result, why = _match(watch, state, file)
        if row is None or result is None:
            left.append(why)
            continue
        code = Exit.CLOSED if result.breaks else Exit.EVIDENCE_MISSING if result.lacks else Exit.OPEN
        lacks = code is Exit.EVIDENCE_MISSING
        if lacks and row.gpu_code is not None:
            left.append(f"{file.name} lacks evidence: the verdict that there is on {row.version} stays")
            continue
        if lacks:
            left.append(f"{file.name} lacks evidence: {row.version} is still to be run")
        place, text = watch.folder.result_file(row.version, gpu=True), file.read_text(encoding="utf-8")
        verdict = None if lacks else int(code)
        if row.gpu_code == verdict and _read(place) == text:
            continue  # it was taken in before
        write_whole(place, text)
        done = row.model_copy(update={"gpu_code": verdict, "untold": row.untold if lacks else Untold.VERDICT})
        issues += write_issue(watch, done)
        state = put_release(state, done)
        watch.folder.write_state(state)
        changed[row.version] = done
    return state, list(changed.values()), issues, left


def _match(watch: Watch, state: WatchState, file: Path) -> tuple[WatchedRelease | None, UpgradeResult | None, str]:
    """The release that a file answers and the answer, or why it is none."""
    rows = {row.version: row for row in state.releases}
    row, result = rows.get(_version_of(file)), read_upgrade(file)
    if row is None or row.standing is not Standing.JUDGED or result is None:
        return None, None, f"{file.name} is no answer of the gpu tier on a release that was judged"
    modules = [module.id for module in watch.catalog.modules]
    if why := find_gpu_fault(result, row, tool=TOOL, targets=watch.rules.gpu_targets, modules=modules):
        return None, None, f"{file.name} is no answer on {row.against} -> {row.version}: {why}"
    return row, result, ""


def _version_of(file: Path) -> str:
    try:
        return str(Version(file.stem))
    except InvalidVersion:
        return ""


def _read(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8")
    return ""
