"""Receipts and sessions made by hand, one of every outcome."""

from __future__ import annotations

from dataclasses import replace

from megacpp_validate.environments.host_session import ParityResult
from megacpp_validate.evidence.receipt import (
    Backend,
    Check,
    Failure,
    Machine,
    Outcome,
    Part,
    Receipt,
    TrainingRecord,
    TrainingStep,
)

H200 = Machine(gpu="NVIDIA H200", capability="9.0", driver="580.159.03", cuda="13.0", torch="2.11.0", python="3.12.3")
UNDEFINED = (
    "Transformer Engine cannot be used: OSError: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal. Likely "
    "cause: cuBLAS is older than this release wants. Next step: upgrade nvidia-cublas. Found: release 2.14.1."
)


def part(name: str, observed: float | None, bound: float | None, *, at_least: bool = False) -> Part:
    passed = observed is not None and bound is not None and (observed >= bound if at_least else observed <= bound)
    return Part(name, observed, bound, passed, "2 x sqrt(8) x 2^-8", at_least)


def check(name: str, *parts: Part, detail: str = "") -> Check:
    return Check(name, all(part.passed for part in parts), parts, detail)


HELD = check("bf16.gqa4.forward", part("relative-error", 1e-3, 2e-3), part("bound-discriminates", 2e-3, 2e-3))
OUT = check("bf16.gqa4.grad.key", part("relative-error", 0.51234, 2e-3), part("factor", 1e-4, 1e-3))
BACKEND = Check("attention.bf16.soft_cap.backend", False, detail="requested te, claimed sdpa, seen sdpa")


def receipt(probe: str, outcome: Outcome, reason: str = "", **more: object) -> Receipt:
    values: dict[str, object] = {"requested": "te", "seconds": {"total": 12.34}, "machine": H200, **more}
    cell = f"te2.20.2-h200-{probe}"
    return replace(Receipt(cell, "te2.20.2", "h200", probe, outcome, reason, "te"), **values)  # type: ignore[arg-type]


GOOD = receipt("imports", Outcome.PASS, checks=(HELD,), backends=(Backend("linear", "te", "te", ("te",)),))
FAIL = receipt("attention", Outcome.FAIL, "1 of 2 checks failed: bf16.gqa4.grad.key", checks=(HELD, OUT))
FALLBACK = receipt(
    "permute",
    Outcome.FAIL,
    "1 of 2 checks failed: attention.bf16.soft_cap.backend",
    checks=(HELD, BACKEND),
    backends=(Backend("attention.bf16.soft_cap", "te", "sdpa", ("sdpa",), ("te: soft-capped logits have no kernel",)),),
)
ERROR = receipt(
    "native_block",
    Outcome.ERROR,
    "RuntimeError: cuDNN Error: set_attribute on a reshape operation",
    checks=(HELD,),
    failure=Failure("RuntimeError", "cuDNN", "transformer_engine/fused_attn.py:310 in fwd", "Traceback: all"),
)
TIMEOUT = receipt("expert_gemm", Outcome.TIMEOUT, "killed after 300 s in deep_gemm/jit.py:10 in build")
IMPORT = receipt("linear_walker", Outcome.IMPORT_ERROR, UNDEFINED)
BLOCKED = receipt("layer_spec", Outcome.BLOCKED, f"blocked by imports: {UNDEFINED}", blocked_by="cell-of-imports")
NOT_RUN = receipt(
    "fp8_block", Outcome.NOT_RUN, "the target h200 wants sm_90. Next step: run it there.", machine=Machine()
)
UNSUPPORTED = receipt("fp8_mxfp8", Outcome.EXPECTED_UNSUPPORTED)
REDS = (FAIL, FALLBACK, ERROR, TIMEOUT, IMPORT, BLOCKED)


def session(*receipts: Receipt) -> ParityResult:
    return ParityResult(
        tool="megacpp-validate 0.1.0", target="h200", stack="te2.20.2", requested="te", folder=".megacpp/receipts",
        requested_because="Transformer Engine is the default on the target h200", interpreter="/usr/bin/python3",
        seed=3, seconds=61.5, receipts=receipts,
    )  # fmt: skip


ALL = session(GOOD, *REDS, NOT_RUN, UNSUPPORTED)
CLEAN = session(GOOD, UNSUPPORTED)
NOTHING = session(NOT_RUN, replace(NOT_RUN, probe="attention"))


def record(precision: str = "bf16", seconds: float = 0.5, steps: int = 1000) -> TrainingRecord:
    """A run whose step 611 takes longer, and whose first step compiles."""
    rows = tuple(
        TrainingStep(n, 3.0 - n / 1000, 2.0, 1.0, 20.0 if n == 0 else 0.9 if n == 611 else seconds)
        for n in range(steps)
    )
    return TrainingRecord(
        "plan", "scaled", "AEMR", 2_600_000_000, 4, {"data": "4"}, precision, {"moe": "False"}, {}, 2.0, 3.5, rows,
        4_000_000_000, {"start-up": 1_000_000_000, "data": 0, "step": 3_000_000_000}, 10, 1.0,
    )  # fmt: skip


def trained(precision: str, seconds: float) -> Receipt:
    return receipt(f"smoke_{precision}", Outcome.PASS, checks=(HELD,), training=(record(precision, seconds),))
