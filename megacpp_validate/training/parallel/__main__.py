"""Start the ranks of a run: on this host, on several hosts, or as a Slurm job.

    python -m megacpp_validate.training.parallel [--nnodes N --rdzv-endpoint HOST:PORT] --nproc-per-node R --folder RUN
        MODULE [ARGUMENT ...]

Exit status: 0 every rank ended well and left a receipt; 1 one did not; 2 arguments or allocation wrong; 6 hosts or
Slurm not available. docs/launchers.md shows each.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from .launch import Hosts, WrongLaunch, launch
from .slurm import SlurmJob, SlurmUnavailable, submit
from .verdict import Limits, RunEnd, end_path, write_end


def main(given: list[str] | None = None) -> int:
    """Start a run as the arguments say; the exit status."""
    options = _parse(given)
    try:
        return _submit(options) if options.slurm else _start(options)
    except WrongLaunch as fault:
        code, words = 2, str(fault)
    except SlurmUnavailable as fault:
        code, words = 6, str(fault)
    sys.stderr.write(f"{words}\n")
    return code


def _parse(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megacpp_validate.training.parallel", description="Start the ranks of a run.")
    add = parser.add_argument
    add("--nnodes", type=int, default=1, help="hosts; each of them runs this command")
    add("--nproc-per-node", type=int, required=True, help="ranks on each host")
    add("--rdzv-endpoint", default="", help="HOST:PORT where torchrun's agents meet; needed for several hosts")
    add("--rdzv-id", default="", help="name of the run (default: the Slurm job, or the folder's name)")
    add("--folder", type=Path, required=True, help="of the run; shared by all hosts")
    add("--world", type=int, help="ranks of the plan; another number than nnodes x nproc-per-node is refused")
    add("--limit-s", type=float, default=3600.0, help="of the whole run")
    add("--silent-s", type=float, default=600.0, help="without a sign of life of any rank")
    add("--joining-s", type=float, default=120.0, help="until the process group is up on every rank")
    add("--slurm", action="store_true", help="submit a Slurm job that runs this on each node, and wait for it")
    add("--minutes", type=int, default=60, help="slurm: time limit of the job")
    add("--gpus-per-host", type=int, default=0, help="slurm: asks for --gres=gpu:N; 0 asks for none")
    add("--cpus-per-host", type=int, default=0, help="slurm: 0 leaves it to Slurm")
    add("--partition", default="", help="slurm")
    add("--account", default="", help="slurm")
    add("--requeue", action="store_true", help="slurm: may start the job again")
    add("module", help="that each rank runs")
    add("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(given)


def _start(options: argparse.Namespace) -> int:
    _refuse(options)
    job = os.environ.get("SLURM_JOB_ID", "")
    run = f"slurm-{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else options.folder.absolute().name
    hosts = Hosts(options.nnodes, options.rdzv_endpoint or "localhost:0", options.rdzv_id or run)
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    end = launch(
        options.module,
        options.arguments,
        ranks=options.nproc_per_node,
        folder=options.folder.absolute(),
        limits=Limits(options.limit_s, min(options.silent_s, options.limit_s), options.joining_s),
        hosts=hosts,
        is_stopped=lambda: bool(stopped),
    )
    return _report(options.folder, end)


def _refuse(options: argparse.Namespace) -> None:
    ranks, wrong = options.nnodes * options.nproc_per_node, []
    if options.world is not None and options.world != ranks:
        idle = "ranks are missing" if options.world > ranks else "ranks would be idle"
        wrong.append(
            f"the plan's world is {options.world}, and {options.nnodes} host(s) with {options.nproc_per_node} rank(s) "
            f"each make {ranks}: {idle}"
        )
    host, _, port = options.rdzv_endpoint.rpartition(":")
    if options.rdzv_endpoint and not (host and port.isdigit() and int(port) < 65536):
        wrong.append(f"--rdzv-endpoint is {options.rdzv_endpoint!r}, and not HOST:PORT, as in node-a:29500")
    elif options.nnodes > 1 and not options.slurm and not (port.isdigit() and int(port)):
        wrong.append(f"{options.nnodes} hosts need an --rdzv-endpoint HOST:PORT that all of them reach")
    if wrong:
        raise WrongLaunch(f"{'; '.join(wrong)}. Next step: change those; no rank was started.")


def _submit(options: argparse.Namespace) -> int:
    _refuse(options)
    words = [
        "--nnodes", str(options.nnodes), "--nproc-per-node", str(options.nproc_per_node),
        "--folder", str(options.folder.absolute()), "--limit-s", str(options.limit_s),
        "--silent-s", str(options.silent_s), "--joining-s", str(options.joining_s), options.module, *options.arguments,
    ]  # fmt: skip
    job = SlurmJob(
        words=tuple(words),
        hosts=options.nnodes,
        folder=options.folder.absolute(),
        minutes=options.minutes,
        endpoint=options.rdzv_endpoint,
        gpus_per_host=options.gpus_per_host,
        cpus_per_host=options.cpus_per_host,
        partition=options.partition,
        account=options.account,
        requeue=options.requeue,
    )
    end = submit(job)
    sys.stdout.write(f"{end['ending']}: {len(end['ranks'])} rank(s), {end['seconds']:.1f} s; {end_path(job.folder)}\n")
    sys.stderr.write(end["words"] + "\n" * bool(end["words"]))
    return 0 if end["ending"] == "done" else 1


def _report(folder: Path, end: RunEnd) -> int:
    """Write the end of the run: each host has the same, from the same files."""
    write_end(folder, end)
    sys.stdout.write(f"{end.ending}: {len(end.ranks)} rank(s), {end.seconds:.1f} s; {end_path(folder)}\n")
    sys.stderr.write(end.words + "\n" * bool(end.words))
    return {"done": 0, "not-started": 6}.get(end.ending, 1)


if __name__ == "__main__":
    sys.exit(main())
