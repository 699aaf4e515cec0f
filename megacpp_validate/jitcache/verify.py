"""Whether a sealed cache is warm: tasks run on a copy of it, and nothing may be compiled there."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.prewarm import PrewarmTask, UnkeptKernel
from ..environments.interpreter import read_commit
from ..environments.plan import IMAGE_DIGEST, LOCK_HASH, find_target
from ..evidence.whole_file import write_whole
from .layout import cache_arch, folder_aside, require_temporary, require_usable, require_writable
from .manifest import (
    Listed,
    Manifest,
    ManifestInvalid,
    compare_stack,
    compare_variables,
    find_products,
    hash_variables,
    library_of,
    list_files,
    require_place,
)
from .prewarm import SealOptions, Selected, describe_ended, run_prewarm, select_tasks
from .result import JitCause, JitCompile, JitVerdict, JitVerifyResult, JitVerifyRow, PrewarmResult
from .seal import Checked, check_sealed, is_sealed, open_working
from .stack import COUNTED, Answer, JitOptions, JitStack, asked_nothing, open_stack, run_tasks

# Of a whole target, and of a part: whoever reads the verdict on a target must not find the other in its place.
_VERDICT: Final = "jit_verify-{target}.json"
_IN_PART: Final = "jit_verify-{target}.part.json"
_SHOWN: Final = 4  # shapes of a kernel, and files that nobody could watch, that are named
_DRIVER: Final = "cuda"
_NAMELESS: Final = "PTX"  # a file of the driver's cache in which no name is found (jit/driver_cache.py)


def run_verify(
    catalog: Catalog, tasks: Sequence[PrewarmTask], unkept: Sequence[UnkeptKernel], options: JitOptions,
    work: Path | None, receipts: Path, report: Callable[[str], None],
) -> JitVerifyResult:  # fmt: skip
    """Check, run, judge, and write the verdict.

    A cache that was verified in part never passes for one that was verified whole: the verdict lists the tasks that
    were left out, and its file has another name (`name_verdict`).

    Args:
        tasks, unkept: of the matrix.
        work: folder for the working copy; that for temporary files where it is None.
        receipts: folder for the verdict, receipts and logs.
        report: called with a line a task that has ended.

    Raises:
        ToolError: by the class of what is wrong.
        OSError: a disk is full.
    """
    target = find_target(catalog, options.target)
    selected = replace(select_tasks(tasks, target.id, options), unkept=tuple(unkept))
    require_writable(receipts, "--receipts")  # now, and not a quarter of an hour later
    parent = work or require_temporary()
    require_usable(parent, "--work")
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    folder = require_place(options.place(), cache_arch(target.arch))
    if not is_sealed(folder):
        raise ManifestInvalid(
            f"{folder} is not sealed, so that its contents are not known. Likely cause: a prewarm with --no-seal or "
            "without an end, or a copy that did not keep the modes of files. Next step: `nox -s prewarm` to its end, "
            "or `nox -s jit_cache -- seal`, which compares every file with its hash."
        )
    checked = check_sealed(folder)  # first: on files that changed nothing is proven
    took = time.monotonic() - began
    options = replace(options, mode=checked.manifest.mode)
    with folder_aside(parent, "megacpp-jit-work-") as root, open_stack(catalog, target, options, root) as stack:
        if reason := stack.why_not(at_build=options.at_build):
            fields = judge_tasks(selected, {task.id: Answer(missing=reason) for task in selected.tasks}, checked)
        else:
            fields = run_on_copy(stack, folder, checked, selected, options, receipts.absolute(), report)
        result = JitVerifyResult(
            tool=TOOL, commit=read_commit(), target=target.id, architecture=stack.architecture, folder=str(folder),
            mode=stack.mode, manifest=checked.digest, interpreter=stack.interpreter,
            image_digest=os.environ.get(IMAGE_DIGEST, ""), lock_hash=os.environ.get(LOCK_HASH, ""),
            gpu=stack.facts.gpu.name if stack.facts.gpu else "", left_out=selected.left_out,
            ranks=max([options.ranks, *(task.ranks for task in selected.tasks)]), missing=checked.manifest.missing,
            files=len(checked.manifest.files), bytes=checked.manifest.bytes, started=started,
            opened_s=round(took + fields.pop("copied_s", 0.0), 2), seconds=round(time.monotonic() - began, 1),
            **fields,
        )  # fmt: skip
    write_whole(receipts / name_verdict(result), result.model_dump_json(indent=2) + "\n")
    return result


def run_prewarm_and_verify(
    catalog: Catalog, tasks: Sequence[PrewarmTask], unkept: Sequence[UnkeptKernel], options: JitOptions,
    sealing: SealOptions, receipts: Path, report: Callable[[str], None],
) -> PrewarmResult:  # fmt: skip
    """Fill the caches, seal them, verify what was sealed. Arguments and errors as `run_prewarm` and `run_verify`."""
    require_writable(receipts, "--receipts")
    result = run_prewarm(catalog, tasks, options, sealing, report)
    if not result.sealed:
        return result
    verdict = run_verify(catalog, tasks, unkept, options, None, receipts, report)
    return result.model_copy(update={"verdict": verdict})


def name_verdict(result: JitVerifyResult) -> str:
    """The name of the file in which a verdict is kept."""
    return (_IN_PART if result.left_out else _VERDICT).format(target=result.target)


def run_on_copy(
    stack: JitStack, sealed: Path, checked: Checked, selected: Selected, options: JitOptions, receipts: Path,
    report: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Compare with the stack, copy, run, judge: fields of the verdict."""
    manifest = checked.manifest
    if differences := compare_stack(manifest, stack.read_seen(), stack.architecture, stack.mode):
        return {"differences": differences}
    began = time.monotonic()
    # What a stack leaves when it is only asked (the driver's folder, where it names its GPU) is not what was sealed.
    shutil.rmtree(stack.root / stack.architecture, ignore_errors=True)
    folder = open_working(sealed, manifest, stack.root)
    copied_s = time.monotonic() - began
    before = {listed.path: listed for listed in list_files(folder)}

    def run(task: PrewarmTask) -> Answer:
        answer = stack.run(task, receipts, options.limit_s)
        report(describe_ended(task, answer))
        return answer

    fields = judge_tasks(selected, run_tasks(selected.tasks, run, options.jobs, stack.processes), checked)
    unreported = find_unreported(before, list_files(folder), fields["rows"])
    unreported, unproven = set_unwatched_apart(unreported, fields["unwatched"])
    if unreported or any(row.verdict not in (JitVerdict.WARM, JitVerdict.NOT_RUN) for row in fields["rows"]):
        # Where all is warm, no variable that differs is in a key of what ran.
        fields["notes"] += compare_variables(manifest.variables, hash_variables(stack.environment.variables))
    return {**fields, "copied_s": copied_s, "unreported": unreported, "unproven": unproven}


