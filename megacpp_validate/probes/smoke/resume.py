"""Kill -9 in the middle, and resume: on the same ranks with the same bits, on other ranks within rounding noise."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...training.parallel.checkpoint import LATEST
from ..bench import Bench
from .faults import find_other_bits
from .reproduce import check_follows, reference_of, run_reference
from .runs import Run, Runs, Trajectory, check_parts, have_ended, open_runs


def probe(bench: Bench) -> None:
    """Train without a break; train, kill and resume; resume on one rank."""
    every = int(bench.setting("checkpoint_every", "3"))
    with open_runs(bench) as runs:
        whole = runs.run("plan")
        saved = runs.folder / "checkpoints"
        saving = {"checkpoint_folder": str(saved), "checkpoint_every": every}
        killed = runs.run("killed", **saving, fault=f"dies:{every + 1}")  # SIGKILL, a step after the first checkpoint
        check_killed(bench, killed, runs.plan.world - 1)
        if killed.done or not (saved / LATEST).exists():
            return
        elsewhere = Path(shutil.copytree(saved, runs.folder / "checkpoints-elsewhere"))
        resumed = runs.run("resumed", **saving, resume=True)
        if have_ended(bench, whole, resumed):
            check_parts(bench, whole, resumed)
            check_same_bits(bench, whole, resumed)
            resume_elsewhere(bench, runs, whole, elsewhere)


def resume_elsewhere(bench: Bench, runs: Runs, whole: Run, saved: Path) -> None:
    """The same checkpoint on one rank: another world, the same training."""
    alone = run_reference(runs)
    other = runs.run("resumed-alone", plan=alone[0].order.plan, checkpoint_folder=str(saved), resume=True)
    if not have_ended(bench, *alone, other):
        return
    wanted, after = whole.trajectory, other.trajectory
    check_parts(bench, other)
    bench.check("other-world.continues", 0 < after.first < len(wanted.losses), f"resumed at step {after.first}")
    # Steps before the checkpoint are those of the run that wrote it; both sides then have roundings of two worlds.
    before = wanted.cut(0, after.first)
    seen = Trajectory((*before.losses, *after.losses), (*before.grad_norms, *after.grad_norms))
    check_follows(bench, "other-world", seen, reference_of([run.trajectory for run in alone], whole.order))


def check_killed(bench: Bench, run: Run, rank: int) -> None:
    """The run did not end well, and accuses the rank that was killed, and no other."""
    end = run.end
    accused = ", ".join(map(str, end.culprits)) or "none"
    said = f"killed: rank {rank}; accused: {accused}; {end.words.partition(chr(10))[0] or end.ending}"
    bench.check("killed.is-told", end.ending == "died" and end.culprits == (rank,), said)


def check_same_bits(bench: Bench, whole: Run, resumed: Run) -> None:
    """The resumed run continues at the checkpoint, and has the bits that it has without the break."""
    seen, without = resumed.trajectory, whole.trajectory
    steps = len(without.losses) - seen.first
    bench.check("same-world.continues", seen.first > 0 and steps > 0, f"resumed at step {seen.first}")
    found = find_other_bits("resume", seen, without)
    bench.check("same-world.same-bits", not found, "; ".join(one.words for one in found) or f"{steps} steps")
