"""What became of the JIT caches: compiled ahead of time (`prewarm`), found again without a compile (`jit_verify`)."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from ..errors import Exit, exit_for
from ..evidence.values import Frozen


class JitCompile(Frozen):
    """One kernel that was compiled.

    Attributes:
        library: whose compiler: "triton", "inductor", "cute", "fa4", "deep_gemm".
        kernel: its name there.
        shape: what it was compiled for: sizes, dtypes, whatever tells it from another of its name.
        seconds: that it took; 0 where nobody measured.
        looked_for: key or file that was not in the cache; empty where nobody knows.
    """

    library: str
    kernel: str
    shape: str = ""
    seconds: float = Field(default=0.0, ge=0.0)
    looked_for: str = ""


class JitTaskState(StrEnum):
    """What became of a task of prewarm."""

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


class JitCacheSize(Frozen):
    """Files and bytes of one library's cache."""

    library: str
    files: int
    bytes: int


class JitVerdict(StrEnum):
    """What a task or a cell made of a sealed cache. Only `WARM` is good."""

    WARM = "warm"  # ran, and nothing was compiled
    COMPILED = "compiled"
    SILENT = "silent"  # ran, and asked no cache for what it compiled when it was prewarmed: it took another path
    FAILED = "failed"  # did not come to an end, or came to a bad one
    NOT_RUN = "not-run"


class JitCause(StrEnum):
    """Why a sealed cache did not have a kernel, as its manifest tells it."""

    NO_TASK = "no-task"  # it was sealed without this task
    OTHER_SETTINGS = "other-settings"  # the task had others then
    OTHER_KEY = "other-key"  # the same task: a shape, a variable or a source file is another one


class JitVerifyRow(Frozen):
    """One task or cell on the sealed cache.

    Attributes:
        compiled: what was not found.
        unkept: what this release compiles in every process, whatever is in a cache (matrix/prewarm.toml); it closes
            nothing.
        hits: kernels that were found; None where the cell does not count them.
        known: shapes of each compiled kernel that the cache does have: "KERNEL: SHAPE; SHAPE".
        cause: why it was not found, where anything was compiled.
        reason: why it failed, or did not run.
        seconds: of its process.
    """

    task: str
    verdict: JitVerdict
    cause: JitCause | None = None
    compiled: tuple[JitCompile, ...] = ()
    unkept: tuple[JitCompile, ...] = ()
    hits: int | None = None
    known: tuple[str, ...] = ()
    reason: str = ""
    seconds: float = 0.0


class StackDifference(Frozen):
    """One thing in which a cache and a stack differ.

    Attributes:
        what: which: "torch", "include path".
        recorded: in the manifest.
        observed: here.
        matters: to which caches.
    """

    what: str
    recorded: str
    observed: str
    matters: str = ""


class JitVerifyResult(Frozen):
    """Whether a sealed cache is warm for what runs on it; also the file that is kept as evidence of it.

    Attributes:
        manifest: hash of the manifest that was verified, "sha256:...".
        mode: of DeepGEMM's compiler.
        ranks: most devices that a cell took.
        files, bytes: of the sealed cache, each of whose hashes was right.
        differences: of cache and stack; where there is one, nothing was run.
        rows: tasks, then cells.
        left_out: tasks of the target that were not asked for, and why not: "ID: reason"; nothing is said of them.
        missing: ids of tasks that the cache does not have.
        unreported: files of compiled kernels that appeared and that no process told of.
        unproven: what appeared where no process could watch, in sentences.
        unwatched: what compiles in memory, where no cache can be warm: "LIBRARY: why".
        notes: of the processes: one that was waited for in vain, a folder that could not be written.
        opened_s: seconds to check and to copy the cache into a folder that can be written.
    """

    schema_id: Literal["megacpp-validate/jit-verify/1"] = "megacpp-validate/jit-verify/1"
    tool: str
    commit: str = ""
    target: str
    architecture: str
    folder: str
    mode: str
    manifest: str
    interpreter: str
    image_digest: str = ""
    lock_hash: str = ""
    gpu: str = ""
    ranks: int = Field(default=1, ge=1)
    files: int = Field(default=0, ge=0)
    bytes: int = Field(default=0, ge=0)
    differences: tuple[StackDifference, ...] = ()
    rows: tuple[JitVerifyRow, ...] = ()
    left_out: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unreported: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    unwatched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    started: str = ""
    opened_s: float = Field(default=0.0, ge=0.0)
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def exit(self) -> Exit:
        """Closed where anything was compiled, came to a bad end, or is of another stack.

        Evidence is missing where something did not run, or could not be watched: that is not verified.
        """
        verdicts = {row.verdict for row in self.rows}
        bad = {JitVerdict.COMPILED, JitVerdict.SILENT, JitVerdict.FAILED}
        return exit_for(
            breaks=bool(self.differences or self.unreported or verdicts & bad),
            lacks=not verdicts or bool(self.unproven) or JitVerdict.NOT_RUN in verdicts,
        )


class PrewarmResult(Frozen):
    """What a prewarm came to.

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
        verdict: of the sealed cache; None where it was not sealed, or not verified.
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
    verdict: JitVerifyResult | None = None
    swept: int = 0
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def exit(self) -> Exit:
        """Closed where a task failed, evidence missing where one did not run; else that of the verdict."""
        states = {row.state for row in self.rows}
        if not states or states & {JitTaskState.FAILED, JitTaskState.NOT_RUN} or self.verdict is None:
            return exit_for(breaks=JitTaskState.FAILED in states, lacks=not states or JitTaskState.NOT_RUN in states)
        return self.verdict.exit


class JitCacheResult(Frozen):
    """What was done with a sealed cache.

    Attributes:
        deed: "check", "seal", "unseal", "export", "import", "open".
        folder: ROOT/ARCH that it was done to, or that it made.
        manifest: hash of the manifest.
        stack: versions that the cache is for.
        missing: tasks that are not in it.
        extra: files that appeared since it was sealed.
        sealed: whether nobody writes there by accident; of "check", which reads what is not sealed, too.
        in_place: whether Triton finds its kernels there without a working copy.
        archive, archive_hash, archive_bytes: of an export.
        kept: an import found the same cache there already.
        differences: of cache and stack; of an import that was refused by them.
        variables: that put every cache there, of "open".
    """

    schema_id: Literal["megacpp-validate/jit-cache/1"] = "megacpp-validate/jit-cache/1"
    tool: str
    deed: str
    folder: str
    architecture: str
    manifest: str = ""
    mode: str = ""
    made: str = ""
    stack: dict[str, str] = Field(default_factory=dict)
    caches: tuple[JitCacheSize, ...] = ()
    tasks: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    sealed: bool = True
    in_place: bool = True
    archive: str = ""
    archive_hash: str = ""
    archive_bytes: int = 0
    kept: bool = False
    differences: tuple[StackDifference, ...] = ()
    variables: dict[str, str] = Field(default_factory=dict)
    seconds: float = Field(default=0.0, ge=0.0)

    @property
    def exit(self) -> Exit:
        """Closed where the cache is of another stack."""
        return exit_for(breaks=bool(self.differences))
