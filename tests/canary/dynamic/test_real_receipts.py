"""What four releases did on an H200 on 2026-11-21, from the receipts that are kept: every step has its right blame."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, StepResult, compare_stacks
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.evidence.store import read_receipts
from megacpp_validate.evidence.values import Cause
from tests.diagnosis.planted import MODULES

KEPT = Path(__file__).parents[3] / "docs" / "evidence" / "h200"
STACKS = ("te2.12.0", "te2.14.1", "te2.17.1", "te2.20.2")
REST = MODULES[1:]


@cache
def kept(stack: str) -> StackReceipts:
    return StackReceipts(stack, tuple(read_receipts(KEPT / stack).found.values()))


def step(catalog: Catalog, before: str, after: str) -> StepResult:
    return compare_stacks(kept(before), kept(after), catalog.modules)


Named = tuple[tuple[str, Cause, str, tuple[str, ...]], ...]
IMPORTS: Named = (("imports", Cause.BINARY, "cuBLAS", REST),)
WITH_ATTENTION = ("native_block", "layer_spec")  # whose last probe runs a whole layer
ATTENTION: Named = (("attention", Cause.ENVIRONMENT, "cuDNN", WITH_ATTENTION),)
BLAMED: dict[tuple[str, str], Named] = {
    ("te2.12.0", "te2.14.1"): IMPORTS,
    ("te2.12.0", "te2.17.1"): ATTENTION,
    ("te2.12.0", "te2.20.2"): (),
    ("te2.14.1", "te2.12.0"): (),
    ("te2.14.1", "te2.17.1"): ATTENTION,
    ("te2.14.1", "te2.20.2"): (),
    ("te2.17.1", "te2.12.0"): (),
    ("te2.17.1", "te2.14.1"): IMPORTS,
    ("te2.17.1", "te2.20.2"): (),
    ("te2.20.2", "te2.12.0"): (),
    ("te2.20.2", "te2.14.1"): IMPORTS,
    ("te2.20.2", "te2.17.1"): ATTENTION,
} | {(stack, stack): () for stack in STACKS}


@pytest.mark.parametrize(("ends", "wanted"), BLAMED.items(), ids=["-".join(ends) for ends in BLAMED])
def test_every_step_has_its_right_blame(catalog: Catalog, ends: tuple[str, str], wanted: Named) -> None:
    found = step(catalog, *ends)
    assert tuple((one.module, one.cause, one.component, one.cascades) for one in found.culprits) == wanted


@pytest.mark.parametrize("module", MODULES)
def test_a_missing_or_torn_receipt_is_lost_and_nobody(catalog: Catalog, module: str) -> None:
    cell = f"te2.20.2-h200-{module}"
    left = tuple(receipt for receipt in kept("te2.20.2").receipts if receipt.probe != module)
    missing, torn = "there is no receipt", StackReceipts("te2.20.2", kept("te2.20.2").receipts, {cell: "cut short"})
    for after, why in ((StackReceipts("te2.20.2", left), missing), (torn, "cut short")):
        found = compare_stacks(kept("te2.12.0"), after, catalog.modules)
        assert found.culprits == ()
        assert found.lost == {cell: why}
