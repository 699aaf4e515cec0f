"""Cells as Slurm jobs: what a job is given, and everything that happens to clusters, on a real Slurm of two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.environments.cell import Cell
from megacpp_validate.environments.fleet import Ran, run_cells
from megacpp_validate.environments.slurm import (
    Cluster,
    QueuedJob,
    SlurmJobs,
    list_options,
    name_fault,
    plan_job,
    read_cluster,
)
from megacpp_validate.errors import InfrastructureFailed
from megacpp_validate.evidence.receipt import Failure, Outcome, Receipt
from megacpp_validate.evidence.store import read_receipts
from megacpp_validate.probes.order import Order, Target
from tests import slurm_cluster
from tests.environments.places import make_probes

ROOT = Path(__file__).parents[2]
SITE = """
retries = 3
[all]
partition = "gpu"
exclusive = true
nice = 5
[target.h200]
partition = "big"
gres = "gpu:h200:{gpus}"
mem = "2048M"
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


SCANCEL = """#!/bin/sh
echo "$@" >> "$JOBS/cancelled"
kill -9 -$(cat "$JOBS/$2.pid") 2> /dev/null; touch "$JOBS/$2.done"
"""


def test_a_job_is_given_what_the_site_says(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path / "site.toml", SITE), ["h200", "cpu"])
    words = list_options(plan_job(cluster, "h200", gpus=4, limit_s=601))
    assert {"--time=26", "--gres=gpu:h200:4", "--mem=2048M", "--partition=big", "--exclusive", "--nice=5"} <= set(words)
    assert "--no-requeue" in words
    other = list_options(plan_job(cluster, "cpu", gpus=0, limit_s=60))
    assert {"--partition=gpu", "--time=16"} <= set(other)
    assert not any(word.startswith(("--gres", "--mem")) for word in other)
    assert read_cluster(None, []) == Cluster()


KILLED = Receipt(
    cell="native-cpu-x", stack="native", target="cpu", probe="x", outcome=Outcome.ERROR, reason="", requested="native",
    failure=Failure("SIGKILL", "nothing"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("word", "receipt", "name"),
    [
        ("NODE_FAIL", None, "node-fail"), ("PREEMPTED", None, "preempted"), ("CANCELLED", None, "cancelled"),
        ("TIMEOUT", None, "job-time-limit"), ("BOOT_FAIL", None, "boot-fail"), ("OUT_OF_MEMORY", None, "out-of-memory"),
        ("COMPLETED", None, "no-receipt"), ("FAILED", None, "no-receipt"), ("", None, "gone"),
        ("COMPLETED", KILLED, "killed"), ("CANCELLED", KILLED, "cancelled"),
    ],
)  # fmt: skip
def test_the_fault_of_an_attempt(word: str, receipt: Receipt | None, name: str, tmp_path: Path) -> None:
    (tmp_path / "7_0_log.out").write_text("srun: error: no such image\n")
    fault = name_fault(QueuedJob(word, "n1"), receipt, tmp_path)
    assert fault.startswith(f"{name}: ")
    assert "(node n1)" in fault
    assert fault.endswith("no such image")


SBATCH = """#!/bin/sh
[ -e "$JOBS/refuse" ] && echo "invalid partition specified: nowhere" >&2 && exit 1
n=$(($(ls "$JOBS" | grep -c name) + 1))
sed -n 's/^#SBATCH --job-name=//p' "$1" > "$JOBS/$n.name"
if [ -e "$JOBS/lose" ]; then rm "$JOBS/lose"; touch "$JOBS/$n.done"
else
  cp "$1" "$JOBS/$n.sh"  # submitit moves it
  run='echo $$ > "$JOBS/$1.pid"; SLURM_JOB_ID=$1 bash "$JOBS/$1.sh"; touch "$JOBS/$1.done"'
  setsid sh -c "$run" sh $n > /dev/null 2>&1 &
fi
echo "Submitted batch job $n"
"""
SQUEUE = """#!/bin/sh
for name in "$JOBS"/*.name; do
  [ -e "$name" ] || continue
  n=$(basename "$name" .name); state=RUNNING; [ -e "$JOBS/$n.done" ] && state=COMPLETED
  echo "$n|$state|n1|None"
done
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the jobs of three scripts that stand for Slurm, on one node."""
    (tmp_path / "bin").mkdir()
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("srun", "#!/bin/sh\n"), ("scancel", SCANCEL)):
        write(tmp_path / "bin" / name, text).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("JOBS", str(jobs))
    return jobs


