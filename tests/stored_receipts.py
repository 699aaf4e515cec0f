"""Small receipts in a store: what tests of the index, of rates and of the verb `history` share."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from megacpp_validate.evidence.receipt import (
    Backend,
    Check,
    JitCompiles,
    Machine,
    Outcome,
    Part,
    Receipt,
    Timing,
    write_receipt,
)

GOOD = Check("bf16.out", True, (Part("relative-error", 1e-3, 2e-3, True, "2 x native"),))
BAD = Check("bf16.gradient", False, (Part("relative-error", 0.5, 2e-3, False, "2 x native"),))


def make_receipt(outcome: Outcome = Outcome.PASS, **changes: Any) -> Receipt:
    """A receipt of `te2.20.2-h200-attention`, or of the parts that are named."""
    parts = {name: changes.get(name, default) for name, default in DEFAULTS.items()}
    told: dict[str, Any] = {
        **parts,
        "cell": "-".join(parts.values()),
        "outcome": outcome,
        "reason": "" if outcome.is_good else f"it ended with {outcome}",
        "requested": "te",
        "checks": {Outcome.PASS: (GOOD,), Outcome.EXPECTED_UNSUPPORTED: (GOOD,), Outcome.FAIL: (GOOD, BAD)}.get(
            outcome, ()
        ),
        "backends": (Backend("attention.bf16", "te", "te", ("te",)),) if outcome is Outcome.PASS else (),
        "blocked_by": "te2.20.2-h200-imports" if outcome is Outcome.BLOCKED else "",
        "machine": Machine(host="node-1", gpu="NVIDIA H200"),
        "jit": JitCompiles({"triton": 3}, {"triton": 1}),
        "started": "2026-11-21T19:25:37+00:00",
        "seconds": {"probe": 2.5, "total": 10.25},
        "peak_memory_mib": 512.5,
        "timings": (Timing("forward", "cuda-events", (1.0, 1.25, 1.5), 1.25, 0.4, 10),),
        "environment": "a" * 64,
        "commit": "c" * 40,
        "image_digest": "sha256:" + "d" * 64,
        "lock_hash": "e" * 64,
    }
    return Receipt(**{**told, **changes})


DEFAULTS = {"stack": "te2.20.2", "target": "h200", "probe": "attention"}


def put(store: Path, run: str, receipt: Receipt | None = None, **changes: Any) -> Path:
    """Write a receipt into a run, as one that lies there for a while; gives its file."""
    receipt = dataclasses.replace(receipt or make_receipt(), **changes)
    path = store / run / f"{receipt.cell}.json"
    write_receipt(receipt, path)
    age(path)
    return path


def age(path: Path, seconds: float = 60.0) -> None:
    """Wait until a file is as old as the index trusts it to be, by setting its time; its change time it has itself."""
    then = time.time() - seconds
    os.utime(path, (then, then))
