"""One stack and its JIT caches: what it is made of, how a task of prewarm or a cell runs in it, and what it answers."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import Field

from ..catalog.bridge import BridgeModule, Catalog, ProbeCell
from ..catalog.bridge import Target as TargetRow
from ..catalog.prewarm import PROBE, PrewarmTask
from ..environments.fleet import count_cores
from ..environments.interpreter import host_interpreter, read_facts, require_torch
from ..environments.plan import RunOptions, choose_rows, why_not_here
from ..environments.stacks import Stack, plan_cells
from ..environments.venv import cpu_interpreter
from ..errors import NoEnvironment, NothingSelected
from ..evidence.receipt import Outcome, Receipt
from ..evidence.values import Frozen, Result
from ..process import Processes
from . import layout
from .layout import DRIVER, CompilerOf, JitCompile, StackSeen

_MODULE: Final = "megacpp_validate.jit"
_STACK: Final = "stack"
_STACK_LIMIT_S: Final = 300.0  # imports torch once, on a disk that may be cold
# Libraries whose processes report what a cache had. Kernels of a graph of TorchInductor are Triton's when it is
# compiled, and the graph's when it is found.
COUNTED: Final = {
    "deep_gemm": "deep_gemm", "fa4": "fa4", "inductor": "inductor or triton", "triton": "inductor or triton",
}  # fmt: skip
_DID_NOT_RUN: Final = (Outcome.NOT_RUN, Outcome.BLOCKED)
_LEAST_FREE: Final = 2**20  # bytes; a kernel has 30 kB to 1 MB
_ROOT: Final = Path(".megacpp/jit")


@dataclass(frozen=True)
class JitOptions(RunOptions):
    """Options that prewarm and jit_verify share.

    Attributes:
        tasks: ids; all where there is none.
        root: of the caches; that of MEGACPP_JIT_ROOT where it is None.
        ranks: most devices that a cell may take.
        at_build: only what needs no GPU, as when an image is built.
        compile_only: the same on any machine, in a folder that is removed: whether every kernel compiles.
    """

    tasks: tuple[str, ...] = ()
    root: Path | None = None
    ranks: int = 1
    at_build: bool = False
    compile_only: bool = False


class JitVerdict(StrEnum):
    """How a task ended, or found a sealed cache. Only `DONE` and `WARM` are good."""

    DONE = "done"  # of prewarm: what it compiled is in the cache
    WARM = "warm"  # ran, and nothing was compiled
    COMPILED = "compiled"
    SILENT = "silent"  # ran, and used no cache for what it compiled when it was prewarmed: it took another path
    FAILED = "failed"  # did not come to an end, or came to a bad one
    NOT_RUN = "not-run"


class JitRow(Frozen):
    """One task of prewarm, or one task or cell on a sealed cache.

    Attributes:
        compiled: what was not found; what another task of prewarm had compiled before it is not among them.
        unkept: what this release compiles in every process, whatever is in a cache (matrix/prewarm.toml); it closes
            nothing.
        known: shapes of each compiled kernel that a sealed cache does have: "KERNEL: SHAPE; SHAPE".
        hits: kernels that were found.
        reason: why it failed, or did not run.
        seconds: of its process.
    """

    task: str
    verdict: JitVerdict
    compiled: tuple[JitCompile, ...] = ()
    unkept: tuple[JitCompile, ...] = ()
    known: tuple[str, ...] = ()
    hits: int = 0
    reason: str = ""
    seconds: float = 0.0


class JitResult(Result):
    """What tasks did with the caches of an architecture.

    Attributes:
        architecture: of the folder: "sm_90a"; "cpu".
        folder: ROOT/ARCH; empty where nothing is kept.
        mode: of DeepGEMM's compiler; "compile only" in earlier files.
        interpreter: of the stack, in words.
        manifest: its hash, "sha256:..."; empty where the cache is not sealed.
        rows: in the order of the matrix, tasks before cells.
        left_out: tasks of the target that did not run, and why not: "ID: reason".
    """

    target: str
    architecture: str
    folder: str
    mode: str = layout.NVCC
    interpreter: str
    manifest: str = ""
    rows: tuple[JitRow, ...] = ()
    left_out: tuple[str, ...] = ()
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def breaks(self) -> bool:
        """Whether a task failed, or a sealed cache was not warm for one."""
        bad = (JitVerdict.COMPILED, JitVerdict.SILENT, JitVerdict.FAILED)
        return any(row.verdict in bad for row in self.rows)

    @property
    def lacks(self) -> bool:
        """Whether a task did not run, or none was selected."""
        return not self.rows or any(row.verdict is JitVerdict.NOT_RUN for row in self.rows)


def find_root(root: Path | None) -> Path:
    """The root of the caches, absolute: processes start in folders of their own."""
    return (root or Path(os.environ.get(layout.ROOT_VARIABLE) or _ROOT)).absolute()


@dataclass(frozen=True)
class Selected:
    """Which of a target's tasks a run takes.

    Attributes:
        tasks: to run.
        of_target: all of them.
        left_out: the others: not named, excluded by --at-build, or for more devices than --ranks: "ID: reason".
    """

    tasks: tuple[PrewarmTask, ...]
    of_target: tuple[PrewarmTask, ...]
    left_out: tuple[str, ...]


def select_tasks(every: Sequence[PrewarmTask], target: str, options: JitOptions) -> Selected:
    """The tasks to run. A task that is named is never left out for the devices that it takes.

    A task for more devices than --ranks is left for a host that has them: it stops neither the others nor their seal.

    Raises:
        WrongArguments: a task that the target does not have, or that needs a GPU with --at-build.
        NothingSelected: there is none.
    """
    of_target = tuple(task for task in every if target in task.targets)
    possible = [task for task in of_target if not (task.gpu and (options.at_build or options.compile_only))]
    chosen = choose_rows(f"task of {target}", possible, options.tasks)
    tasks = tuple(task for task in chosen if options.tasks or task.ranks <= options.ranks)
    if not tasks:
        raise NothingSelected(
            f"no task of matrix/prewarm.toml for {target} is selected. Next step: name one, or leave --tasks out."
        )

    left_out = list[str]()
    for task in (task for task in of_target if task not in tasks):
        why = f"the task takes {task.ranks} devices. Next step: `--ranks {task.ranks}` on a host that has them"
        left_out.append(f"{task.id}: {why if task in chosen else 'excluded by --tasks, or it needs a GPU'}")
    return Selected(tasks, of_target, tuple(left_out))


class Answer(Frozen):
    """What the process of a task answered.

    Attributes:
        compiled: kernels that no cache had.
        hits: library -> kernels that a cache had.
        failure: why it did not come to a good end.
        missing: why it could not run here: no GPU, no such library. That is no failure.
        unwatched: what it compiled in memory, where there is no cache: "LIBRARY: why".
        versions, compiler, include_paths: what it is made of.
    """

    compiled: tuple[JitCompile, ...] = ()
    hits: dict[str, int] = Field(default_factory=dict)
    failure: str = ""
    missing: str = ""
    unwatched: tuple[str, ...] = ()
    seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)
    compiler: CompilerOf = CompilerOf()
    include_paths: tuple[str, ...] = ()

    @property
    def asked(self) -> tuple[str, ...]:
        """Libraries that it compiled for, or found in a cache."""
        found = {library for library, number in self.hits.items() if number}
        return tuple(sorted(found | {one.library for one in self.compiled}))


def judge_answer(task: PrewarmTask, answer: Answer, ended: JitVerdict, **fields: Any) -> JitRow:
    """The row of a task; `ended` is its verdict, and `fields` are others of the row, where it ended well."""
    verdict = JitVerdict.FAILED if answer.failure else JitVerdict.NOT_RUN if answer.missing else ended
    return JitRow(
        task=task.id, verdict=verdict, hits=sum(answer.hits.values()), reason=answer.failure or answer.missing,
        seconds=answer.seconds, **{"compiled": answer.compiled, **fields},
    )  # fmt: skip


def asked_nothing(task: PrewarmTask, answer: Answer) -> bool:
    """Whether a task neither compiled nor found anything of the library that it is there for.

    Of probes and cells nothing is known beforehand: their library is that of the cache that gains most from them, and
    another precision may not use it. The driver's cache does not report hits.
    """
    if task.is_cell or task.library == DRIVER:
        return False
    return COUNTED.get(task.library, task.library) not in {COUNTED.get(one, one) for one in answer.asked}


def require_purpose(task: PrewarmTask, answer: Answer) -> Answer:
    """The answer, as a failure where nothing was compiled ahead of time."""
    if answer.failure or answer.missing or not asked_nothing(task, answer):
        return answer
    failure = (
        f"the task compiled nothing for {task.library}, and looked for nothing in its cache. Likely cause: a variable "
        "switches compiling, or its cache, off, or the monitor does not know the release. Next step: unset the "
        "variable, or read the log."
    )
    return answer.model_copy(update={"failure": failure})


def read_receipt_answer(receipt: Receipt) -> Answer:
    """What the receipt of a cell reports of compiles."""
    jit = receipt.jit
    reason = f"{receipt.outcome.value}: {receipt.reason}" if receipt.reason else receipt.outcome.value
    return Answer(
        compiled=tuple(
            JitCompile(library=one.library, kernel=one.kernel, shape=one.shape, seconds=max(0.0, one.seconds))
            for one in jit.compiled
        ),
        hits=jit.hits,
        failure="" if receipt.outcome.is_good or receipt.outcome in _DID_NOT_RUN else reason,
        missing=reason if receipt.outcome in _DID_NOT_RUN else "",
        unwatched=tuple(f"{library}: {why}" for library, why in jit.unwatched.items()),
        seconds=receipt.seconds.get("total", 0.0),
    )


def read_answer(line: str) -> Answer:
    """The last line of a task of `megacpp_validate.jit`. Raises ValueError, KeyError, TypeError or AttributeError."""
    fields: dict[str, Any] = json.loads(line)
    kernels, unwatched, _ = fields.pop("compiled"), fields.pop("unwatched"), fields.pop("task")
    cached = [one.pop("cached") for one in kernels]
    return Answer(
        compiled=tuple(JitCompile(**one) for one, hit in zip(kernels, cached, strict=True) if not hit),
        hits=Counter(one["library"] for one, hit in zip(kernels, cached, strict=True) if hit),
        unwatched=tuple(f"{library}: {why}" for library, why in unwatched.items()),
        **fields,
    )


@dataclass(frozen=True, kw_only=True)
class JitStack(Stack):
    """A stack whose variables put every cache below one root.

    Attributes:
        processes: stops all that it started.
        root, architecture: of the caches.
        scratch: for working folders.
    """

    catalog: Catalog
    target: TargetRow
    processes: Processes
    root: Path
    architecture: str
    seed: int
    scratch: Path

    def why_not(self, options: JitOptions) -> str:
        """Why this machine cannot run the target's tasks; empty where it can.

        At build it needs no GPU, but the same kind of CPU: caches hold host code.
        """
        same_machine = self.target.machine in ("", self.facts.machine)
        can = options.compile_only or (options.at_build and same_machine)
        return "" if can else why_not_here(self.target, self.facts)

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
        if task.is_cell:
            answer = self._run_cell(task, logs, limit_s)
        else:
            order = {"task": task.id, "code": task.code, "settings": dict(task.settings)}
            answer = self._ask(order, logs / f"{task.id}.log", limit_s)
        disk = os.statvfs(self.root)
        if answer.failure and disk.f_bavail * disk.f_frsize < _LEAST_FREE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root))
        return answer

    def _run_cell(self, task: PrewarmTask, logs: Path, limit_s: float) -> Answer:
        rows: list[BridgeModule | ProbeCell] = [*self.catalog.modules, *self.catalog.compositions, *self.catalog.smoke]
        chosen = [row for row in rows if row.id == task.cell]
        (cell,) = plan_cells(self, self.target, chosen, logs, seed=self.seed, limit_s=limit_s)
        return read_receipt_answer(cell.run(self.scratch / f"cell-{task.id}", self.processes))

    def _ask(self, order: Mapping[str, Any], log: Path, limit_s: float) -> Answer:
        """Start a task of `megacpp_validate.jit`, and read its last line, or why there is none."""
        # A working folder of its own: what a vendor library drops there is nobody's evidence.
        folder = Path(tempfile.mkdtemp(prefix=f"{order['task']}-", dir=self.scratch))
        given = folder / "order"
        given.write_text(json.dumps({**order, "arch": self.architecture}), encoding="utf-8")
        call = self.environment.call(_MODULE)
        ended = self.processes.run(call, folder=folder, limit_s=limit_s, log=log, given=given, ask_where=True)
        for line in reversed(ended.words.splitlines()):
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                return read_answer(line)
        how = ended.how if ended.code != 0 else "the process ended without an answer"
        return Answer(failure=f"{how}; its last output: {ended.last_words}", seconds=ended.seconds)

    def read_seen(self) -> StackSeen:
        """What the caches depend on, as a process in the stack reports it.

        Raises:
            NoEnvironment: it reports nothing.
        """
        answered = self._ask({"task": _STACK, "code": _STACK}, self.scratch / f"{_STACK}.log", _STACK_LIMIT_S)
        if answered.failure or answered.missing:
            raise NoEnvironment(
                f"{self.environment.shown} does not report its stack: {answered.failure or answered.missing}. "
                "Likely cause: a damaged package. Next step: `nox -s doctor`."
            )
        gpu = self.facts.gpu
        versions = {**answered.versions, "gpu": gpu.name if gpu else "", "driver": gpu.driver if gpu else ""}
        return StackSeen(
            machine=self.facts.machine,
            versions={name: version for name, version in sorted(versions.items()) if version},
            compiler=answered.compiler,
            include_paths=answered.include_paths,
        )


@contextmanager
def open_stack(catalog: Catalog, target: TargetRow, options: JitOptions, root: Path) -> Iterator[JitStack]:
    """The stack of an interpreter, with every cache below `root`.

    Raises:
        NoEnvironment: there is no interpreter that has torch.
    """
    architecture, processes = layout.cache_arch(target.arch), Processes()
    variables = {
        **os.environ,
        # One thread, as ranks have: how many there are is part of a key of TorchInductor, and would make a cache
        # that was filled by so many processes at a time cold for another number of them.
        "OMP_NUM_THREADS": "1",
        **layout.cache_variables(root, architecture),
        "MEGACPP_JIT_DRIVER_CACHE": "",  # of a process that worked on a copy itself (jit/driver_cache.py)
    }
    find = host_interpreter if target.arch and not options.compile_only else cpu_interpreter
    environment = find(variables, options.python)
    facts = read_facts(environment, processes)
    require_torch(facts)
    with tempfile.TemporaryDirectory(prefix="megacpp-jit-") as scratch:
        yield JitStack(
            "", environment, facts, catalog=catalog, target=target, processes=processes, root=root,
            architecture=architecture, seed=options.seed, scratch=Path(scratch),
        )  # fmt: skip


def run_tasks(
    tasks: Sequence[PrewarmTask], run: Callable[[PrewarmTask], Answer], jobs: int, processes: Processes,
    report: Callable[[str], None],
) -> dict[str, Answer]:  # fmt: skip
    """Run tasks side by side, the longest first; then, one at a time, those that train: they take whole GPUs.

    Args:
        tasks: to run.
        run: one of them, called from several threads.
        jobs: at a time; 0 for what suits: compilers take a core each, and importing torch takes one for 8 seconds.
        processes: stopped where anything is raised, an interrupt too.
        report: called with a line a task that has ended.

    Raises:
        OSError: as `run`.
    """
    alone = [task for task in tasks if task.is_cell and task.code != PROBE]
    others = sorted((task for task in tasks if task not in alone), key=lambda task: -task.seconds)
    ended: dict[str, Answer] = {}

    def end(task: PrewarmTask, answer: Answer) -> None:
        word = "failed" if answer.failure else "not run" if answer.missing else f"{len(answer.compiled)} compiled"
        report(f"{word:12} {task.id} ({answer.seconds:.1f} s)")
        ended[task.id] = answer

    with ThreadPoolExecutor(jobs or max(1, min(8, count_cores()))) as pool:
        try:
            futures = {pool.submit(run, task): task for task in others}
            for future in as_completed(futures):
                end(futures[future], future.result())
            for task in alone:
                end(task, run(task))
        except BaseException:
            processes.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return ended
