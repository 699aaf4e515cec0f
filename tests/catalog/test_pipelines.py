"""The pipelines of the matrix: every fault of the file at once, and what a plan makes of the rows."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.watch_result import GpuStep, WatchResult
from megacpp_validate.catalog.bridge import MatrixInvalid, matrix_folder, read_catalog
from megacpp_validate.catalog.pipelines import Pipelines, read_pipelines, read_sessions
from megacpp_validate.cli.gate import pipeline_verbs
from megacpp_validate.cli.gate.pipeline_plan import UnknownPipeline, plan_pipeline
from megacpp_validate.report.pipeline_forms import render_github_outputs, render_gitlab_pipeline, tell_pipeline
from tests.command_line import end_of
from tests.running_processes import hearing_signals, is_running

assert pipeline_verbs  # its import makes the verb known

TARGETS = ("h200", "b200", "gb10", "cpu")
FACTS = {
    "step": [{"old": "2.12.0", "new": "2.17.1"}, {"old": "2.17.1", "new": "2.20.2"}],
    "pinned": [{"stack": "te2.20.2"}],
    "image": [{"image": "h200"}, {"image": "cpu"}],
    "release": [{"old": "2.20.2", "new": "2.21.0", "target": "h200"}],
}
NOXFILE = Path(__file__).parents[2] / "noxfile.py"


@pytest.fixture(scope="module")
def pipelines() -> Pipelines:
    return read_pipelines(TARGETS)


def test_every_session_of_every_job_stands_in_the_noxfile(pipelines: Pipelines) -> None:
    sessions = read_sessions(NOXFILE)
    assert {"lint", "tests", "te_canary"} <= sessions
    asked = {call.session for job in pipelines.jobs for call in (*job.run, *job.after)}
    assert asked <= sessions, f"not in the noxfile: {sorted(asked - sessions)}"


def test_every_job_of_every_pipeline_is_planned(pipelines: Pipelines) -> None:
    everywhere = [runner.id for runner in pipelines.runners]
    planned = {
        job.job
        for row in pipelines.pipelines
        for job in plan_pipeline(pipelines, row.id, FACTS, everywhere, tool="t").jobs
    }
    assert planned == {job.id for job in pipelines.jobs}


def test_a_pull_request_runs_the_five_kinds_on_machines_that_are_always_there(pipelines: Pipelines) -> None:
    plan = plan_pipeline(pipelines, "pull_request", FACTS, tool="t")
    assert {job.job for job in plan.jobs} == {
        "lint", "tests_stack", "tests_host", "te_canary", "import_firewall", "cpu_parity",
    }  # fmt: skip
    assert plan.left_out == ()
    assert {job.runner for job in plan.jobs} == {"cpu"}
    steps = [call.words for job in plan.jobs if job.job == "te_canary" for call in job.commands]
    assert steps[0][:6] == ("./nox", "-s", "te_canary", "--", "2.12.0", "2.17.1")
    assert plan.minutes == 10  # the aim of the design


def test_two_machines_share_the_tests_and_leave_none_out(pipelines: Pipelines) -> None:
    taken = {job.id: job.run[0].arguments for job in pipelines.jobs if job.run[0].session == "tests"}
    assert taken["tests_host"] == ["tests", *(f"--ignore={folder}" for folder in taken["tests_stack"])]
    assert [folder for folder in taken["tests_stack"] if not (NOXFILE.parent / folder).is_dir()] == []


def test_what_has_no_machine_or_needs_what_is_left_out_is_not_run_and_says_why(pipelines: Pipelines) -> None:
    plan = plan_pipeline(pipelines, "te_watch_gpu", FACTS, tool="t")
    assert plan.jobs == ()
    (row,) = plan.left_out
    assert (row.id, row.outcome) == ("te_watch_gpu-2.20.2-2.21.0-h200", "not-run")
    assert "there is no runner h200" in row.reason
    (job,) = plan_pipeline(pipelines, "te_watch_gpu", FACTS, ["h200"], tool="t").jobs
    assert (job.github, job.commands[0].arguments[:2]) == (("self-hosted", "linux", "h200"), ("2.20.2", "2.21.0"))
    assert job.commands[0].arguments[4:6] == ("--target", "h200")

    waits = [job.model_copy(update={"runner": "engine"}) if job.id == "lock_check" else job for job in pipelines.jobs]
    hosted = [
        job.model_copy(update={"runner": "cpu"}) if job.pipeline == "images" and job.needs else job for job in waits
    ]
    plan = plan_pipeline(Pipelines(**{**vars(pipelines), "jobs": tuple(hosted)}), "images", FACTS, tool="t")
    assert plan.jobs == ()
    assert "lock_check, which it needs, is not run" in plan.left_out[1].reason


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(pipelines: Pipelines) -> None:
    with pytest.raises(UnknownPipeline, match="choose one of pull_request"):
        plan_pipeline(pipelines, "pull-request", FACTS, tool="t")
    with pytest.raises(UnknownPipeline, match="no runner 'a100'"):
        plan_pipeline(pipelines, "pull_request", FACTS, ["a100"], tool="t")


def test_github_takes_lists_and_gitlab_a_child_pipeline(pipelines: Pipelines) -> None:
    plan = plan_pipeline(pipelines, "images", FACTS, ["engine"], tool="t")
    lines = dict(line.split("=", 1) for line in render_github_outputs(plan).splitlines())
    first, then = json.loads(lines["first"]), json.loads(lines["then"])
    assert json.loads(lines["left_out"]) == []
    assert [job["id"] for job in first] == ["lock_check"]
    assert [job["id"] for job in then] == ["images-h200", "images-cpu", "image_proof"]
    assert then[0]["commands"][0][:5] == ["./nox", "-s", "images", "--", "h200"]
    child = json.loads(render_gitlab_pipeline(plan))
    assert child["images-cpu"]["needs"] == ["lock_check"]
    assert child["images-cpu"]["script"][0].startswith("./nox -s images -- cpu ")
    assert child["images-cpu"]["tags"] == ["docker"]
    watch = json.loads(render_gitlab_pipeline(plan_pipeline(pipelines, "te_watch", FACTS, tool="t")))["te_watch"]
    assert watch["cache"] == {"key": "te_watch", "paths": [".megacpp/te_watch/"], "when": "always"}
    late = plan.model_copy(update={"jobs": (plan.jobs[0].model_copy(update={"stage": 2}),)})
    with pytest.raises(ValueError, match="more than 2 stages"):
        render_github_outputs(late)
    assert "**not run**" in "\n".join(tell_pipeline(plan_pipeline(pipelines, "images", FACTS, tool="t")))
    empty = json.loads(render_gitlab_pipeline(plan_pipeline(pipelines, "te_watch_gpu", {}, tool="t")))
    assert "nothing" in empty  # GitLab refuses a child pipeline without a job


def test_a_job_without_its_machine_fails_wherever_the_plan_goes(pipelines: Pipelines) -> None:
    plan = plan_pipeline(pipelines, "images", FACTS, tool="t")
    lines = dict(line.split("=", 1) for line in render_github_outputs(plan).splitlines())
    left = json.loads(lines["left_out"])
    assert [row["id"] for row in left] == ["images-h200", "images-cpu", "image_proof"]
    assert "there is no runner engine" in left[0]["not_run"]
    job = json.loads(render_gitlab_pipeline(plan))["image_proof"]
    assert job["tags"] == ["linux"]
    assert job["script"][0].startswith("echo 'image_proof: not-run: there is no runner engine")
    assert job["script"][1] == "exit 4"


def test_a_release_has_its_decision_and_the_pages_with_it_even_where_it_is_closed(pipelines: Pipelines) -> None:
    (job,) = plan_pipeline(pipelines, "release", FACTS, tool="t").jobs
    (decides,) = job.commands
    decision = decides.arguments[decides.arguments.index("--output") + 1]
    assert decision == "reports/release_gate-te2.20.2.json"
    report = job.after[-1]
    assert (report.session, report.arguments[:3]) == ("report", ("docs/evidence", "--gate", decision))
    plan = plan_pipeline(pipelines, "release", FACTS, tool="t")
    lines = dict(line.split("=", 1) for line in render_github_outputs(plan).splitlines())
    assert json.loads(lines["first"])[0]["after"][-1][:3] == ["./nox", "-s", "report"]
    child = json.loads(render_gitlab_pipeline(plan))["release_gate-te2.20.2"]
    assert child["after_script"][-1].startswith("./nox -s report -- docs/evidence --gate ")


FAULTS = {
    "no such runner": ('runner = "h200"\nminutes = 120', 'runner = "a100"\nminutes = 120', "there is no runner 'a100'"),
    "no such pipeline": ('pipeline = "pins"\nrunner', 'pipeline = "pin"\nrunner', "there is no pipeline 'pin'"),
    "no such session": ('session = "lint" ', 'session = "lints" ', "there is no nox session 'lints'"),
    "nobody gives it": ('arguments = ["--check"]', 'arguments = ["{image}"]', "nothing gives {image}"),
    "a shell": ('arguments = ["--check"]', 'arguments = ["--check; rm -rf /"]', "arguments"),
    "an expression": ('arguments = ["--check"]', 'arguments = ["${{secrets.x}}"]', "arguments"),
    "out of the checkout": ('artifacts = ["containers/locks/"', 'artifacts = ["../locks/"', "artifacts"),
    "an absolute place": ('artifacts = ["containers/locks/"', 'artifacts = ["/etc/"', "artifacts"),
    "a key": ("hosted = true", "hosted = true\ncores = 2", "Extra inputs"),
    "no commit": ('sha = "11bd', 'sha = "v4', "sha"),
    "no time": ('cron = "17 3', 'cron = "61 3', "61 in '61 3 * * *' is no time"),
    "a clock without a schedule": ('when = "tag"', 'when = "tag"\ncron = "1 1 * * *"', "do not go together"),
    "before what it needs": ('needs = ["lock_check"]\neach', 'needs = ["image_proof"]\neach', "stands before"),
    "of another pipeline": ('needs = ["lock_check"]\neach', 'needs = ["lint"]\neach', "is a job of the pipeline"),
    "needs nobody": ('needs = ["lock_check"]\neach', 'needs = ["gone"]\neach', "which there is not"),
    "a third stage": ('needs = ["lock_check"]\nrun', 'needs = ["images"]\nrun', "a workflow has 2 stages"),
    "no such target": ('gpu_targets = ["h200"]', 'gpu_targets = ["h100"]', "gpu_targets names 'h100'"),
    "two targets": ('gpu_targets = ["h200"]', 'gpu_targets = ["h200", "b200"]', "keeps the verdict of one"),
    "another machine": ('gpu_targets = ["h200"]', 'gpu_targets = ["b200"]', "te_watch_gpu: runs on 'h200'"),
    "no label": ('labels = ["te-watch"]', "labels = []", "labels"),
    "a state for a label": ('labels = ["te-watch"]', 'labels = ["clean"]', "'clean' stands first"),
    "twice": ('id = "lint"', 'id = "te_watch"\nartifacts = []', "job te_watch is there 2 times"),
    "without a job": ('[[pipeline]]\nid = "pins"', '[[pipeline]]\nid = "x"\nsays = "x"\nwhen = "tag"\nminutes = 1\n\n'
                      '[[pipeline]]\nid = "pins"', "pipeline x: there is no job of it"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "said"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_file_is_refused_by_name(old: str, new: str, said: str, tmp_path: Path) -> None:
    text = (matrix_folder() / "pipelines.toml").read_text()
    assert old in text
    (tmp_path / "pipelines.toml").write_text(text.replace(old, new, 1))
    asked = {call.session for job in read_pipelines(TARGETS).jobs for call in (*job.run, *job.after)}
    with pytest.raises(MatrixInvalid, match="fault") as refused:
        read_pipelines(TARGETS, tmp_path, asked)
    assert said in str(refused.value)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the matrix and a `nox` that writes down what it is asked, and ends as its file says."""
    shutil.copytree(matrix_folder(), tmp_path / "matrix")
    shutil.copytree(matrix_folder().parent / "containers", tmp_path / "containers")
    asked = sorted({call.session for job in read_pipelines(TARGETS).jobs for call in (*job.run, *job.after)})
    sessions = (f"@nox.session\ndef {name}(session): ...\n" for name in asked)
    (tmp_path / "noxfile.py").write_text("import nox\n" + "".join(sessions))
    nox = tmp_path / "nox"
    nox.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\nif [ "$2" = "$FAILS" ]; then exit "$CODE"; fi\n')
    nox.chmod(0o755)
    return tmp_path


