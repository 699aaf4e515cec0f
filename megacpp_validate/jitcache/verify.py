"""Whether a sealed cache is warm: tasks run on a copy of it, and nothing may be compiled there."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from ..catalog.bridge import Catalog
from ..catalog.prewarm import PrewarmRows, PrewarmTask, UnkeptKernel
from ..environments.interpreter import read_commit
from ..environments.plan import IMAGE_DIGEST, LOCK_HASH, find_target
from ..errors import writing_to
from ..evidence.receipt import write_whole
from . import layout
from .cache import check_sealed, open_working
from .layout import DRIVER, JitCompile, Manifest, StackDifference, library_of
from .stack import (
    COUNTED,
    Answer,
    JitOptions,
    JitResult,
    JitRow,
    JitStack,
    JitVerdict,
    asked_nothing,
    find_root,
    judge_answer,
    open_stack,
    run_tasks,
    select_tasks,
)

_NAMELESS: Final = "PTX"  # a file of the driver's cache in which no name is found (jit/driver_cache.py)


class JitVerifyResult(JitResult):
    """Whether a sealed cache is warm for what runs on it; also the file that is kept as evidence of it.

    Attributes:
        ranks: most devices that a cell took.
        files, bytes: of the sealed cache, each of whose hashes was right.
        differences: of cache and stack; where there is one, nothing was run.
        missing: ids of tasks that the cache does not have.
        unreported: files of compiled kernels that appeared without a report of a process.
        unproven: files that appeared where no process could watch.
        unwatched: what compiles in memory, where no cache can be warm: "LIBRARY: why".
        opened_s: seconds to check and to copy the cache into a folder that can be written.
    """

    schema_id: Literal["megacpp-validate/jit-verify/2"] = "megacpp-validate/jit-verify/2"
    commit: str = ""
    image_digest: str = ""
    lock_hash: str = ""
    gpu: str = ""
    ranks: int = Field(default=1, ge=1)
    files: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)
    differences: tuple[StackDifference, ...] = ()
    missing: tuple[str, ...] = ()
    unreported: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    unwatched: tuple[str, ...] = ()
    started: str = ""
    opened_s: float = Field(default=0.0, ge=0.0)

    @property
    def breaks(self) -> bool:
        """Whether anything was compiled, came to a bad end, or is of another stack."""
        return super().breaks or bool(self.differences or self.unreported)

    @property
    def lacks(self) -> bool:
        """Whether something did not run, or could not be watched: that is not verified."""
        return super().lacks or bool(self.unproven)


def run_verify(
    catalog: Catalog, matrix: PrewarmRows, options: JitOptions, receipts: Path, report: Callable[[str], None],
) -> JitVerifyResult:  # fmt: skip
    """Check, run, judge, and write the verdict.

    A cache that was verified in part never passes for one that was verified whole: the verdict lists the tasks that
    were left out, and its file has another name (`name_verdict`).

    Args:
        matrix: tasks, and what no cache keeps.
        receipts: folder for the verdict, receipts and logs.
        report: called with a line a task that has ended.

    Raises:
        ToolError: by the class of what is wrong.
        OSError: a disk is full.
    """
    target = find_target(catalog, options.target)
    selected = select_tasks(matrix.task, target.id, options)
    with writing_to(receipts, "receipts", "--receipts"):  # now, and not a quarter of an hour later
        receipts.mkdir(parents=True, exist_ok=True)
    parent = Path(tempfile.gettempdir())
    layout.require_usable(parent, "TMPDIR")
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    folder = layout.arch_folder(find_root(options.root), layout.cache_arch(target.arch))
    manifest, digest = check_sealed(folder)  # first: on files that changed nothing is proven
    answers, new, opened_s = dict[str, Answer](), tuple[str, ...](), time.monotonic() - began
    differences: tuple[StackDifference, ...] = ()
    with (
        tempfile.TemporaryDirectory(prefix="megacpp-jit-work-", dir=parent.absolute()) as root,
        open_stack(catalog, target, options, Path(root)) as stack,
    ):
        if reason := stack.why_not(options):
            answers = {task.id: Answer(missing=reason) for task in selected.tasks}
        else:
            differences = layout.compare_stack(manifest, stack.read_seen(), stack.architecture, matrix.keys)
            if not differences:
                answers, new = run_on_copy(stack, folder, selected.tasks, options, receipts, report)
        rows = tuple(judge_task(task, answers[task.id], manifest, matrix.unkept) for task in selected.tasks if answers)
        unwatched = tuple(dict.fromkeys(line for answer in answers.values() for line in answer.unwatched))
        unreported, unproven = judge_files(new, rows, unwatched)
        result = JitVerifyResult(
            commit=read_commit(), target=target.id, architecture=stack.architecture, folder=str(folder),
            manifest=digest, interpreter=stack.shown,
            image_digest=os.environ.get(IMAGE_DIGEST, ""), lock_hash=stack.environment.variables.get(LOCK_HASH, ""),
            gpu=stack.facts.gpu.name if stack.facts.gpu else "", differences=differences, rows=rows,
            ranks=max([options.ranks, *(task.ranks for task in selected.tasks)]), left_out=selected.left_out,
            missing=manifest.missing, unreported=unreported, unproven=unproven, unwatched=unwatched,
            files=len(manifest.files), bytes=manifest.bytes, started=started, opened_s=round(opened_s, 2),
            seconds=round(time.monotonic() - began, 1),
        )  # fmt: skip
    write_whole(receipts / name_verdict(result), result.model_dump_json(indent=2) + "\n")
    return result


def name_verdict(result: JitVerifyResult) -> str:
    """The name of the file: who reads the verdict on a target must not find that on a part of it in its place."""
    return f"jit_verify-{result.target}{'.part' if result.left_out else ''}.json"


def run_on_copy(
    stack: JitStack, sealed: Path, tasks: Sequence[PrewarmTask], options: JitOptions, receipts: Path,
    report: Callable[[str], None],
) -> tuple[dict[str, Answer], tuple[str, ...]]:  # fmt: skip
    """Run tasks on a working copy; the answer of each, and the compiled kernels that appeared."""
    # What a stack leaves when it reports itself (the driver's folder, where it names its GPU) is not what was sealed.
    shutil.rmtree(stack.root / stack.architecture, ignore_errors=True)
    folder = Path(open_working(sealed, stack.root).folder)
    before = layout.list_files(folder)
    logs = receipts.absolute()
    answers = run_tasks(
        tasks, lambda task: stack.run(task, logs, options.limit_s), options.jobs, stack.processes, report
    )
    return answers, tuple(layout.find_products(before, layout.list_files(folder)))


def judge_task(task: PrewarmTask, answer: Answer, manifest: Manifest, unkept: Sequence[UnkeptKernel] = ()) -> JitRow:
    """How a task or a cell found the cache. What did not run is not verified, whatever it reports of compiles.

    Args:
        task: row of `matrix/prewarm.toml`.
        answer: of its process on the working copy.
        manifest: of the cache.
        unkept: what no cache keeps.
    """
    excused = _find_unkept(answer.compiled, unkept, manifest.stack.versions.get("transformer-engine", ""))
    missed = tuple(one for one in answer.compiled if one not in excused)
    done = next((one for one in manifest.tasks if one.id == task.id), None)
    # A library that this task used when it was finished must be used again: a fallback compiles nothing, either.
    used = done.asked if done else ()
    found = {COUNTED.get(library) for library, number in answer.hits.items() if number}
    lost = any(COUNTED.get(library) not in (None, *found) for library in used)
    verdict = JitVerdict.SILENT if lost or asked_nothing(task, answer) else JitVerdict.WARM
    known = []
    for library, kernel in dict.fromkeys((one.library, one.kernel) for one in missed):
        every = (one for other in manifest.tasks for one in other.compiled)
        shapes = dict.fromkeys(one.shape for one in every if (one.library, one.kernel) == (library, kernel))
        known.append(f"{kernel}: {'; '.join([*shapes][:4]) or 'nothing'}")
    ended = JitVerdict.COMPILED if missed else verdict
    return judge_answer(task, answer, ended, compiled=missed, unkept=excused, known=tuple(known))


def _find_unkept(
    compiled: Sequence[JitCompile], unkept: Sequence[UnkeptKernel], release: str
) -> tuple[JitCompile, ...]:
    """What no cache keeps, and the other halves of it.

    NVRTC leaves two files a kernel: its machine code, which has a name, and what that was made of, in which none may be
    found. Where nothing else of the driver's was compiled, and there are no more of those than of named ones, they are
    these halves: a kernel that is really missing leaves its machine code, and with it its name.
    """
    named = [one for one in compiled if any(row.fits(one.library, one.kernel, release) for row in unkept)]
    others = [one for one in compiled if one.library == DRIVER and one not in named]
    halves = others if len(others) <= len(named) and all(one.kernel == _NAMELESS for one in others) else []
    return tuple(one for one in compiled if one in named or one in halves)


def judge_files(
    paths: Iterable[str], rows: Sequence[JitRow], unwatched: Iterable[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compiled kernels that appeared without a report of a process, and those that no process could report.

    A monitor that misses a compile would call a cold cache warm: so the files count too. Of the driver's cache each
    file must have been reported, since its processes report files (jit/driver_cache.py). A process that cannot work on
    a copy of that cache reports no compile there, and says so: what appears then is no breakage, and no proof either.

    Args:
        paths: of `find_products`.
        rows: what the processes reported.
        unwatched: what the processes could not watch: "LIBRARY: why".
    """
    every = [one for row in rows for one in (*row.compiled, *row.unkept)]
    files = {f"{DRIVER}/{one.shape}" for one in every if one.library == DRIVER}
    reported = {one.library for one in every if one.library != DRIVER}
    if reported & {"fa4", "cute"}:
        reported |= {"fa4", "cute"}  # one compiler, two caches
    if "inductor" in reported:
        reported.add("triton")  # TorchInductor writes its kernels in Triton
    found = [path for path in paths if path not in files and library_of(path) not in reported]
    blind = any(line.startswith(f"{DRIVER}: ") for line in unwatched)
    unproven = tuple(path for path in found if blind and library_of(path) == DRIVER)
    return tuple(path for path in found if path not in unproven), unproven
