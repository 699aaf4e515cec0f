"""Compile ahead of time what the presets and the probes need, and seal it: which tasks, and what became of each.

While a prewarm runs, a draft of the manifest lies in ROOT/ARCH/.prewarm, written anew whenever a task has ended well.
So a prewarm that was killed continues: the next one first removes what the draft does not have, because a kernel may be
half written, and no library checks what it reads from a cache.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.prewarm import PrewarmTask, UnkeptKernel, choose_tasks
from ..environments.interpreter import read_commit
from ..environments.plan import find_target
from ..errors import NothingSelected, WrongArguments
from ..evidence.whole_file import write_whole
from .layout import (
    DRAFT,
    LIBRARIES,
    MANIFEST,
    MANIFEST_HASH,
    STATE,
    cache_arch,
    hold_folder,
    require_space,
    require_usable,
    require_writable,
)
from .manifest import (
    FileSeen,
    Listed,
    Manifest,
    StackSeen,
    TaskDone,
    compare_stack,
    describe_files,
    hash_variables,
    list_files,
    manifest_text,
    read_draft,
    read_manifest,
    remove_temporary,
    require_place,
    write_manifest,
)
from .result import JitTaskRow, JitTaskState, PrewarmResult
from .seal import check_sealed, is_sealed, seal, unseal
from .stack import Answer, JitOptions, JitStack, hold_to_purpose, open_stack, run_tasks

_RUNNING: Final = f"{STATE}/running"  # there while a prewarm runs; one that is killed leaves it
_ONLY_ON_A_GPU: Final = frozenset({"gpu", "driver"})
_SECOND: Final = 10**9  # layers of images keep no finer times


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
        left_out: the others: not named, excluded by --at-build, or for more devices than --ranks: "ID: reason".
        unkept: what no cache keeps of any.
    """

    tasks: tuple[PrewarmTask, ...]
    of_target: tuple[PrewarmTask, ...]
    left_out: tuple[str, ...]
    unkept: tuple[UnkeptKernel, ...] = ()


def select_tasks(every: Sequence[PrewarmTask], target: str, options: JitOptions) -> Selected:
    """The tasks to run. A task that is named is never left out for the devices that it takes.

    A task for more devices than --ranks is left for a host that has them: it stops neither the others nor their seal.

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
    excluded = "not named" if options.tasks else "it needs a GPU, which --at-build excludes"

    def explain(task: PrewarmTask) -> str:
        if task not in chosen:
            return excluded
        step = f"`--ranks {task.ranks} --reopen` on a host that has them"
        return f"it takes {task.ranks} devices, and --ranks is {options.ranks}. Next step: {step}"

    return Selected(tasks, of_target, tuple(f"{task.id}: {explain(task)}" for task in of_target if task not in tasks))


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
        require_usable(folder, "--root")  # before a process is started
    with open_stack(catalog, target, options, root) as stack:
        if reason := stack.why_not(at_build=options.at_build):
            fields: dict[str, Any] = {"rows": tuple(_row(task, Answer(missing=reason)) for task in selected.tasks)}
        else:
            require_place(root, stack.architecture, stack.facts.machine)
            seen = stack.read_seen()
            keys = {
                task.id: hash_task(task, stack.architecture, stack.mode, seen, stack.sources)
                for task in selected.of_target
            }
            fields = find_sealed(folder, selected, keys, reopen=sealing.reopen) if is_sealed(folder) else {}
            if not fields:
                if is_sealed(folder):
                    unseal(folder)
                blank = Manifest(
                    architecture=folder.name, target=target.id, folder=str(folder), mode=stack.mode, stack=seen,
                    tasks=(), files=(), variables=hash_variables(stack.environment.variables),
                    made=datetime.now(UTC).isoformat(timespec="seconds"), tool=TOOL, commit=read_commit(),
                )  # fmt: skip
                with open_prewarm(folder, blank, selected.of_target, keys) as progress:
                    fields = fill(stack, selected, progress, options, sealing, report)
        return PrewarmResult(
            tool=TOOL, target=target.id, architecture=stack.architecture, folder=str(folder), mode=stack.mode,
            interpreter=stack.interpreter, left_out=selected.left_out, seconds=round(time.monotonic() - started, 1),
            **fields,
        )  # fmt: skip


def find_sealed(folder: Path, selected: Selected, keys: Mapping[str, str], *, reopen: bool) -> dict[str, Any]:
    """Fields of the result where nothing is left to do in a sealed cache; none where it is to be opened again.

    Raises:
        CacheChanged: a file is not the one that was sealed.
        WrongArguments: tasks are left to do, and `reopen` is not set.
    """
    done = _find_done(read_manifest(folder)[0], keys)
    undone = [task.id for task in selected.tasks if task.id not in done]
    if undone and reopen:
        return {}
    checked = check_sealed(folder)
    if undone:
        raise WrongArguments(
            f"{folder} is sealed, and {len(undone)} task(s) are not done there for this stack: {', '.join(undone)}. "
            "Likely cause: another stack, --mode or version of this tool filled it, or it was sealed at image build. "
            "Next step: say --reopen to continue in it, or give another --root."
        )
    rows = _list_rows(selected, done, {})
    return {"rows": rows, "caches": checked.manifest.sizes, "manifest": checked.digest, "sealed": True}


def fill(
    stack: JitStack, selected: Selected, progress: Progress, options: JitOptions, sealing: SealOptions,
    report: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Run what is not finished, and write the manifest of what lies there then: fields of the result."""
    folder = progress.folder
    waiting = [task for task in selected.tasks if task.id not in progress.done]

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
    progress.write_draft()
    manifest, rows = progress.manifest, _list_rows(selected, progress.done, answers)
    fields: dict[str, Any] = {"rows": rows, "caches": manifest.sizes, "swept": progress.swept}
    if progress.failed:
        return fields
    digest = write_manifest(folder, manifest)
    sealed = sealing.seal and all(row.state in (JitTaskState.DONE, JitTaskState.KEPT) for row in rows)
    if sealed:
        seal(folder, shared=sealing.shared)
    return {**fields, "manifest": digest, "sealed": sealed}


