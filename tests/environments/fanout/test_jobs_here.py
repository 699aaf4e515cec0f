"""Real processes: jobs on this machine, and the file by which one reaches another machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from megacpp_validate.environments.container import ContainerEnvironment
from megacpp_validate.environments.environment import Environment
from megacpp_validate.environments.fanout.drive import Cancelled, Drive
from megacpp_validate.environments.fanout.events import Rules, Told
from megacpp_validate.environments.fanout.faults import claim, read_answer
from megacpp_validate.environments.fanout.launcher import CLAIM, JOB_FILE, Work
from megacpp_validate.environments.fanout.local import LocalLauncher, read_gpus
from megacpp_validate.environments.fanout.pyxis import PyxisEnvironment
from megacpp_validate.environments.fanout.shipped import receive_environment, ship_environment, write_job
from megacpp_validate.environments.interpreter import PACKAGE, InterpreterEnvironment
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.store import read_receipts
from tests.environments.fanout.scripted_scheduler import order_of
from tests.environments.places import make_probes

RULES = Rules(poll_s=0.02, grace_s=0.0)


def works(folder: Path, main: str, *probes: str, gpus: int = 0) -> list[Work]:
    environment = make_probes(folder, main)
    return [Work(order_of(probe), environment, 60.0, gpus) for probe in probes]


def test_cells_side_by_side_each_with_gpus_of_its_own(tmp_path: Path) -> None:
    say = "time.sleep(0.3)\nwrite(reason=os.environ.get('CUDA_VISIBLE_DEVICES', 'none'))"
    small = works(tmp_path, say, *"abc", gpus=1)
    large = works(tmp_path, say, "two", gpus=2)
    drive = Drive([*small, *large], LocalLauncher(4, ("0", "1")), tmp_path / "receipts", RULES)
    taken = {cell: done.receipt.reason for cell, done in drive.run().items()}
    assert taken["te1-cpu-two"] == "0,1"
    assert {taken[f"te1-cpu-{probe}"] for probe in "abc"} == {"0", "1"}
    assert read_gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}) == ("2", "3")
    assert read_gpus({"CUDA_VISIBLE_DEVICES": ""}) == read_gpus({"PATH": "/nowhere"}) == ()


def test_a_process_that_somebody_kills_is_run_again_and_a_crash_is_an_answer(tmp_path: Path) -> None:
    once = tmp_path / "once"
    main = (
        f"first = not os.path.exists({str(once)!r})\nopen({str(once)!r}, 'a').write(order['probe'])\n"
        "if order['probe'] == 'crash': os.abort()\nif first: os.kill(os.getpid(), signal.SIGKILL)\nwrite()"
    )
    done = Drive(works(tmp_path, main, "a", "crash"), LocalLauncher(1), tmp_path / "receipts", RULES).run()
    killed, crashed = done["te1-cpu-a"].receipt, done["te1-cpu-crash"].receipt
    assert (killed.outcome, [fault.partition(":")[0] for fault in killed.retries]) == (Outcome.PASS, ["killed"])
    assert (crashed.outcome, crashed.retries) == (Outcome.ERROR, ())
    assert sorted(once.read_text()) == sorted("aa" + "crash")
    assert (tmp_path / "receipts" / "te1-cpu-a.attempt-1.log").exists() is False  # it said nothing


def test_a_stop_ends_the_processes(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    main = f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    drive = Drive(works(tmp_path, main, "a"), LocalLauncher(1), tmp_path / "receipts", RULES)

    def stop_when_it_runs(told: Told) -> None:
        if told.what == "runs":
            while not pid.exists() or not pid.read_text():
                pass
            drive.stop.set()

    drive.progress = stop_when_it_runs
    with pytest.raises(Cancelled):
        drive.run()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert not read_receipts(tmp_path / "receipts").found


MINE = {"PATH": "/usr/bin", "TOKEN": "secret", "GONE": "1", "PYTHONPATH": "/mine"}
DIGEST = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    "environment",
    [
        InterpreterEnvironment(("py", "-B"), MINE, "why", (Path("/o"),), "hash"),
        ContainerEnvironment("docker", f"a@{DIGEST}", "id", "python3", "", MINE, gpus=True, init=False, because="why"),
        PyxisEnvironment(f"a@{DIGEST}", "python3", MINE, "why"),
    ],
)
def test_an_environment_arrives_as_it_is_and_secrets_are_not_written(environment: Environment) -> None:
    here = replace(environment, variables={k: v for k, v in MINE.items() if k != "GONE"} | {"MORE": "2"})  # type: ignore[type-var]
    text = json.dumps(ship_environment(here, MINE))
    assert "secret" not in text
    there = receive_environment(json.loads(text), {**MINE, "SLURM_JOB_ID": "7"})
    variables = {"PATH": "/usr/bin", "TOKEN": "secret", "PYTHONPATH": "/mine", "MORE": "2", "SLURM_JOB_ID": "7"}
    assert there == replace(here, variables=variables)


def one_cell(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-P", "-m", "megacpp_validate.environments.fanout.one_cell", str(folder / JOB_FILE)]
    return subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def test_a_job_leaves_the_receipt_of_its_cell_and_a_second_one_nothing(tmp_path: Path) -> None:
    (work,) = works(tmp_path, "print('said')\nwrite()", "a")
    attempt = tmp_path / "attempt"
    path = write_job(work, attempt, os.environ)
    assert path.stat().st_mode & 0o077 == 0
    job = one_cell(attempt)
    assert (job.communicate(timeout=60)[0], job.returncode) == ("pass te1-cpu-a: nothing to say\n", 0)
    receipt = read_answer(work.order, attempt)
    assert receipt is not None
    assert receipt.outcome is Outcome.PASS
    assert read_answer(replace(work.order, seed=3), attempt) is None
    assert (attempt / "te1-cpu-a.log").read_text() == "said\n"
    again = one_cell(attempt)
    assert "another job runs this attempt" in again.communicate(timeout=60)[0]
    assert (again.returncode, claim(attempt)) == (1, False)


def test_a_job_that_is_told_to_end_takes_its_cell_with_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (work,) = works(tmp_path, f"open({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)", "a")
    write_job(work, tmp_path / "attempt", os.environ)
    job = one_cell(tmp_path / "attempt")
    while not pid.exists() or not pid.read_text():
        assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=30)
    assert job.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert read_answer(work.order, tmp_path / "attempt") is None
    assert (tmp_path / "attempt" / CLAIM).is_dir()


def test_a_job_that_is_none_says_so(tmp_path: Path) -> None:
    (tmp_path / JOB_FILE).write_text('{"schema_id": "other"}')
    job = one_cell(tmp_path)
    said = job.communicate(timeout=60)[0]
    assert job.returncode == 1
    assert "is no job: ValueError: schema_id is 'other'" in said
    assert not (tmp_path / CLAIM).exists()
