"""A run under Slurm: its batch script, what the scheduler's variables say, and submission.

One task a host, not one a rank: the task is a launcher, which has its host's ranks in hand as on one host. It sees a
rank die when it does, keeps the last collective of each, and ends what they started, where a task a rank would leave
srun to kill the step and nobody to say why. It also is what runs without Slurm, so that one way is proved for all.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..errors import TrainingError
from .host_meeting import HostPlace

FIRST_PORT, PORTS = 20000, 10000  # below 32768, where Linux begins to give ports away
NO_SLURM: Final = (
    "there is no Slurm here: {} is not on the PATH. Likely cause: this is no login node of a cluster. Next step: "
    "submit {} from one, or install Slurm (Debian: apt-get install slurmctld slurmd slurm-client munge), or use "
    "--launcher torchrun on each host."
)


class NoSlurm(TrainingError, RuntimeError):
    """A submission without a Slurm, or one that Slurm refused."""


class WrongAllocation(TrainingError, ValueError):
    """Tasks or hosts of the scheduler that are not those of the plan; no rank was started."""


@dataclass(frozen=True)
class SlurmJob:
    """What a batch script asks for.

    Attributes:
        name: of the job.
        hosts: nodes.
        command: of the launcher on each host, the rendezvous excepted; the same on all.
        folder: of the run, shared between the hosts; the script's logs go there.
        minutes: time limit.
        gpus_per_host: 0 asks for none.
        cpus_per_host: 0 leaves it to Slurm.
        partition, account: of the cluster; empty for its defaults.
        port: where the launchers meet; 0 takes one from the job's number.
        signal_before: seconds before the time limit at which the launchers are told to end.
        requeue: whether Slurm may start the job again; a run that resumes from its checkpoint can ask for it.
        exports: variables of the launchers and their ranks, beside those that the job inherits.
    """

    name: str
    hosts: int
    command: Sequence[str]
    folder: Path
    minutes: int
    gpus_per_host: int = 0
    cpus_per_host: int = 0
    partition: str = ""
    account: str = ""
    port: int = 0
    signal_before: int = 60
    requeue: bool = False
    exports: Mapping[str, str] = field(default_factory=dict)


def render_slurm(job: SlurmJob) -> str:
    """The batch script of a job; depends on nothing but the job.

    Raises:
        WrongAllocation: numbers that cannot be, or a line break where Slurm reads to the end of the line.
    """
    _refuse(job)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(job.exports.items()))
    port = str(job.port) if job.port else f"$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"
    folder = shlex.quote(str(job.folder))
    return f"""#!/bin/bash
{_render_head(job)}
set -euo pipefail
{exports}
# Launchers meet at the first host, under the address by which Slurm itself reaches it.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')
export MASTER_ADDR="${{MASTER_ADDR:-$first}}" MEGACPP_PORT={port}

# The shell has the signal of the time limit; srun would kill the step at once if it had it, so that nobody could tell.
stop() {{ scancel --signal=TERM "$SLURM_JOB_ID.0" || true; }}
trap stop TERM

# Where one task fails, host 0 still judges: it ends the others itself.
srun --kill-on-bad-exit=0 --label --output={folder}/slurm-host-%t.log \\
  {shlex.join(job.command[:1])} {_with_rendezvous(job.command[1:])} &
step=$!
code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do  # a wait that the signal cut short
  code=0
  wait "$step" || code=$?
