"""Compile ahead of time what the presets and the probes ask for, and seal it: which tasks, and what became of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.prewarm import PrewarmTask, UnkeptKernel, choose_tasks
from ..environments.interpreter import read_commit
from ..environments.plan import find_target
from ..errors import NothingSelected, WrongArguments
from .answer import Answer, hold_to_purpose
from .files import Listed, hash_files, list_files
from .layout import STATE, cache_arch
from .manifest import FileSeen, Manifest, StackSeen, TaskDone, hash_variables, measure_caches, write_manifest
from .place import require_place, require_space, require_usable, require_writable
from .progress import Progress, hash_task, open_prewarm
from .result import JitTaskRow, JitTaskState, PrewarmResult
from .seal import check_sealed, is_sealed, seal, unseal
from .stack import JitOptions, JitStack, open_stack, run_tasks


@dataclass(frozen=True)
class SealOptions:
    """How a prewarm treats the seal: it continues in a sealed cache; it seals at its end; any user may add files."""

    reopen: bool = False
    seal: bool = True
    shared: bool = False


@dataclass(frozen=True)
class Selected:
    """Which of a target's tasks a run takes.

    Attributes:
        tasks: to run.
        of_target: all of them.
        left_out: those that the caller left out (--tasks, --at-build): "ID: reason".
        beyond: those that were requested and cannot run so, by id: why.
        unkept: what no cache keeps of any.
    """

    tasks: tuple[PrewarmTask, ...]
    of_target: tuple[PrewarmTask, ...]
    left_out: tuple[str, ...]
    beyond: Mapping[str, str]
    unkept: tuple[UnkeptKernel, ...] = ()

    @property
    def requested(self) -> tuple[PrewarmTask, ...]:
        """What an answer is about, in the matrix's order: what runs, and what was requested and cannot run."""
        return tuple(task for task in self.of_target if task in self.tasks or task.id in self.beyond)


def select_tasks(every: Sequence[PrewarmTask], target: str, options: JitOptions) -> Selected:
    """The tasks to run. One that is named is never left out for the devices that it takes.

    Only names and --at-build narrow what is requested. --ranks says what there is to run it on.

    Raises:
        WrongArguments: as `choose_tasks`.
        NothingSelected: there is none.
    """
    if options.tasks == ():
        raise NothingSelected("no task is selected. Next step: name one, or leave --tasks out for all.")
    chosen = choose_tasks(every, target, options.tasks or (), without_gpu=options.at_build)
    tasks = tuple(task for task in chosen if options.tasks or task.ranks <= options.ranks)
    if not tasks:
        raise NothingSelected(
            f"matrix/prewarm.toml has no task for {target} that can run so. Next step: add one, or leave --at-build "
            "out."
        )
    of_target = choose_tasks(every, target)
    why = "not named" if options.tasks else "it needs a GPU, which --at-build excludes"
    return Selected(
        tasks,
        of_target,
        left_out=tuple(f"{task.id}: {why}" for task in of_target if task not in chosen),
        beyond={
            task.id: f"it takes {task.ranks} devices, and --ranks is {options.ranks}. Next step: --ranks {task.ranks} "
            "on a host that has them, or leave it out: --tasks with the others"
            for task in chosen
            if task not in tasks
        },
    )


def run_prewarm(
    catalog: Catalog, tasks: Sequence[PrewarmTask], options: JitOptions, sealing: SealOptions,
    report: Callable[[str], None],
) -> PrewarmResult:  # fmt: skip
    """Fill the caches of a target, and seal them.

    Args:
        tasks: of the matrix.
        report: called with a line a task that has ended.

    Raises:
        ToolError: by the class of what is wrong.
        OSError: a disk is full.
    """
    started, target = time.monotonic(), find_target(catalog, options.target)
    selected = select_tasks(tasks, target.id, options)
    root = options.place()
    folder = require_place(root, cache_arch(target.arch))  # the stack says of which kind of CPU
    if not is_sealed(folder):
        require_writable(folder, "--root")  # before a process is started
        require_usable(folder)
    with open_stack(catalog, target, options, root) as stack:
        if reason := stack.why_not(at_build=options.at_build):
            rows = [_row(task, Answer(missing=selected.beyond.get(task.id, reason))) for task in selected.requested]
            fields: dict[str, Any] = {"rows": tuple(rows)}
        else:
            require_place(root, stack.architecture, stack.facts.machine)
            seen, sources = stack.read_seen(), stack.sources
            keys = {one.id: hash_task(one, stack.architecture, stack.mode, seen, sources) for one in selected.of_target}
            fields = find_sealed(folder, selected, keys, reopen=sealing.reopen) if is_sealed(folder) else {}
            if not fields:
                earlier = unseal(folder) if is_sealed(folder) else None
                with open_prewarm(folder, stack.facts.machine, keys, earlier) as progress:
                    fields = fill(stack, seen, selected, progress, options, sealing, report)
        return PrewarmResult(
            tool=TOOL, target=target.id, architecture=stack.architecture, folder=str(folder), mode=stack.mode,
            interpreter=stack.interpreter, left_out=selected.left_out, seconds=round(time.monotonic() - started, 1),
            **fields,
        )  # fmt: skip


