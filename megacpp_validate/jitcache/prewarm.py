"""A prewarm that is under way: which tasks are finished for this stack, which files are theirs, and what is left to do.

What is finished stands in ROOT/ARCH/.prewarm, a file a task, written when its process has ended well. So a prewarm that
was killed goes on where it was: what no finished task had on disk when it ended is thrown away first, because a kernel
may be half written, and no library reads a cache with suspicion.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Final

from pydantic import ValidationError

from ..catalog.prewarm import PrewarmTask
from ..evidence.values import Frozen
from ..evidence.whole_file import write_whole
from .files import Seen, drop_passing, hash_files, list_files
from .layout import LIBRARIES, MANIFEST, MANIFEST_HASH, OPENED, STATE
from .manifest import FileSeen, Manifest, StackSeen, TaskDone, compare_stack
from .place import mark_place, require_writable
from .result import JitCompile
from .variables import hash_variables

_DONE: Final = "done"
_RUNNING: Final = "running"  # there while a prewarm runs; one that is killed leaves it
_ADOPTED: Final = "adopted.json"  # files that were there before, of whoever used the folder
_LOCK: Final = "lock"
_NAMES: Final = ".json"
_SECOND: Final = 10**9
_ONLY_ON_A_GPU: Final = frozenset({"gpu", "driver"})


class PrewarmTaken(RuntimeError):
    """Another prewarm works in the folder."""


class _Owned(Frozen):
    path: str
    bytes: int
    mtime_ns: int


class _Record(Frozen):
    """A task that is finished."""

    key: str
    done: TaskDone
    files: tuple[_Owned, ...]


@dataclass(frozen=True)
class Answer:
    """What the process of a task told.

    Attributes:
        compiled: kernels that no cache had.
        hits: library -> kernels that a cache had; None where it is not counted.
        failure: why it did not come to a good end.
        missing: why it could not run here: no GPU, no such library. That is no failure.
        unwatched: what it compiled in memory, where there is no cache: "LIBRARY: why".
        notes: what else a person should know.
    """

    compiled: tuple[JitCompile, ...] = ()
    hits: Mapping[str, int] | None = field(default_factory=dict)
    failure: str = ""
    missing: str = ""
    unwatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def asked(self) -> tuple[str, ...] | None:
        """Libraries that it compiled for, or found in a cache; None where it does not count what it found."""
        if self.hits is None:
            return None
        found = {library for library, number in self.hits.items() if number}
        return tuple(sorted(found | {one.library for one in self.compiled}))


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
        told: the manifest that lay here before, or that of the sealed cache that this is a working copy of.
        swept: files of a killed prewarm that were thrown away.
        failed: a task did not end well, and may have left half a file.
    """

    folder: Path
    keys: Mapping[str, str]
    told: Manifest | None = None
    swept: int = 0
    failed: bool = False
    _records: dict[str, _Record] = field(default_factory=dict)
    _owned: set[_Owned] = field(default_factory=set)
    _now: set[str] = field(default_factory=set)  # ids that this run has finished
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def is_done(self, task: PrewarmTask) -> bool:
        """Whether it is finished for this very stack, and every file that it left is there as some task left it."""
        record = self._records.get(task.id)
        if record is None or record.key != self.keys.get(task.id):
            return False
        with suppress(OSError):
            return all(self._is_as_left(_seen(self.folder, file.path)) for file in record.files)
        return False

    def _is_as_left(self, file: _Owned) -> bool:
        """Whether a file has the size and time that a finished task left it with; a later one may have left it anew.

        In whole seconds: layers of images keep no more.
        """
        return any(
            (known.bytes, known.mtime_ns // _SECOND) == (file.bytes, file.mtime_ns // _SECOND)
            for known in self._owned
            if known.path == file.path
        )

    def kept(self, task: PrewarmTask) -> TaskDone | None:
        """What is known of a finished task."""
        return self._records[task.id].done if self.is_done(task) else None

    def keep(self, task: PrewarmTask, answer: Answer) -> None:
        """Write down that a task is finished, and what is on disk now.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            new = [file for file in _list_owned(self.folder) if file not in self._owned]
            # What it finds now, it may have compiled when it was finished before: for another stack, or elsewhere.
            before = self._records[task.id].done if task.id in self._records else self._earlier.get(task.id)
            compiled = dict.fromkeys((*(before.compiled if before is not None else ()), *answer.compiled))
            done = TaskDone(
                id=task.id, code=task.code, settings=task.settings, ranks=task.ranks, seconds=answer.seconds,
                compiled=tuple(compiled), asked=answer.asked,
            )  # fmt: skip
            self._write(_Record(key=self.keys[task.id], done=done, files=tuple(new)))
            self._owned.update(new)

    def settle(self) -> None:
        """Forget what was on disk when a task of this run ended and is not now that all have.

        It was a passing file of a task beside it, and the task would not count as finished without it.

        Raises:
            OSError: it cannot be written.
        """
        for record in [self._records[name] for name in sorted(self._now)]:
            files = tuple(file for file in record.files if (self.folder / file.path).exists())
            if files != record.files:
                self._write(record.model_copy(update={"files": files}))

    def _write(self, record: _Record) -> None:
        name = record.done.id
        write_whole(_state(self.folder) / _DONE / f"{name}{_NAMES}", record.model_dump_json(indent=1) + "\n")
        self._records[name] = record
        self._now.add(name)

    def finished(self, tasks: Iterable[PrewarmTask]) -> tuple[TaskDone, ...]:
        """What is known of each finished task, in their order."""
        return tuple(done for task in tasks if (done := self.kept(task)) is not None)

    def carried(self, tasks: Iterable[PrewarmTask], stack: StackSeen, mode: str) -> tuple[TaskDone, ...]:
        """Tasks that were finished for a like stack in the cache that lay here before, and that nobody has run since.

        Their kernels are still there, and a prewarm of other tasks must not seal them as missing. Whether they are
        found is for `jit_verify` to say.

        Args:
            tasks: of the target.
            stack, mode: of here.
        """
        told = self.told
        if told is None or compare_stack(told, stack, self.folder.name, mode):
            return ()
        there = {seen.path: seen.bytes for seen in list_files(self.folder)}
        if not all(_is_still(file, there.get(file.path)) for file in told.files):
            return ()
        same = {(task.id, task.code, task.ranks, *sorted(task.settings.items())) for task in tasks}
        return tuple(
            done
            for done in told.tasks
            if done.id not in self._records and (done.id, done.code, done.ranks, *sorted(done.settings.items())) in same
        )

    @property
    def _earlier(self) -> dict[str, TaskDone]:
        return {task.id: task for task in self.told.tasks} if self.told is not None else {}

    def read(self) -> None:
        """Take up what is written down."""
        for place in sorted((_state(self.folder) / _DONE).glob(f"*{_NAMES}")):
            with suppress(OSError, ValidationError):  # damaged: then that task is not finished
                self._records[place.stem] = _Record.model_validate_json(place.read_bytes())
        for record in self._records.values():
            self._owned.update(record.files)
        with suppress(OSError, ValueError, ValidationError):
            rows: list[Any] = json.loads((_state(self.folder) / _ADOPTED).read_bytes())
            self._owned.update(_Owned.model_validate(row) for row in rows)

    def begin(self) -> None:
        """Throw away what a killed prewarm left half done; else own what lies there.

        Raises:
            OSError: the folder cannot be written.
        """
        state = _state(self.folder)
        for name in (MANIFEST_HASH, MANIFEST):  # of before: it does not hold from here on
            (self.folder / name).unlink(missing_ok=True)
        there = _list_owned(self.folder)
        if (state / _RUNNING).exists():
            for file in there:
                if file not in self._owned:
                    (self.folder / file.path).unlink()
                    self.swept += 1
            drop_passing(self.folder)
        elif adopted := list(self._drop_changed(file for file in there if file not in self._owned)):
            self._owned.update(adopted)
            there = _list_owned(self.folder)
            known = [file for file in there if file in self._owned]
            write_whole(state / _ADOPTED, json.dumps([file.model_dump() for file in known]) + "\n")
        write_whole(state / _RUNNING, f"{os.getpid()}\n")
        for name in LIBRARIES:
            (self.folder / name).mkdir(exist_ok=True)

    def _drop_changed(self, files: Iterable[_Owned]) -> Iterator[_Owned]:
        """Those that lie there of nobody; one that a task left otherwise is no kernel of its any more, and goes."""
        paths = {file.path for file in self._owned}
        for file in files:
            if file.path not in paths or self._is_as_left(file):
                yield file
            else:
                (self.folder / file.path).unlink()
                self.swept += 1

    def end(self) -> None:
        """The run came to its end. Where a task failed, the next one throws away what no finished task owns."""
        if not self.failed:
            (_state(self.folder) / _RUNNING).unlink(missing_ok=True)


def _is_still(file: FileSeen, size: int | None) -> bool:
    """Whether a file may be the one of a manifest; a group of Triton's has another length in another folder."""
    return size is not None and (file.names_root or size == file.bytes)


def _state(folder: Path) -> Path:
    return folder / STATE


def _seen(folder: Path, path: str) -> _Owned:
    found = (folder / path).stat()
    return _Owned(path=path, bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def _list_owned(folder: Path) -> list[_Owned]:
    return [_Owned(path=seen.path, bytes=seen.bytes, mtime_ns=seen.mtime_ns) for seen in list_files(folder)]


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
        CacheReadOnly: it cannot be written.
        PrewarmTaken: another prewarm works there.
        OSError: its disk is full.
    """
    require_writable(folder)
    state = _state(folder)
    state.mkdir(exist_ok=True)
    with (state / _LOCK).open("w") as lock:
        _take(lock, folder)
        mark_place(folder, machine)
        progress = Progress(folder, keys, earlier or _read_opened(folder))
        progress.read()
        progress.begin()
        yield progress
        progress.end()  # not where it was interrupted: then the next one sweeps


@contextmanager
def without_prewarm(folder: Path) -> Iterator[None]:
    """ROOT/ARCH in which no prewarm works meanwhile, to be moved away. Raises PrewarmTaken."""
    with ExitStack() as held:
        with suppress(FileNotFoundError):
            _take(held.enter_context((folder / STATE / _LOCK).open()), folder)
        yield


def _take(lock: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as fault:
        raise PrewarmTaken(
            f"another prewarm works in {folder}. Likely cause: it was started twice, or is not at its end yet. Next "
            "step: wait for it, or give another --root."
        ) from fault


def _read_opened(folder: Path) -> Manifest | None:
    with suppress(OSError, ValidationError):
        return Manifest.model_validate_json((folder / OPENED).read_bytes())
    return None


def read_progress(folder: Path, keys: Mapping[str, str]) -> Progress:
    """What is finished in a folder that nobody shall write to, such as a sealed one."""
    progress = Progress(folder, keys)
    progress.read()
    return progress


def make_manifest(
    folder: Path, *, target: str, mode: str, stack: StackSeen, tasks: Sequence[TaskDone], missing: Sequence[str],
    words: Mapping[str, str], variables: Mapping[str, str] | None = None,
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
        NoPlainFile: a link lies there.
        OSError: a file cannot be read.
    """
    seen = list_files(folder)
    hashes = hash_files(folder, (file.path for file in seen))
    return Manifest(
        architecture=folder.name, target=target, folder=str(folder), mode=mode, stack=stack, tasks=tuple(tasks),
        missing=tuple(missing), files=tuple(_say_file(folder, file, hashes[file.path]) for file in seen),
        variables=None if variables is None else hash_variables(variables),
        made=words["made"], tool=words["tool"], commit=words["commit"],
    )  # fmt: skip


def _say_file(folder: Path, file: Seen, digest: str) -> FileSeen:
    names = file.path.endswith(_NAMES) and str(folder).encode() in (folder / file.path).read_bytes()
    return FileSeen(path=file.path, bytes=file.bytes, sha256=digest, mtime_ns=file.mtime_ns, names_root=names)
