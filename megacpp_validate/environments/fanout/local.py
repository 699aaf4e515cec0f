"""Jobs on this machine: cells side by side, each with GPUs of its own where there are any.

They end with this tool, whatever ends it: a second start runs again what was on its way.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ...evidence.receipt import Receipt
from ...process import Processes
from ..cell import Cell
from ..container import ContainerEnvironment
from ..environment import Environment
from ..interpreter import InterpreterEnvironment
from .faults import claim
from .launcher import Phase, Seen, Try, Work

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_LIMIT_S: Final = 30.0


def read_gpus(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that a process started here would see, as CUDA_VISIBLE_DEVICES names them; empty where there is none."""
    if VISIBLE in variables:
        return tuple(name.strip() for name in variables[VISIBLE].split(",") if name.strip() not in ("", "-1"))
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True, env=variables)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(told.stdout.split())


@dataclass
class _Running:
    future: Future[Receipt]
    gpus: tuple[str, ...]


@dataclass
class LocalLauncher:
    """This machine.

    Attributes:
        jobs: at a time.
        gpus: by name; each belongs to one cell at a time.
    """

    jobs: int
    gpus: tuple[str, ...] = ()
    _processes: Processes = field(default_factory=Processes)
    _running: dict[str, _Running] = field(default_factory=dict)
    _pool: ThreadPoolExecutor | None = None
    _scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def survives(self) -> bool:
        """They do not: see `environments.guard`."""
        return False

    def takes(self, work: Work, running: int) -> bool:
        """Whether there is room beside those; what wants more GPUs than there are runs alone, and says so itself."""
        if running == 0:
            return True
        return running < self.jobs and work.gpus <= len(self._free())

    def submit(self, work: Work, attempt: Try) -> str:
        """Start it in a thread of its own."""
        attempt.folder.mkdir(parents=True, exist_ok=True)
        claim(attempt.folder)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=max(1, self.jobs))
            self._scratch = tempfile.TemporaryDirectory(prefix="megacpp-")
        gpus = self._free()[: work.gpus]
        environment = _on_gpus(work.environment, gpus) if work.gpus else work.environment
        cell = Cell(environment, work.order, attempt.folder, work.limit_s)
        place = Path(self._scratch.name if self._scratch else os.devnull, attempt.name)
        future = self._pool.submit(cell.run, place, self._processes)
        self._running[attempt.name] = _Running(future, gpus)
        return str(os.getpid())

    def look(self, attempts: Sequence[Try]) -> dict[str, Seen]:
        """What became of them."""
        return {attempt.name: self._look(attempt) for attempt in attempts}

    def cancel(self, attempts: Sequence[Try]) -> None:
        """All of them end at once; nothing is started afterwards."""
        if any(attempt.name in self._running for attempt in attempts):
            self._processes.stop()

    def close(self) -> None:
        """Wait for the threads: their processes have ended, or were stopped."""
        if self._pool is not None:
            self._processes.stop()
            self._pool.shutdown(wait=True, cancel_futures=True)
        if self._scratch is not None:
            self._scratch.cleanup()

    def _free(self) -> tuple[str, ...]:
        taken = {gpu for one in self._running.values() if not one.future.done() for gpu in one.gpus}
        return tuple(gpu for gpu in self.gpus if gpu not in taken)

    def _look(self, attempt: Try) -> Seen:
        one = self._running.get(attempt.name)
        if one is None:
            return Seen(Phase.GONE, because="the tool that had started it has ended")
        if not one.future.done():
            return Seen(Phase.RUNS)
        fault = None if one.future.cancelled() else one.future.exception()
        return Seen(Phase.OVER, because=f"{type(fault).__name__}: {fault}" if fault else "")


def _on_gpus(environment: Environment, gpus: tuple[str, ...]) -> Environment:
    """The environment with these GPUs alone; its identity is taken before, since any of them would do."""
    match environment:
        case InterpreterEnvironment() | ContainerEnvironment():
            return replace(environment, variables={**environment.variables, VISIBLE: ",".join(gpus)})
        case _:
            return environment
