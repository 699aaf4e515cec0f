"""`python -m tests.cells checks|boundary [--jobs N]`: see `checks.py` and `boundary.py`."""

from __future__ import annotations

import argparse
import os
import sys

from .boundary import never_varied
from .checks import required_on_cpu, required_on_h200, write_required
from .run import trace_boundary


def main() -> int:
    """Write the checks that the gate requires, or name the arguments that no cell varies: 1 where there are any."""
    parser = argparse.ArgumentParser(prog="python -m tests.cells", description=__doc__)
    parser.add_argument("verb", choices=["checks", "boundary"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    if given.verb == "checks":
        write_required({"h200": required_on_h200(), "cpu": required_on_cpu(given.jobs)})
        return 0
    found = never_varied(trace_boundary(given.jobs))
    for name, kind in found.items():
        print(f"{name}: only {kind}")  # noqa: T201
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