def describe_ended(task: PrewarmTask, answer: Answer) -> str:
    """A line of progress."""
    word = "failed" if answer.failure else "not run" if answer.missing else f"{len(answer.compiled)} compiled"
    return f"{word:12} {task.id} ({answer.seconds:.1f} s)"


def _list_rows(
    selected: Selected, done: Mapping[str, TaskDone], answers: Mapping[str, Answer]
) -> tuple[JitTaskRow, ...]:
    """A row a task: what this run made of it, or that an earlier one had finished it."""
    return tuple(
        _row(task, answers[task.id])
        if task.id in answers
        else JitTaskRow(task=task.id, library=task.library, state=JitTaskState.KEPT, compiled=done[task.id].compiled)
        for task in selected.tasks
    )


def _row(task: PrewarmTask, answer: Answer) -> JitTaskRow:
    state = JitTaskState.FAILED if answer.failure else JitTaskState.NOT_RUN if answer.missing else JitTaskState.DONE
    return JitTaskRow(
        task=task.id, library=task.library, state=state, compiled=answer.compiled,
        hits=sum((answer.hits or {}).values()), reason=answer.failure or answer.missing, seconds=answer.seconds,
    )  # fmt: skip


# --- a prewarm that is under way -------------------------------------------------------------------------------------


def hash_task(task: PrewarmTask, architecture: str, mode: str, stack: StackSeen, sources: str) -> str:
    """What must be the same for a finished task to stay finished.

    Args:
        task: its code and settings count, and not how long it takes.
        architecture, mode: of the caches.
        stack: without the GPU and its driver where the task needs none: compiled in an image, it holds on the host.
        sources: identity of what of this project runs there.
    """
    versions = {name: version for name, version in stack.versions.items() if task.gpu or name not in _ONLY_ON_A_GPU}
    parts = {
        "task": [task.id, task.code, task.ranks, task.settings],
        "caches": [architecture, mode],
        "stack": stack.model_copy(update={"versions": versions}).model_dump(mode="json"),
        "sources": sources,
    }
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _find_done(manifest: Manifest, keys: Mapping[str, str]) -> dict[str, TaskDone]:
    """The tasks of a manifest that are finished for this very stack, by id."""
    return {done.id: done for done in manifest.tasks if done.key and done.key == keys.get(done.id)}


