"""Whom a launcher accuses, and what another launcher than the local one is told of a run."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.smoke import resume
from megacpp_validate.probes.smoke.runs import Run, read_plan, run_as_job
from megacpp_validate.training.sizes import read_size
from megacpp_validate.training.smoke.order import SmokeOrder
from megacpp_validate.training.smoke.run import environment_of
from megacpp_validate.training.smoke.same_bits import VARIABLES

PLAN = asdict(read_plan("data=2 expert_parallel=2"))
# Notes what it was given, and leaves the end of a run as its launchers do.
SBATCH = """#!/bin/sh
for script; do :; done
folder=$(dirname "$(dirname "$script")")
env > "$folder/environment"
cp "$script" "$folder/job.sh"
cat > "$folder/run.json" <<'END'
{"ending": "died", "culprits": [1], "words": "rank 1 died", "seconds": 1.0,
 "ranks": [{"receipt": {"rank": 0}}, {"receipt": null}]}
END
echo Submitted batch job 7
"""
GONE = "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n"


def new_bench(**settings: str) -> Bench:
    given = {"size": "tiny", "plan": "data=2 expert_parallel=2", **settings}
    return Bench(Order("smoke_resume", "s", Target("cpu", ""), "native", stands_on=("imports",), settings=given))


@pytest.mark.parametrize(("killed", "ending", "culprits", "passes"), [
    (1, "died", (1,), True),
    (1, "died", (0,), False),  # the wrong rank
    (1, "died", (0, 1), False),
    (1, "died", (), False),
    (1, "hung", (1,), False),
    (1, "done", (), False),
    (None, "died", (1,), False),
])  # fmt: skip
def test_the_rank_that_was_killed_is_accused(
    killed: int | None, ending: str, culprits: tuple[int, ...], passes: bool
) -> None:
    bench = new_bench()
    run = Run("killed", SmokeOrder(plan=PLAN), read_size("tiny"), ending, "a rank died\nmore", (), culprits)
    resume.check_killed(bench, run, killed)
    (check,) = bench.checks
    assert (check.name, check.passed) == ("killed.is-told", passes)
    assert "\n" not in check.detail


def test_nobody_is_killed_where_another_launcher_starts_the_ranks() -> None:
    bench = new_bench(launcher="slurm")
    with pytest.raises(CannotRun, match=r"slurm.*Next step: .*--launcher local"):
        resume.probe(bench)
    assert bench.checks == []


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_slurm_is_given_what_a_local_run_has(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    order = SmokeOrder(plan=PLAN, device=device, deterministic=device == "cuda")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("srun", GONE), ("squeue", GONE)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    end = run_as_job(order, tmp_path / "run", 77.0, {"OMP_NUM_THREADS": "3"})
    assert end[:4] == ("died", "rank 1 died", ({"rank": 0},), (1,))
    given = dict(line.split("=", 1) for line in (tmp_path / "run/environment").read_text().splitlines() if "=" in line)
    assert given["OMP_NUM_THREADS"] == "3"
    assert {name: given[name] for name in VARIABLES if name in given} == environment_of(order)
    job = (tmp_path / "run/job.sh").read_text()
    assert ("#SBATCH --gres=gpu:2" in job) is (device == "cuda")
    assert json.loads((tmp_path / "run/order.json").read_text())["device"] == device
