"""A smoke run as a process: its order as JSON on standard input, what became of it as the last line of its output.

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
from typing import Any

from ...bridge.errors import BridgeError
from ..errors import TrainingError, WrongSize
from .order import read_order
from .run import SmokeResult, run_smoke

LIMITS = ("limit_s", "silent_s")


def main() -> int:
    """0 where the run is done, 1 where it ended otherwise, 2 where the order cannot be and nothing was started."""
    try:
        result = run_given(sys.stdin.read())
    except (TrainingError, BridgeError, OSError) as fault:
        result = SmokeResult("refused", (), str(fault), 0.0, {})
    sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return {"done": 0, "refused": 2}.get(result.ending, 1)


def run_given(text: str) -> SmokeResult:
    """Run an order from its text. Raises as `read_order` and `run_smoke`."""
    try:
        given = json.loads(text)
    except ValueError as fault:
        raise WrongSize(
            f"no JSON came in: {fault}. Next step: give a JSON object on standard input, {{}} at the least."
        ) from fault
    if not isinstance(given, dict):
        raise WrongSize(f"{given!r} is no JSON object. Next step: give one, {{}} at the least.")
    limits: dict[str, Any] = {name: read_seconds(name, given.pop(name)) for name in LIMITS if name in given}
    named = str(given.pop("folder", ""))
    order = read_order(json.dumps(given))
    folder = Path(named or tempfile.mkdtemp(prefix="megacpp-smoke-"))
    try:
        result = run_smoke(order, folder, **limits)
    except Exception:
        _forget(folder, unless=named)
        raise
    if result.ending == "done":
        _forget(folder, unless=named)
    return result


def read_seconds(name: str, value: Any) -> float:
    """A limit. Raises WrongSize where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise WrongSize(f"{name} is {value!r}. Next step: give seconds, above 0.")
    return float(value)


def _forget(folder: Path, *, unless: str) -> None:
    if not unless:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
