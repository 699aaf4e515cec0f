"""The guest side of the suite's own score: an order on standard input, one JSON line a run into a file or out.

    python -m megacpp_validate.selftest [RUNS.jsonl] [--mutants ID,...] [--clean N] [--seed S] [--jobs J] < ORDER.json

It needs the standard library and torch, nothing else.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from ..evidence.selftest import SelftestOrder
from .crew import LIMIT_S, run_tasks
from .lines import run_line
from .order import read_selftest_order
from .tasks import plan_tasks


def main() -> None:
    """Do what is ordered; the exit status is 0 wherever every run gave its line, whatever is in it."""
    given = _read_arguments()
    try:
        order = _narrowed(read_selftest_order(sys.stdin.read()), given)
    except ValueError as fault:
        sys.exit(str(fault))
    with nullcontext(sys.stdout) if given.runs is None else given.runs.open("w", encoding="utf-8") as file:
        for run in run_tasks(plan_tasks(order), given.jobs, given.limit):
            file.write(run_line(run))
            file.flush()


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m megacpp_validate.selftest", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="?", type=Path, help="file for the runs; standard output without it")
    parser.add_argument("--mutants", help="ids of those to plant, with commas; all of the order without it")
    parser.add_argument("--clean", type=int, help="at least so many probe runs without a fault")
    parser.add_argument("--seed", type=int, help="of the first run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a run may take")
    return parser.parse_args()


def _narrowed(order: SelftestOrder, given: argparse.Namespace) -> SelftestOrder:
    """The order with what the options say instead.

    Raises:
        ValueError: a mutant that the order has not.
    """
    if given.mutants is not None:
        wanted = [name for name in given.mutants.split(",") if name]
        known = {mutant.id: mutant for mutant in order.mutants}
        if unknown := [name for name in wanted if name not in known]:
            raise ValueError(f"there is no mutant {', '.join(unknown)}. Next step: choose from {', '.join(known)}.")
        order = replace(order, mutants=tuple(known[name] for name in wanted))
    return replace(
        order,
        clean=order.clean if given.clean is None else given.clean,
        seed=order.seed if given.seed is None else given.seed,
    )


if __name__ == "__main__":
    main()
