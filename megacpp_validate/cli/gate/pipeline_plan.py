"""A pipeline, planned: which jobs, where, in what order; what has no machine is left out with the reason. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from ...catalog.pipelines import Call, Pipelines
from ...evidence.pipeline_plan import LeftOut, PipelinePlan, PlannedJob, SessionCall

Facts = Mapping[str, Sequence[Mapping[str, str]]]  # `each` -> one mapping of names to values a job


class UnknownPipeline(ValueError):
    """There is no such pipeline; the text names those that there are."""


def plan_pipeline(
    pipelines: Pipelines, name: str, facts: Facts, runners: Collection[str] = (), *, tool: str
) -> PipelinePlan:
    """The jobs of a pipeline.

    Args:
        pipelines: the matrix.
        name: id of the pipeline.
        facts: what the rows of each kind are.
        runners: ids of machines that are there beside those that are hosted.
        tool: name and version of this tool, for the record.

    Raises:
        UnknownPipeline: no such pipeline, or no such runner.
    """
    row = next((row for row in pipelines.pipelines if row.id == name), None)
    if row is None:
        names = ", ".join(row.id for row in pipelines.pipelines)
        raise UnknownPipeline(f"there is no pipeline {name!r}. Next step: choose one of {names}.")
    known = {runner.id: runner for runner in pipelines.runners}
    if unknown := sorted(set(runners) - known.keys()):
        raise UnknownPipeline(
            f"there is no runner {', '.join(map(repr, unknown))}. Next step: choose from {', '.join(known)}, which are "
            "the rows of matrix/pipelines.toml."
        )
    there = next((tuple(runner.gitlab) for runner in pipelines.runners if runner.hosted), ())
    jobs: list[PlannedJob] = []
    left: list[LeftOut] = []
    for job in (job for job in pipelines.jobs if job.pipeline == name):
        runner = known[job.runner]
        for values in facts.get(job.each, ()) if job.each else ({},):
            own = "-".join([job.id, *values.values()])
            if not runner.hosted and runner.id not in runners:
                reason = _say_no_runner(runner.id, runner.says)
                left.append(LeftOut(id=own, job=job.id, reason=reason, gitlab=there))
                continue
            if gone := [other for other in job.needs if not any(planned.job == other for planned in jobs)]:
                reason = f"{', '.join(gone)}, which it needs, is not run"
                left.append(LeftOut(id=own, job=job.id, reason=reason, gitlab=there))
                continue
            before = [planned for planned in jobs if planned.job in job.needs]
            jobs.append(
                PlannedJob(
                    id=own,
                    job=job.id,
                    runner=runner.id,
                    github=tuple(runner.github),
                    gitlab=tuple(runner.gitlab),
                    needs=tuple(planned.id for planned in before),
                    stage=max((planned.stage + 1 for planned in before), default=0),
                    minutes=job.minutes,
                    commands=_calls(job.run, values),
                    after=_calls(job.after, values),
                    artifacts=tuple(job.artifacts),
                    keeps=tuple(job.keeps),
                )
            )
    return PipelinePlan(tool=tool, pipeline=name, minutes=row.minutes, jobs=tuple(jobs), left_out=tuple(left))


def _calls(calls: Sequence[Call], values: Mapping[str, str]) -> tuple[SessionCall, ...]:
    def put(text: str) -> str:
        return re.sub(r"\{(\w+)\}", lambda place: values[place[1]], text)

    return tuple(SessionCall(session=call.session, arguments=tuple(map(put, call.arguments))) for call in calls)


def _say_no_runner(name: str, says: str) -> str:
    return (
        f"there is no runner {name} ({says}). Next step: register one under its labels, and name it in MEGACPP_RUNNERS."
    )
