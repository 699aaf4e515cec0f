"""The whole layer runs what other modules are about: red for that, it is a cascade, and red by itself a culprit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, compare_stacks
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.diagnosis.blame import blame
from megacpp_validate.evidence.receipt import Check, Part, Receipt
from megacpp_validate.evidence.values import Cause
from tests.diagnosis.planted import MODULES, fails, good


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
