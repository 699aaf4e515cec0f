"""The one launcher of a run: on this host, over several hosts by torchrun, or under Slurm.

    python -m megacpp_validate.training.parallel.host_launch --launcher local|torchrun|slurm --hosts N
        --ranks-per-host R --folder RUN [--rendezvous HOST:PORT] MODULE [ARGUMENT ...]

Exit status: 0 every rank ended well and left a receipt; 1 one did not; 2 arguments, plan or allocation wrong, and
6 hosts, port or Slurm not to be had, with no rank started in either. docs/launchers.md shows each.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Final

from ..errors import TrainingError
from .gather import end_path, read_end, write_end
from .host_meeting import HostPlace, MeetingFailed
from .host_run import run_hosts
from .launch import Limits, RunEnd, WrongLaunch, launch
from .rank_process import PortInUse
from .slurm_script import (
    RENDEZVOUS,
    NoSlurm,
    SlurmJob,
    WrongAllocation,
    read_names,
    read_place,
    render_slurm,
    submit,
)

ROOT: Final = Path(__file__).parents[3]  # where the package is found


def main(given: list[str] | None = None) -> int:
    """Start a run as the arguments say; the exit status."""
    asked = _parse(given)
    try:
        return _start(asked)
    except (WrongLaunch, WrongAllocation) as fault:
        code, words = 2, str(fault)
    except (PortInUse, MeetingFailed, NoSlurm) as fault:
        code, words = 6, str(fault)
    sys.stderr.write(f"{words}\n")
    return code


def _parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="host_launch", description="Start the ranks of a run.")
    add = parser.add_argument
    add("--launcher", choices=("local", "torchrun", "slurm"), required=True)
    add("--hosts", type=int, default=1)
    add("--ranks-per-host", type=int, required=True)
    add("--folder", type=Path, required=True, help="of the run; shared by all hosts")
    add("--world", type=int, help="ranks of the plan; another number than hosts x ranks-per-host is refused")
    add("--rendezvous", default="127.0.0.1:0", help="HOST:PORT of host 0, where the launchers meet")
    add("--host-rank", type=int, help="torchrun: the number of this host, from 0 (default: SLURM_PROCID)")
    add("--limit-s", type=float, default=3600.0, help="of the whole run")
    add("--silent-s", type=float, default=600.0, help="without a sign of life of any rank")
    add("--joining-s", type=float, default=120.0, help="until every host, and then every rank, has joined")
    add("--submit", action="store_true", help="slurm: submit the script, wait, and show the end of the run")
    add("--in-job", action="store_true", help="slurm: what the script starts on each host")
    add("--minutes", type=int, default=60, help="slurm: time limit of the job")
    add("--gpus-per-host", type=int, default=0, help="slurm: asks for --gres=gpu:N; 0 asks for none")
    add("--cpus-per-host", type=int, default=0, help="slurm: 0 leaves it to Slurm")
    add("--partition", default="", help="slurm")
    add("--account", default="", help="slurm")
    add("--requeue", action="store_true", help="slurm: may start the job again")
    add("module", help="that each rank runs")
    add("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(given)


def _start(asked: argparse.Namespace) -> int:
    _refuse(asked)
    limits = Limits(asked.limit_s, min(asked.silent_s, asked.limit_s), joining=asked.joining_s)
    folder, words = asked.folder.absolute(), [asked.module, *asked.arguments]
    if asked.launcher == "slurm" and not asked.in_job:
        return _submit(asked, folder)
    if asked.launcher == "local":
        port = _read_address(asked.rendezvous)[1]
        end_path(folder).unlink(missing_ok=True)
        return _tell(
            folder, launch(words[0], words[1:], ranks=asked.ranks_per_host, folder=folder, limits=limits, port=port)
        )
    place = _read_place(asked)
    end = run_hosts(words, place, rendezvous=_read_address(asked.rendezvous), folder=folder, limits=limits)
    if place.host == 0:
        return _tell(folder, end)
    sys.stdout.write(f"{place.words(place.host)}: the run is {end.ending}\n")
    return 0 if end.ending == "done" else 1


def _refuse(asked: argparse.Namespace) -> None:
    wrong = []
    if asked.hosts < 1 or asked.ranks_per_host < 1:
        wrong.append(f"{asked.hosts} host(s) with {asked.ranks_per_host} rank(s) each is no run")
    elif asked.world is not None and asked.world != asked.hosts * asked.ranks_per_host:
        idle = "ranks are missing" if asked.world > asked.hosts * asked.ranks_per_host else "ranks would be idle"
        wrong.append(
            f"the plan's world is {asked.world}, and {asked.hosts} host(s) with {asked.ranks_per_host} rank(s) each "
            f"make {asked.hosts * asked.ranks_per_host}: {idle}"
        )
    if asked.launcher == "local" and asked.hosts != 1:
        wrong.append(f"--launcher local runs on this host, and --hosts is {asked.hosts}")
    if asked.launcher == "torchrun" and asked.hosts > 1 and _read_address(asked.rendezvous)[1] == 0:
        wrong.append(f"{asked.hosts} hosts need a --rendezvous HOST:PORT that all of them know")
    if wrong:
        raise WrongLaunch(f"{'; '.join(wrong)}. Next step: change those numbers; no rank was started.")


def _read_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise WrongLaunch(f"--rendezvous is {text!r}. Next step: pass HOST:PORT, as node-a:29500; no rank was started.")
    return host.strip("[]"), int(port)


def _read_place(asked: argparse.Namespace) -> HostPlace:
    if asked.launcher == "slurm":
        names = read_names(os.environ)
        return read_place(os.environ, hosts=asked.hosts, ranks_per_host=asked.ranks_per_host, names=names)
    if asked.host_rank is None and "SLURM_PROCID" in os.environ:  # one srun starts this command on each host
        return read_place(os.environ, hosts=asked.hosts, ranks_per_host=asked.ranks_per_host)
    host = 0 if asked.host_rank is None and asked.hosts == 1 else asked.host_rank
    if host is None or not 0 <= host < asked.hosts:
        raise WrongLaunch(
            f"--host-rank is {host}, and there are {asked.hosts} host(s). Next step: pass each host its number, from "
            f"0 to {asked.hosts - 1}; no rank was started."
        )
    return HostPlace(host, asked.hosts, asked.ranks_per_host)


def _submit(asked: argparse.Namespace, folder: Path) -> int:
    """Write the script, and with --submit wait for its job; without, show it."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "job.sh"
    job = SlurmJob(
        name="megacpp-run",
        hosts=asked.hosts,
        command=_command(asked, folder),
        folder=folder,
        minutes=asked.minutes,
        gpus_per_host=asked.gpus_per_host,
        cpus_per_host=asked.cpus_per_host,
        partition=asked.partition,
        account=asked.account,
        port=_read_address(asked.rendezvous)[1],
        requeue=asked.requeue,
        exports={"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))},
    )
    script.write_text(render_slurm(job), encoding="utf-8")
    if not asked.submit:
        sys.stdout.write(f"{script.read_text(encoding='utf-8')}\n# {script}: submit with sbatch --wait {script}\n")
        return 0
    end_path(folder).unlink(missing_ok=True)
    code = submit(script)
    end = read_end(folder)
    if end is None:
        logs = "\n".join(_last(path) for path in sorted(folder.glob("slurm-*.log")))
        sys.stderr.write(
            f"the job ended with exit status {code}, and host 0 left no {end_path(folder)}. Likely cause: the job was "
            f"cancelled or ended before its ranks. Its logs end so:\n{logs}\n"
        )
        return code or 6
    sys.stdout.write(f"{end['ending']}: {len(end['ranks'])} rank(s), {end['seconds']:.1f} s; {end_path(folder)}\n")
    sys.stderr.write(end["words"] + "\n" * bool(end["words"]))
    return code or (end["ending"] != "done")


def _command(asked: argparse.Namespace, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", f"{__package__}.host_launch", "--launcher", "slurm", "--in-job",
        "--hosts", str(asked.hosts), "--ranks-per-host", str(asked.ranks_per_host), "--folder", str(folder),
        "--rendezvous", RENDEZVOUS, "--limit-s", str(asked.limit_s), "--silent-s", str(asked.silent_s),
        "--joining-s", str(asked.joining_s), asked.module, *asked.arguments,
    ]  # fmt: skip


def _tell(folder: Path, end: RunEnd) -> int:
    write_end(folder, end)
    sys.stdout.write(f"{end.ending}: {len(end.ranks)} rank(s), {end.seconds:.1f} s; {end_path(folder)}\n")
    sys.stderr.write(end.words + "\n" * bool(end.words))
    return 0 if end.ending == "done" else 1


def _last(path: Path) -> str:
    return f"{path}: {path.read_text(encoding='utf-8', errors='replace').strip()[-1500:]}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrainingError as fault:
        sys.exit(str(fault))
