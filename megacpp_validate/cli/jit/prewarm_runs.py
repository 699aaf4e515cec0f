"""The verb that compiles ahead of time: what it runs, and the exit code of each answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from ...catalog.bridge import Catalog, read_catalog
from ...catalog.bridge import Target as TargetRow
from ...catalog.prewarm import PrewarmTask, UnkeptKernel, UnknownTask, choose_tasks, read_prewarm
from ...environments.environment import NoEnvironment
from ...environments.interpreter import read_commit
from ...environments.plan import UnknownTarget, find_target, why_not_here
from ...jitcache.crew import run_side_by_side
from ...jitcache.files import NoPlainFile, list_files
from ...jitcache.layout import STATE, cache_arch
from ...jitcache.manifest import Manifest, ManifestChanged, ManifestInvalid, measure_caches, write_manifest
from ...jitcache.place import (
    CacheReadOnly,
    CannotLoad,
    OtherArchitecture,
    require_loadable,
    require_place,
    require_space,
    require_writable,
)
from ...jitcache.prewarm import Answer, PrewarmTaken, Progress, hash_task, make_manifest, open_prewarm, read_progress
from ...jitcache.purpose import hold_to_purpose
from ...jitcache.result import JitTaskRow, JitTaskState, PrewarmResult
from ...jitcache.seal import CacheDamaged, check_sealed, is_sealed, seal, unseal
from ...process import Processes
from ..app import TOOL, Exit, Format, foreseen, refuse, refuse_full_disk
from .jit_stack import AskedJit, JitStack, default_jobs, open_stack
from .jit_telling import TaskProgress, tell_jit

_LOGS = "logs"
_STEP_BEYOND = "Next step: --ranks {ranks} on a host that has them, or leave it out: --tasks with the others."
FORESEEN: Mapping[type[Exception], Exit] = {
    UnknownTarget: Exit.WRONG_ARGUMENTS, UnknownTask: Exit.WRONG_ARGUMENTS, NoEnvironment: Exit.NO_ENVIRONMENT,
    OtherArchitecture: Exit.WRONG_ARGUMENTS, CacheReadOnly: Exit.WRONG_ARGUMENTS, PrewarmTaken: Exit.INFRASTRUCTURE,
    CannotLoad: Exit.WRONG_ARGUMENTS, NoPlainFile: Exit.CLOSED, CacheDamaged: Exit.CLOSED,
    ManifestChanged: Exit.CLOSED, ManifestInvalid: Exit.EVIDENCE_MISSING,
}  # fmt: skip


@dataclass(frozen=True)
class How:
    """How a prewarm goes: only what needs no GPU; in a sealed cache; sealed at its end, for any user to add to."""

    at_build: bool
    reopen: bool
    seal: bool
    shared: bool


@foreseen(FORESEEN)
def run_prewarm(
    matrix: Path | None, asked: AskedJit, how: How, fmt: Format, output: Path | None, *, verbose: bool
) -> None:
    """A prewarm; closed where a task failed, and not open where one did not run."""
    catalog = read_catalog(matrix)
    target = find_target(catalog, asked.target)
    every = read_prewarm(catalog, matrix)
    selected = select_tasks(every, target, asked, at_build=how.at_build)
    try:
        result = _prewarm(catalog, target, asked, how, selected)
    except OSError as fault:
        refuse_full_disk(asked.place(), fault)
        raise
    tell_jit(result, fmt, output, verbose=verbose)
    if result.breaks:
        raise typer.Exit(Exit.CLOSED)
    raise typer.Exit(Exit.EVIDENCE_MISSING if result.lacks else Exit.OPEN)


@dataclass(frozen=True)
class Selected:
    """Which of a target's tasks a run takes.

    Attributes:
        tasks: to run.
        of_target: all of them.
        not_asked: those that the caller left out (--tasks, --at-build): "ID: reason". Nothing is asked of them.
        beyond: those that were asked for and cannot run so, by id: why.
        unkept: what no cache keeps of any.
    """

    tasks: tuple[PrewarmTask, ...]
    of_target: tuple[PrewarmTask, ...]
    not_asked: tuple[str, ...]
    beyond: Mapping[str, str]
    unkept: tuple[UnkeptKernel, ...] = ()

    @property
    def asked(self) -> tuple[PrewarmTask, ...]:
        """What an answer is about, in the matrix's order: what is run, and what was asked for and cannot be."""
        return tuple(task for task in self.of_target if task in self.tasks or task.id in self.beyond)


