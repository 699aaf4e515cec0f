"""What the batch script asks for, that bash takes it, and what of the scheduler's variables is refused."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.training.parallel.host_launch import main
from megacpp_validate.training.parallel.slurm_script import (
    RENDEZVOUS,
    SlurmJob,
    WrongAllocation,
    read_place,
    render_slurm,
)

pytestmark = pytest.mark.thorough

JOB = SlurmJob("run", 4, ["python", "-m", "launcher", RENDEZVOUS, "it's"], Path("/shared/run"), 90)
STEP = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[0-1]"}


def asked(job: SlurmJob) -> set[str]:
    return {line.removeprefix("#SBATCH --") for line in render_slurm(job).splitlines() if line.startswith("#SBATCH")}


def test_the_script_asks_for_one_task_a_host() -> None:
    assert asked(JOB) == {
        "job-name=run", "nodes=4", "ntasks-per-node=1", "time=01:30:00", "signal=B:TERM@60",
        "output=/shared/run/slurm-%j.log", "open-mode=append", "no-requeue",
    }  # fmt: skip


def test_gpus_and_the_rest_are_asked_for_where_they_are_wanted() -> None:
    more = replace(JOB, gpus_per_host=4, cpus_per_host=16, partition="p", account="a", requeue=True)
    assert asked(more) - asked(JOB) == {"gres=gpu:4", "cpus-per-task=16", "partition=p", "account=a", "requeue"}
    assert asked(JOB) - asked(more) == {"no-requeue"}


def test_bash_takes_the_script_and_words_arrive_whole() -> None:
    script = render_slurm(replace(JOB, exports={"PYTHONPATH": "/a b:/c"}, port=29500))
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "export PYTHONPATH='/a b:/c'\n" in script
    assert "MEGACPP_PORT=29500\n" in script
    assert """python -m launcher "$MASTER_ADDR:$MEGACPP_PORT" 'it'"'"'s' &\n""" in script


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hosts": 0}, "hosts is 0"),
        ({"minutes": 1, "signal_before": 60}, "signal_before 60 s is not within"),
        ({"partition": "p\n#SBATCH --exclusive"}, "has white space"),
        ({"exports": {"A=1;B": "x"}}, "no name of a variable"),
    ],
)
def test_a_job_that_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(WrongAllocation, match=said):
        render_slurm(replace(JOB, **change))  # type: ignore[arg-type]


def test_the_place_is_the_schedulers() -> None:
    place = read_place(STEP, hosts=2, ranks_per_host=4, names=["a", "b"])
    assert (place.host, place.world, list(place.ranks_of(1)), place.words(1)) == (1, 8, [4, 5, 6, 7], "host 1 (b)")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_NNODES": "1", "SLURM_NTASKS": "1"}, "Slurm gave 1 host.*the plan has 2: ranks would be missing"),
        ({"SLURM_NNODES": "3", "SLURM_NTASKS": "3"}, "hosts would be idle"),
        ({"SLURM_NTASKS": "1"}, "1 task.* on 2 host.*: hosts have no launcher"),
        ({"SLURM_NTASKS": "4"}, "a host has several"),
        ({"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
    ],
)
def test_an_allocation_that_is_not_the_plans_is_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(WrongAllocation, match=said):
        read_place({**STEP, **change}, hosts=2, ranks_per_host=4)


def test_without_a_slurm_it_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("sbatch") is None
    words = ["--launcher", "slurm", "--hosts", "2", "--ranks-per-host", "1", "--folder", str(tmp_path)]
    assert main([*words, "--submit", "nothing"]) == 6
    assert "there is no Slurm here: sbatch is not on the PATH" in capsys.readouterr().err
    assert main([*words, "nothing"]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out
