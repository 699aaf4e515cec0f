"""A prewarm that is under way: which tasks are finished for this stack, which files are theirs, and what is left to do.

What is finished stands in ROOT/ARCH/.prewarm, a file a task, written when its process has ended well. So a prewarm that
was killed continues: the next one first removes what no finished task had on disk when it ended, because a kernel may
be half written, and no library checks what it reads from a cache.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError

from ..catalog.prewarm import PrewarmTask
from ..errors import InfrastructureFailed
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .answer import Answer
from .files import Listed, list_files, remove_temporary
from .layout import LIBRARIES, MANIFEST, MANIFEST_HASH, OPENED, STATE
from .manifest import Manifest, StackSeen, TaskDone, compare_stack
from .place import mark_place, require_writable

_DONE: Final = "done"
_RUNNING: Final = "running"  # there while a prewarm runs; one that is killed leaves it
_ADOPTED: Final = "adopted.json"  # files that were there before, of whoever used the folder
_LOCK: Final = "lock"
_FILES: Final = TypeAdapter(tuple[Listed, ...])
_SECOND: Final = 10**9  # layers of images keep no finer times
_ONLY_ON_A_GPU: Final = frozenset({"gpu", "driver"})


class _Record(Frozen):
    """A task that is finished, and the files that it left."""

    key: str
    done: TaskDone
    files: tuple[Listed, ...]


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


@dataclass
class Progress:
    """What is finished in one ROOT/ARCH, on disk at every moment.

    Attributes:
        folder: ROOT/ARCH.
        keys: of the tasks of this run, by id.
        earlier: the manifest that lay here before, or that of the sealed cache that this is a working copy of.
        swept: files of a killed prewarm that were removed.
        failed: a task did not end well, and may have left half a file.
    """

    folder: Path
    keys: Mapping[str, str]
    earlier: Manifest | None = None
    swept: int = 0
    failed: bool = False
    _records: dict[str, _Record] = field(default_factory=dict)
    _owned: set[Listed] = field(default_factory=set)
    _now: set[str] = field(default_factory=set)  # ids that this run has finished
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Take up what is written down; a damaged record is that of a task that is not finished."""
        for place in sorted((self.folder / STATE / _DONE).glob("*.json")):
            with suppress(OSError, ValidationError):
                self._records[place.stem] = _Record.model_validate_json(place.read_bytes())
        for record in self._records.values():
            self._owned.update(record.files)
        with suppress(OSError, ValidationError):
            self._owned.update(_FILES.validate_json((self.folder / STATE / _ADOPTED).read_bytes()))

    def find_done(self, task: PrewarmTask) -> TaskDone | None:
        """A task that is finished for this very stack, and every file that it left is as some task left it."""
        record = self._records.get(task.id)
        if record is None or record.key != self.keys.get(task.id):
            return None
        with suppress(OSError):
            if all(self._is_as_left(_list_one(self.folder, file.path)) for file in record.files):
                return record.done
        return None

    def _is_as_left(self, file: Listed) -> bool:
        """Whether a file has the size and time that a finished task left it with; a later one may have left it anew."""
        times = {(one.bytes, one.mtime_ns // _SECOND) for one in self._owned if one.path == file.path}
        return (file.bytes, file.mtime_ns // _SECOND) in times

    def keep(self, task: PrewarmTask, answer: Answer) -> None:
        """Write down that a task is finished, and what is on disk now. Raises `OSError`."""
        with self._lock:
            new = tuple(file for file in list_files(self.folder) if file not in self._owned)
            # What it finds now, it may have compiled when it was finished before: for another stack, or elsewhere.
            earlier = {done.id: done for done in self.earlier.tasks} if self.earlier else {}
            before = self._records[task.id].done if task.id in self._records else earlier.get(task.id)
            compiled = tuple(dict.fromkeys((*(before.compiled if before else ()), *answer.compiled)))
            done = TaskDone(
                id=task.id, code=task.code, settings=task.settings, ranks=task.ranks, seconds=answer.seconds,
                compiled=compiled, asked=answer.asked,
            )  # fmt: skip
            self._write(_Record(key=self.keys[task.id], done=done, files=new))
            self._owned.update(new)

    def settle(self) -> None:
        """Forget what was on disk when a task of this run ended and is not now that all have.

        It was a temporary file of a task beside it, and the task would not count as finished without it.
        """
        for record in [self._records[name] for name in sorted(self._now)]:
            self._write(
                record.model_copy(
                    update={"files": tuple(one for one in record.files if (self.folder / one.path).exists())}
                )
            )

    def _write(self, record: _Record) -> None:
        name = record.done.id
        write_whole(self.folder / STATE / _DONE / f"{name}.json", record.model_dump_json(indent=1) + "\n")
        self._records[name] = record
        self._now.add(name)

    def list_finished(self, tasks: Iterable[PrewarmTask], stack: StackSeen, mode: str) -> dict[str, TaskDone]:
        """What is known of each finished task: of this stack, else of a like one in the cache that was here.

        The kernels of the latter are still there, and a prewarm of other tasks must not seal them as missing. Whether
        they are found is for `jit_verify` to say.
        """
        rows = tuple(tasks)
        finished = {done.id: done for done in self._find_earlier(rows, stack, mode)}
        return finished | {task.id: done for task in rows if (done := self.find_done(task)) is not None}

    def _find_earlier(self, tasks: tuple[PrewarmTask, ...], stack: StackSeen, mode: str) -> Iterator[TaskDone]:
        if self.earlier is None or compare_stack(self.earlier, stack, self.folder.name, mode):
            return
        there = {listed.path: listed.bytes for listed in list_files(self.folder)}
        for file in self.earlier.files:  # a group of Triton's has another length in another folder
            if file.path not in there or not (file.names_root or there[file.path] == file.bytes):
                return
        same = [(task.id, task.code, task.ranks, task.settings) for task in tasks]
        for done in self.earlier.tasks:
            if done.id not in self._records and (done.id, done.code, done.ranks, done.settings) in same:
                yield done

    def begin(self) -> None:
        """Remove what a killed prewarm left half done; else own what lies there. Raises `OSError`."""
        state = self.folder / STATE
        for name in (MANIFEST_HASH, MANIFEST):  # of before: it does not hold from here on
            (self.folder / name).unlink(missing_ok=True)
        others = [file for file in list_files(self.folder) if file not in self._owned]
        paths = {file.path for file in self._owned}
        if (state / _RUNNING).exists():
            self._sweep(others)
            remove_temporary(self.folder)
        else:
            # A file that a task left otherwise is not a kernel of its any more, and goes.
            kept = [file for file in others if file.path not in paths or self._is_as_left(file)]
            self._sweep(file for file in others if file not in kept)
            self._owned.update(kept)
            if kept:
                known = tuple(file for file in list_files(self.folder) if file in self._owned)
                write_whole(state / _ADOPTED, _FILES.dump_json(known).decode() + "\n")
        write_whole(state / _RUNNING, f"{os.getpid()}\n")
        for name in LIBRARIES:
            (self.folder / name).mkdir(exist_ok=True)

    def _sweep(self, files: Iterable[Listed]) -> None:
        for file in files:
            (self.folder / file.path).unlink()
            self.swept += 1

    def end(self) -> None:
        """The run came to its end. Where a task failed, the next one removes what no finished task owns."""
        if not self.failed:
            (self.folder / STATE / _RUNNING).unlink(missing_ok=True)


def _list_one(folder: Path, path: str) -> Listed:
    found = (folder / path).stat()
    return Listed(path, found.st_size, found.st_mtime_ns)


@contextmanager
def open_prewarm(
    folder: Path, machine: str, keys: Mapping[str, str], earlier: Manifest | None = None
) -> Iterator[Progress]:
    """Hold ROOT/ARCH against a second prewarm, and take up what is finished there.

    Args:
        folder: of `require_place`.
        machine: kind of CPU.
        keys: of the tasks, by id.
        earlier: the manifest that lay there; else that of the sealed cache that it is a working copy of.

    Raises:
        WrongArguments: it cannot be written.
        InfrastructureFailed: another prewarm works there.
        OSError: its disk is full.
    """
    require_writable(folder, "--root")
    (folder / STATE).mkdir(exist_ok=True)
    with hold_folder(folder):
        mark_place(folder, machine)
        if earlier is None:
            with suppress(OSError, ValidationError):
                earlier = Manifest.model_validate_json((folder / OPENED).read_bytes())
        progress = Progress(folder, keys, earlier)
        progress.begin()
        yield progress
        progress.end()  # not where it was interrupted: then the next one sweeps


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """ROOT/ARCH in which no other prewarm works meanwhile. Raises `InfrastructureFailed`."""
    if not (folder / STATE).is_dir():  # no prewarm was ever here
        yield
        return
    lock = FileLock(folder / STATE / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as fault:
        raise InfrastructureFailed(
            f"another prewarm works in {folder}. Likely cause: it was started twice, or is not at its end yet. Next "
            "step: wait for it, or give another --root."
        ) from fault
    try:
        yield
    finally:
        lock.release()
