"""Small receipts for the release gate: good ones of every required cell, written as a run writes them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.catalog.gate import GatePolicy, GateRules, read_gate_policy
from megacpp_validate.evidence.receipt import (
    Backend,
    Check,
    JitCompiles,
    Library,
    Machine,
    Outcome,
    Package,
    Part,
    Receipt,
    Timing,
    cell_id,
)
from megacpp_validate.evidence.receipt_file import receipt_text
from megacpp_validate.evidence.release_gate import GateDecision
from megacpp_validate.evidence.store import read_store
from megacpp_validate.gate.release import decide_release
from megacpp_validate.gate.release_asked import Asked, Baseline, SignedFolder

AT = datetime(2026, 11, 22, 12, tzinfo=UTC)
STACK, TARGET = "te2.20.2", "h200"
COMMIT, OTHER_COMMIT = "a" * 40, "b" * 40
IMAGE = f"sha256:{'1' * 64}"
PROBES = ("imports", "attention", "linear_walker", "permute", "expert_gemm", "native_block", "layer_spec")
CHECK = Check("bf16.forward", True, (Part("frobenius", 0.001, 0.01, True, "counted roundings"),))
FAILED = Check("bf16.forward", False, (Part("frobenius", 0.1, 0.01, False, "counted roundings"),))
NOT_A_NUMBER = Check("bf16.forward", False, (Part("finite", 3.0, 0.0, False, "no NaN and no Inf, ever"),))


@cache
def _policy() -> GatePolicy:
    return read_gate_policy(read_catalog())


def rules(release: str = "te-upgrade", target: str = TARGET, **kind: Any) -> GateRules:
    """The shipped rules; keys of the kind of release replaced."""
    found = _policy().choose(release, target)
    return found.model_copy(update={"kind": found.kind.model_copy(update=kind)})


def good(probe: str, *, hours: float = 1.0, stack: str = STACK, target: str = TARGET, **changes: Any) -> Receipt:
    """A receipt that nothing is wrong with, `hours` old."""
    receipt = Receipt(
        cell=cell_id(stack, target, probe),
        stack=stack,
        target=target,
        probe=probe,
        outcome=Outcome.PASS,
        reason="",
        requested="te",
        checks=(CHECK,),
        backends=(Backend(f"{probe}.bf16", "te", "te", ("te",)),),
        packages=(Package("transformer_engine", stack.removeprefix("te"), "/env/transformer_engine/__init__.py"),),
        libraries=(Library("libcudnn", "9.22.0", ("/env/libcudnn.so.9",)),),
        machine=Machine(gpu="NVIDIA H200", capability="9.0"),
        started=(AT - timedelta(hours=hours)).isoformat(),
        seconds=seconds(probe, hours),
        peak_memory_mib=100.0,
        timings=(Timing("bf16.forward", "cuda-events", (1.0, 1.0), 1.0, 0.0, 5),),
        environment="e" * 64,
        commit=COMMIT,
    )
    return replace(receipt, **changes)


def seconds(probe: str, hours: float) -> dict[str, float]:
    """No two processes take the same time."""
    return {"import-torch": 3.0 + hours, "probe": sum(probe.encode()) / 1000, "total": 9.5 + hours}


def red(probe: str, *, hours: float = 1.0, **changes: Any) -> Receipt:
    """One that failed a check."""
    seen: dict[str, Any] = {"outcome": Outcome.FAIL, "reason": "out of bounds", "checks": (FAILED,)} | changes
    return good(probe, hours=hours, **seen)


def golden(probe: str, **changes: Any) -> Receipt:
    """One of a golden image."""
    return good(probe, **({"image_digest": IMAGE, "lock_hash": "c" * 64} | changes))


def compiled(**after: int) -> JitCompiles:
    """Kernels that were compiled after warm-up."""
    return JitCompiles(after=after)


def put(folder: Path, *receipts: Receipt, run: str = "run") -> None:
    """Write receipts into one run of a store."""
    (folder / run).mkdir(parents=True, exist_ok=True)
    for receipt in receipts:
        (folder / run / f"{receipt.cell}.json").write_text(receipt_text(receipt))


def fill(folder: Path, **changes: Any) -> Path:
    """A store that is good throughout."""
    put(folder, *(good(probe, **changes) for probe in PROBES))
    return folder


def judge(
    folder: Path,
    wanted: GateRules | None = None,
    *,
    baseline: Baseline | None = None,
    signed: SignedFolder | None = None,
    **asked: Any,
) -> GateDecision:
    """What the gate says of a store."""
    store = read_store(folder)
    told = Asked(**({"stack": STACK, "at": AT} | asked))
    return decide_release(store.files, store.load, wanted or rules(), told, baseline=baseline, signed=signed)


def place(folder: Path, probe: str, run: str = "run") -> Path:
    """The file of a cell."""
    return folder / run / f"{cell_id(STACK, TARGET, probe)}.json"
