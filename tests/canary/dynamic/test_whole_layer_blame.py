"""The whole layer runs what other modules are about: red for that, it is a cascade, and red by itself a culprit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, compare_stacks
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.diagnosis.blame import blame
from megacpp_validate.evidence.receipt import Check, Outcome, Part, Receipt
from megacpp_validate.evidence.store import read_receipts
from megacpp_validate.evidence.values import Cause
from tests.diagnosis.planted import MODULES, fails, good

KEPT = Path(__file__).parents[3] / "docs" / "evidence" / "h200"


@cache
def kept(stack: str) -> StackReceipts:
    return StackReceipts(stack, tuple(read_receipts(KEPT / stack).found.values()))


def with_the_layer_run(receipts: StackReceipts) -> StackReceipts:
    """What 2.17.1 left on an H200, had the layer spec run the layer that it builds: as the block, it meets attention's
    own exception; what it checked before stays."""
    by_name = {receipt.probe: receipt for receipt in receipts.receipts}
    spec, block = by_name["layer_spec"], by_name["native_block"]
    assert block.failure is not None
    trace = block.failure.traceback.replace("native_block_samples.py", "whole_layer.py").replace(
        "probes/native_block.py", "probes/layer_spec.py"
    )
    run = replace(
        spec, outcome=Outcome.ERROR, reason=block.reason, failure=replace(block.failure, traceback=trace),
        checks=(*spec.checks, Check("bf16.whole.gqa4.forward.repeated", True)), timings=(),
    )  # fmt: skip
    return StackReceipts(receipts.stack, tuple((by_name | {"layer_spec": run}).values()))


@pytest.mark.parametrize("before", ["te2.12.0", "te2.20.2"])
def test_attention_that_dies_in_cudnn_is_named_once(catalog: Catalog, before: str) -> None:
    found = compare_stacks(kept(before), with_the_layer_run(kept("te2.17.1")), catalog.modules)
    (culprit,) = found.culprits
    assert (culprit.module, culprit.cause, culprit.component) == ("attention", Cause.ENVIRONMENT, "cuDNN")
    assert culprit.cascades == ("native_block", "layer_spec")


def red(probe: str, *names: str) -> dict[str, Receipt]:
    return {probe: fails(probe, *names)}


WRONG: dict[str, tuple[str, dict[str, Receipt]]] = {
    "attention": ("attention", red("attention", "bf16.gqa4.d64.forward", "bf16.gqa4.d64.grad.key")
                  | red("native_block", "bf16.gqa4.d64.swiglu.forward")),
    "attention's gradient": ("attention", red("attention", "bf16.gqa4.d64.grad.key")),
    "linear": ("linear_walker", red("linear_walker", "bf16.bias.forward", "delayed.bias.grad.weight")
               | red("native_block", "bf16.gqa4.d64.swiglu.forward")),
    "block": ("native_block", red("native_block", "bf16.gqa4.d64.swiglu.forward",
                                  "bf16.gqa4.d64.swiglu.grad.qkv.weight.query")),
    "nobody else": ("layer_spec", {}),
}  # fmt: skip


@pytest.mark.parametrize(("culprit", "others"), WRONG.values(), ids=WRONG)
def test_wrong_numbers_of_the_whole_layer_go_to_whoever_has_them(
    catalog: Catalog, culprit: str, others: dict[str, Receipt]
) -> None:
    backward = ("bf16.whole.gqa4.grad.rows", "bf16.whole.gqa4.grad.self_attention.layernorm_qkv.weight.key")
    forward = () if "attention" in others and len(others) == 1 else ("bf16.whole.gqa4.forward",)
    found = {name: good(name) for name in MODULES} | others | red("layer_spec", *forward, *backward)
    assert blame(found.values(), catalog.modules).culprits == (culprit,)


def test_a_layer_out_of_the_scope_is_a_fault_of_the_layer_spec(catalog: Catalog) -> None:
    part = Part("low-precision-ran", 0.001, 0.02, False, "half the error", at_least=True)
    check = Check("delayed.whole.gqa4.grad.applied", False, (part,))
    spec = replace(fails("layer_spec", "seen"), checks=(check,))
    before = StackReceipts("te1", tuple(good(name, "te1", "1.0") for name in MODULES))
    after = StackReceipts("te2", tuple(spec if name == "layer_spec" else good(name) for name in MODULES))
    (culprit,) = compare_stacks(before, after, catalog.modules).culprits
    assert (culprit.module, culprit.cause) == ("layer_spec", Cause.SILENT_FALLBACK)


def test_a_recompute_out_of_the_scope_is_a_fault_of_the_imports(catalog: Catalog) -> None:
    part = Part("low-precision-ran", 0.001, 0.02, False, "half the error", at_least=True)
    checks = (
        Check("recompute.fp8.delayed.reentrant.grad", False),
        Check("recompute.fp8.delayed.reentrant.grad.applied", False, (part,)),
    )
    imports = replace(fails("imports", "seen"), checks=checks)
    before = StackReceipts("te1", tuple(good(name, "te1", "1.0") for name in MODULES))
    after = StackReceipts("te2", tuple(imports if name == "imports" else good(name) for name in MODULES))
    (culprit,) = compare_stacks(before, after, catalog.modules).culprits
    assert (culprit.module, culprit.cause, culprit.cascades) == ("imports", Cause.SILENT_FALLBACK, ())
