"""Receipts as probes leave them, with faults planted: what each kind of fault looks like in the module that has it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from megacpp_validate.canary.dynamic.step import StackReceipts
from megacpp_validate.evidence.receipt import Backend, Check, Failure, Library, Machine, Outcome, Package, Part, Receipt

MODULES: Final = ("imports", "attention", "linear_walker", "permute", "expert_gemm", "native_block", "layer_spec")
LIBRARIES: Final = (
    Library("libcudnn", "9.14.0", ("/opt/nvidia/cudnn/lib/libcudnn.so.9",)),
    Library("libcublasLt", "13.1.0", ("/opt/nvidia/cu13/lib/libcublasLt.so.13",)),
)
MACHINE: Final = Machine("host", "Linux", "3.12.3", "2.11.0+cu130", "NVIDIA H200", "9.0", "580.1", "13.0")
CUDNN: Final = "cuDNN Error: execute failed with code: CUDNN_STATUS_EXECUTION_FAILED"
CUBLAS: Final = "cuBLAS Error: the requested functionality is not supported"
# Module -> (class of Transformer Engine, file of it, checks that fail where its numbers are wrong).
KNOWN: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "imports": ("autocast", "pytorch/quantization.py", ("scope.delayed.restored", "fp8.delayed.forward")),
    "attention": ("DotProductAttention", "pytorch/attention/backends.py", ("bf16.gqa4.d64.forward",)),
    "linear_walker": ("Linear", "pytorch/module/linear.py", ("bf16.bias.forward", "delayed.bias.grad.weight")),
    "permute": ("moe_unpermute", "pytorch/permutation.py", ("bf16.aligned.rows", "bf16.top2.dropped.sum.forward")),
    "expert_gemm": ("GroupedLinear", "pytorch/module/grouped_linear.py", ("bf16.all-busy.forward",)),
    "native_block": ("LayerNormMLP", "pytorch/module/layernorm_mlp.py", ("bf16.gqa4.d64.gelu.grad.mlp.fc1_weight",)),
    "layer_spec": ("RMSNorm", "pytorch/module/rmsnorm.py", ("bf16.norm.unit.forward",)),
}
# Culprit -> checks of those that run what it has at fault.
REACHED: Final[dict[str, dict[str, tuple[str, ...]]]] = {
    "imports": {"linear_walker": ("delayed.bias.forward",), "expert_gemm": ("fp8.delayed.all-busy.forward",),
                "native_block": ("fp8.delayed.gqa4.d64.gelu.forward",), "layer_spec": ("delayed.mlp.gelu.forward",)},
    "attention": {"native_block": ("bf16.gqa4.d64.swiglu.forward", "bf16.gqa4.d64.swiglu.grad.qkv.weight.query")},
    "linear_walker": {"native_block": ("bf16.gqa4.d64.swiglu.forward", "bf16.gqa4.d64.swiglu.grad.out.weight")},
    "permute": {"expert_gemm": ("fp8.delayed.all-busy.forward",)},
    "expert_gemm": {"layer_spec": ("bf16.experts.forward",)},
    "native_block": {"layer_spec": ("bf16.mlp.swiglu.grad.fc1_weight",)},
    "layer_spec": {},
}  # fmt: skip


def good(probe: str, stack: str = "te2", te: str = "2.0", **other: Any) -> Receipt:
    return replace(_receipt(probe, stack, Outcome.PASS, "", te), checks=(Check("seen", True),), **other)


def fails(probe: str, *names: str, stack: str = "te2", te: str = "2.0", **other: Any) -> Receipt:
    checks = tuple(Check(name, False, (Part("relative-error", 0.5, 0.01, False, "derived"),)) for name in names)
    made = _receipt(probe, stack, Outcome.FAIL, f"{len(names)} checks failed", te)
    return replace(made, **({"checks": (Check("seen", True), *checks)} | other))


def falls_back(probe: str, path: str) -> Receipt:
    check = Check(f"{path}.backend", False, detail="requested te, claimed sdpa, seen sdpa")
    row = Backend(path, "te", "sdpa", ("sdpa",), ("te: the dtype is not taken",))
    made = _receipt(probe, "te2", Outcome.FAIL, "1 check failed", "2.0")
    return replace(made, checks=(check,), backends=(row,))


def raises(
    probe: str, kind: str, text: str, frame: str = "", *, stack: str = "te2", te: str = "2.0", bridge: str = ""
) -> Receipt:
    """As `probes.process.describe` writes it; the bridge's own frames differ from module to module."""
    file, line = f"/work/megacpp_validate/bridge/{bridge or probe}.py", 40 + len(probe)
    trace = (
        f'Traceback (most recent call last):\n  File "{file}", line {line}, in forward\n    call()\n{kind}: {text}\n'
    )
    failure = Failure(kind, text, frame or f"megacpp_validate/bridge/{bridge or probe}.py:{line} in forward", trace)
    return replace(_receipt(probe, stack, Outcome.ERROR, f"{kind}: {text}", te), failure=failure)