def select_tasks(
    every: Sequence[PrewarmTask], target: TargetRow, asked: AskedJit, *, at_build: bool = False
) -> Selected:
    """The tasks to run. One that is named is never left out for the devices that it takes.

    Only what the caller says narrows what is asked: names, or --at-build. --ranks says what there is to run it on.

    Raises:
        UnknownTask: as `choose_tasks`.
    """
    if asked.tasks == ():
        refuse("no task is selected. Next step: name one, or leave --tasks out for all.", Exit.NOTHING_SELECTED)
    chosen = choose_tasks(every, target.id, asked.tasks or (), without_gpu=at_build)
    tasks = tuple(task for task in chosen if asked.tasks or task.ranks <= asked.ranks)
    if not tasks:
        refuse(
            f"matrix/prewarm.toml has no task for {target.id} that could run so. Next step: add one, or leave "
            "--at-build out.",
            Exit.NOTHING_SELECTED,
        )
    of_target = choose_tasks(every, target.id)
    why = "not named" if asked.tasks else "it needs a GPU, and --at-build was said"
    return Selected(
        tasks,
        of_target,
        not_asked=tuple(f"{task.id}: {why}" for task in of_target if task not in chosen),
        beyond={
            task.id: f"it takes {task.ranks} devices, and --ranks says {asked.ranks}"
            for task in chosen
            if task not in tasks
        },
    )


def _prewarm(catalog: Catalog, target: TargetRow, asked: AskedJit, how: How, selected: Selected) -> PrewarmResult:
    started = time.monotonic()
    root, processes = asked.place(), Processes()
    folder = require_place(root, cache_arch(target.arch), "")  # of which kind of CPU, the stack says
    if not is_sealed(folder):
        require_writable(folder)  # before a process is started
        require_space(folder)
        require_loadable(folder)
    with open_stack(catalog, target, asked, root, processes) as stack:
        result = PrewarmResult(
            tool=TOOL, target=target.id, architecture=stack.architecture, folder=str(folder), mode=stack.mode,
            interpreter=stack.interpreter, left_out=selected.not_asked,
        )  # fmt: skip
        reason = why_no_tasks(target, stack, at_build=how.at_build)
        if reason:
            rows = tuple(_row(task, Answer(missing=selected.beyond.get(task.id, reason))) for task in selected.asked)
            return result.model_copy(update={"rows": rows, "seconds": round(time.monotonic() - started, 1)})
        require_place(root, stack.architecture, stack.facts.machine)
        sources = stack.sources
        keys = {
            task.id: hash_task(task, stack.architecture, stack.mode, stack.seen, sources) for task in selected.of_target
        }
        update = _find_sealed(folder, selected, keys, reopen=how.reopen) if is_sealed(folder) else {}
        if not update:
            require_writable(folder)
            earlier = _open_again(folder) if is_sealed(folder) else None
            with open_prewarm(folder, stack.facts.machine, keys, earlier) as progress:
                update = _fill(stack, selected, progress, asked, how)
    return result.model_copy(update={**update, "seconds": round(time.monotonic() - started, 1)})


def _open_again(folder: Path) -> Manifest:
    """A sealed cache opened by its owner, whole: what is damaged must not be sealed again as if it were.

    Raises:
        CacheDamaged: a file is not the one that was sealed; each is named.
        CacheReadOnly: it is somebody else's, such as that of an image.
    """
    check_sealed(folder)
    try:
        return unseal(folder)
    except PermissionError as fault:
        raise CacheReadOnly(
            f"{folder} was sealed by another user: {fault.strerror}: {fault.filename}. Likely cause: it is the cache "
            f"of an image. Next step: `nox -s jit_cache -- open --root {folder.parent} --work FOLDER`, and prewarm in "
            "FOLDER."
        ) from fault


def why_no_tasks(target: TargetRow, stack: JitStack, *, at_build: bool) -> str:
    """Why this machine cannot run the target's tasks. At build it needs no GPU, but the same kind of CPU."""
    reason = why_not_here(target, stack.facts)
    other_machine = bool(target.machine) and target.machine != stack.facts.machine
    return "" if at_build and not other_machine else reason


