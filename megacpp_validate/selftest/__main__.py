"""The process that plants the faults: an order on standard input, one JSON line a run into a file.

    python -m megacpp_validate.selftest RUNS.jsonl JOBS SECONDS < ORDER.json

SECONDS limits one run. It needs the standard library and torch, nothing else.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from .tasks import plan_tasks, read_selftest_order, run_line, run_tasks


def main() -> None:
    """Run what is ordered; the exit status is 0 where every run gave its line, whatever the line holds."""
    runs, jobs, limit_s = sys.argv[1:]
    if find_spec("torch") is None:
        sys.exit(f"{sys.executable} has no torch")
    tasks = plan_tasks(read_selftest_order(sys.stdin.read()))
    with Path(runs).open("w", encoding="utf-8") as file:
        file.writelines(map(run_line, run_tasks(tasks, int(jobs), float(limit_s))))


if __name__ == "__main__":
    main()
