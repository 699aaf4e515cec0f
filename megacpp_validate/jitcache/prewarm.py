"""Compile ahead of time what the presets and the probes need, and seal it.

While a prewarm runs, a draft of the manifest lies in ROOT/ARCH/.prewarm, written anew whenever a task has ended well.
So a prewarm that was killed continues: the next one first removes what the draft does not have, because a kernel may be
half written, and no library checks what it reads from a cache.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from filelock import FileLock, Timeout
from pydantic import Field

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.prewarm import PrewarmTask
from ..environments.interpreter import read_commit
from ..environments.plan import find_target
from ..errors import Exit, InfrastructureFailed, WrongArguments, exit_for
from ..evidence.receipt import write_whole
from ..evidence.values import Frozen
from . import layout
from .cache import check_sealed, is_sealed, seal
from .manifest import (
    JitCacheSize,
    JitCompile,
    Manifest,
    StackSeen,
    TaskDone,
    describe_files,
    manifest_text,
    read_draft,
    require_place,
    write_manifest,
)
from .stack import (
    Answer,
    JitOptions,
    JitStack,
    Selected,
    find_root,
    open_stack,
    require_purpose,
    run_tasks,
    select_tasks,
)

_ONLY_ON_A_GPU: Final = frozenset({"gpu", "driver"})
_SECOND: Final = 10**9  # layers of images keep no finer times


class JitTaskState(StrEnum):
    """How a task of prewarm ended."""

    DONE = "done"
    KEPT = "kept"  # an earlier run has done it, for the same stack, and its files are still there
    FAILED = "failed"
    NOT_RUN = "not-run"


class JitTaskRow(Frozen):
    """One task of prewarm.

    Attributes:
        compiled: what it compiled; what another task had compiled before it is not among them.
        hits: kernels that it took from the cache.
        reason: of a state that is not good, in sentences.
        seconds: of its process.
    """

    task: str
    library: str
    state: JitTaskState
    compiled: tuple[JitCompile, ...] = ()
    hits: int = 0
    reason: str = ""
    seconds: float = 0.0


class PrewarmResult(Frozen):
    """The tasks of a prewarm, and the caches that it left.

    Attributes:
        architecture: of the folder: "sm_90a"; "cpu".
        folder: ROOT/ARCH.
        mode: of DeepGEMM's compiler: "nvcc", "nvrtc".
        interpreter: of the stack, in words.
        rows: in the order of the matrix.
        left_out: tasks of the target that this run did not do, and why not: "ID: reason".
        caches: what lies there now.
        manifest: hash of the manifest; empty where none was written.
        sealed: whether the folder is sealed now.
        swept: files that no finished task owns, left by a run that was killed; they were removed.
    """

    schema_id: Literal["megacpp-validate/prewarm/1"] = "megacpp-validate/prewarm/1"
    tool: str
    target: str
    architecture: str
    folder: str
    mode: str
    interpreter: str
    rows: tuple[JitTaskRow, ...] = ()
    left_out: tuple[str, ...] = ()
    caches: tuple[JitCacheSize, ...] = ()
    manifest: str = ""
    sealed: bool = False
    swept: int = 0
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def exit(self) -> Exit:
        """Closed where a task failed, evidence missing where one did not run."""
        states = {row.state for row in self.rows}
        return exit_for(breaks=JitTaskState.FAILED in states, lacks=not states or JitTaskState.NOT_RUN in states)


@dataclass(frozen=True)
class SealOptions:
    """How a prewarm ends: whether it seals the cache, and whether any user may add files to the sealed one."""

    seal: bool = True
    shared: bool = False


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
    root = find_root(options.root)
    folder = require_place(root, layout.cache_arch(target.arch))  # the stack says of which kind of CPU
    if not is_sealed(folder):
        layout.require_usable(folder, "--root")  # before a process is started
    with open_stack(catalog, target, options, root) as stack:
        if reason := stack.why_not(at_build=options.at_build):
            fields: dict[str, Any] = {"rows": tuple(_row(task, Answer(missing=reason)) for task in selected.tasks)}
        else:
            require_place(root, stack.architecture, stack.facts.machine)
            seen = stack.read_seen()
            blank = Manifest(
                architecture=folder.name, target=target.id, folder=str(folder), mode=stack.mode, stack=seen, tasks=(),
                files=(), made=datetime.now(UTC).isoformat(timespec="seconds"), tool=TOOL, commit=read_commit(),
            )  # fmt: skip
            keys = {task.id: hash_task(task, blank, stack.sources) for task in selected.of_target}
            if is_sealed(folder):
                fields = list_sealed(folder, selected, keys)
            else:
                with open_prewarm(folder, blank, selected.of_target, keys) as progress:
                    fields = fill(stack, selected, progress, options, sealing, report)
        return PrewarmResult(
            tool=TOOL, target=target.id, architecture=stack.architecture, folder=str(folder), mode=stack.mode,
            interpreter=stack.interpreter, left_out=selected.left_out, seconds=round(time.monotonic() - started, 1),
            **fields,
        )  # fmt: skip


def list_sealed(folder: Path, selected: Selected, keys: Mapping[str, str]) -> dict[str, Any]:
    """Fields of the result where nothing is left to do in a sealed cache.

    Raises:
        CacheChanged: a file is not the one that was sealed.
        WrongArguments: tasks are left to do.
    """
    checked = check_sealed(folder)
    done = _find_done(checked.manifest, keys)
    if undone := [task.id for task in selected.tasks if task.id not in done]:
        raise WrongArguments(
            f"{folder} is sealed, and {len(undone)} task(s) are not done there for this stack: {', '.join(undone)}. "
            "Likely cause: another stack, --mode or version of this tool filled it, or it was sealed at image build. "
            f"Next step: `nox -s jit_cache -- open --root {folder.parent} --work FOLDER`, and prewarm with --root "
            "FOLDER; or give another --root."
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
        answer = require_purpose(task, stack.run(task, folder / layout.STATE / "logs", options.limit_s))
        if not answer.failure and not answer.missing:
            progress.keep(task, answer)
        return answer

    answers = run_tasks(waiting, run, options.jobs, stack.processes, report)
    rows = _list_rows(selected, progress.done, answers)
    fields: dict[str, Any] = {"rows": rows, "swept": progress.swept}
    if any(row.state is JitTaskState.FAILED for row in rows):  # it may have left half a file: the next one sweeps
        return {**fields, "caches": progress.manifest.sizes}
    progress.write_draft()
    digest = write_manifest(folder, progress.manifest)
    sealed = sealing.seal and all(row.state is not JitTaskState.NOT_RUN for row in rows)
    if sealed:
        seal(folder, shared=sealing.shared)
    return {**fields, "caches": progress.manifest.sizes, "manifest": digest, "sealed": sealed}


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


def hash_task(task: PrewarmTask, blank: Manifest, sources: str) -> str:
    """What must be the same for a finished task to stay finished.

    Args:
        task: its code and settings count, and not how long it takes.
        blank: architecture, mode and stack; without the GPU and its driver where the task needs none: compiled in an
            image, it holds on the host.
        sources: identity of what of this project runs there.
    """
    versions = {name: one for name, one in blank.stack.versions.items() if task.gpu or name not in _ONLY_ON_A_GPU}
    stack: StackSeen = blank.stack.model_copy(update={"versions": versions})
    parts = {
        "task": [task.id, task.code, task.ranks, task.settings],
        "caches": [blank.architecture, blank.mode],
        "stack": stack.model_dump(mode="json"),
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
        manifest: what lies there, and which tasks are finished for this stack.
        swept: files that were removed.
    """

    folder: Path
    tasks: Sequence[PrewarmTask]
    keys: Mapping[str, str]
    manifest: Manifest
    swept: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> dict[str, TaskDone]:
        """Tasks that are finished for this very stack, by id."""
        return _find_done(self.manifest, self.keys)

    def begin(self, earlier: Manifest | None) -> None:
        """Take up what is finished, and remove every file that is not as a prewarm left it. Raises `OSError`."""
        for name in (layout.MANIFEST_HASH, layout.MANIFEST):  # of before: it does not hold from here on
            (self.folder / name).unlink(missing_ok=True)
        recorded = {file.path: file for file in earlier.files} if earlier else {}
        kept = 0
        for file in layout.list_files(self.folder):
            row = recorded.get(file.path)
            # A group of Triton's has another length in another folder.
            same = row and (file.bytes, file.mtime_ns // _SECOND) == (row.bytes, row.mtime_ns // _SECOND)
            if row and (same or row.names_root):
                kept += 1
            elif earlier:
                (self.folder / file.path).unlink()
                self.swept += 1
        layout.remove_temporary(self.folder)
        if earlier and kept == len(recorded):
            done = tuple(_find_done(earlier, self.keys).values())
            self.manifest = self.manifest.model_copy(update={"files": earlier.files, "tasks": done})
        for name in layout.LIBRARIES:
            (self.folder / name).mkdir(exist_ok=True)
        self.write_draft()

    def keep(self, task: PrewarmTask, answer: Answer) -> None:
        """Write down that a task is finished, and what is on disk now. Raises `OSError`."""
        with self._lock:
            done = TaskDone(
                id=task.id, code=task.code, settings=task.settings, ranks=task.ranks, seconds=answer.seconds,
                compiled=answer.compiled, asked=answer.asked, key=self.keys[task.id],
            )  # fmt: skip
            self.manifest = self.manifest.model_copy(update={"tasks": (*self.manifest.tasks, done)})
            self.write_draft()

    def write_draft(self) -> None:
        """Write the manifest of what is on disk now. Raises `OSError`."""
        files, done = describe_files(self.folder, self.manifest.files), self.done
        missing = tuple(task.id for task in self.tasks if task.id not in done)
        self.manifest = self.manifest.model_copy(update={"files": files, "missing": missing})
        write_whole(self.folder / layout.DRAFT, manifest_text(self.manifest))


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
    layout.require_usable(folder, "--root")
    (folder / layout.STATE).mkdir(exist_ok=True)
    try:
        with FileLock(folder / layout.STATE / "lock", timeout=0):
            progress = Progress(folder, tasks, keys, blank)
            progress.begin(read_draft(folder))
            yield progress
    except Timeout as fault:
        raise InfrastructureFailed(
            f"another prewarm works in {folder}. Next step: wait for it, or give another --root."
        ) from fault
