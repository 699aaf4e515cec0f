"""A planned pipeline in a terminal."""

from __future__ import annotations

import shlex

from rich.console import Console
from rich.text import Text

from megacpp_validate.evidence.pipeline_plan import PipelinePlan

from ..ink import draw_sentence, plain, print_indented


def render_pipeline(plan: PipelinePlan, *, console: Console | None = None) -> None:
    """Print every job with where it runs and what it calls; then what is not run, with why."""
    console = console or Console()
    console.print(Text(f"{plain(plan.pipeline)}: {len(plan.jobs)} job(s), {plan.minutes} minutes aimed at", "bold"))
    for job in plan.jobs:
        after = f", after {', '.join(job.needs)}" if job.needs else ""
        console.print(
            Text(f"  {plain(job.id)}  on {job.runner}, {job.minutes} min at most{plain(after)}"), soft_wrap=True
        )
        for call in job.commands:
            console.print(Text(f"      {plain(shlex.join(call.words))}", "dim"), soft_wrap=True)
    for row in plan.left_out:
        console.print(Text(f"  {plain(row.id)}  {row.outcome}", "yellow"), soft_wrap=True)
        print_indented(console, draw_sentence(row.reason, "dim"), 6)