@dataclass
class Progress:
    """What is finished in one ROOT/ARCH, on disk at every moment.

    Attributes:
        folder: ROOT/ARCH.
        tasks: of the target.
        keys: of those tasks, by id.
        manifest: what lies there, and which tasks are finished: for this stack, or for a like one whose kernels are
            still there. Whether they are found is for `jit_verify` to say.
        before: tasks that were finished before, for whatever stack.
        swept: files that were removed.
        failed: a task did not end well, and may have left half a file.
    """

    folder: Path
    tasks: Sequence[PrewarmTask]
    keys: Mapping[str, str]
    manifest: Manifest
    before: Mapping[str, TaskDone] = field(default_factory=dict)
    swept: int = 0
    failed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> dict[str, TaskDone]:
        """Tasks that are finished for this very stack, by id."""
        return _find_done(self.manifest, self.keys)

    def begin(self, earlier: Manifest | None) -> None:
        """Take up what is finished, and remove what is not as it was left, or what a killed prewarm left half done.

        Raises `OSError`.
        """
        for name in (MANIFEST_HASH, MANIFEST):  # of before: it does not hold from here on
            (self.folder / name).unlink(missing_ok=True)
        was_killed, there = (self.folder / _RUNNING).exists(), list_files(self.folder)
        recorded = {file.path: file for file in earlier.files} if earlier else {}
        kept = [file for file in there if file.path in recorded and _is_as_left(file, recorded[file.path])]
        for file in there:
            if file not in kept and (was_killed or file.path in recorded):
                (self.folder / file.path).unlink()
                self.swept += 1
        if was_killed:
            remove_temporary(self.folder)
        if earlier is not None:
            self.before = {done.id: done for done in earlier.tasks}
            if len(kept) == len(recorded):
                self.manifest = self.manifest.model_copy(
                    update={"files": earlier.files, "tasks": tuple(self._take_up(earlier))}
                )
        (self.folder / _RUNNING).write_text(f"{os.getpid()}\n")
        for name in LIBRARIES:
            (self.folder / name).mkdir(exist_ok=True)
        self.write_draft()

    def _take_up(self, earlier: Manifest) -> Iterator[TaskDone]:
        blank = self.manifest
        is_like = not compare_stack(earlier, blank.stack, blank.architecture, blank.mode)
        same = [(task.id, task.code, task.ranks, task.settings) for task in self.tasks]
        for done in earlier.tasks:
            is_same = is_like and (done.id, done.code, done.ranks, done.settings) in same
            if is_same or (done.key and done.key == self.keys.get(done.id)):
                yield done

    def keep(self, task: PrewarmTask, answer: Answer) -> None:
        """Write down that a task is finished, and what is on disk now. Raises `OSError`."""
        with self._lock:
            # What it finds now, it may have compiled when it was finished before: for another stack, or elsewhere.
            before = self.before.get(task.id)
            compiled = tuple(dict.fromkeys((*(before.compiled if before else ()), *answer.compiled)))
            done = TaskDone(
                id=task.id, code=task.code, settings=task.settings, ranks=task.ranks, seconds=answer.seconds,
                compiled=compiled, asked=answer.asked, key=self.keys[task.id],
            )  # fmt: skip
            found = {one.id: one for one in (*self.manifest.tasks, done)}
            self.manifest = self.manifest.model_copy(update={"tasks": tuple(found.values())})
            self.write_draft()

    def write_draft(self) -> None:
        """Write the manifest of what is on disk now. Raises `OSError`."""
        done = {one.id: one for one in self.manifest.tasks}
        self.manifest = self.manifest.model_copy(
            update={
                "files": describe_files(self.folder, self.manifest.files),
                "tasks": tuple(done[task.id] for task in self.tasks if task.id in done),
                "missing": tuple(task.id for task in self.tasks if task.id not in done),
            }
        )
        write_whole(self.folder / DRAFT, manifest_text(self.manifest))


def _is_as_left(file: Listed, recorded: FileSeen) -> bool:
    """Whether a file has its size and time; a group of Triton's has another length in another folder."""
    same = (file.bytes, file.mtime_ns // _SECOND) == (recorded.bytes, recorded.mtime_ns // _SECOND)
    return same or recorded.names_root


@contextmanager
def open_prewarm(
    folder: Path, blank: Manifest, tasks: Sequence[PrewarmTask], keys: Mapping[str, str]
) -> Iterator[Progress]:
    """Hold ROOT/ARCH against a second prewarm, and take up what is finished there.

    Args:
        folder: of `require_place`.
        blank: manifest without tasks and files.
        tasks: of the target.
        keys: of those tasks, by id.

    Raises:
        WrongArguments: it cannot be written.
        InfrastructureFailed: another prewarm works there.
        OSError: its disk is full.
    """
    require_writable(folder, "--root")
    (folder / STATE).mkdir(exist_ok=True)
    with hold_folder(folder):
        progress = Progress(folder, tasks, keys, blank)
        progress.begin(read_draft(folder))
        yield progress
        if not progress.failed:  # and not where it was interrupted: then the next one sweeps
            (folder / _RUNNING).unlink(missing_ok=True)
