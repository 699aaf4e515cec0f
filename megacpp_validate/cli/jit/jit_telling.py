"""How the verbs of the JIT caches tell a result: as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ...catalog.prewarm import PrewarmTask
from ...jitcache.prewarm import Answer
from ...jitcache.result import JitCacheResult, JitVerifyResult, PrewarmResult
from ...report.terminal.jit import render_prewarm, render_verify
from ...report.terminal.jit_cache import render_cache
from ..app import Format
from ..output import write_told
from ..progress import Progress

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
class TaskProgress(Progress):
    """What becomes of tasks.

    Attributes:
        total: tasks of the run.
    """

    total: int = 0
    _ended: int = 0
    _running: dict[str, None] = field(default_factory=dict)

    def __call__(self, task: PrewarmTask, answer: Answer | None) -> None:
        """Tell that a task starts (None), or has ended."""
        if answer is None:
            self._running[task.id] = None
        else:
            self._ended += 1
            self._running.pop(task.id, None)
            said = f"{len(answer.compiled)} compiled"
            word = "failed" if answer.failure else "not run" if answer.missing else said
            self.say(f"[{self._ended}/{self.total}] {word:12} {task.id} ({answer.seconds:.1f} s)")
        self.show(f"[{self._ended}/{self.total}] ", self._running)