def judge_tasks(selected: Selected, answers: Mapping[str, Answer], checked: Checked) -> dict[str, Any]:
    """The rows, what could not be watched, and the notes of a verdict."""
    tasks = selected.tasks
    rows = [judge_task(task, answers[task.id], checked.manifest, selected.unkept) for task in tasks]
    return {
        "rows": tuple(rows),
        "unwatched": tuple(dict.fromkeys(line for task in tasks for line in answers[task.id].unwatched)),
        "notes": tuple(f"{task.id}: {line}" for task in tasks for line in answers[task.id].notes),
    }


def judge_task(
    task: PrewarmTask, answer: Answer, manifest: Manifest, unkept: Sequence[UnkeptKernel] = ()
) -> JitVerifyRow:
    """What a task or a cell made of the cache. What did not run is not verified, whatever it reports of compiles.

    Args:
        task: row of `matrix/prewarm.toml`.
        answer: of its process on the working copy.
        manifest: of the cache.
        unkept: what no cache keeps.
    """
    excused = _find_unkept(answer.compiled, unkept, manifest.stack.versions.get("transformer-engine", ""))
    missed = tuple(one for one in answer.compiled if one not in excused)
    if answer.missing:
        verdict = JitVerdict.NOT_RUN
    elif answer.failure:
        verdict = JitVerdict.FAILED
    elif missed:
        verdict = JitVerdict.COMPILED
    else:
        verdict = JitVerdict.SILENT if _is_silent(task, answer, manifest) else JitVerdict.WARM
    names = dict.fromkeys((one.library, one.kernel) for one in missed)
    known = tuple(_list_known(manifest, library, kernel) for library, kernel in names)
    cause = _find_cause(task, manifest) if missed else None
    return JitVerifyRow(
        task=task.id, verdict=verdict, compiled=missed, unkept=excused, known=known, cause=cause,
        hits=None if answer.hits is None else sum(answer.hits.values()),
        reason=answer.missing or answer.failure, seconds=answer.seconds,
    )  # fmt: skip


