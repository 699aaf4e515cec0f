"""A plan against one rank, the same seed: losses and gradient norms step by step, within what rounding does."""

from __future__ import annotations

from typing import Any

from ..bench import Bench
from .runs import Run, Runs, open_runs
from .trajectories import TWINS, Reference, Trajectory, compare_trajectories, depth_of, locate_departure


def probe(bench: Bench) -> None:
    """Run the plan, the reference and its twins, and compare."""
    with open_runs(bench) as runs:
        plan = runs.run("plan")
        alone = run_reference(runs)
        if have_ended(bench, plan, *alone):
            check_follows(bench, "reproduces", plan.trajectory, reference_of(alone))


def run_reference(runs: Runs) -> list[Run]:
    """One rank; then its twins without the loss that balances experts, the one in a single pass first."""
    alone = {"world": 1, "data": 1, "expert_parallel": 1, "tensor_parallel": 1, "sequence_parallel": False}
    given = runs.bench.setting("twins")
    splits = [split for split in map(int, given.split()) if runs.size.batch % split == 0] if given else TWINS
    changes = {**runs.changes, "aux_coefficient": 0.0}
    asked: dict[str, dict[str, Any]] = {"one-rank": {"plan": {**alone, "accumulate": runs.plan.accumulate}}}
    for split in (1, *splits):
        asked[f"twin-{split}"] = {"plan": {**alone, "accumulate": split}, "changes": changes}
    return runs.run_beside(asked)


def reference_of(runs: list[Run]) -> Reference:
    """Of `run_reference`, where all ended well."""
    one, *twins = runs
    return Reference(one.trajectory, tuple(twin.trajectory for twin in twins), one.order.precision, depth_of(one.size))


def have_ended(bench: Bench, *runs: Run) -> bool:
    """Whether all of these runs ended well on every rank; a check each."""
    for run in runs:
        world = run.order.read_plan().world
        bench.check(f"{run.name}.ended", run.done, f"{world} rank(s), {run.ending}" if run.done else run.words)
    return all(run.done for run in runs)


def check_follows(bench: Bench, name: str, seen: Trajectory, reference: Reference) -> None:
    """A check on losses and one on gradient norms; a third one that fails names the first step and module off."""
    checks = [verdict.as_check(name) for verdict in compare_trajectories(seen, reference)]
    bench.checks += checks
    if all(check.passed for check in checks) or not seen.streams:
        return
    step, module = locate_departure(seen, reference)
    said = f"step {step}, {module or 'no single module'}" if step >= 0 else "no stream and no gradient of a part is off"
    bench.check(f"{name}.first-off", step < 0, said)
