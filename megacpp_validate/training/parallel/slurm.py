"""A run as a Slurm job, submitted through submitit: one task a node, which starts torchrun for the node's ranks.

A cluster's shared file system has to hold the interpreter, the package and the folder of the run.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .. import TrainingError
from .launch import RunEnd, read_end

_FIRST_PORT, _PORTS = 20000, 10000  # below 32768, where Linux begins to give ports away
_ROOT: Final = Path(__file__).parents[3]  # where the package is found
_LOOK_EVERY: Final = 1.0  # seconds
_STOP_BEFORE_S: Final = 60  # before the time limit, for ranks to be stopped and the verdict to be written


class SlurmUnavailable(TrainingError, RuntimeError):
    """A submission without a Slurm, or one that Slurm refused, or a job that left no end of its run."""


def submit(words: tuple[str, ...], hosts: int, folder: Path, settings: Mapping[str, str]) -> RunEnd:
    """Submit a job and wait for it: the end of its run.

    Args:
        words: arguments of the launcher (`__main__`) on each node; the rendezvous is on the first node, at a port from
            the job's number, where they name none.
        hosts: nodes.
        folder: of the run, shared between the nodes.
        settings: options of sbatch by name, such as partition; `time` is in minutes.

    Raises:
        SlurmUnavailable: no Slurm or submitit here, Slurm refused the job, or the job left no end of its run.
    """
    (folder / "run.json").unlink(missing_ok=True)
    try:
        import submitit

        executor = submitit.SlurmExecutor(folder=folder / "slurm")
        executor.update_parameters(**plan_job(hosts, settings))
        number = str(executor.submit(run_node, words).job_id)
    except Exception as fault:  # submitit's own kinds differ between releases
        raise SlurmUnavailable(
            f"the job was not submitted: {' '.join(str(fault).split())[-400:]}. Next step: run this on a login node "
            "with submitit installed, or run the command on each host with --nnodes and --rdzv-endpoint."
        ) from fault
    while _is_queued(number):
        time.sleep(_LOOK_EVERY)
    if (end := read_end(folder)) is None:
        raise SlurmUnavailable(
            f"job {number} is over and left no {folder / 'run.json'}. Likely cause: the job was cancelled, or a node "
            f"does not see that folder. Next step: see {folder}/slurm/{number}_*_log.err."
        )
    return end


def plan_job(hosts: int, settings: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of a job, under submitit's names; Slurm starts it again with `requeue` alone."""
    more = dict(settings)
    minutes = int(more.pop("time", "60"))
    requeue = "requeue" if more.pop("requeue", "") else "no-requeue"
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    return {
        "job_name": "megacpp-run", "nodes": hosts, "ntasks_per_node": 1, "time": minutes, "wckey": None,
        # Where one task fails, the others still write the verdict: they end their ranks by themselves.
        "signal_delay_s": min(_STOP_BEFORE_S, 30 * minutes), "srun_args": ["--kill-on-bad-exit=0"],
        "setup": [f"export PYTHONPATH={shlex.quote(path)}"],
        "additional_parameters": {**more, requeue: True, "export": "ALL"},
    }  # fmt: skip


def run_node(words: tuple[str, ...]) -> int:
    """The task on a node: the launcher, in a process of its own; its exit status."""
    # Of the first node, where the batch script called srun: the name of a node need not resolve.
    address = os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    endpoint = f"{address}:{_FIRST_PORT + int(os.environ['SLURM_JOB_ID']) % _PORTS}"
    command = [sys.executable, "-m", __package__, "--rdzv-endpoint", endpoint, *words]
    # submitit's sign of the time limit is SIGUSR2, which Slurm sends to every process of the job: ranks ignore it.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    with subprocess.Popen(command) as launcher:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda *_: launcher.terminate())
        return launcher.wait()


def _is_queued(number: str) -> bool:
    """Whether Slurm still has the job; it forgets one that is over after some minutes (MinJobAge)."""
    words = ["squeue", "--noheader", "--format=%T", f"--jobs={number}"]
    seen = subprocess.run(words, capture_output=True, text=True, check=False)
    if seen.returncode:
        return "Invalid job id" not in seen.stderr  # or the controller does not answer for now
    return seen.stdout.strip() not in ("", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
