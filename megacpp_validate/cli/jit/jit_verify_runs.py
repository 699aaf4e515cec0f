"""The verb that proves a sealed cache warm: what it runs, and the exit code of each answer."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import typer

from ...catalog.bridge import Catalog, read_catalog
from ...catalog.bridge import Target as TargetRow
from ...catalog.prewarm import read_prewarm, read_unkept
from ...environments.interpreter import read_commit
from ...environments.plan import IMAGE_DIGEST, LOCK_HASH, find_target
from ...evidence.whole_file import write_whole
from ...jitcache.aside import folder_aside
from ...jitcache.crew import run_side_by_side
from ...jitcache.files import list_files
from ...jitcache.layout import MANIFEST_HASH, cache_arch
from ...jitcache.manifest import ManifestInvalid, compare_stack
from ...jitcache.place import require_loadable, require_place, try_to_write
from ...jitcache.prewarm import Answer
from ...jitcache.result import JitVerdict, JitVerifyResult
from ...jitcache.seal import Checked, check_sealed, is_sealed
from ...jitcache.variables import hash_variables, say_other_variables
from ...jitcache.verify import find_unreported, judge_task, set_unwatched_apart
from ...jitcache.working import open_working
from ...process import Processes
from ..app import TOOL, Exit, Format, foreseen, refuse, refuse_full_disk, refuse_receipts
from .jit_stack import AskedJit, JitStack, default_jobs, open_stack, require_temporary
from .jit_telling import TaskProgress, result_text, tell_jit
from .prewarm_runs import FORESEEN, Selected, select_tasks, why_no_tasks

# Of a whole target, and of a choice: whoever reads the verdict on a target must not find the other in its place.
_VERDICT: Final = "jit_verify-{target}.json"
_IN_PART: Final = "jit_verify-{target}.part.json"
_WORKING: Final = "megacpp-jit-work-"


@foreseen(FORESEEN)
def run_jit_verify(
    matrix: Path | None, asked: AskedJit, folders: Folders, fmt: Format, output: Path | None, *, at_build: bool,
    verbose: bool,
) -> None:  # fmt: skip
    """Check, run, judge; closed where anything was compiled, and not open where anything did not run.

    What the target has and the caller did not leave out, by --tasks or --at-build, must run: so whether the machine has
    the devices for it or not, a cache that was verified in part never passes for one that was verified whole.
    """
    catalog = read_catalog(matrix)
    target = find_target(catalog, asked.target)
    selected = select_tasks(read_prewarm(catalog, matrix), target, asked, at_build=at_build)
    selected = replace(selected, unkept=read_unkept(matrix))
    _require_folders(folders)
    try:
        result = verify(catalog, target, selected, asked, folders, at_build=at_build)
    except OSError as fault:
        refuse_full_disk(folders.work or Path(tempfile.gettempdir()), fault)
        raise
    try:
        write_whole(folders.receipts / name_verdict(result), result_text(result))
    except OSError as fault:
        refuse_receipts(folders.receipts, fault)
    tell_jit(result, fmt, output, verbose=verbose)
    if result.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.EVIDENCE_MISSING if result.lacks else Exit.OPEN)


def name_verdict(result: JitVerifyResult) -> str:
    """Of the file in which a verdict is kept."""
    return (_IN_PART if result.left_out else _VERDICT).format(target=result.target)


@dataclass(frozen=True)
class Folders:
    """Of the working copy (None: a temporary one), and of receipts and logs."""

    work: Path | None
    receipts: Path


def _require_folders(folders: Folders) -> None:
    """Refuse folders that cannot be used before anything runs, and not a quarter of an hour later.

    Raises:
        NoEnvironment: there is none for temporary files.
        CannotLoad: libraries cannot be loaded from the working copy.
    """
    try:
        try_to_write(folders.receipts)
    except OSError as fault:
        refuse_receipts(folders.receipts, fault)
    require_temporary()
    work = folders.work or Path(tempfile.gettempdir())
    try:
        try_to_write(work)
    except OSError as fault:
        refuse_full_disk(work, fault)
        refuse(
            f"the working copy cannot be made in {work}: {fault.strerror or fault}. Likely cause: it is a file, or "
            "lies in a place that is not yours. Next step: give --work a folder that you can write.",
            Exit.WRONG_ARGUMENTS,
        )
    require_loadable(work)


def verify(
    catalog: Catalog,
    target: TargetRow,
    selected: Selected,
    asked: AskedJit,
    folders: Folders,
    *,
    at_build: bool = False,
) -> JitVerifyResult:
    """The verdict. Raises as `open_stack`, `check_sealed` and `open_working`."""
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    folder = require_place(asked.place(), cache_arch(target.arch), "")
    if not is_sealed(folder):
        raise ManifestInvalid(
            f"{folder} is not sealed, so that nothing says what it was when it was made. {_say_unsealed(folder)}"
        )
    checked = check_sealed(folder)  # first: on files that changed nothing is proven
    took = time.monotonic() - began
    asked = replace(asked, mode=checked.manifest.mode)
    with (
        folder_aside(folders.work or Path(tempfile.gettempdir()), _WORKING) as work,
        open_stack(catalog, target, asked, work, Processes()) as stack,
    ):
        if reason := why_no_tasks(target, stack, at_build=at_build):
            ran = _judge(selected, {task.id: Answer(missing=reason) for task in selected.tasks}, checked)
        else:
            ran = _run(stack, checked, selected, asked, folders.receipts.absolute())
        return JitVerifyResult(
                tool=TOOL, commit=read_commit(), target=target.id, architecture=stack.architecture, folder=str(folder),
                mode=stack.mode, manifest=checked.digest, interpreter=stack.interpreter,
                image_digest=os.environ.get(IMAGE_DIGEST, ""), lock_hash=os.environ.get(LOCK_HASH, ""),
                gpu=stack.seen.versions.get("gpu", ""), left_out=selected.not_asked, missing=checked.manifest.missing,
                ranks=max([asked.ranks, *(task.ranks for task in selected.tasks)]),
                files=len(checked.manifest.files), bytes=checked.manifest.bytes, started=started,
                opened_s=round(took + ran.pop("copied_s", 0.0), 2),
                seconds=round(time.monotonic() - began, 1), **ran,
            )  # fmt: skip


def _say_unsealed(folder: Path) -> str:
    """Why a folder is not sealed, as far as can be seen, and what to do."""
    if (folder / MANIFEST_HASH).exists():
        return (
            "Likely cause: a prewarm with --no-seal, or a copy that did not keep the modes of files. Next step: "
            "`nox -s jit_cache -- seal`, which holds every file to its hash."
        )
    return (
        "Likely cause: there is no cache yet, or a prewarm did not come to its end. Next step: `nox -s prewarm` to its "
        "end."
    )


def _run(stack: JitStack, checked: Checked, selected: Selected, asked: AskedJit, receipts: Path) -> dict[str, Any]:
    """Compare with the stack, copy, run, judge: fields of the verdict."""
    manifest = checked.manifest
    if differences := compare_stack(manifest, stack.seen, stack.architecture, stack.mode):
        return {"differences": differences}
    began = time.monotonic()
    # What a stack leaves when it is only asked (the driver's folder, where it names its GPU) is not what was sealed.
    shutil.rmtree(stack.root / stack.architecture, ignore_errors=True)
    folder = open_working(asked.place() / stack.architecture, manifest, stack.root)
    copied_s = time.monotonic() - began
    before = {seen.path: seen for seen in list_files(folder)}
    with TaskProgress(total=len(selected.tasks)) as shown:
        answers = run_side_by_side(
            selected.tasks, lambda task: stack.run(task, receipts, asked.limit_s),
            asked.jobs or default_jobs(stack.target), shown, stack.processes.stop,
        )  # fmt: skip
    judged = _judge(selected, answers, checked)
    unreported, unproven = set_unwatched_apart(
        find_unreported(before, list_files(folder), judged["rows"]), judged["unwatched"]
    )
    cold = unreported or any(row.verdict not in (JitVerdict.WARM, JitVerdict.NOT_RUN) for row in judged["rows"])
    # Where all is warm, none of them is in a key of what ran.
    other = say_other_variables(manifest.variables, hash_variables(stack.environment.variables)) if cold else ()
    return {
        **judged, "copied_s": copied_s, "notes": (*judged["notes"], *other), "unreported": unreported,
        "unproven": unproven,
    }  # fmt: skip


def _judge(selected: Selected, answers: Mapping[str, Answer], checked: Checked) -> dict[str, Any]:
    tasks = selected.tasks
    answers = {**answers, **{name: Answer(missing=reason) for name, reason in selected.beyond.items()}}
    return {
        "rows": tuple(judge_task(task, answers[task.id], checked.manifest, selected.unkept) for task in selected.asked),
        "unwatched": tuple(dict.fromkeys(line for task in tasks for line in answers[task.id].unwatched)),
        "notes": tuple(f"{task.id}: {line}" for task in tasks for line in answers[task.id].notes),
    }
