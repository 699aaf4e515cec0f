"""A job under a real Slurm of two virtual nodes: right ranks, faults named, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from megacpp_validate.training.parallel.__main__ import main
from megacpp_validate.training.parallel.launch import read_end
from megacpp_validate.training.parallel.ranks import read_record
from megacpp_validate.training.parallel.slurm import SlurmUnavailable, plan_job, submit
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


def command(folder: Path, settings: str = "time=2", what: str = "fine") -> list[str]:
    words = [sys.executable, "-m", "megacpp_validate.training.parallel", "--slurm", settings, "--nnodes", "2"]
    return [*words, "--nproc-per-node", "1", "--folder", str(folder), "launched_rank", what]


def run(slurm: dict[str, str], words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=slurm, capture_output=True, text=True, check=False, timeout=100)


def test_a_job_brings_the_receipts_of_all_ranks_home(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run(slurm, command(tmp_path))
    end = read_end(tmp_path)
    assert end is not None, done.stderr
    assert (done.returncode, end.ending) == (0, "done"), end.words
    assert [rank["receipt"] for rank in end.ranks] == [
        {"rank": rank, "total": [1.0] * 3, "world": 2, "local": 0} for rank in range(2)
    ]
    assert "total" in (tmp_path / "rank-1.stdout.log").read_text()
    assert processes_of(tmp_path) == []


def test_the_signal_of_the_time_limit_ends_the_ranks(slurm: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, what="slow"), env=slurm, stderr=subprocess.PIPE) as job:
        wait_for(lambda: read_record(tmp_path / "rank-1.collectives").step >= 3)
        queue = run(slurm, ["squeue", "--noheader", "--format=%A"]).stdout.split()
        run(slurm, ["scancel", "--signal=USR2", *queue])  # what --signal=USR2@60 does
        words = job.communicate(timeout=100)[1].decode()
    assert job.returncode == 1
    assert "the launcher got SIGTERM or SIGINT, and all ranks were ended" in words
    assert processes_of(tmp_path) == []


def test_a_job_that_slurm_refuses_says_so(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run(slurm, command(tmp_path, "partition=nowhere"))
    assert done.returncode == 6
    assert "was not submitted" in done.stderr
    assert "invalid partition" in done.stderr


def test_a_job_has_one_task_a_node() -> None:
    more = plan_job(4, {"time": "1", "gres": "gpu:4", "partition": "p", "requeue": "1"})
    assert (more["nodes"], more["ntasks_per_node"], more["time"], more["signal_delay_s"]) == (4, 1, 1, 30)
    assert more["setup"][0].startswith("export PYTHONPATH=")
    assert more["additional_parameters"] == {"gres": "gpu:4", "partition": "p", "requeue": True, "export": "ALL"}


def test_without_a_slurm_there_is_a_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnavailable, match="Next step"):
        submit(("module",), 4, tmp_path, {})


def test_several_hosts_need_an_endpoint(tmp_path: Path) -> None:
    assert main(["--nnodes", "2", "--nproc-per-node", "2", "--folder", str(tmp_path), "nothing"]) == 2