ORDER = Order("x", "native", Target("cpu", ""), "native", tool="tool 1", environment="e")


def run_one(folder: Path, main: str = "write()", order: Order = ORDER, **more: Any) -> Ran:
    cell = Cell(make_probes(folder, main), order, folder / "receipts", 60.0)
    options = {"fresh": False, "retries": 1, **more}
    jobs = SlurmJobs(Cluster(poll_s=0.2, grace_s=0.0), folder / "receipts")
    (ran,) = run_cells([cell], jobs, **options)
    return ran


def test_a_job_without_a_receipt_is_run_again_and_a_second_start_runs_nothing(scripts: Path, tmp_path: Path) -> None:
    (scripts / "lose").touch()
    notes: list[str] = []
    for kept in (False, True):
        receipt, reused, _ = run_one(tmp_path, progress=lambda event: notes.append(event.note))
        assert (receipt.outcome, reused, len(receipt.retries)) == (Outcome.PASS, kept, 1)
        assert receipt.retries[0].startswith("no-receipt: the job ended (COMPLETED)")
        assert read_receipts(tmp_path / "receipts").found["native-cpu-x"] == receipt
    assert len(list(scripts.glob("*.name"))) == 2
    assert any(note.startswith("no-receipt") for note in notes)


def test_a_cell_that_is_lost_twice_is_given_up_and_a_third_start_tries_again(scripts: Path, tmp_path: Path) -> None:
    ran = run_one(tmp_path, "os._exit(os.kill(os.getpid(), 9))")
    assert (ran.receipt.outcome, [fault[:7] for fault in ran.receipt.retries]) == (Outcome.NOT_RUN, ["killed:"] * 2)
    assert run_one(tmp_path).receipt.retries == ()
    assert len(list(scripts.glob("*.name"))) == 3


def test_a_job_that_slurm_refuses_is_infrastructure(scripts: Path, tmp_path: Path) -> None:
    (scripts / "refuse").touch()
    with pytest.raises(InfrastructureFailed, match=r"invalid partition.*--no-requeue.*Next step"):
        run_one(tmp_path)


class Gone(Exception):
    """The tool ends with its jobs on their way, as by kill -9."""


def test_a_job_that_is_on_its_way_is_taken_up_and_one_of_another_order_is_cancelled(
    scripts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(*_: object) -> None:
        raise Gone

    wait_for = f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)\nwrite()"
    with monkeypatch.context() as killed:
        killed.setattr(SlurmJobs, "wait", leave)
        killed.setattr(SlurmJobs, "stop", lambda _: None)
        with pytest.raises(Gone):
            run_one(tmp_path, wait_for)
    (tmp_path / "go").touch()
    assert run_one(tmp_path, wait_for).receipt.outcome is Outcome.PASS
    assert len(list(scripts.glob("*.name"))) == 1
    with monkeypatch.context() as killed:
        killed.setattr(SlurmJobs, "wait", leave)
        killed.setattr(SlurmJobs, "stop", lambda _: None)
        with pytest.raises(Gone):
            run_one(tmp_path, "time.sleep(600)", replace(ORDER, seed=1))
    assert run_one(tmp_path, order=replace(ORDER, seed=2)).receipt.seed == 2
    assert (scripts / "cancelled").read_text() == "--quiet 2\n"


# --- On a real Slurm. ---


@pytest.fixture(scope="module")
def slurm() -> Iterator[dict[str, str]]:
    if missing := slurm_cluster.why_no_slurm():
        pytest.skip(f"not-run: {missing}")
    with slurm_cluster.run_cluster(2) as variables:
        yield variables


