"""A planned pipeline as other programs take it: outputs of a GitHub step, a GitLab child pipeline, Markdown."""

from __future__ import annotations

import json
import shlex
from typing import Any, Final

from megacpp_validate.evidence.pipeline_plan import PipelinePlan, PlannedJob

from .markdown.text import escape

EVIDENCE_MISSING: Final = 4  # as exit code
STAGES: Final = ("first", "then")  # jobs of a matrix cannot wait for each other, so a workflow has two of them


def render_github_outputs(plan: PipelinePlan) -> str:
    """Lines for $GITHUB_OUTPUT: the jobs of either stage, and those left out, as one JSON list each, for `fromJSON`.

    One that is left out becomes a job that ends with the exit code of missing evidence: it is no pass.

    Raises:
        ValueError: more stages than a workflow has.
    """
    if late := [job.id for job in plan.jobs if job.stage >= len(STAGES)]:
        raise ValueError(f"{', '.join(late)}: more than {len(STAGES)} stages; the workflow in jobs.yml has no more")
    lines = []
    for number, name in enumerate(STAGES):
        rows = [_github_job(job) for job in plan.jobs if job.stage == number]
        lines.append(f"{name}={json.dumps(rows)}")
    left = [{"id": row.id, "not_run": row.reason} for row in plan.left_out]
    return "\n".join([*lines, f"left_out={json.dumps(left)}"]) + "\n"


def _github_job(job: PlannedJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "runner": list(job.github),
        "minutes": job.minutes,
        "commands": [list(call.words) for call in job.commands],
        "after": [list(call.words) for call in job.after],
        "artifacts": "\n".join(job.artifacts),
    }


def render_gitlab_pipeline(plan: PipelinePlan) -> str:
    """A child pipeline, in which what is left out fails. JSON is YAML, so no text of ours is taken for syntax."""
    jobs: dict[str, Any] = {
        job.id: {
            "stage": "test",
            "tags": list(job.gitlab),
            "timeout": f"{job.minutes} minutes",
            "needs": list(job.needs),
            "interruptible": True,
            "script": [shlex.join(call.words) for call in job.commands],
            **({"after_script": [shlex.join(call.words) for call in job.after]} if job.after else {}),
            **({"artifacts": {"when": "always", "paths": list(job.artifacts)}} if job.artifacts else {}),
        }
        for job in plan.jobs
    }
    for job in (job for job in plan.jobs if job.keeps):
        jobs[job.id]["cache"] = {"key": job.id, "paths": list(job.keeps), "when": "always"}
    for row in plan.left_out:
        said = shlex.join(["echo", f"{row.id}: {row.outcome}: {row.reason}"])
        jobs[row.id] = {"stage": "test", "tags": list(row.gitlab), "script": [said, f"exit {EVIDENCE_MISSING}"]}
    if not jobs:  # GitLab refuses a child pipeline without a job
        jobs["nothing"] = {"stage": "test", "script": ["echo nothing is planned"], "tags": []}
    return json.dumps({"workflow": {"rules": [{"when": "always"}]}, **jobs}, indent=2) + "\n"


def tell_pipeline(plan: PipelinePlan) -> list[str]:
    """Jobs, and what is left out, in Markdown."""
    lines = [
        f"## {escape(plan.pipeline)}: {len(plan.jobs)} job(s)",
        "",
        "| job | machine | limit | runs |",
        "|" + " --- |" * 4,
    ]
    for job in plan.jobs:
        runs = "; ".join(shlex.join(call.words) for call in (*job.commands, *job.after))
        lines.append(f"| {escape(job.id)} | {escape(job.runner)} | {job.minutes} min | {escape(f'`{runs}`')} |")
    lines += [f"\n{escape(row.id)}: **not run**: {escape(row.reason)}" for row in plan.left_out]
    return lines
