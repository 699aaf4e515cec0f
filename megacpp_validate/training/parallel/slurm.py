"""A run as a Slurm job, submitted through submitit: one task a node, which starts torchrun for the node's ranks.

submitit is a dependency of the package; a cluster's shared file system has to hold the interpreter, the package and the
folder of the run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import TrainingError
from .verdict import end_path, read_end

_FIRST_PORT, _PORTS = 20000, 10000  # below 32768, where Linux begins to give ports away
_ROOT: Final = Path(__file__).parents[3]  # where the package is found
_LOOK_EVERY: Final = 1.0  # seconds
_STOP_BEFORE_S: Final = 60  # before the time limit, for ranks to be stopped and the verdict to be written


class SlurmUnavailable(TrainingError, RuntimeError):
    """A submission without a Slurm, or one that Slurm refused, or a job that left no end of its run."""


@dataclass(frozen=True)
class SlurmJob:
    """What is asked of Slurm.

    Attributes:
        words: arguments of the launcher (`__main__`) on each node, the rendezvous excepted.
        hosts: nodes.
        folder: of the run, shared between the nodes.
        minutes: time limit.
        endpoint: of the rendezvous; empty takes the first node and a port from the job's number.
        gpus_per_host: 0 asks for none.
        cpus_per_host: 0 leaves it to Slurm.
        partition, account: of the cluster; empty for its defaults.
        requeue: whether Slurm may start the job again; a run that resumes from its checkpoint can ask for it.
    """

    words: tuple[str, ...]
    hosts: int
    folder: Path
    minutes: int
    endpoint: str = ""
    gpus_per_host: int = 0
    cpus_per_host: int = 0
    partition: str = ""
    account: str = ""
    requeue: bool = False


def submit(job: SlurmJob) -> Mapping[str, Any]:
    """Submit a job and wait for it: the end of its run, as `verdict.read_end` reads it.

    Raises:
        SlurmUnavailable: no Slurm or submitit here, Slurm refused the job, or the job left no end of its run.
    """
    try:
        import submitit
        from submitit.core.utils import FailedJobError, FailedSubmissionError
    except ImportError as fault:
        raise SlurmUnavailable(
            f"Slurm jobs are submitted with submitit, which cannot be imported here: {fault}. Next step: "
            f"{sys.executable} -m pip install submitit."
        ) from fault
    if missing := [tool for tool in ("sbatch", "srun", "squeue") if shutil.which(tool) is None]:
        raise SlurmUnavailable(
            f"there is no Slurm here: {', '.join(missing)} not on the PATH. Likely cause: this is no login node of a "
            "cluster. Next step: submit from one, or run the command on each host with --nnodes and --rdzv-endpoint."
        )
    end_path(job.folder).unlink(missing_ok=True)
    logs = job.folder / "slurm"
    executor = submitit.SlurmExecutor(folder=logs)
    executor.update_parameters(**plan_job(job))
    try:
        number = str(executor.submit(run_node, job).job_id)
    except (FailedJobError, FailedSubmissionError, OSError) as fault:
        raise SlurmUnavailable(
            f"sbatch refused the job: {' '.join(str(fault).split())[-400:]}. Next step: change what it names, and "
            "submit again."
        ) from fault
    while _is_queued(number):
        time.sleep(_LOOK_EVERY)
    if (end := read_end(job.folder)) is None:
        raise SlurmUnavailable(
            f"job {number} is over and left no {end_path(job.folder)}. Likely cause: the job was cancelled, or a node "
            f"does not see that folder. Next step: see {logs}/{number}_*_log.err."
        )
    return end


def plan_job(job: SlurmJob) -> dict[str, Any]:
    """The parameters of a job, under submitit's names."""
    wanted = {
        "gres": f"gpu:{job.gpus_per_host}" if job.gpus_per_host else "", "cpus_per_task": job.cpus_per_host,
        "partition": job.partition, "account": job.account,
    }  # fmt: skip
    # Where one task fails, the others still write the verdict: they end their ranks by themselves.
    more: dict[str, Any] = {"requeue" if job.requeue else "no-requeue": True, "export": "ALL"}
    path = shlex.quote(os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])))
    return {
        **{name: value for name, value in wanted.items() if value},
        "job_name": "megacpp-run", "nodes": job.hosts, "ntasks_per_node": 1, "time": job.minutes, "wckey": None,
        "signal_delay_s": min(_STOP_BEFORE_S, 30 * job.minutes), "srun_args": ["--kill-on-bad-exit=0"],
        "setup": [f"export PYTHONPATH={path}"], "additional_parameters": more,
    }  # fmt: skip


def run_node(job: SlurmJob) -> int:
    """What a task runs on its node: the launcher, in a process of its own; its exit status."""
    endpoint = job.endpoint
    if not endpoint:
        listed = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        first = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()[0]
        endpoint = f"{_address(first)}:{_FIRST_PORT + int(os.environ['SLURM_JOB_ID']) % _PORTS}"
    command = [sys.executable, "-m", __package__, "--rdzv-endpoint", endpoint, *job.words]
    # submitit's sign of the time limit is SIGUSR2, which Slurm sends to every process of the job: ranks ignore it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with subprocess.Popen(command) as launcher:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda *_: launcher.terminate())
        return launcher.wait()


def _address(node: str) -> str:
    """By which Slurm itself reaches a node: its name need not resolve."""
    shown = subprocess.run(
        ["scontrol", "--oneliner", "show", "node", node], capture_output=True, text=True, check=False
    )
    found = [word.removeprefix("NodeAddr=") for word in shown.stdout.split() if word.startswith("NodeAddr=")]
    return found[0] if found else node


def _is_queued(number: str) -> bool:
    """Whether Slurm still has the job; it forgets one that is over after some minutes (MinJobAge)."""
    words = ["squeue", "--noheader", "--format=%T", f"--jobs={number}"]
    seen = subprocess.run(words, capture_output=True, text=True, check=False)
    if seen.returncode:
        return "Invalid job id" not in seen.stderr  # or the controller does not answer for now
    return seen.stdout.strip() not in ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
