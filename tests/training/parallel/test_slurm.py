"""A job under a real Slurm of two virtual nodes: right ranks, faults named, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from megacpp_validate.training.parallel.collective_record import read_record
from megacpp_validate.training.parallel.slurm import SlurmJob, SlurmUnavailable, plan_job, submit
from megacpp_validate.training.parallel.verdict import read_end
from tests import slurm_cluster
from tests.running_processes import processes_of
from tests.training.parallel.test_launch import wait_for

pytestmark = pytest.mark.thorough

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    if missing := slurm_cluster.why_no_slurm():
        pytest.skip(f"not-run: {missing}")
    with slurm_cluster.run_cluster(2) as variables:
        yield {**variables, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}


def command(folder: Path, *options: str, what: str = "fine") -> list[str]:
    words = [sys.executable, "-m", "megacpp_validate.training.parallel", "--slurm", "--nnodes", "2"]
    words += ["--nproc-per-node", "1", "--folder", str(folder), "--minutes", "2"]
    return [*words, *options, "launched_rank", what]


def run(slurm: dict[str, str], words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=slurm, capture_output=True, text=True, check=False, timeout=100)


def test_a_job_brings_the_receipts_of_all_ranks_home(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run(slurm, command(tmp_path))
    end = read_end(tmp_path)
    assert end is not None, done.stderr
    assert (done.returncode, end["ending"]) == (0, "done"), end["words"]
    assert [rank["receipt"] for rank in end["ranks"]] == [
        {"rank": rank, "total": [1.0] * 3, "world": 2, "local": 0} for rank in range(2)
    ]
    assert "total" in (tmp_path / "rank-1.stdout.log").read_text()
    assert processes_of(tmp_path) == []


def test_a_rank_killed_on_the_second_node_is_named(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run(slurm, command(tmp_path, what="killed"))
    assert done.returncode == 1
    assert "At fault: rank 1." in done.stderr
    assert "rank 1 ended by SIGKILL; last collective: all_reduce float32[3] #1 of ranks 0, 1 (left)" in done.stderr
    assert processes_of(tmp_path) == []


def test_the_signal_of_the_time_limit_ends_the_ranks(slurm: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, what="slow"), env=slurm, stderr=subprocess.PIPE) as job:
        wait_for(lambda: read_record(tmp_path / "rank-1.collectives").step >= 3)
        queue = run(slurm, ["squeue", "--noheader", "--format=%A"]).stdout.split()
        run(slurm, ["scancel", "--signal=USR2", *queue])  # what --signal=USR2@60 does
        words = job.communicate(timeout=100)[1].decode()
    assert job.returncode == 1
    assert "the launcher was asked to end (SIGTERM or SIGINT), and all ranks were ended" in words
    assert processes_of(tmp_path) == []


def test_a_job_that_slurm_refuses_says_so(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run(slurm, command(tmp_path, "--partition", "nowhere"))
    assert done.returncode == 6
    assert "sbatch refused" in done.stderr
    assert "invalid partition" in done.stderr


JOB = SlurmJob(("module",), 4, Path("/shared/run"), 90)


def test_a_job_asks_for_one_task_a_node() -> None:
    plain = plan_job(JOB)
    assert (plain["nodes"], plain["ntasks_per_node"], plain["time"], plain["signal_delay_s"]) == (4, 1, 90, 60)
    assert plain["additional_parameters"]["no-requeue"] is True
    more = plan_job(replace(JOB, gpus_per_host=4, cpus_per_host=16, partition="p", account="a", requeue=True))
    wanted = {"gres": "gpu:4", "cpus_per_task": 16, "partition": "p", "account": "a"}
    assert {name: value for name, value in more.items() if name not in plain} == wanted
    assert "no-requeue" not in more["additional_parameters"]


def test_without_a_slurm_it_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnavailable, match=r"there is no Slurm here: sbatch, srun, squeue not on the PATH.*Next"):
        submit(JOB)