@dataclass
class Run:
    """A matrix on a cluster, and what is done to it."""

    slurm: dict[str, str]
    folder: Path
    words: list[str]
    site: str = ""
    tries: dict[str, str] = field(default_factory=dict)  # cell by number
    hit: set[str] = field(default_factory=set)
    earlier: set[str] = field(default_factory=set)  # numbers of jobs of other runs

    def __post_init__(self) -> None:
        with suppress(subprocess.CalledProcessError):  # of a Slurm that does not answer
            self.earlier = set(self.ask("squeue", "-h", "--states=all", "--format=%i").split())

    @property
    def receipts(self) -> Path:
        return self.folder / "receipts"

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def start(self) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = write(self.folder / "site.toml", f"retries = 2\npoll_s = 0.5\ngrace_s = 1\n{self.site}")
        command = [sys.executable, "-m", "megacpp_validate.cli", "matrix", *self.words, "--launcher", "slurm"]
        command += ["--cluster", str(settings), "--receipts", str(self.receipts), "--python", sys.executable]
        variables = {**self.slurm, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.folder / "said").open("ab") as said:
            return subprocess.Popen(command, env=variables, stdout=said, stderr=said, cwd=ROOT)

    def ask(self, *words: str) -> str:
        return subprocess.run(words, env=self.slurm, capture_output=True, text=True, check=True).stdout

    def jobs(self) -> list[list[str]]:
        """Number, cell, state and node of every job of this run that the controller remembers."""
        rows = [row.split("|") for row in self.ask("squeue", "-h", "--states=all", "--format=%i|%j|%T|%N").splitlines()]
        rows = [row for row in rows if row[0] not in self.earlier]
        self.tries |= {row[0]: row[1] for row in rows}
        return rows

    def running(self, node: str = "") -> list[str] | None:
        """A job that has begun its cell and was not hit yet; on this node where one is named."""
        for row in self.jobs():
            begun = list((self.receipts / ".matrix.work").glob(f"{row[1]}.*/{row[0]}_*")) and list(
                (self.receipts / ".matrix.work").glob(f"{row[1]}.*/{row[1]}.log")
            )
            if row[2] == "RUNNING" and node in ("", row[3]) and row[0] not in self.hit and begun:
                return row
        return None

    def hit_one(self, node: str = "") -> list[str]:
        job: list[str] = until(lambda: self.running(node))
        self.hit.add(job[0])
        return job


def until(look: Callable[[], Any]) -> Any:
    end = time.monotonic() + 300
    while not (found := look()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.05)
    return found


def kill_probe(cell: str) -> bool:
    """kill -9 of a cell's probe; whether there was one."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if b"megacpp_validate.probes" in words and any(word.endswith(f"/{cell}.json".encode()) for word in words):
                os.kill(int(entry.name), signal.SIGKILL)
                return True
    return False


STACKS = ["--environment", f"one=python:{sys.executable}", "--environment", f"two=python:{sys.executable}"]
PROBES = "imports,attention,linear_walker,permute,expert_gemm,native_block,layer_spec"


@pytest.mark.thorough
def test_a_job_cancelled_a_node_lost_the_tool_killed_a_process_killed(slurm: dict[str, str], tmp_path: Path) -> None:
    """Every cell has one receipt, and was started once more than its receipt has retries."""
    run = Run(slurm, tmp_path, ["--targets", "cpu", "--probes", PROBES, *STACKS])
    first = run.start()
    run.ask("scancel", run.hit_one()[0])
    run.hit_one("n1")
    run.ask("scontrol", "update", "nodename=n1", "state=down", "reason=lost")
    until(lambda: "node-fail" in run.said)
    with suppress(subprocess.CalledProcessError):  # it has registered again by itself
        run.ask("scontrol", "update", "nodename=n1", "state=resume")
    until(run.running)
    first.send_signal(signal.SIGKILL)
    first.wait()
    second = run.start()
    until(lambda: (job := run.running()) and kill_probe(job[1]))
    while second.poll() is None:
        with suppress(subprocess.CalledProcessError):
            run.jobs()
        time.sleep(0.1)
    assert second.wait() == 0, run.said
    found = read_receipts(run.receipts)
    assert not found.unreadable
    assert len(found.found) == 14
    faults = Counter(fault.partition(":")[0] for receipt in found.found.values() for fault in receipt.retries)
    assert (faults["cancelled"], faults["killed"]) == (1, 1), run.said
    assert faults["node-fail"] >= 1
    tries = Counter(run.tries.values())
    assert {cell: 1 + len(receipt.retries) for cell, receipt in found.found.items()} == dict(tries)
    assert not list((run.receipts / ".matrix.work").iterdir())
