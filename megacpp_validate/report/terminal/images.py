"""Images in a terminal: plans, builds, proofs."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ...images.build_result import ImageBuild, ImagePlans, ImageProof, LintOutcome
from ..ink import draw_sentence, plain, print_indented, print_labelled, print_marked
from ..words.images import (
    BAD,
    RISK,
    group_refused,
    mark_digest,
    mark_lint,
    mark_proof,
    say_build,
    say_lint,
    say_plan,
    say_proof,
    summarize_build,
    summarize_plans,
    summarize_proof,
)

_LABEL = 8


def render_plans(plans: ImagePlans, *, console: Console) -> None:
    """Print what would be built for each target, what is refused, and what linters say of the recipe."""
    print_indented(console, draw_sentence(summarize_plans(plans), "bold"), 0)
    for plan in plans.plans:
        console.print()
        title = Text().append(plan.target, "bold").append(f"  {plan.platform}, {plan.cache_arch}")
        print_marked(console, mark_digest(plan), title, 0)
        for label, said in say_plan(plan):
            print_long(console, label, said)
    for heading, rows, mark in (("Refused", plans.refused, BAD), ("With less, or not known", plans.warned, RISK)):
        if rows:
            console.print()
            console.print(Text(heading, "bold"))
        for targets, why in group_refused(rows):
            print_marked(console, mark, draw_sentence(f"{targets}: {why}"))
    if plans.lints:
        console.print()
        console.print(Text("The recipe", "bold"))
    for lint in plans.lints:
        print_marked(console, mark_lint(lint), draw_sentence(say_lint(lint)))
        for fault in lint.faults if lint.outcome is LintOutcome.FAULTS else ():
            print_indented(console, draw_sentence(fault, "red"), 4)


def render_build(build: ImageBuild, *, console: Console) -> None:
    """Print what is known of an image."""
    print_indented(console, draw_sentence(summarize_build(build), "bold"), 0)
    for label, said in say_build(build):
        print_long(console, label, said)


def render_proof(proof: ImageProof, *, console: Console) -> None:
    """Print what was done with an image, and whether it went as it should."""
    render_build(proof.build, console=console)
    console.print()
    print_indented(console, draw_sentence(summarize_proof(proof), "bold"), 0)
    for one in proof.proofs:
        print_marked(console, mark_proof(one), draw_sentence(say_proof(one)))


def print_long(console: Console, label: str, said: str) -> None:
    """Print a label and what belongs to it; a reference by digest is never folded, because it is copied."""
    if "@sha256:" in said or said.startswith("sha256:"):
        row = Text("    ").append(f"{plain(label):<{_LABEL}}", "dim").append(plain(said))
        console.print(row, soft_wrap=True)
    else:
        print_labelled(console, label, draw_sentence(said), _LABEL)
