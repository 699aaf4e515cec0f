"""The verb of pipelines: a plan told, or its jobs run here through nox."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NoReturn, assert_never

import typer
from rich.console import Console

from ...canary.dynamic.watch_result import WatchUnreadable, read_gpu_steps
from ...catalog.bridge import Catalog, matrix_folder
from ...catalog.images import read_images
from ...catalog.pipelines import read_pipelines, read_sessions
from ...evidence.pipeline_plan import PipelinePlan, PlannedJob, SessionCall
from ...report.pipeline_forms import render_github_outputs, render_gitlab_pipeline, tell_pipeline
from ...report.terminal.pipeline import render_pipeline
from ..app import TOOL, Exit, errors, foreseen, refuse
from ..output import write_told
from .pipeline_plan import Facts, UnknownPipeline, plan_pipeline
from .pipeline_verbs import PlanFormat

_GRACE_S: Final = 5.0  # that a process group has to end by itself


@dataclass(frozen=True)
class Asked:
    """The arguments."""

    name: str
    plan: bool
    facts: str
    runners: tuple[str, ...]


@foreseen({UnknownPipeline: Exit.WRONG_ARGUMENTS, WatchUnreadable: Exit.WRONG_ARGUMENTS})
def run_pipeline(catalog: Catalog, matrix: Path | None, asked: Asked, fmt: PlanFormat, output: Path | None) -> None:
    """Plan and tell, or plan and run."""
    root = (matrix or matrix_folder()).absolute().parent
    noxfile = root / "noxfile.py"
    read = read_pipelines([target.id for target in catalog.targets], matrix, read_sessions(noxfile))
    plan = plan_pipeline(read, asked.name, _find_facts(catalog, matrix, asked.facts), asked.runners, tool=TOOL)
    if asked.plan:
        _tell(plan, fmt, output)
        raise typer.Exit(Exit.OPEN)
    if not noxfile.is_file():
        refuse(
            f"there is no noxfile in {root}. Likely cause: the tool is installed and not a checkout. Next step: run it "
            "in a checkout, or with --plan.",
            Exit.WRONG_ARGUMENTS,
        )
    _run_here(plan, root)


def _find_facts(catalog: Catalog, matrix: Path | None, told: str) -> Facts:
    images = read_images({target.id: target.machine for target in catalog.targets}, matrix)
    stacks = [stack.te for stack in catalog.stacks]
    return {
        "step": [{"old": old, "new": new} for old, new in pairwise(stacks)],
        "pinned": [{"stack": catalog.pinned.id}],
        "image": [{"image": image.target} for image in images.image],
        "release": [step.model_dump() for step in read_gpu_steps(told)] if told else [],
    }


def _tell(plan: PipelinePlan, fmt: PlanFormat, output: Path | None) -> None:
    def draw(console: Console) -> None:
        render_pipeline(plan, console=console)

    write_told(draw if fmt is PlanFormat.TABLE else None, lambda: _text(plan, fmt), output)


def _text(plan: PipelinePlan, fmt: PlanFormat) -> str:
    match fmt:
        case PlanFormat.JSON | PlanFormat.TABLE:
            return plan.model_dump_json(indent=2) + "\n"
        case PlanFormat.MARKDOWN:
            return "\n".join(tell_pipeline(plan)) + "\n"
        case PlanFormat.GITHUB:
            return render_github_outputs(plan)
        case PlanFormat.GITLAB:
            return render_gitlab_pipeline(plan)
        case _:
            assert_never(fmt)


def _run_here(plan: PipelinePlan, root: Path) -> NoReturn:
    """Every job in order; one whose needs did not end well is not run, and that is no pass."""
    if not plan.jobs and not plan.left_out:
        refuse(f"{plan.pipeline} has no job. Next step: give --facts what it is to run on.", Exit.NOTHING_SELECTED)
    codes: dict[str, int] = {}
    for job in plan.jobs:
        if bad := [other for other in job.needs if codes.get(other) != Exit.OPEN]:
            errors.print(f"{job.id}: not-run, for {', '.join(bad)} did not end well", markup=False)
            codes[job.id] = Exit.EVIDENCE_MISSING
            continue
        codes[job.id] = _run_job(job, root)
        errors.print(f"{job.id}: ended with {codes[job.id]}", markup=False)
    for row in plan.left_out:
        errors.print(f"{row.id}: {row.outcome}: {row.reason}", markup=False)
        codes[row.id] = Exit.EVIDENCE_MISSING
    bad_codes = [code for code in codes.values() if code != Exit.OPEN]
    raise typer.Exit(Exit.CLOSED if Exit.CLOSED in bad_codes else next(iter(bad_codes), Exit.OPEN))


def _run_job(job: PlannedJob, root: Path) -> int:
    """Its sessions one after the other, up to the first that is not open, then what follows; its limit is for all."""
    deadline = time.monotonic() + 60.0 * job.minutes
    ended: int = Exit.OPEN
    for call, follows in [*((call, False) for call in job.commands), *((call, True) for call in job.after)]:
        if ended != Exit.OPEN and not follows:
            continue
        try:
            code = _run_call(call, root, deadline - time.monotonic())
        except subprocess.TimeoutExpired:
            errors.print(f"{job.id}: ended after {job.minutes} minutes, its limit", markup=False)
            return ended or Exit.INFRASTRUCTURE
        ended = ended or (code if code >= 0 else Exit.INFRASTRUCTURE)
    return ended


def _run_call(call: SessionCall, root: Path, limit_s: float) -> int:
    """One session in a process group of its own, which ends with this process however that is told to end.

    Raises:
        TimeoutExpired: it took longer.
    """
    command = [str(root / "nox"), *call.words[1:]]
    try:
        process = subprocess.Popen(command, cwd=root, env=_variables(os.environ), start_new_session=True)
    except OSError as fault:
        refuse(
            f"{command[0]} cannot be started: {fault.strerror or fault}. Likely cause: a checkout without it, or one "
            "whose files lost their mode. Next step: `git status`, `chmod +x nox`.",
            Exit.NO_ENVIRONMENT,
        )
    with process:
        try:
            return process.wait(max(limit_s, 0.0))
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> None:
    """Tell the whole group, which may have to tell others; end what does not listen."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        finally:  # a second interrupt waits for nobody
            os.killpg(process.pid, signal.SIGKILL)


def _variables(given: Mapping[str, str]) -> dict[str, str]:
    """Those of this process, less what nox has put there for the session that this verb runs in."""
    return {name: value for name, value in given.items() if name not in {"VIRTUAL_ENV", "NOX_CURRENT_SESSION"}}
