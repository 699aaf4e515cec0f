"""Words for images: what would be built, what was built, and what was proved of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...images.build_result import BuildStep, ImageBuild, ImagePlans, ImageProof, Lint, LintOutcome, Proof, Refused
from ...images.plan_result import ImagePlan
from ..marks import Mark
from ..summaries import count

GOOD: Final = Mark("✓", "-", "good", "good")
BAD: Final = Mark("✗", "X", "refused", "bad")
RISK: Final = Mark("▲", "!", "at risk", "risk")
NOT_RUN: Final = Mark("○", "?", "not run", "risk")
QUIET: Final = Mark("·", ".", "note", "quiet")

_SHORT: Final = 19  # "sha256:" and twelve digits, as engines show a digest
_SLOW_S: Final = 1.0
_HASH: Final = 12


def summarize_plans(plans: ImagePlans) -> str:
    """One sentence over everything."""
    unverified = sum(not plan.verified for plan in plans.plans)
    said = [f"{count(len(plans.plans), 'image')} can be built"]
    if plans.refused:
        said.append(f"{len({row.target for row in plans.refused})} cannot")
    if unverified:
        said.append(f"{unverified} on a base whose digest no registry has confirmed to this project yet")
    faults = sum(len(lint.faults) for lint in plans.lints if lint.outcome is LintOutcome.FAULTS)
    said.append(f"the recipe has {count(faults, 'fault')}" if faults else "no linter that ran finds a fault")
    return "; ".join(said) + "."


def say_plan(plan: ImagePlan) -> Iterator[tuple[str, str]]:
    """A label and a sentence for each thing that a build starts from."""
    yield "base", plan.reference
    if plan.pulled != plan.reference:
        yield "pulled", plan.pulled
    yield "digest", say_digest(plan)
    yield "lock", f"{plan.lock} (SHA-256 {plan.lock_hash[:_HASH]})"
    yield "steps", ", ".join(plan.steps)
    for source in plan.sources:
        name = source.upper().replace("-", "_")
        commit = plan.arguments.get(f"{name}_COMMIT", "")
        yield "source", f"{source} at {commit[:_HASH]} of {plan.arguments.get(f'{name}_REPOSITORY', '')}"


def say_digest(plan: ImagePlan) -> str:
    """Whether somebody has seen the base under its digest."""
    if plan.verified:
        return f"verified with its registry on {plan.verified}"
    return f"not verified: {plan.unverified.removeprefix('not verified: ') or 'no registry has been asked'}"


def mark_digest(plan: ImagePlan) -> Mark:
    """How that looks."""
    return GOOD if plan.verified else RISK


def group_refused(rows: tuple[Refused, ...]) -> Iterator[tuple[str, str]]:
    """Targets and why; what holds for several of them is told once."""
    targets: dict[str, list[str]] = {}
    for row in rows:
        targets.setdefault(row.why, []).append(row.target)
    for why, names in targets.items():
        yield ", ".join(dict.fromkeys(names)), why


def mark_lint(lint: Lint) -> Mark:
    """How a linter's answer looks."""
    return {LintOutcome.CLEAN: GOOD, LintOutcome.FAULTS: BAD, LintOutcome.NOT_RUN: NOT_RUN}[lint.outcome]


def say_lint(lint: Lint) -> str:
    """One line: who, of what, and how many faults."""
    match lint.outcome:
        case LintOutcome.CLEAN:
            return f"{lint.linter}: {lint.subject}: clean"
        case LintOutcome.FAULTS:
            return f"{lint.linter}: {lint.subject}: {count(len(lint.faults), 'fault')}"
        case _:
            return f"{lint.linter}: {lint.subject}: not run: {' '.join(lint.faults)}"


def say_build(build: ImageBuild) -> Iterator[tuple[str, str]]:
    """A label and a sentence for each thing that is known of an image."""
    yield "image", build.name
    yield "digest", build.reference
    yield "base", build.base
    yield "", f"verified on {build.base_verified}" if build.base_verified else "its digest is not verified yet"
    yield "lock", f"{build.lock} (SHA-256 {build.lock_hash[:_HASH]})"
    if build.revision:
        yield "commit", build.revision
    yield "engine", f"Docker Engine {build.engine}, buildx {build.buildx}, {build.platform}"
    yield "time", f"{build.seconds:.1f} s{say_steps(build.steps)}"


def say_steps(steps: tuple[BuildStep, ...]) -> str:
    """The steps that took their time, longest first."""
    slow = sorted((step for step in steps if step.seconds >= _SLOW_S), key=lambda step: -step.seconds)
    return ": " + ", ".join(f"{step.name} {step.seconds:.1f}" for step in slow) if slow else ""


def summarize_build(build: ImageBuild) -> str:
    """What to do with it."""
    where = "pushed; whoever reaches its registry pulls it by its digest" if build.pushed else "in this host's engine"
    return f"The image for {build.target} is {where}."


def mark_proof(proof: Proof) -> Mark:
    """How one proof looks."""
    return GOOD if proof.holds else BAD


def say_proof(proof: Proof) -> str:
    """One line: what was done, and what was seen."""
    return f"{proof.deed}: {proof.seen} ({proof.seconds:.1f} s)"


def summarize_proof(proof: ImageProof) -> str:
    """One sentence over everything."""
    failed = sum(not one.holds for one in proof.proofs)
    if failed:
        return f"{failed} of {count(len(proof.proofs), 'proof')} do not hold."
    return f"Every one of {count(len(proof.proofs), 'proof')} holds."
