"""One stack and its JIT caches: what it is made of, and how a task of prewarm or a cell is run in it."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationError

from ...catalog.bridge import Catalog
from ...catalog.bridge import Target as TargetRow
from ...catalog.prewarm import PROBE, PrewarmTask
from ...environments.cell import Cell
from ...environments.environment import NoEnvironment
from ...environments.facts import Facts, read_facts, require_torch
from ...environments.identity import hash_parts, list_sources
from ...environments.interpreter import PACKAGE, InterpreterEnvironment, host_interpreter, read_commit
from ...environments.plan import plan_blank, plan_compositions, plan_parity, plan_smoke
from ...environments.schedule import count_cores, share_cores
from ...evidence.values import Frozen
from ...jitcache.aside import folder_aside
from ...jitcache.layout import NVCC, NVRTC, ROOT_VARIABLE, cache_arch, cache_variables
from ...jitcache.manifest import CompilerOf, StackSeen
from ...jitcache.prewarm import Answer
from ...jitcache.result import JitCompile
from ...jitcache.verify import read_receipt_answer
from ...probes.order import Order
from ...process import Processes
from ..app import TOOL

_MODULE: Final = "megacpp_validate.jit"
_STACK: Final = "stack"
_STACK_LIMIT_S: Final = 300.0  # imports torch once, on a disk that may be cold
_LAST_WORDS: Final = 800  # characters
_NO_SPACE: Final = os.strerror(errno.ENOSPC)
_ROOT: Final = Path(".megacpp/jit")


@dataclass(frozen=True)
class AskedJit:
    """The arguments that prewarm and jit_verify share; an empty root is that of MEGACPP_JIT_ROOT, `jobs` 0 what suits.

    Attributes:
        tasks: ids; None for all.
        mode: of DeepGEMM's compiler.
        ranks: most devices that a cell may take.
    """

    target: str
    tasks: tuple[str, ...] | None
    root: Path | None
    python: str
    mode: str
    ranks: int
    jobs: int
    seed: int
    limit_s: float

    def place(self) -> Path:
        """The root, absolute: processes start in folders of their own."""
        return (self.root or Path(os.environ.get(ROOT_VARIABLE) or _ROOT)).absolute()


class _Told(Frozen):
    """One kernel, as a task tells it."""

    library: str
    kernel: str
    shape: str = ""
    seconds: float = 0.0
    cached: bool = False
    looked_for: str = ""


class _Answered(Frozen):
    """The last line of a task."""

    task: str
    compiled: tuple[_Told, ...] = ()
    seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)
    compiler: CompilerOf = CompilerOf()
    include_paths: tuple[str, ...] = ()
    unwatched: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
    missing: str = ""
    failure: str = ""


@dataclass(frozen=True)
class JitStack:
    """A stack whose variables put every cache below one root.

    Attributes:
        catalog, target: of the matrix.
        environment: with those variables.
        processes: that its processes are among.
        facts: what it has, as it says.
        seen: the same for the manifest.
        root, architecture, mode: of the caches.
        scratch: for working folders.
    """

    catalog: Catalog
    target: TargetRow
    environment: InterpreterEnvironment
    processes: Processes
    facts: Facts
    seen: StackSeen
    root: Path
    architecture: str
    mode: str
    seed: int
    scratch: Path

    @property
    def interpreter(self) -> str:
        """In words."""
        return (
            f"{self.facts.executable} ({self.environment.because}): Python {self.facts.python}, torch "
            f"{self.facts.torch or 'none'}"
        )

    @property
    def sources(self) -> str:
        """Identity of what of this project runs there."""
        return hash_parts(tuple(list_sources(PACKAGE)))

    def run(self, task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        """Run a task or a cell in a process of its own.

        Args:
            task: row of `matrix/prewarm.toml`.
            logs: folder for its log, and the receipt of a cell.
            limit_s: seconds that it may take.

        Raises:
            Stopped: everything was stopped.
            OSError: a folder cannot be written, or a disk is full.
        """
        logs.mkdir(parents=True, exist_ok=True)
        limit = max(limit_s, float(task.limit_s))
        answer = self._run_cell(task, logs, limit) if task.is_cell else self._run_task(task, logs, limit)
        if _NO_SPACE in answer.failure:
            raise OSError(errno.ENOSPC, _NO_SPACE, str(self.root))
        return answer

    def _run_cell(self, task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        order = replace(self._order(task), environment=self.environment.identity)
        cell = Cell(self.environment, order, logs, limit_s)
        receipt = cell.run(self.scratch / f"cell-{task.id}", self.processes)
        return read_receipt_answer(receipt)

    def _order(self, task: PrewarmTask) -> Order:
        variables = self.environment.variables
        blank = plan_blank(self.target, self.facts, variables, seed=self.seed, tool=TOOL, commit=read_commit())
        if task.code != PROBE:
            return plan_smoke(self.catalog, blank, [task.cell])[0]
        plan = plan_compositions if _is_composition(self.catalog, task.cell) else plan_parity
        return plan(self.catalog, blank, [task.cell])[0]

    def _run_task(self, task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        told = ask_task(
            self.environment, self.processes, _order_of(task, self.root, self.architecture, self.seed),
            folder=_own_folder(self.scratch, task.id), log=logs / f"{task.id}.log", limit_s=limit_s, root=self.root,
        )  # fmt: skip
        if isinstance(told, Answer):
            return told
        rows = [one.model_dump(exclude={"cached"}) for one in told.compiled if not one.cached]
        return Answer(
            compiled=tuple(JitCompile(**{**row, "seconds": max(0.0, row["seconds"])}) for row in rows),
            hits=Counter(one.library for one in told.compiled if one.cached),
            failure=told.failure,
            missing=told.missing,
            unwatched=tuple(f"{library}: {why}" for library, why in told.unwatched.items()),
            notes=told.notes,
            seconds=told.seconds,
        )


def _is_composition(catalog: Catalog, probe: str) -> bool:
    return any(row.id == probe for row in catalog.compositions)


def _order_of(task: PrewarmTask, root: Path, architecture: str, seed: int) -> dict[str, Any]:
    return {
        "task": task.id, "code": task.code, "library": task.library, "arch": architecture,
        "settings": dict(task.settings), "root": str(root), "seed": seed,
    }  # fmt: skip


def _own_folder(scratch: Path, name: str) -> Path:
    """A new working folder: what a vendor library drops there is nobody's evidence."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=scratch))