def _find_unkept(
    compiled: Sequence[JitCompile], unkept: Sequence[UnkeptKernel], release: str
) -> tuple[JitCompile, ...]:
    """What no cache keeps, and the other halves of it.

    NVRTC leaves two files a kernel: its machine code, which has a name, and what that was made of, in which none may be
    found. Where nothing else of the driver's was compiled, and there are no more of those than of named ones, they are
    these halves: a kernel that is really missing leaves its machine code, and with it its name.
    """
    named = [one for one in compiled if any(row.fits(one.library, one.kernel, release) for row in unkept)]
    others = [one for one in compiled if one.library == _DRIVER and one not in named]
    halves = others if len(others) <= len(named) and all(one.kernel == _NAMELESS for one in others) else []
    return tuple(one for one in compiled if one in named or one in halves)


def _is_silent(task: PrewarmTask, answer: Answer, manifest: Manifest) -> bool:
    """Whether a library was not asked that this task asked when it was finished: a fallback compiles nothing, either.

    What it found then counts as what it compiled: another task may have been first. And a task that asks nothing of
    the library that it is there for is silent whatever it did then: compiling may have been switched off both times.
    """
    if asked_nothing(task, answer):
        return True
    done = next((one for one in manifest.tasks if one.id == task.id), None)
    if done is None or answer.hits is None:
        return False
    found = {COUNTED.get(library) for library, number in answer.hits.items() if number}
    asked = tuple(one.library for one in done.compiled) if done.asked is None else done.asked
    return any(COUNTED.get(library) not in (None, *found) for library in asked)


def _find_cause(task: PrewarmTask, manifest: Manifest) -> JitCause:
    done = next((one for one in manifest.tasks if one.id == task.id), None)
    if done is None:
        return JitCause.NO_TASK
    same = (done.code, done.settings, done.ranks) == (task.code, task.settings, task.ranks)
    return JitCause.OTHER_KEY if same else JitCause.OTHER_SETTINGS


def _list_known(manifest: Manifest, library: str, kernel: str) -> str:
    shapes = manifest.shapes_of(library, kernel)
    more = f"; and {len(shapes) - _SHOWN} more" if len(shapes) > _SHOWN else ""
    return f"{kernel}: {'; '.join(shapes[:_SHOWN])}{more}" if shapes else f"{kernel}: nothing"


def find_unreported(
    before: Mapping[str, Listed], after: Iterable[Listed], rows: Sequence[JitVerifyRow]
) -> tuple[str, ...]:
    """Compiled kernels that appeared in the working copy, in caches of which no process reported a compile.

    A monitor that misses a compile would call a cold cache warm: so the files count too. Of the driver's cache each
    file must have been reported, since its processes report files (jit/driver_cache.py).

    Args:
        before, after: the working copy before anything ran, and now.
        rows: what the processes reported.
    """
    every = [one for row in rows for one in (*row.compiled, *row.unkept)]
    files = {f"{_DRIVER}/{one.shape}" for one in every if one.library == _DRIVER}
    told = {one.library for one in every if one.library != _DRIVER}
    if told & {"fa4", "cute"}:
        told |= {"fa4", "cute"}  # one compiler, two caches
    if "inductor" in told:
        told.add("triton")  # TorchInductor writes its kernels in Triton
    return tuple(path for path in find_products(before, after) if path not in files and library_of(path) not in told)


def set_unwatched_apart(unreported: Sequence[str], unwatched: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Files that no process reported, and sentences about those that no process could report.

    A process that cannot work on a copy of the driver's cache reports no compile there, and says so. What appears there
    then is no breakage (the kernels that no cache keeps appear each time), and no proof either.

    Args:
        unreported: as `find_unreported` has them.
        unwatched: what the processes could not watch: "LIBRARY: why".
    """
    blind = any(line.startswith(f"{_DRIVER}: ") for line in unwatched)
    apart = [path for path in unreported if library_of(path) == _DRIVER and blind]
    if not apart:
        return tuple(unreported), ()
    more = f" and {len(apart) - _SHOWN} more" if len(apart) > _SHOWN else ""
    said = (
        f"{len(apart)} file(s) appeared in the driver's cache, which could not be watched: "
        f"{', '.join(apart[:_SHOWN])}{more}. Whether it is warm is not proven"
    )
    return tuple(path for path in unreported if path not in apart), (said,)
