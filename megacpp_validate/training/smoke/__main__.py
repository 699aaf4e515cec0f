"""A smoke run as a process: its order as JSON on standard input, its end as the last line of its output.

    python -m megacpp_validate.training.smoke < ORDER

ORDER has the fields of `order.SmokeOrder`, and besides `folder`, where logs and receipts stay, `limit_s` and
`silent_s`; or it has those of `rank.compare_features`, whose answers are files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ...bridge.errors import BridgeError
from .. import TrainingError
from ..parallel.launch import RunEnd
from .order import SmokeOrder, run_smoke


def main() -> int:
    """0 where the run is done, 1 where it ended otherwise, 2 for an impossible order, with nothing started."""
    try:
        given = json.loads(sys.stdin.read())
        if "arms" in given:
            from .rank import compare_features

            compare_features(**given)
            return 0
        limits = {name: float(given.pop(name)) for name in ("limit_s", "silent_s") if name in given}
        folder = Path(given.pop("folder"))
        end = run_smoke(SmokeOrder(**given), folder, **limits)  # type: ignore[arg-type]
    except (TrainingError, BridgeError, OSError, LookupError, TypeError, ValueError) as fault:
        end = RunEnd("refused", (), str(fault), (), 0.0)
    receipts = [receipt for _, receipt in sorted(end.receipts.items())]
    sys.stdout.write(json.dumps({**vars(end), "ranks": receipts}) + "\n")
    return {"done": 0, "refused": 2}.get(end.ending, 1)


if __name__ == "__main__":
    sys.exit(main())
