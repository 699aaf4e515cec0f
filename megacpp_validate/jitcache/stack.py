"""One stack and its JIT caches: what it is made of, and how a task of prewarm or a cell is run in it."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import Field, ValidationError

from .. import TOOL
from ..catalog.bridge import Catalog
from ..catalog.bridge import Target as TargetRow
from ..catalog.prewarm import PROBE, PrewarmTask
from ..environments.cell import Cell
from ..environments.environment import hash_parts, list_sources
from ..environments.facts import Facts, read_facts, require_torch
from ..environments.fleet import count_cores
from ..environments.interpreter import PACKAGE, InterpreterEnvironment, host_interpreter, read_commit
from ..environments.plan import plan_blank, plan_compositions, plan_parity, plan_smoke, why_not_here
from ..environments.venv import find_cpu_python
from ..errors import NoEnvironment
from ..evidence.values import Frozen
from ..process import Processes
from .answer import Answer, read_receipt_answer
from .layout import NVCC, NVRTC, ROOT_VARIABLE, cache_arch, cache_variables
from .manifest import CompilerOf, StackSeen
from .place import folder_aside
from .result import JitCompile

_MODULE: Final = "megacpp_validate.jit"
_STACK: Final = "stack"
_STACK_LIMIT_S: Final = 300.0  # imports torch once, on a disk that may be cold
_LAST_WORDS: Final = 800  # characters
_NO_SPACE: Final = os.strerror(errno.ENOSPC)
_ROOT: Final = Path(".megacpp/jit")


@dataclass(frozen=True)
class JitOptions:
    """What prewarm, jit_verify and an import share.

    Attributes:
        tasks: ids; None for all.
        root: of the caches; that of MEGACPP_JIT_ROOT where it is None.
        python: interpreter of the stack.
        mode: of DeepGEMM's compiler.
        ranks: most devices that a cell may take.
        jobs: processes at a time; 0 for what suits.
        at_build: only what needs no GPU, as when an image is built.
        limit_s: seconds that one task may take.
    """

    target: str = ""
    tasks: tuple[str, ...] | None = None
    root: Path | None = None
    python: str = ""
    mode: str = ""
    ranks: int = 1
    jobs: int = 1
    at_build: bool = False
    seed: int = 0
    limit_s: float = 900.0

    def place(self) -> Path:
        """The root, absolute: processes start in folders of their own."""
        return (self.root or Path(os.environ.get(ROOT_VARIABLE) or _ROOT)).absolute()


class _Kernel(JitCompile):
    """One kernel, as a task reports it; `cached` where a cache had it."""

    cached: bool = False


class _Answered(Frozen):
    """The last line of a task."""

    task: str
    compiled: tuple[_Kernel, ...] = ()
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
        environment: with those variables.
        processes: stops all that it started.
        facts: what it has.
        root, architecture, mode: of the caches.
        scratch: for working folders.
    """

    catalog: Catalog
    target: TargetRow
    environment: InterpreterEnvironment
    processes: Processes
    facts: Facts
    root: Path
    architecture: str
    mode: str
    seed: int
    scratch: Path

    @property
    def interpreter(self) -> str:
        """In words."""
        facts = self.facts
        return f"{facts.executable} ({self.environment.because}): Python {facts.python}, torch {facts.torch or 'none'}"

    @property
    def sources(self) -> str:
        """Identity of what of this project runs there."""
        return hash_parts(tuple(list_sources(PACKAGE)))

    def why_not(self, *, at_build: bool) -> str:
        """Why this machine cannot run the target's tasks; empty where it can.

        At build it needs no GPU, but the same kind of CPU.
        """
        same_machine = self.target.machine in ("", self.facts.machine)
        return "" if at_build and same_machine else why_not_here(self.target, self.facts)

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
        variables = self.environment.variables
        blank = plan_blank(self.target, self.facts, variables, seed=self.seed, tool=TOOL, commit=read_commit())
        composed = any(row.id == task.cell for row in self.catalog.compositions)
        plan = plan_smoke if task.code != PROBE else plan_compositions if composed else plan_parity
        order = replace(plan(self.catalog, blank, [task.cell])[0], environment=self.environment.identity)
        cell = Cell(self.environment, order, logs, limit_s)
        return read_receipt_answer(cell.run(self.scratch / f"cell-{task.id}", self.processes))

    def _run_task(self, task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        order = {"task": task.id, "code": task.code, "library": task.library, "settings": dict(task.settings)}
        answered = self._ask({**order, "seed": self.seed}, logs / f"{task.id}.log", limit_s)
        if isinstance(answered, Answer):
            return answered
        return Answer(
            compiled=tuple(
                JitCompile(**one.model_dump(exclude={"cached"})) for one in answered.compiled if not one.cached
            ),
            hits=Counter(one.library for one in answered.compiled if one.cached),
            failure=answered.failure,
            missing=answered.missing,
            unwatched=tuple(f"{library}: {why}" for library, why in answered.unwatched.items()),
            notes=answered.notes,
            seconds=answered.seconds,
        )

    def _ask(self, order: Mapping[str, Any], log: Path, limit_s: float) -> _Answered | Answer:
        """Start a task of `megacpp_validate.jit`, and read its last line; an `Answer` says why there is none."""
        # A working folder of its own: what a vendor library drops there is nobody's evidence.
        folder = Path(tempfile.mkdtemp(prefix=f"{order['task']}-", dir=self.scratch))
        given = folder / "order"
        given.write_text(json.dumps({**order, "arch": self.architecture, "root": str(self.root)}), encoding="utf-8")
        call = self.environment.call(_MODULE, shares=(self.root,))
        ended = self.processes.run(call, folder=folder, limit_s=limit_s, log=log, given=given, ask_where=True)
        for line in reversed(ended.words.splitlines()):
            with suppress(ValidationError):
                answered = _Answered.model_validate_json(line)
                if answered.task == order["task"]:
                    return answered
        words = " | ".join(filter(None, map(str.strip, ended.words.splitlines())))[-_LAST_WORDS:]
        how = ended.how if ended.code != 0 else "it ended without an answer"
        return Answer(failure=f"{how}; its last output: {words or 'nothing'}", seconds=ended.seconds)

    def read_seen(self) -> StackSeen:
        """What the caches depend on, as a process in the stack reports it.

        Raises:
            NoEnvironment: it reports nothing.
        """
        order = {"task": _STACK, "code": _STACK, "library": "", "settings": {}}
        told = self._ask(order, self.scratch / f"{_STACK}.log", _STACK_LIMIT_S)
        if not isinstance(told, _Answered) or told.failure or told.missing:
            raise NoEnvironment(
                f"{self.environment.shown} does not report what it is made of: {told.failure or told.missing}. Likely "
                "cause: a damaged package, or it finds another megacpp-validate first. Next step: `nox -s doctor`."
            )
        gpu = self.facts.gpu
        versions = {**told.versions, "gpu": gpu.name if gpu else "", "driver": gpu.driver if gpu else ""}
        return StackSeen(
            machine=self.facts.machine,
            versions={name: version for name, version in sorted(versions.items()) if version},
            compiler=told.compiler.model_copy(update={"mode": ""}),  # the manifest holds the requested one itself
            include_paths=told.include_paths,
        )


def require_temporary() -> Path:
    """The folder for temporary files.

    Raises:
        NoEnvironment: there is none.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as fault:
        raise NoEnvironment(
            f"there is no folder for temporary files: {fault.strerror or fault}. Likely cause: a read-only root, or a "
            "full disk. Next step: mount one on /tmp (`--tmpfs /tmp:exec` of `docker run`), or name one in TMPDIR."
        ) from fault


@contextmanager
def open_stack(catalog: Catalog, target: TargetRow, options: JitOptions, root: Path) -> Iterator[JitStack]:
    """The stack of an interpreter, with every cache below `root`.

    Raises:
        NoEnvironment: there is no interpreter that has torch.
    """
    architecture, mode, processes = cache_arch(target.arch), options.mode or NVCC, Processes()
    python = options.python if target.arch else find_cpu_python(options.python)
    with folder_aside(require_temporary(), "megacpp-jit-") as scratch:
        variables = {
            **os.environ,
            # One thread, as ranks have: how many there are is part of a key of TorchInductor, and would make a cache
            # that was filled by so many processes at a time cold for another number of them.
            "OMP_NUM_THREADS": "1",
            **cache_variables(root, architecture, nvrtc=mode == NVRTC),
            "MEGACPP_JIT_DRIVER_CACHE": "",  # of a process that worked on a copy itself (jit/driver_cache.py)
        }
        environment = host_interpreter(variables, python)
        facts = read_facts(environment, processes)
        require_torch(facts)
        yield JitStack(
            catalog, target, environment, processes, facts, root, architecture, mode, options.seed, scratch
        )  # fmt: skip


def run_tasks(
    tasks: Sequence[PrewarmTask], run: Callable[[PrewarmTask], Answer], jobs: int, processes: Processes
) -> dict[str, Answer]:
    """Run tasks side by side, the longest first; then, one at a time, those that train: they take whole GPUs.

    Args:
        tasks: to run.
        run: one of them, called from several threads.
        jobs: at a time; 0 for what suits: compilers take a core each, and importing torch takes one for 8 seconds.
        processes: stopped where anything is raised, an interrupt too.

    Raises:
        OSError: as `run`.
    """
    alone = [task for task in tasks if task.is_cell and task.code != PROBE]
    others = sorted((task for task in tasks if task not in alone), key=lambda task: -task.seconds)
    ended = {}
    with ThreadPoolExecutor(jobs or max(1, min(8, count_cores()))) as pool:
        try:
            futures = {pool.submit(run, task): task.id for task in others}
            for future in as_completed(futures):
                ended[futures[future]] = future.result()
            ended |= {task.id: run(task) for task in alone}
        except BaseException:
            processes.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return ended