def call(monkeypatch: pytest.MonkeyPatch, checkout: Path, *arguments: str) -> int:
    return end_of(monkeypatch, "pipeline", *arguments, "--matrix", checkout / "matrix")


@pytest.mark.parametrize(("fails", "code", "ended"), [("", 0, 0), ("tests", 1, 1), ("lint", 6, 6)])
def test_without_plan_the_jobs_run_here(
    fails: str,
    code: int,
    ended: int,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILS", fails)
    monkeypatch.setenv("CODE", str(code))
    assert call(monkeypatch, checkout, "pull_request") == ended
    asked = [line.split()[1] for line in (checkout / "asked").read_text().splitlines()]
    pairs = len(read_catalog().stacks) - 1
    assert asked == ["lint", "tests", "tests", *["te_canary"] * pairs, "import_firewall", "cpu_parity"]


def test_what_follows_runs_after_a_closed_one_too_and_the_code_is_the_first(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "release_gate")
    monkeypatch.setenv("CODE", "4")
    assert call(monkeypatch, checkout, "release") == 4
    asked = [line.split()[1] for line in (checkout / "asked").read_text().splitlines()]
    assert asked == ["release_gate", "release_gate", "report"]


def test_a_checkout_that_cannot_run_its_sessions_is_told(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (checkout / "nox").chmod(0o644)
    assert call(monkeypatch, checkout, "te_watch") == 5
    (checkout / "nox").unlink()
    assert call(monkeypatch, checkout, "te_watch") == 5
    assert capfd.readouterr().err.count("cannot be started") == 2
    (checkout / "noxfile.py").write_text("def broken(:\n")
    assert call(monkeypatch, checkout, "te_watch") == 2
    assert "noxfile.py is no Python" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_what_was_started_too(number: signal.Signals, checkout: Path) -> None:
    (checkout / "nox").write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {checkout}/child\nwait\n")
    command = [sys.executable, "-m", "megacpp_validate.cli", "pipeline", "te_watch", "--matrix", checkout / "matrix"]
    with hearing_signals(), subprocess.Popen(command, stderr=subprocess.PIPE) as verb:
        until = time.monotonic() + 30
        while not ((checkout / "child").is_file() and (checkout / "child").read_text()) and time.monotonic() < until:
            time.sleep(0.02)
        child = int((checkout / "child").read_text())
        verb.send_signal(number)
        assert verb.wait(20) == 130
    until = time.monotonic() + 20  # a signal is on its way: a machine under load brings it late
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.02)
    assert not is_running(child)


def test_a_job_is_not_run_here_after_one_that_it_needs_has_failed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAILS", "lock")
    monkeypatch.setenv("CODE", "1")
    assert call(monkeypatch, checkout, "images", "--runners", "engine") == 1
    assert (checkout / "asked").read_text().split() == ["-s", "lock", "--", "--check"]
    assert "image_proof: not-run" in capfd.readouterr().err
    monkeypatch.setenv("FAILS", "")
    assert call(monkeypatch, checkout, "images") == 4  # left out for want of a machine: no pass
    assert call(monkeypatch, checkout, "te_watch_gpu") == 3


def test_the_watch_s_facts_become_jobs_and_garbage_does_not(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    step = GpuStep(old="2.20.2", new="2.21.0", target="h200")
    facts = checkout / "te_watch.json"
    result = WatchResult(tool="t", index="i", asked_at="now", pinned="2.20.2", gpu=(step,))
    facts.write_text(result.model_dump_json())
    options = ["te_watch_gpu", "--plan", "--format", "json", "--runners", "h200", "--facts"]
    assert call(monkeypatch, checkout, *options, str(facts)) == 0
    assert json.loads(capfd.readouterr().out)["jobs"][0]["id"] == "te_watch_gpu-2.20.2-2.21.0-h200"
    for text in ("", "{}", result.model_dump_json().replace("2.21.0", "2.21.0; rm -rf /")):
        facts.write_text(text)
        assert call(monkeypatch, checkout, *options, str(facts)) == 2
        assert "Next step" in capfd.readouterr().err
    assert call(monkeypatch, checkout, *options, str(checkout / "gone.json")) == 2
