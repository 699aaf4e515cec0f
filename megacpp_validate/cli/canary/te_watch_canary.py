"""One release judged by te-canary, in a process that ends with the watch, whatever ends that."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from ...canary.dynamic.upgrade_result import UpgradeResult
from ...canary.dynamic.watch import decide_release
from ...canary.dynamic.watch_result import Standing, Untold, WatchedRelease
from ...catalog.bridge import matrix_folder
from ...evidence.whole_file import write_whole
from ...process import Call, Processes
from ..app import TOOL, Exit, errors
from .te_watch_steps import Watch
from .watch_folder import read_upgrade

_LIMIT_S: Final = 1800.0  # of one release; both tiers take two minutes on two cores
_MOST_WORDS: Final = 600


def judge(watch: Watch, row: WatchedRelease, against: str) -> WatchedRelease:
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
            "untold": Untold.LOOK if words else Untold.VERDICT,
        }
    )


def _answers(result: UpgradeResult, old: str, new: str, tiers: tuple[str, ...]) -> bool:
    steps = [(step.old.version, step.new.version) for step in result.static]
    return result.tool == TOOL and set(tiers) <= set(result.tiers) and ("static" not in tiers or steps == [(old, new)])


def _run_canary(watch: Watch, old: str, new: str) -> tuple[int, tuple[UpgradeResult, str] | None, str]:
    """The verb te-canary in a process of its own: its exit code, its answer, and its last words.

    Its folder for temporary files is one of this run, so that nothing of it stays where it is killed.
    """
    tiers = tuple(watch.rules.tiers)
    with tempfile.TemporaryDirectory(prefix="megacpp-te-watch-") as scratch:
        file, log, its_own = Path(scratch, "result.json"), Path(scratch, "log"), Path(scratch, "tmp")
        its_own.mkdir()
        command = [sys.executable, "-m", "megacpp_validate.cli", "te-canary", old, new, "--tiers", ",".join(tiers)]
        command += ["--format", "json", "--output", str(file)]
        command += ["--matrix", str((watch.matrix or matrix_folder()).absolute())]
        call = Call(tuple(command), {**os.environ, "TMPDIR": str(its_own)})
        ended = Processes().run(call, folder=Path.cwd(), limit_s=_LIMIT_S, log=log)
        if ended.code is None:
            return Exit.INFRASTRUCTURE, None, f"it was not there after {_LIMIT_S:.0f} s"
        if ended.code == Exit.INTERRUPTED:
            raise KeyboardInterrupt
        result = read_upgrade(file)
        words = " ".join(ended.words.split())[-_MOST_WORDS:]
        if result is None or not _answers(result, old, new, tiers):
            code = ended.code if ended.code > Exit.CLOSED else Exit.INFRASTRUCTURE  # no answer, no verdict
            return code, None, words
        return ended.code, (result, file.read_text(encoding="utf-8")), ""
