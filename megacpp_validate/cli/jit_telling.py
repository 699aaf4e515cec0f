"""How the verbs of the JIT caches tell a result: as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.status import Status

from ..catalog_prewarm import PrewarmTask
from ..evidence.jit import JitCacheResult, JitVerifyResult, PrewarmResult
from ..jitcache.prewarm import Answer
from ..report.terminal_jit import render_prewarm, render_verify
from ..report.terminal_jit_cache import render_cache
from .app import Format, errors
from .output import write_told

JitResult = PrewarmResult | JitVerifyResult | JitCacheResult


def result_text(result: JitResult) -> str:
    """The result as JSON; the same text for the same result."""
    return result.model_dump_json(indent=2) + "\n"


def tell_jit(result: JitResult, fmt: Format, output: Path | None, *, verbose: bool = False) -> None:
    """Print a result, or write it to a file."""
    draw: Callable[[Console], None] | None = None
    if fmt is Format.TABLE:

        def draw(console: Console) -> None:
            if isinstance(result, PrewarmResult):
                render_prewarm(result, verbose=verbose, console=console)
            elif isinstance(result, JitVerifyResult):
                render_verify(result, verbose=verbose, console=console)
            else:
                render_cache(result, console=console)

    write_told(draw, lambda: result_text(result), output)


@dataclass
class TaskProgress:
    """What runs, where a person looks on; what has ended, a line each, everywhere.

    Attributes:
        total: tasks of the run.
    """

    total: int
    _ended: int = 0
    _running: dict[str, None] = field(default_factory=dict)
    _status: Status | None = None

    def __enter__(self) -> TaskProgress:
        if errors.is_terminal:
            self._status = errors.status("starting")
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, task: PrewarmTask, answer: Answer | None) -> None:
        """Tell that a task starts (None), or has ended."""
        if answer is None:
            self._running[task.id] = None
        else:
            self._ended += 1
            self._running.pop(task.id, None)
            said = f"{len(answer.compiled)} compiled"
            word = "failed" if answer.failure else "not run" if answer.missing else said
            line = f"[{self._ended}/{self.total}] {word:12} {task.id} ({answer.seconds:.1f} s)"
            errors.print(line, markup=False)
        if self._status is not None and self._running:
            self._status.update(f"[{self._ended}/{self.total}] running: {', '.join(self._running)}")