done
exit "$code"
"""


def _refuse(job: SlurmJob) -> None:
    wrong = [f"{name} is {value}" for name, value in (("hosts", job.hosts), ("minutes", job.minutes)) if value < 1]
    lines = {"name": job.name, "folder": str(job.folder), "partition": job.partition, "account": job.account}
    wrong += [f"{name} {text!r} has white space" for name, text in lines.items() if text.split() != [text] * bool(text)]
    wrong += [f"{name!r} is no name of a variable" for name in job.exports if not name.isidentifier()]
    if not 0 <= job.signal_before < 60 * job.minutes:
        wrong.append(f"signal_before {job.signal_before} s is not within the limit of {job.minutes} minute(s)")
    if wrong:
        raise WrongAllocation(f"no Slurm job can be made: {'; '.join(wrong)}. Next step: change those.")


def _render_head(job: SlurmJob) -> str:
    asked = {
        "job-name": job.name,
        "nodes": str(job.hosts),
        "ntasks-per-node": "1",
        "time": f"{job.minutes // 60:02d}:{job.minutes % 60:02d}:00",
        "gres": f"gpu:{job.gpus_per_host}" if job.gpus_per_host else "",
        "cpus-per-task": str(job.cpus_per_host) if job.cpus_per_host else "",
        "partition": job.partition,
        "account": job.account,
        "signal": f"B:TERM@{job.signal_before}",
        "output": f"{job.folder}/slurm-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value]
    return "\n".join([*lines, "#SBATCH --requeue" if job.requeue else "#SBATCH --no-requeue"])


def _with_rendezvous(words: Sequence[str]) -> str:
    """The launcher's arguments, with where to meet put in for the place of it."""
    return " ".join('"$MASTER_ADDR:$MEGACPP_PORT"' if word == RENDEZVOUS else shlex.quote(word) for word in words)


RENDEZVOUS: Final = "@RENDEZVOUS@"


def read_place(
    variables: Mapping[str, str], *, hosts: int, ranks_per_host: int, names: Sequence[str] = ()
) -> HostPlace:
    """This host's place, as the scheduler says.

    Args:
        variables: of this process.
        hosts: of the plan.
        ranks_per_host: of the plan.
        names: of the hosts, as `scontrol show hostnames` gives them.

    Raises:
        WrongAllocation: not within a job step, or its hosts or tasks are not the plan's.
    """
    needed = ("SLURM_NNODES", "SLURM_NTASKS", "SLURM_PROCID")
    if missing := [name for name in needed if not variables.get(name, "").isdigit()]:
        raise WrongAllocation(
            f"{', '.join(missing)} is not set: this is no task of a Slurm job. Next step: submit with --submit, or use "
            "--launcher torchrun."
        )
    nodes, tasks, number = (int(variables[name]) for name in needed)
    where = variables.get("SLURM_STEP_NODELIST", "its nodes")
    wrong = []
    if nodes != hosts:
        fewer = "ranks would be missing" if nodes < hosts else "hosts would be idle"
        wrong.append(f"Slurm gave {nodes} host(s) ({where}), and the plan has {hosts}: {fewer}")
    if tasks != nodes:
        fewer = "hosts have no launcher" if tasks < nodes else "a host has several"
        wrong.append(f"the step has {tasks} task(s) on {nodes} host(s): {fewer}, and one a host is needed")
    if wrong:
        raise WrongAllocation(
            f"{'; '.join(wrong)}. The plan's world is {hosts} x {ranks_per_host} = {hosts * ranks_per_host} rank(s). "
            "Likely cause: sbatch or srun was given other numbers than the script's. Next step: submit the script "
            "unchanged, or change --hosts; no rank was started."
        )
    return HostPlace(number, hosts, ranks_per_host, tuple(names))


def read_names(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the step's hosts in their order; empty where scontrol does not tell."""
    listed = variables.get("SLURM_STEP_NODELIST", "")
    if not listed or shutil.which("scontrol") is None:
        return ()
    told = subprocess.run(["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=False)
    return tuple(told.stdout.split())


def submit(script: Path) -> int:
    """Submit a script and wait for the job: its exit status.

    Raises:
        NoSlurm: there is no sbatch, or it refused the job.
    """
    if shutil.which("sbatch") is None:
        raise NoSlurm(NO_SLURM.format("sbatch", script))
    done = subprocess.run(["sbatch", "--wait", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode and not done.stdout.strip():
        raise NoSlurm(
            f"sbatch refused {script}: {done.stderr.strip()}. Next step: change what it names, and submit again."
        )
    return done.returncode
