"""A plan against one rank, the same seed: losses and gradient norms step by step, within what rounding does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ...evidence.receipt import Check, Part
from ..bench import Bench
from .runs import Run, Runs, open_runs
from .trajectories import (
    LOST,
    MOST,
    Reference,
    Seen,
    Trajectory,
    Twins,
    Verdict,
    compare_trajectories,
    locate_departure,
)

TWINS: Final = (2, 4, 8)  # passes that the sequences of a step are split into


def probe(bench: Bench) -> None:
    """Run the plan, the reference and its twins, and compare."""
    with open_runs(bench) as runs:
        judge_plan(bench, runs, runs.run("plan"))


def judge_plan(bench: Bench, runs: Runs, plan: Run) -> None:
    """Hold a run that has ended to one rank that is run now."""
    reference, twins = run_reference(runs)
    for run in (plan, reference, *twins):
        check_ended(bench, run)
    if all(run.done for run in (plan, reference, *twins)):
        check_follows(bench, "reproduces", plan, plan.trajectory, reference.trajectory, twins)
        if not all(check.passed for check in bench.checks):
            tell_where(bench, plan, reference, twins)


def run_reference(runs: Runs) -> tuple[Run, list[Run]]:
    """One rank; and its twins without the loss that balances experts, the one in a single pass first."""
    alone = {"world": 1, "data": 1, "expert_parallel": 1, "tensor_parallel": 1, "sequence_parallel": False}
    given = runs.bench.setting("twins")
    splits = [split for split in map(int, given.split()) if runs.size.batch % split == 0] if given else list(TWINS)
    changes = {**runs.changes, "aux_coefficient": 0.0}
    asked: dict[str, dict[str, Any]] = {"one-rank": {"plan": {**alone, "accumulate": runs.plan.accumulate}}}
    for split in (1, *splits):
        asked[f"twin-{split}"] = {"plan": {**alone, "accumulate": split}, "changes": changes}
    reference, *twins = runs.run_beside(asked)
    return reference, twins


def check_ended(bench: Bench, run: Run) -> None:
    """The run ended well on every rank."""
    world = run.order.read_plan().world
    bench.check(f"{run.name}.ended", run.done, f"{world} rank(s), {run.ending}" if run.done else run.words)


def check_follows(
    bench: Bench, name: str, run: Run, seen: Trajectory, reference: Trajectory, twins: Sequence[Run]
) -> None:
    """A check on losses and one on gradient norms."""
    first, *others = (twin.trajectory for twin in twins)
    verdicts = compare_trajectories(
        seen, reference, Twins(first, tuple(others)), precision=run.order.precision, depth=run.depth
    )
    bench.checks.extend(check_of(name, verdict) for verdict in verdicts)


def tell_where(bench: Bench, plan: Run, reference: Run, twins: Sequence[Run]) -> None:
    """Name the first step and module that are off, from the norms of streams and of gradients: a check that failed."""
    first, *others = (seen_of(twin) for twin in twins)
    known = Reference(seen_of(reference), (first, *others), plan.order.precision, plan.depth)
    step, module = locate_departure(seen_of(plan), known)
    said = f"step {step}, {module or 'no single module'}" if step >= 0 else "no stream and no gradient of a part is off"
    bench.check("reproduces.first-off", step < 0, said)


def seen_of(run: Run) -> Seen:
    """What rank 0 left of a run that was audited."""
    receipt, trajectory = run.receipts[0], run.trajectory
    streams, parts = receipt["stream_norms"] or {}, receipt["part_norms"] or {}
    return Seen(trajectory.losses, trajectory.grad_norms, streams, parts)


def check_of(name: str, verdict: Verdict) -> Check:
    """A verdict as a check with its bounds."""
    name = f"{name}.{verdict.quantity}"
    if verdict.fault:
        return Check(name, False, detail=verdict.fault)
    parts = [
        Part("deviation", verdict.observed, verdict.bound, verdict.follows, verdict.derivation),
        Part(
            "bound-discriminates", verdict.first, MOST, verdict.first <= MOST,
            "at step 0: a norm's gradient that is missing on one of two ranks changes the norm of all by this share",
        ),
    ]  # fmt: skip
    if verdict.quantity == "loss":
        parts.append(
            Part(
                "update-discriminates", verdict.lost, LOST, verdict.lost <= LOST,
                "least share of the change of the loss that a bound lets pass: one of two ranks that does not update",
            )
        )  # fmt: skip
    return Check(name, verdict.follows and verdict.discriminates, tuple(parts), f"worst at step {verdict.step}")