def ask_task(
    environment: InterpreterEnvironment, processes: Processes, order: Mapping[str, Any], *, folder: Path, log: Path,
    limit_s: float, root: Path,
) -> _Answered | Answer:  # fmt: skip
    """Start a task of `megacpp_validate.jit`, and read its last line; an `Answer` says why there is none.

    Raises:
        Stopped: everything was stopped.
        OSError: the order or the log cannot be written.
    """
    given = folder / "order"
    given.write_text(json.dumps(order), encoding="utf-8")
    try:
        ended = processes.run(
            environment.call(_MODULE, shares=(root,)), folder=folder, limit_s=limit_s, log=log, given=given,
            ask_where=True,
        )  # fmt: skip
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return Answer(failure=f"its process could not be started: {fault}")
    for line in reversed(ended.words.splitlines()):
        if line.startswith("{") and '"task"' in line:
            try:
                answered = _Answered.model_validate_json(line)
            except ValidationError:
                continue
            if answered.task == order["task"]:
                return answered
    words = " | ".join(filter(None, map(str.strip, ended.words.splitlines())))[-_LAST_WORDS:]
    how = ended.how if ended.code != 0 else "ended well and answered nothing"
    said = f"{how}; its last words: {words or 'nothing'}"
    return Answer(failure=said, seconds=ended.seconds)


def require_temporary() -> None:
    """Refuse a machine on which no temporary file can be written.

    Raises:
        NoEnvironment: it is one.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as fault:
        raise NoEnvironment(
            f"there is no folder for temporary files: {fault.strerror or fault}. Likely cause: a read-only root, or a "
            "full disk. Next step: mount one on /tmp (`--tmpfs /tmp:exec` of `docker run`), or name one in TMPDIR."
        ) from fault


@contextmanager
def open_stack(
    catalog: Catalog, target: TargetRow, asked: AskedJit, root: Path, processes: Processes
) -> Iterator[JitStack]:
    """The stack of an interpreter, with every cache below `root`, asked what it is made of.

    Raises:
        NoEnvironment: there is no interpreter that has torch, or it does not answer.
    """
    require_temporary()
    architecture, mode = cache_arch(target.arch), asked.mode or NVCC
    jobs = asked.jobs or default_jobs(target)
    with folder_aside(Path(tempfile.gettempdir()), "megacpp-jit-") as scratch:
        variables = {
            **share_cores(os.environ, jobs),
            # One thread, as ranks have: how many there are is part of a key of TorchInductor, and would make a cache
            # that was filled by so many processes at a time cold for another number of them.
            "OMP_NUM_THREADS": "1",
            **cache_variables(root, architecture, nvrtc=mode == NVRTC),
            "MEGACPP_JIT_DRIVER_CACHE": "",  # of a process that worked on a copy itself (jit/driver_cache.py)
        }
        door = scratch / "door"
        door.mkdir()
        environment = host_interpreter(variables, door, asked.python)
        facts = read_facts(environment, processes)
        require_torch(facts)
        seen = _read_stack(environment, facts, processes, root, architecture, scratch)
        yield JitStack(
            catalog, target, environment, processes, facts, seen, root, architecture, mode, asked.seed, scratch
        )


def _read_stack(
    environment: InterpreterEnvironment, facts: Facts, processes: Processes, root: Path, architecture: str,
    scratch: Path,
) -> StackSeen:  # fmt: skip
    """What the caches depend on, as a process in the stack tells it.

    Raises:
        NoEnvironment: it tells nothing.
    """
    order = {"task": _STACK, "code": _STACK, "library": "", "arch": architecture, "settings": {}, "root": str(root)}
    told = ask_task(
        environment, processes, order, folder=_own_folder(scratch, _STACK), log=scratch / f"{_STACK}.log",
        limit_s=_STACK_LIMIT_S, root=root,
    )  # fmt: skip
    failure = told.failure or (told.missing if isinstance(told, _Answered) else "")
    if not isinstance(told, _Answered) or failure:
        raise NoEnvironment(
            f"{environment.shown} does not tell what it is made of: {failure}. Likely cause: a damaged package, or it "
            "finds another megacpp-validate first. Next step: `nox -s doctor` on it."
        )
    versions = {
        **told.versions,
        "gpu": facts.gpu.name if facts.gpu else "",
        "driver": facts.gpu.driver if facts.gpu else "",
    }
    return StackSeen(
        machine=facts.machine,
        versions={name: version for name, version in sorted(versions.items()) if version},
        compiler=told.compiler.model_copy(update={"mode": ""}),  # what was asked for stands in the manifest itself
        include_paths=told.include_paths,
    )


def default_jobs(target: TargetRow) -> int:
    """Processes at a time: compilers take a core each, and importing torch takes one for 8 seconds."""
    return max(1, min(8 if target.arch else 2, count_cores()))
