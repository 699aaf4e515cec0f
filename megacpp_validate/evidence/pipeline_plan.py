"""What a pipeline comes to: jobs of nox sessions, where each runs, and what is left out with why."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .values import Frozen


class SessionCall(Frozen):
    """One nox session and its arguments."""

    session: str
    arguments: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """As the shell would be told, without the shell."""
        return ("./nox", "-s", self.session, *(("--", *self.arguments) if self.arguments else ()))


class PlannedJob(Frozen):
    """One job.

    Attributes:
        id: of its own: that of its row, and what tells it from others of that row.
        job: the row of the matrix that it comes from.
        runner: the kind of machine.
        github, gitlab: by which labels or tags that machine is asked for.
        needs: ids of jobs that must have ended well before it.
        stage: how many jobs stand before it at the most, counted from 0.
        minutes: after which it is ended.
        commands: up to the first that is not open.
        after: run then, whatever came of them: what shows an answer is wanted most where it is no pass. On GitLab their
            own exit codes count for nothing.
        artifacts: files and folders that are kept, relative to the checkout.
        keeps: those that go from one run to the next.
    """

    id: str
    job: str
    runner: str
    github: tuple[str, ...]
    gitlab: tuple[str, ...]
    needs: tuple[str, ...] = ()
    stage: int = Field(default=0, ge=0)
    minutes: int = Field(gt=0)
    commands: tuple[SessionCall, ...]
    after: tuple[SessionCall, ...] = ()
    artifacts: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()


class LeftOut(Frozen):
    """A job that is not run, and why. It is no pass; `gitlab`: tags of a machine that is there, and says so."""

    id: str
    job: str
    outcome: Literal["not-run"] = "not-run"
    reason: str
    gitlab: tuple[str, ...] = ()


class PipelinePlan(Frozen):
    """One pipeline, planned.

    Attributes:
        pipeline: its id.
        minutes: the aim for the longest way through it.
        jobs: in the order in which they may run one after the other.
    """

    schema_id: Literal["megacpp-validate/pipeline-plan/1"] = "megacpp-validate/pipeline-plan/1"
    tool: str
    pipeline: str
    minutes: int
    jobs: tuple[PlannedJob, ...]
    left_out: tuple[LeftOut, ...] = ()
