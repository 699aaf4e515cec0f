"""Small receipts in a store: what tests of the index, of rates and of the verb `history` share."""

from __future__ import annotations

import dataclasses
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
    write_receipt,
)


def make_receipt(outcome: Outcome = Outcome.PASS, probe: str = "attention", **changes: Any) -> Receipt:
    """A receipt of a probe of `te2.20.2-h200`."""
    good = outcome.is_good
    check = Check("bf16.out", good, (Part("relative-error", 1e-3 if good else 0.5, 2e-3, good, "2 x native"),))
    values: dict[str, Any] = {
        "cell": f"te2.20.2-h200-{probe}", "stack": "te2.20.2", "target": "h200", "probe": probe, "outcome": outcome,
        "reason": "" if good else f"it ended with {outcome}", "requested": "te", "checks": (check,),
        "backends": (Backend("attention.bf16", "te", "te", ("te",)),), "machine": Machine(host="node-1"),
        "jit": JitCompiles({"triton": 3}, {"triton": 1}), "started": "2026-11-21T19:25:37+00:00",
        "seconds": {"probe": 2.5, "total": 10.25}, "peak_memory_mib": 512.5, "environment": "a" * 64,
    }  # fmt: skip
    return Receipt(**{**values, **changes})


def put(store: Path, run: str, receipt: Receipt | None = None, **changes: Any) -> Path:
    """Write a receipt into a run; its file."""
    receipt = dataclasses.replace(receipt or make_receipt(), **changes)
    path = store / run / f"{receipt.cell}.json"
    write_receipt(receipt, path)
    return path