def dies(probe: str, signal: str, file: str = "", *, stack: str = "te2") -> Receipt:
    """As `environments.cell` writes it: no package, no library, and a log that is never twice the same."""
    frame = f"/opt/te-{stack}/transformer_engine/{file}:{len(probe)} in run" if file else ""
    failure = Failure(signal, f"some words of {probe} at 0x{hash(probe) % 9999:x}", frame, "")
    outcome = Outcome.TIMEOUT if signal == "timeout" else Outcome.ERROR
    bare = Receipt(f"{stack}-h200-{probe}", stack, "h200", probe, outcome, f"died of {signal}", "te")
    return replace(bare, failure=failure)


def cannot_import(stack: str = "te2", text: str = "libtransformer_engine.so: undefined symbol: cublasLtNew") -> Receipt:
    failure = Failure("OSError", text, "transformer_engine/common/__init__.py:360")
    return replace(_receipt("imports", stack, Outcome.IMPORT_ERROR, _said(text), ""), failure=failure)


def blocked(probe: str, by: str = "imports", text: str = "libx.so: undefined symbol: y") -> Receipt:
    cell = f"te2-h200-{by}"
    made = _receipt(probe, "te2", Outcome.BLOCKED, f"blocked by {cell}: {_said(text)}", "")
    return replace(made, blocked_by=cell)


def not_run(probe: str) -> Receipt:
    return _receipt(probe, "te2", Outcome.NOT_RUN, "there is no GPU", "")


def keyword(module: str) -> tuple[str, str]:
    return "TypeError", f"{KNOWN[module][0]}.__init__() got an unexpected keyword argument 'of_{module}'"


def clean(stack: str, te: str = "") -> StackReceipts:
    return StackReceipts(stack, tuple(good(module, stack, te or stack.removeprefix("te")) for module in MODULES))


def stack_of(stack: str, *changed: Receipt, te: str = "") -> StackReceipts:
    """A clean stack with these receipts instead of its own; `te` is its release."""
    found = {receipt.probe: receipt for receipt in clean(stack, te).receipts}
    return StackReceipts(stack, tuple((found | {receipt.probe: receipt for receipt in changed}).values()))


def _said(text: str) -> str:
    where = "/tmp/x/transformer_engine/common/__init__.py:360"
    return (
        f"Transformer Engine cannot be used: OSError: {text} (at {where}). Likely cause: another build. Next step: no"
    )


def _receipt(probe: str, stack: str, outcome: Outcome, reason: str, te: str) -> Receipt:
    packages = (Package("transformer_engine", te, "/opt/te/transformer_engine/__init__.py"),) if te else ()
    return Receipt(
        f"{stack}-h200-{probe}", stack, "h200", probe, outcome, reason, "te",
        packages=packages, libraries=LIBRARIES, machine=MACHINE,
    )  # fmt: skip
