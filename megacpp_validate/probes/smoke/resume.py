"""Kill -9 in the middle, and resume: on the same ranks with the same bits, on other ranks within what rounding does."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...training.parallel.checkpoint import LATEST
from ...training.parallel.ranks import LAUNCHER
from ..bench import Bench
from .reproduce import check_follows, have_ended, reference_of, run_reference
from .runs import Run, Runs, open_runs
from .trajectories import Trajectory

_LOOK_EVERY: Final = 0.01  # seconds
_LAUNCHER: Final = f"{LAUNCHER}=".encode()


def probe(bench: Bench) -> None:
    """Train without a break; train, kill and resume; resume on one rank."""
    every = int(bench.setting("checkpoint_every", "3"))
    with open_runs(bench) as runs:
        if runs.launcher == "slurm":
            bench.cannot_run(
                f"the rank to kill is looked for among the processes of this one, and {runs.launcher} starts ranks "
                "elsewhere. Next step: run this cell with --launcher local."
            )
        whole = runs.run("plan")
        saved = runs.folder / "checkpoints"
        saving = {"checkpoint_folder": str(saved), "checkpoint_every": every}
        last = runs.plan.world - 1
        with killing(saved / LATEST, last) as killer:
            killed = runs.run("killed", **saving)
        check_killed(bench, killed, last if killer.killed else None)
        if killed.done or not (saved / LATEST).exists():
            return
        elsewhere = Path(shutil.copytree(saved, runs.folder / "checkpoints-elsewhere"))
        resumed = runs.run("resumed", **saving, resume=True)
        if have_ended(bench, whole, resumed):
            check_same_bits(bench, whole, resumed)
            resume_elsewhere(bench, runs, whole, elsewhere)


def resume_elsewhere(bench: Bench, runs: Runs, whole: Run, saved: Path) -> None:
    """The same checkpoint on one rank: another world, the same training."""
    alone = run_reference(runs)
    other = runs.run("resumed-alone", plan=alone[0].order.plan, checkpoint_folder=str(saved), resume=True)
    if not have_ended(bench, *alone, other):
        return
    wanted, after = whole.trajectory, other.trajectory
    bench.check("other-world.continues", 0 < after.first < len(wanted.losses), f"it took up step {after.first}")
    # Steps before the checkpoint are those of the run that wrote it; both sides then have roundings of two worlds.
    before = wanted.cut(0, after.first)
    seen = Trajectory((*before.losses, *after.losses), (*before.grad_norms, *after.grad_norms))
    check_follows(bench, "other-world", seen, reference_of(alone))


def check_killed(bench: Bench, run: Run, rank: int | None) -> None:
    """The run did not end well, and accuses the rank that was killed (None: none could be), and no other."""
    accused = ", ".join(map(str, run.culprits)) or "none"
    said = f"killed: rank {rank}; accused: {accused}; {run.words.partition(chr(10))[0] or run.ending}"
    told = rank is not None and run.ending == "died" and run.culprits == (rank,)
    bench.check("killed.is-told", told, "no rank could be killed" if rank is None else said)


def check_same_bits(bench: Bench, whole: Run, resumed: Run) -> None:
    """The resumed run goes on where the checkpoint was, and every loss has the bits that it has without the break."""
    seen, whole_run = resumed.trajectory, whole.trajectory
    first = seen.first
    bench.check("same-world.continues", 0 < first < len(whole_run.losses), f"it took up step {first}")
    for name, values in seen.series.items():
        wanted = whole_run.series[name][first:]
        differ = [first + at for at, (one, other) in enumerate(zip(values, wanted, strict=False)) if one != other]
        same = len(values) == len(wanted) > 0 and not differ
        said = f"{len(values)} of {len(wanted)} steps; not the same bits: {differ[:3] or 'none'}"
        bench.check(f"same-world.{name}", same, said)


class killing:  # noqa: N801 - a context manager, used as a verb
    """While this is open, the process of a rank is killed with SIGKILL as soon as a file is there.

    Args:
        sign: the file: the first checkpoint is whole.
        rank: to kill.

    Attributes:
        killed: whether it was.
    """

    def __init__(self, sign: Path, rank: int, kill: Callable[[int, int], None] = os.kill) -> None:
        self.killed = False
        self._sign, self._rank, self._kill = sign, rank, kill
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> killing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            if self._sign.exists():
                for process in find_rank(self._rank, os.getpid()):
                    with suppress(ProcessLookupError):
                        self._kill(process, signal.SIGKILL)
                        self.killed = True
                return


def find_rank(rank: int, launcher: int) -> list[int]:
    """Processes of a rank that this launcher started, by the variables that it gave them."""
    wanted = {_LAUNCHER + str(launcher).encode(), f"RANK={rank}".encode()}
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted <= set(place.read_bytes().split(b"\0")):
                found.append(int(place.parent.name))
    return found
