"""Receipts as plain JSON, written without the product: good ones of every module, and changed ones."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

AT: Final = datetime(2026, 11, 22, 12, tzinfo=UTC)
AT_WORDS: Final = "2026-11-22T12:00:00+00:00"
STACK, TARGET = "te2.20.2", "h200"
COMMIT: Final = "a" * 40
CODE: Final = "0" * 64  # that produced every receipt; no checkout has it
PROBES: Final = ("imports", "attention", "linear_walker", "permute", "expert_gemm", "native_block", "layer_spec")

Receipt = dict[str, Any]


def part(name: str = "frobenius", observed: float = 0.001, bound: float = 0.01) -> dict[str, Any]:
    """One comparison of a check."""
    return {"name": name, "observed": observed, "bound": bound, "passed": observed <= bound,
            "derivation": "counted roundings", "at_least": False}  # fmt: skip


def check(
    name: str = "bf16.forward", *parts: dict[str, Any], detail: str = "", passed: bool | None = None
) -> dict[str, Any]:
    """One check; it passes where its parts do."""
    held = all(one["passed"] for one in parts) if passed is None else passed
    return {"name": name, "passed": held, "parts": list(parts), "detail": detail}


def backend(path: str, requested: str = "te", claimed: str = "te", *observed: str) -> dict[str, Any]:
    """A path: what it asked for, claims, and was seen to run."""
    return {"path": path, "requested": requested, "claimed": claimed, "observed": list(observed), "reasons": []}


def package(version: str, file: str = "/env/transformer_engine/__init__.py", *copies: str) -> dict[str, Any]:
    """Transformer Engine, as loaded."""
    return {"name": "transformer_engine", "version": version, "file": file, "other_copies": list(copies)}


def library(name: str, version: str, *files: str) -> dict[str, Any]:
    """A library, as mapped."""
    return {"name": name, "version": version, "files": list(files)}


def timing(name: str = "bf16.forward", median: float = 1.0, clock: str = "cuda-events") -> dict[str, Any]:
    """A median of two rounds that are alike."""
    return {"name": name, "clock": clock, "rounds_ms": [median, median], "median_ms": median, "spread": 0.0, "uses": 5}


MACHINE: Final = {"host": "one", "platform": "Linux", "python": "3.12.3", "torch": "2.11.0", "gpu": "NVIDIA H200",
                  "capability": "9.0", "driver": "580.1", "cuda": "13.0"}  # fmt: skip
JIT: Final = {"warm_up": {}, "after": {}, "compiled": [], "hits": {}, "unwatched": {}, "notes": [], "root": "",
              "arch": "", "mode": ""}  # fmt: skip
FAILED: Final = check("bf16.forward", part(observed=0.1))


def good(probe: str, *, hours: float = 1.0, stack: str = STACK, target: str = TARGET, **changes: Any) -> Receipt:
    """A receipt that nothing is wrong with, `hours` old."""
    receipt: Receipt = {
        "cell": f"{stack}-{target}-{probe}", "stack": stack, "target": target, "probe": probe,
        "outcome": "pass", "reason": "", "requested": "te", "requested_because": "",
        "checks": [check("bf16.forward", part())],
        "backends": [backend(f"{probe}.bf16", "te", "te", "te")],
        "packages": [package(stack.removeprefix("te"))],
        "libraries": [library("libcudnn", "9.22.0", "/env/libcudnn.so.9")],
        "machine": MACHINE, "jit": JIT, "failure": None, "blocked_by": "", "seed": 0,
        "started": (AT - timedelta(hours=hours)).isoformat(),
        # No two processes take the same time.
        "seconds": {"import-torch": 3.0 + hours, "probe": sum(f"{probe}".encode()) / 1000, "total": 9.5 + hours},
        "peak_memory_mib": 100.0, "retries": [], "timings": [timing()], "quantizers": [], "compilers": [],
        "training": [], "environment": "e" * 64, "image_digest": "", "lock_hash": "", "commit": COMMIT, "tool": "",
        "schema_id": "megacpp-validate/receipt/6", "code": CODE,
    }  # fmt: skip
    return receipt | changes


def red(probe: str, *, hours: float = 1.0, **changes: Any) -> Receipt:
    """A receipt of a module that failed a check."""
    return good(probe, hours=hours, **({"outcome": "fail", "reason": "out of bounds", "checks": [FAILED]} | changes))


def raised(probe: str, text: str, *, hours: float = 1.0, **changes: Any) -> Receipt:
    """A receipt of a module that raised "class: message"."""
    kind, _, message = text.partition(": ")
    failure = {"type": kind, "message": message, "frame": "", "traceback": ""}
    outcome = "import-error" if probe == "imports" else "error"
    seen = {"outcome": outcome, "reason": text, "failure": failure, "checks": []}
    return good(probe, hours=hours, **(seen | changes))


def put(folder: Path, *receipts: Receipt, run: str = "run") -> None:
    """Write receipts into one run of a store."""
    (folder / run).mkdir(parents=True, exist_ok=True)
    for receipt in receipts:
        (folder / run / f"{receipt['cell']}.json").write_text(sealed(receipt), encoding="utf-8")


def sealed(receipt: Receipt) -> str:
    """The text of a receipt, with the SHA-256 of all of it but these digits at its end."""
    kept = {key: value for key, value in receipt.items() if key != "seal"}
    text = json.dumps({**kept, "seal": ""}, indent=2, ensure_ascii=False) + "\n"
    return text[:-4] + hashlib.sha256(text.encode()).hexdigest() + text[-4:]


def fill(folder: Path, **changes: Any) -> Path:
    """A store that is good throughout."""
    put(folder, *(good(probe, **changes) for probe in PROBES))
    return folder


def place(folder: Path, probe: str, run: str = "run") -> Path:
    """The file of a cell."""
    return folder / run / f"{STACK}-{TARGET}-{probe}.json"
