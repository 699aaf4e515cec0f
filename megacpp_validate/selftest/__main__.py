"""The guest side of the suite's own score: an order on standard input, one JSON line a run into a file or out.

    python -m megacpp_validate.selftest [RUNS.jsonl] [--jobs J] [--limit S] < ORDER.json

It needs the standard library and torch, nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from .tasks import plan_tasks, read_selftest_order, run_line
from .workers import LIMIT_S, run_tasks


def main() -> None:
    """Do what is ordered; the exit status is 0 wherever every run gave its line, whatever is in it."""
    given = _read_arguments()
    try:
        order = read_selftest_order(sys.stdin.read())
    except ValueError as fault:
        sys.exit(str(fault))
    with nullcontext(sys.stdout) if given.runs is None else given.runs.open("w", encoding="utf-8") as file:
        for run in run_tasks(plan_tasks(order), given.jobs, given.limit):
            file.write(run_line(run))
            file.flush()


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megacpp_validate.selftest", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="?", type=Path, help="file for the runs; standard output without it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a run may take")
    return parser.parse_args()


if __name__ == "__main__":
    main()
