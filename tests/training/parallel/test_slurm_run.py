"""The rendered script under a real Slurm of two virtual nodes: right ranks, faults named, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from megacpp_validate.training.parallel.gather import read_end
from tests import slurm_cluster
from tests.running_processes import processes_of

pytestmark = pytest.mark.thorough

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    if missing := slurm_cluster.why_no_slurm():
        pytest.skip(f"not-run: {missing}")
    with slurm_cluster.run_cluster(2) as variables:
        yield {**variables, "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)])}


def command(folder: Path, *options: str, what: str = "gloo-fine") -> list[str]:
    words = [sys.executable, "-m", "megacpp_validate.training.parallel.host_launch", "--launcher", "slurm"]
    words += ["--hosts", "2", "--ranks-per-host", "1", "--folder", str(folder), "--minutes", "2"]
    return [*words, *options, "launched_rank", what]


def run(slurm: dict[str, str], words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, env=slurm, capture_output=True, text=True, check=False, timeout=100)


def test_a_job_brings_the_receipts_of_all_ranks_home(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run(slurm, command(tmp_path, "--submit"))
    end = read_end(tmp_path)
    assert end is not None, done.stderr
    assert (done.returncode, end["ending"]) == (0, "done"), end["words"]
    assert [rank["receipt"] for rank in end["ranks"]] == [
        {"rank": rank, "total": [1.0] * 3, "world": 2, "local": 0} for rank in range(2)
    ]
    assert "1: host 1 (n1): the run is done" in (tmp_path / "slurm-host-1.log").read_text()
    assert "total" in (tmp_path / "rank-1.log").read_text()
    assert processes_of(tmp_path) == []


def test_a_rank_killed_on_the_second_node_is_named(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run(slurm, command(tmp_path, "--submit", what="gloo-killed"))
    assert done.returncode == 1
    assert "At fault: rank 1." in done.stderr
    assert "rank 1 ended by SIGKILL; last collective: all_reduce float32[3] #1 of ranks 0, 1 (left)" in done.stderr
    assert processes_of(tmp_path) == []


def test_fewer_hosts_than_the_plan_are_refused_before_a_rank_starts(slurm: dict[str, str], tmp_path: Path) -> None:
    run(slurm, command(tmp_path))
    done = run(slurm, ["sbatch", "--wait", "--nodes=1", str(tmp_path / "job.sh")])
    assert done.returncode == 2
    said = (tmp_path / "slurm-host-0.log").read_text()
    assert "Slurm gave 1 host(s) (n0), and the plan has 2: ranks would be missing" in said
    assert "The plan's world is 2 x 1 = 2 rank(s)" in said
    assert not list(tmp_path.glob("rank-*"))


def test_the_signal_of_the_time_limit_ends_the_ranks(slurm: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, "--submit", what="alone-slow"), env=slurm, stderr=subprocess.PIPE) as job:
        until = time.monotonic() + 60
        while not (tmp_path / "rank-1.collectives").exists():
            assert time.monotonic() < until
            time.sleep(0.1)
        queue = run(slurm, ["squeue", "--noheader", "--format=%A"]).stdout.split()
        run(slurm, ["scancel", "--batch", "--signal=TERM", *queue])  # what --signal=B:TERM does
        said = job.communicate(timeout=60)[1].decode()
    assert job.returncode == 1
    assert "the launcher was asked to end (SIGTERM or SIGINT), and all ranks were ended" in said
    assert processes_of(tmp_path) == []


def test_a_job_that_slurm_refuses_says_so(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run(slurm, command(tmp_path, "--submit", "--partition", "nowhere"))
    assert done.returncode == 6
    assert "sbatch refused" in done.stderr
    assert "invalid partition" in done.stderr