def find_sealed(folder: Path, selected: Selected, keys: Mapping[str, str], *, reopen: bool) -> dict[str, Any]:
    """What a sealed cache says where nothing is left to do; empty where it is to be opened again.

    Raises:
        CacheChanged: a file is not the one that was sealed.
        WrongArguments: tasks are left to do, and `reopen` is not set.
    """
    progress = Progress(folder, keys)
    undone = [task.id for task in selected.tasks if progress.find_done(task) is None]
    if undone and reopen:
        return {}
    checked = check_sealed(folder)  # first: a task is undone by a file that was changed, too
    if undone:
        raise WrongArguments(
            f"{folder} is sealed, and {len(undone)} task(s) are not done there for this stack: {', '.join(undone)}. "
            "Likely cause: another stack, --mode or version of this tool filled it, it was imported, or it was sealed "
            "at image build. Next step: say --reopen to continue in it, or give another --root."
        )
    rows = _list_rows(selected, progress, {})
    return {"rows": rows, "caches": checked.manifest.sizes, "manifest": checked.digest, "sealed": True}


def fill(
    stack: JitStack, seen: StackSeen, selected: Selected, progress: Progress, options: JitOptions, sealing: SealOptions,
    report: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Run what is not finished, and write the manifest of what lies there then: fields of the result."""
    folder = progress.folder
    waiting = [task for task in selected.tasks if progress.find_done(task) is None]

    def run(task: PrewarmTask) -> Answer:
        answer = stack.run(task, folder / STATE / "logs", options.limit_s)
        answer = hold_to_purpose(task, answer, stack.environment.variables)
        require_space(folder)
        if answer.failure:
            progress.failed = True
        elif not answer.missing:
            progress.keep(task, answer)
        report(describe_ended(task, answer))
        return answer

    answers = run_tasks(waiting, run, options.jobs, stack.processes)
    rows = _list_rows(selected, progress, answers)
    caches = measure_caches((file.path, file.bytes) for file in list_files(folder))
    if progress.failed:
        return {"rows": rows, "caches": caches, "swept": progress.swept}
    progress.settle()
    done = progress.list_finished(selected.of_target, seen, stack.mode)
    manifest = make_manifest(
        folder, target=stack.target.id, mode=stack.mode, stack=seen,
        tasks=[done[task.id] for task in selected.of_target if task.id in done],
        missing=[task.id for task in selected.of_target if task.id not in done],
        words={"made": datetime.now(UTC).isoformat(timespec="seconds"), "tool": TOOL, "commit": read_commit()},
        variables=stack.environment.variables,
    )  # fmt: skip
    digest = write_manifest(folder, manifest)
    # What is beyond this host is missing in the manifest too: it keeps nobody from the rest.
    good = (JitTaskState.DONE, JitTaskState.KEPT)
    sealed = sealing.seal and all(row.state in good for row in rows if row.task not in selected.beyond)
    if sealed:
        seal(folder, shared=sealing.shared)
    return {"rows": rows, "caches": caches, "manifest": digest, "sealed": sealed, "swept": progress.swept}


def describe_ended(task: PrewarmTask, answer: Answer) -> str:
    """A line of progress."""
    word = "failed" if answer.failure else "not run" if answer.missing else f"{len(answer.compiled)} compiled"
    return f"{word:12} {task.id} ({answer.seconds:.1f} s)"


def _list_rows(selected: Selected, progress: Progress, answers: Mapping[str, Answer]) -> tuple[JitTaskRow, ...]:
    """A row for everything that was requested; what is beyond this host may have been finished on another."""
    rows = []
    for task in selected.requested:
        done = progress.find_done(task)
        if task.id in answers:
            rows.append(_row(task, answers[task.id]))
        elif task.id in selected.beyond and done is None:
            rows.append(_row(task, Answer(missing=selected.beyond[task.id])))
        else:
            kept = done.compiled if done is not None else ()
            rows.append(JitTaskRow(task=task.id, library=task.library, state=JitTaskState.KEPT, compiled=kept))
    return tuple(rows)


def _row(task: PrewarmTask, answer: Answer) -> JitTaskRow:
    state = JitTaskState.FAILED if answer.failure else JitTaskState.NOT_RUN if answer.missing else JitTaskState.DONE
    return JitTaskRow(
        task=task.id, library=task.library, state=state, compiled=answer.compiled,
        hits=sum((answer.hits or {}).values()), reason=answer.failure or answer.missing, seconds=answer.seconds,
    )  # fmt: skip


def make_manifest(
    folder: Path, *, target: str, mode: str, stack: StackSeen, tasks: Sequence[TaskDone], missing: Sequence[str],
    words: Mapping[str, Any], variables: Mapping[str, str] | None = None,
) -> Manifest:  # fmt: skip
    """The manifest of what lies in ROOT/ARCH now: every file is read.

    Args:
        folder: ROOT/ARCH.
        target: row of `matrix/targets.toml`.
        mode: "nvcc" or "nvrtc".
        stack: that it was filled by.
        tasks: that are finished.
        missing: ids of those that are not.
        words: `made` (when), `tool` and `commit` (by what).
        variables: of the environment that compiled.

    Raises:
        CacheChanged: a link lies there.
        OSError: a file cannot be read.
    """
    listed = list_files(folder)
    hashes = hash_files(folder, (file.path for file in listed))

    def row(file: Listed) -> FileSeen:
        names_root = file.path.endswith(".json") and str(folder).encode() in (folder / file.path).read_bytes()
        return FileSeen(
            path=file.path, bytes=file.bytes, sha256=hashes[file.path], mtime_ns=file.mtime_ns, names_root=names_root
        )  # fmt: skip

    return Manifest(
        architecture=folder.name, target=target, folder=str(folder), mode=mode, stack=stack, tasks=tuple(tasks),
        missing=tuple(missing), files=tuple(map(row, listed)),
        variables=None if variables is None else hash_variables(variables), **words,
    )  # fmt: skip