def _find_sealed(folder: Path, selected: Selected, keys: Mapping[str, str], *, reopen: bool) -> dict[str, object]:
    """What a sealed cache says where nothing is left to do; empty where it is to be opened again."""
    progress = read_progress(folder, keys)
    undone = [task.id for task in selected.tasks if not progress.is_done(task)]
    if undone and reopen:
        return {}
    checked = check_sealed(folder)  # first: a task is undone by a file that was changed, too
    if undone:
        refuse(
            f"{folder} is sealed, and {len(undone)} task(s) are not done there for this stack: {', '.join(undone)}. "
            "Likely cause: another stack, --mode or version of this tool filled it, it was imported, or it was sealed "
            "at image build. Next step: say --reopen to go on in it, or give another --root.",
            Exit.WRONG_ARGUMENTS,
        )
    rows = _list_rows(selected, progress, {})
    return {"rows": rows, "caches": checked.manifest.sizes, "manifest": checked.digest, "sealed": True}


def _fill(stack: JitStack, selected: Selected, progress: Progress, asked: AskedJit, how: How) -> dict[str, object]:
    """Run what is not finished, and write the manifest of what lies there then."""
    folder, logs = progress.folder, progress.folder / STATE / _LOGS
    waiting = [task for task in selected.tasks if not progress.is_done(task)]

    with TaskProgress(total=len(waiting)) as shown:

        def told(task: PrewarmTask, answer: Answer | None) -> None:
            if answer is not None:
                require_space(folder)
            if answer is not None and answer.failure:
                progress.failed = True
            elif answer is not None and not answer.missing:
                progress.keep(task, answer)
            shown(task, answer)

        answers = run_side_by_side(
            waiting,
            lambda task: hold_to_purpose(task, stack.run(task, logs, asked.limit_s), stack.environment.variables),
            asked.jobs or default_jobs(stack.target), told, stack.processes.stop,
        )  # fmt: skip
    rows = _list_rows(selected, progress, answers)
    caches = measure_caches((file.path, file.bytes) for file in list_files(folder))
    if progress.failed:
        return {"rows": rows, "caches": caches, "swept": progress.swept}
    progress.settle()
    finished = progress.finished(selected.of_target)
    carried = progress.carried(selected.of_target, stack.seen, stack.mode)
    tasks = {done.id: done for done in (*carried, *finished)}
    manifest = make_manifest(
        folder, target=stack.target.id, mode=stack.mode, stack=stack.seen,
        tasks=[tasks[task.id] for task in selected.of_target if task.id in tasks],
        missing=[task.id for task in selected.of_target if task.id not in tasks],
        words={"made": datetime.now(UTC).isoformat(timespec="seconds"), "tool": TOOL, "commit": read_commit()},
        variables=stack.environment.variables,
    )  # fmt: skip
    digest = write_manifest(folder, manifest)
    # What is beyond this host is missing in the manifest too: it keeps nobody from the rest.
    sealed = how.seal and all(
        row.state in (JitTaskState.DONE, JitTaskState.KEPT) for row in rows if row.task not in selected.beyond
    )
    if sealed:
        seal(folder, shared=how.shared)
    return {"rows": rows, "caches": caches, "manifest": digest, "sealed": sealed, "swept": progress.swept}


def _list_rows(selected: Selected, progress: Progress, answers: Mapping[str, Answer]) -> tuple[JitTaskRow, ...]:
    """A row for everything that was asked for; what is beyond this host may have been finished on another."""
    beyond = {
        task.id: Answer(missing=f"{selected.beyond[task.id]}. {_STEP_BEYOND.format(ranks=task.ranks)}")
        for task in selected.asked
        if task.id in selected.beyond and not progress.is_done(task)
    }
    told = {**beyond, **answers}
    return tuple(_row(task, told[task.id]) if task.id in told else _kept_row(task, progress) for task in selected.asked)


def _row(task: PrewarmTask, answer: Answer) -> JitTaskRow:
    state = JitTaskState.FAILED if answer.failure else JitTaskState.NOT_RUN if answer.missing else JitTaskState.DONE
    return JitTaskRow(
        task=task.id, library=task.library, state=state, compiled=answer.compiled,
        hits=sum((answer.hits or {}).values()), reason=answer.failure or answer.missing, seconds=answer.seconds,
    )  # fmt: skip


def _kept_row(task: PrewarmTask, progress: Progress) -> JitTaskRow:
    done = progress.kept(task)
    compiled = done.compiled if done is not None else ()
    return JitTaskRow(task=task.id, library=task.library, state=JitTaskState.KEPT, compiled=compiled)
