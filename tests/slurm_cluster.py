"""A private Slurm on this machine: munge, a controller and one daemon a virtual node, in one folder, none a service.

    python tests/slurm_cluster.py 2 COMMAND ...

runs a command with the client tools pointed at a cluster of two nodes, and ends the cluster with it. Every daemon runs
in the foreground as a child of this process. As distributed by Debian, slurmd takes a node's name (`-N`), so that
several nodes live on one machine.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.running_processes import processes_of

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
SERVER_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
READY_WITHIN, GONE_WITHIN = 20.0, 10.0  # seconds


def why_no_slurm() -> str:
    """What is missing for a cluster here; empty where nothing is."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=SERVER_PATH) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)"
    return "" if os.geteuid() == 0 else "slurmd starts jobs for others, and needs root"


@contextmanager
def run_cluster(nodes: int) -> Iterator[dict[str, str]]:
    """Variables with which Slurm's client tools reach a cluster that lives as long as the block.

    Raises:
        RuntimeError: the nodes do not become idle; with the ends of the logs.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: Slurm's sockets take 107 characters
    variables = {**os.environ, "PATH": SERVER_PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "slurm.conf").write_text(_render_configuration(folder, nodes))
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        (folder / "state").mkdir()
        munge = ["munged", "--foreground", "--force"]  # --force: the folder is open to its owner alone
        munge += [f"--{name}={folder / name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        stack.callback(_end_steps, folder)
        commands = [[*munge, f"--key-file={folder / 'key'}"], ["slurmctld", "-D"]]
        commands += [["slurmd", "-D", "-N", f"n{node}"] for node in range(nodes)]
        for command in commands:
            with (folder / "daemons.log").open("ab") as log:
                daemon = subprocess.Popen(
                    command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=variables, start_new_session=True
                )
            stack.callback(_end, daemon)
            if command[0] == "munged":
                _await((folder / "socket").exists, folder)
        _await(lambda: _idle_nodes(variables) == nodes, folder)
        stack.callback(subprocess.run, ["scancel", "--full", "--user", pwd.getpwuid(0).pw_name], env=variables)
        yield variables


def _render_configuration(folder: Path, nodes: int) -> str:
    host, (controller, *ports) = socket.gethostname().split(".")[0], _free_ports(nodes + 1)
    lines = [
        "ClusterName=private", f"SlurmctldHost={host}(127.0.0.1)", "SlurmUser=root", "SlurmdUser=root",
        "AuthType=auth/munge", f"AuthInfo=socket={folder}/socket", "CredType=cred/munge",
        f"SlurmctldPort={controller}", f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool-%n",
        f"SlurmctldPidFile={folder}/controller.pid", f"SlurmdPidFile={folder}/%n.pid",
        f"SlurmctldLogFile={folder}/controller.log", f"SlurmdLogFile={folder}/%n.log",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none", "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core", "MpiDefault=none", "SwitchType=switch/none", "ReturnToService=2",
        "PropagateResourceLimits=NONE", "KillWait=5",
        *(
            f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=100 State=UNKNOWN"
            for node, port in enumerate(ports)
        ),
        "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]  # fmt: skip
    return "\n".join([*lines, ""])


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _idle_nodes(variables: dict[str, str]) -> int:
    told = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"], env=variables, capture_output=True, text=True, check=False
    )
    return told.stdout.split().count("idle")


def _await(happened, folder: Path) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + READY_WITHIN
    while not happened():
        if time.monotonic() > until:
            logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))
            raise RuntimeError(f"the cluster was not ready within {READY_WITHIN:g} s; its logs end so:\n{logs}")
        time.sleep(0.1)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    with suppress(subprocess.TimeoutExpired):
        daemon.wait(GONE_WITHIN)
    daemon.kill()
    daemon.wait()


def _end_steps(folder: Path) -> None:
    """A job's keeper outlives slurmd by design: what still has this cluster's variables is ended."""
    until = time.monotonic() + GONE_WITHIN
    while (left := processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    if missing := why_no_slurm():
        sys.exit(missing)
    with run_cluster(int(sys.argv[1])) as given:
        code = subprocess.run(sys.argv[2:], env=given, check=False).returncode
    sys.exit(code)
