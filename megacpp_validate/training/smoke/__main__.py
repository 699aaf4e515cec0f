"""A smoke run as a process: its order as JSON on standard input, what became of it as the last line of its output.

    python -m megacpp_validate.training.smoke < ORDER

ORDER has the fields of `order.SmokeOrder`, and `folder`, `limit_s` and `silent_s` besides.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from ..errors import TrainingError
from .order import read_order
from .run import run_smoke


def main() -> int:
    """0 where the run is done, 1 where it ended otherwise, 2 where the order cannot be."""
    given = json.load(sys.stdin)
    limits = {name: float(given.pop(name)) for name in ("limit_s", "silent_s") if name in given}
    folder = Path(given.pop("folder", "") or tempfile.mkdtemp(prefix="megacpp-smoke-"))
    try:
        result = run_smoke(read_order(json.dumps(given)), folder, **limits)
    except (TrainingError, ValueError) as fault:
        sys.stdout.write(json.dumps({"ending": "refused", "words": str(fault), "seconds": 0.0, "ranks": []}) + "\n")
        return 2
    sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return 0 if result.ending == "done" else 1


if __name__ == "__main__":
    sys.exit(main())
