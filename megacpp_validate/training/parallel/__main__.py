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

from .launch import Hosts, Limits, RunEnd, WrongLaunch, launch, write_end
from .slurm import SlurmUnavailable, submit


def main(given: list[str] | None = None) -> int:
    """Start a run as the arguments say; the exit status."""
    words = sys.argv[1:] if given is None else given
    options = _parse(words)
    try:
        if options.nnodes > 1 and options.slurm is None and not options.rdzv_endpoint:
            raise WrongLaunch("several hosts need --rdzv-endpoint HOST:PORT that all reach, as in node-a:29500.")
        end = _submit(options, words) if options.slurm is not None else _start(options)
    except (WrongLaunch, SlurmUnavailable) as fault:
        sys.stderr.write(f"{fault}\n")
        return 2 if isinstance(fault, WrongLaunch) else 6
    sys.stdout.write(f"{end.ending}: {len(end.ranks)} rank(s), {end.seconds:.1f} s; {options.folder / 'run.json'}\n")
    sys.stderr.write(end.words + "\n" * bool(end.words))
    return {"done": 0, "not-started": 6}.get(end.ending, 1)


def _parse(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megacpp_validate.training.parallel", description="Start the ranks of a run.")
    add = parser.add_argument
    add("--nnodes", type=int, default=1, help="hosts; each of them runs this command")
    add("--nproc-per-node", type=int, required=True, help="ranks on each host")
    add("--rdzv-endpoint", default="", help="HOST:PORT where torchrun's agents meet; needed for several hosts")
    add("--rdzv-id", default="", help="name of the run (default: the Slurm job, or the folder's name)")
    add("--folder", type=Path, required=True, help="of the run; shared by all hosts")
    add("--limit-s", type=float, default=3600.0, help="of the whole run")
    add("--silent-s", type=float, default=600.0, help="without a sign of life of any rank")
    add("--joining-s", type=float, default=120.0, help="until the process group is up on every rank")
    add(
        "--slurm", metavar="SETTINGS", help="submit a Slurm job that runs this on each node; as in 'time=30 gres=gpu:4'"
    )
    add("module", help="that each rank runs")
    add("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(given)


def _start(options: argparse.Namespace) -> RunEnd:
    job = os.environ.get("SLURM_JOB_ID", "")
    run = f"slurm-{job}.{os.environ.get('SLURM_RESTART_COUNT', '0')}" if job else options.folder.absolute().name
    stopped: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: stopped.append(number))
    end = launch(
        options.module,
        options.arguments,
        ranks=options.nproc_per_node,
        folder=options.folder.absolute(),
        limits=Limits(options.limit_s, min(options.silent_s, options.limit_s), options.joining_s),
        hosts=Hosts(options.nnodes, options.rdzv_endpoint or "localhost:0", options.rdzv_id or run),
        is_stopped=lambda: bool(stopped),
    )
    write_end(options.folder, end)  # each host has the same, from the same files
    return end


def _submit(options: argparse.Namespace, words: list[str]) -> RunEnd:
    where = words.index("--slurm")
    rest = words[:where] + words[where + 2 :]
    settings = dict(setting.split("=", 1) for setting in options.slurm.split())
    return submit(tuple(rest), options.nnodes, options.folder.absolute(), settings)


if __name__ == "__main__":
    sys.exit(main())
