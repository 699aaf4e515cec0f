"""Tasks of prewarm side by side, each a process of its own that somebody else starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from ..catalog.prewarm import PROBE, PrewarmTask
from .prewarm import Answer

Told = Callable[[PrewarmTask, Answer | None], None]
"""Called with a task when it starts (None) and when it has ended, from one thread."""


def run_side_by_side(
    tasks: Sequence[PrewarmTask], run: Callable[[PrewarmTask], Answer], jobs: int, told: Told, stop: Callable[[], None]
) -> dict[str, Answer]:
    """Run tasks in parallel processes, the longest first; then, one at a time, those that train: they take whole GPUs.

    Args:
        tasks: to run.
        run: one of them.
        jobs: at a time.
        told: of each when it starts and when it has ended.
        stop: called where anything is raised, an interrupt too: nothing may keep running behind it.

    Raises:
        OSError: as `run`.
    """
    ended: dict[str, Answer] = {}
    alone = [task for task in tasks if task.is_cell and task.code != PROBE]
    waiting = sorted((task for task in tasks if task not in alone), key=lambda task: -task.seconds)
    running: dict[Future[Answer], PrewarmTask] = {}
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        try:
            while waiting or running or alone:
                while waiting and len(running) < jobs:
                    _start(pool, run, waiting.pop(0), running, told)
                if not waiting and not running:
                    _start(pool, run, alone.pop(0), running, told)
                over, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in over:
                    task = running.pop(future)
                    ended[task.id] = future.result()
                    told(task, ended[task.id])
        except BaseException:
            stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return ended


def _start(
    pool: ThreadPoolExecutor, run: Callable[[PrewarmTask], Answer], task: PrewarmTask,
    running: dict[Future[Answer], PrewarmTask], told: Told,
) -> None:  # fmt: skip
    told(task, None)
    running[pool.submit(run, task)] = task
