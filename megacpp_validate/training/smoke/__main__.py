"""A smoke run as a process: its order as JSON on standard input, its end as the last line of its output.

    python -m megacpp_validate.training.smoke < ORDER

ORDER has the fields of `order.SmokeOrder`, and besides `limit_s` and `silent_s`, and `folder`, where logs and receipts
stay; without it they stay in a new one where the run did not end well.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from ...bridge.errors import BridgeError
from .. import TrainingError
from ..parallel.launch import RunEnd
from .order import SmokeOrder, run_smoke


def main() -> int:
    """0 where the run is done, 1 where it ended otherwise, 2 for an impossible order, with nothing started."""
    try:
        given = json.loads(sys.stdin.read())
        limits = {name: float(given.pop(name)) for name in ("limit_s", "silent_s") if name in given}
        named = str(given.pop("folder", ""))
        order = SmokeOrder(**given)
        folder = Path(named or tempfile.mkdtemp(prefix="megacpp-smoke-"))
        end = run_smoke(order, folder, **limits)  # type: ignore[arg-type]
        if end.ending == "done" and not named:
            shutil.rmtree(folder, ignore_errors=True)
    except (TrainingError, BridgeError, OSError, TypeError, ValueError) as fault:
        end = RunEnd("refused", (), str(fault), (), 0.0)
    receipts = [receipt for _, receipt in sorted(end.receipts.items())]
    said = {"ending": end.ending, "culprits": list(end.culprits), "words": end.words, "seconds": end.seconds}
    sys.stdout.write(json.dumps({**said, "ranks": receipts}) + "\n")
    return {"done": 0, "refused": 2}.get(end.ending, 1)


if __name__ == "__main__":
    sys.exit(main())
