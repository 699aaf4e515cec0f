"""The reader of `pipelines.toml`: what runs when and where, and the rules of the watch for releases."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from .file import MatrixInvalid, Row, matrix_folder, read_matrix_file

FILE: Final = "pipelines.toml"
Each = Literal["", "step", "pinned", "image", "release"]
# What `each` gives to the arguments of its jobs.
GIVES: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(),
    "step": frozenset({"old", "new"}),
    "pinned": frozenset({"stack"}),
    "image": frozenset({"image"}),
    "release": frozenset({"old", "new", "target"}),
}
# Labels that the watch puts on and takes off; ci/publish_issues.py has them too, for it imports nothing of ours.
STATES: Final = frozenset({"breaks", "at-risk", "clean", "no-evidence", "withdrawn"})
STAGES: Final = 2  # that .github/workflows/jobs.yml has: jobs of a matrix cannot wait for each other
_PLACE: Final = re.compile(r"\{(\w*)\}")

Id = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Words = Annotated[str, Field(min_length=1)]
# Labels and paths end up in files of other programs: no quote, no blank, no expression, and no way out of the checkout.
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Place = Annotated[str, Field(pattern=r"^\.?\w[\w.-]*(/\.?\w[\w.-]*)*/?$")]
Argument = Annotated[str, Field(pattern=r"^[A-Za-z0-9._/={},:@+-]+$")]


class Runner(Row):
    """A kind of machine.

    Attributes:
        says: what it must have.
        github, gitlab: the labels and tags by which it is asked for.
        hosted: it is there without anybody's doing.
    """

    id: Id
    says: Words
    github: list[Label] = Field(min_length=1)
    gitlab: list[Label] = Field(min_length=1)
    hosted: bool


class Action(Row):
    """An action of others: its tag, the commit that the tag named, and who says so."""

    id: str = Field(pattern=r"^[a-z0-9-]+/[a-z0-9-]+$")
    tag: str = Field(pattern=r"^v\d+\.\d+\.\d+$")
    sha: str = Field(pattern=r"^[0-9a-f]{40}$")
    verified: str = Field(pattern=r"^(\d{4}-\d\d-\d\d)?$")
    seen: Words


class TeWatch(Row):
    """The rules of the watch.

    Attributes:
        distribution: whose releases.
        prereleases: whether they are judged, too.
        tiers: of the canary, that run at once.
        gpu_targets: the target whose runner takes the dynamic tier: one, for a release has one verdict of it.
        labels: of every issue; by the first one it is found again, so it is no word for how a release stands.
    """

    distribution: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    prereleases: bool
    tiers: list[Literal["static", "firewall"]] = Field(min_length=1)
    gpu_targets: list[Id]
    labels: list[Label] = Field(min_length=1)


class Pipeline(Row):
    """What belongs together; `cron` in UTC where it runs by the clock, `minutes` the aim for the whole."""

    id: Id
    says: Words
    when: Literal["change", "schedule", "tag", "facts"]
    cron: str = Field(default="", pattern=r"^(\d+ \d+ (\*|\d+) (\*|\d+) (\*|[0-6]))?$")
    minutes: int = Field(gt=0)


class Call(Row):
    """A nox session and its arguments, in which {names} stand for what `each` gives."""

    session: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    arguments: list[Argument] = Field(default_factory=list)


class Job(Row):
    """Sessions that run on one machine, one after the other; see `evidence.pipeline_plan.PlannedJob`."""

    id: Id
    pipeline: str
    runner: str
    minutes: int = Field(gt=0, le=360)
    needs: list[str] = Field(default_factory=list)
    each: Each = ""
    run: list[Call] = Field(min_length=1)
    after: list[Call] = Field(default_factory=list)
    artifacts: list[Place] = Field(default_factory=list)
    keeps: list[Place] = Field(default_factory=list)


class _File(Row):
    runner: list[Runner] = Field(min_length=1)
    action: list[Action] = Field(min_length=1)
    te_watch: TeWatch
    pipeline: list[Pipeline] = Field(min_length=1)
    job: list[Job] = Field(min_length=1)


@dataclass(frozen=True)
class Pipelines:
    """The file; jobs in an order in which each stands after those that it needs."""

    runners: tuple[Runner, ...]
    actions: tuple[Action, ...]
    te_watch: TeWatch
    pipelines: tuple[Pipeline, ...]
    jobs: tuple[Job, ...]


def read_sessions(noxfile: Path) -> frozenset[str]:
    """Names of the sessions in a noxfile, read and not run; none where there is no such file.

    Raises:
        MatrixInvalid: it is no Python.
    """
    if not noxfile.is_file():
        return frozenset()
    try:
        body = ast.parse(noxfile.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError, RecursionError) as fault:
        raise MatrixInvalid([f"{noxfile.name} is no Python that can be read: {fault}"]) from fault
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return frozenset(
        node.name for node in functions if any("nox.session" in ast.unparse(mark) for mark in node.decorator_list)
    )


def read_pipelines(targets: Collection[str], matrix: Path | None = None, sessions: Collection[str] = ()) -> Pipelines:
    """The pipelines.

    Args:
        targets: ids of `targets.toml`.
        matrix: folder of the matrix.
        sessions: of the noxfile; where there are none (an installed package has no noxfile) nobody looks.

    Raises:
        MatrixInvalid: with every fault of the file.
    """
    read = read_matrix_file((matrix or matrix_folder()) / FILE, _File)
    if faults := [*_twice(read), *_dangling(read, targets, sessions), *_order_faults(read), *_clock_faults(read)]:
        raise MatrixInvalid(f"{FILE}: {fault}" for fault in faults)
    return Pipelines(tuple(read.runner), tuple(read.action), read.te_watch, tuple(read.pipeline), tuple(read.job))


def _twice(read: _File) -> Iterator[str]:
    for kind, rows in (
        ("runner", read.runner),
        ("action", read.action),
        ("pipeline", read.pipeline),
        ("job", read.job),
    ):
        ids = [row.id for row in rows]
        yield from (f"{kind} {name} is there {count} times" for name, count in Counter(ids).items() if count > 1)


def _dangling(read: _File, targets: Collection[str], sessions: Collection[str]) -> Iterator[str]:
    runners, pipelines = {row.id for row in read.runner}, {row.id for row in read.pipeline}
    for job in read.job:
        if job.runner not in runners:
            yield f"job {job.id}: there is no runner {job.runner!r}"
        if job.pipeline not in pipelines:
            yield f"job {job.id}: there is no pipeline {job.pipeline!r}"
        for call in (*job.run, *job.after):
            if sessions and call.session not in sessions:
                yield f"job {job.id}: there is no nox session {call.session!r}"
            for name in {name for text in call.arguments for name in _PLACE.findall(text)} - GIVES[job.each]:
                yield f"job {job.id}: nothing gives {{{name}}}"
        if job.each and not any(_PLACE.search(text) for call in (*job.run, *job.after) for text in call.arguments):
            yield f"job {job.id}: each = {job.each!r} makes jobs that are all the same"
    for name in pipelines - {job.pipeline for job in read.job}:
        yield f"pipeline {name}: there is no job of it"
    yield from _gpu_faults(read, targets)


def _gpu_faults(read: _File, targets: Collection[str]) -> Iterator[str]:
    """A release has one verdict of the dynamic tier, of the machine that carries the name of its target."""
    asked = read.te_watch.gpu_targets
    for name in sorted({*asked} - {*targets}):
        yield f"te_watch: gpu_targets names {name!r}, which there is not"
    if len(asked) > 1:
        yield f"te_watch: gpu_targets names {', '.join(asked)}, and the watch keeps the verdict of one"
    for job in (job for job in read.job if job.each == "release" and asked and job.runner not in asked):
        yield f"job {job.id}: runs on {job.runner!r}, and te_watch asks for {', '.join(asked)}"
    if read.te_watch.labels[0] in STATES:
        yield f"te_watch: {read.te_watch.labels[0]!r} stands first in labels, and is a word for how a release stands"


def _order_faults(read: _File) -> Iterator[str]:
    """What a job needs stands before it, in its own pipeline: so there is no circle."""
    seen: dict[str, str] = {}
    stage: dict[str, int] = {}
    of = {job.id: job.pipeline for job in read.job}
    for job in read.job:
        for other in job.needs:
            if other not in of:
                yield f"job {job.id}: needs {other!r}, which there is not"
            elif of[other] != job.pipeline:
                yield f"job {job.id}: needs {other!r}, which is a job of the pipeline {of[other]}"
            elif other not in seen:
                yield f"job {job.id}: stands before {other!r}, which it needs"
        seen[job.id] = job.pipeline
        stage[job.id] = max((stage[other] + 1 for other in job.needs if other in stage), default=0)
        if stage[job.id] >= STAGES:
            yield f"job {job.id}: {stage[job.id]} jobs must end before it, one by one; a workflow has {STAGES} stages"


def _clock_faults(read: _File) -> Iterator[str]:
    limits = (60, 24, 32, 13, 7)
    for row in read.pipeline:
        if (row.when == "schedule") != bool(row.cron):
            yield f"pipeline {row.id}: when = {row.when!r} and cron = {row.cron!r} do not go together"
        for text, limit in zip(row.cron.split(), limits, strict=False):
            if text != "*" and int(text) >= limit:
                yield f"pipeline {row.id}: {text} in {row.cron!r} is no time"
