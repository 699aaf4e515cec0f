"""A fault of the host in a step: nobody is named for it, and its cells are lost."""

from __future__ import annotations

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, compare_stacks
from megacpp_validate.canary.dynamic.upgrade_result import Change, StepResult
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.evidence.receipt import Receipt
from megacpp_validate.evidence.values import ENVIRONMENT
from tests.diagnosis.planted import MODULES, blocked, cannot_import, clean, dies, fails, not_run, raises, stack_of

CATALOG = read_catalog()
ECC = ("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered")


def step(*red: Receipt) -> StepResult:
    return compare_stacks(clean("te1"), stack_of("te2", *red), CATALOG.modules)


@pytest.mark.parametrize("red", [
    raises("attention", *ECC, "transformer_engine/pytorch/attention/backends.py:9 in forward"),
    dies("permute", "SIGTERM"),
], ids=["raised", "killed"])  # fmt: skip
def test_nobody_is_named_and_its_cell_is_lost(red: Receipt) -> None:
    found = step(red)
    assert not found.culprits
    assert found.lost.keys() == {red.cell}
    assert "a fault of the host" in found.lost[red.cell]
    (row,) = (row for row in found.modules if row.module == red.probe)
    assert row.change is Change.LOST


def test_what_it_blocks_is_lost_with_it() -> None:
    found = step(raises("imports", *ECC), *(blocked(module) for module in MODULES[1:]))
    assert not found.culprits
    assert len(found.lost) == len(MODULES)


def test_a_fault_of_a_module_beside_it_is_named_and_nothing_else_is_filed_under_it() -> None:
    found = step(raises("attention", *ECC), fails("permute", "bf16.aligned.rows"))
    assert [(culprit.module, culprit.cascades) for culprit in found.culprits] == [("permute", ())]


def test_before_it_says_nothing_either_and_what_is_red_now_is_named() -> None:
    before = stack_of("te1", raises("attention", *ECC, stack="te1"))
    again = compare_stacks(before, stack_of("te2", raises("attention", *ECC)), CATALOG.modules)
    assert (again.culprits, len(again.lost)) == ((), 1)
    now = compare_stacks(before, stack_of("te2", fails("attention", "bf16.gqa4.d64.forward")), CATALOG.modules)
    assert [culprit.module for culprit in now.culprits] == ["attention"]
    assert "Nothing was seen of it" in now.culprits[0].summary


@pytest.mark.parametrize(("before", "why"), [
    (raises("attention", *ECC, stack="te1"), "a fault of the host: the GPU's memory has an error"),
    (not_run("attention", stack="te1"), "there is no GPU"),
], ids=["host", "not-run"])  # fmt: skip
def test_what_is_good_now_is_said_to_have_nothing_to_be_compared_with(before: Receipt, why: str) -> None:
    found = compare_stacks(stack_of("te1", before), clean("te2"), CATALOG.modules)
    assert (found.culprits, found.lost) == ((), {})
    (row,) = (row for row in found.modules if row.change is Change.NEW)
    assert row.module == "attention"
    assert row.reason.startswith(f"nothing on te1 to compare it with: {why}")
    gone = StackReceipts("te1", clean("te1").receipts, {"te1-h200-attention": "cut short"})
    (row,) = (row for row in compare_stacks(gone, clean("te2"), CATALOG.modules).modules if row.change is Change.NEW)
    assert row.reason == "nothing on te1 to compare it with: cut short"


def test_an_import_that_fails_is_none() -> None:
    found = step(cannot_import(), *(blocked(module) for module in MODULES[1:]))
    assert [culprit.module for culprit in found.culprits] == ["imports"]


@pytest.mark.parametrize(("said", "component"), [
    (("OSError", "[Errno 28] No space left on device: '/c/x'"), "disk"),
    (("RuntimeError", "can't start new thread"), "host limits"),
    (("RuntimeError", "a worker is killed by signal: Bus error. It may be out of shared memory."), "shared memory"),
])  # fmt: skip
def test_what_lasts_until_somebody_mends_it_is_the_environments_and_no_modules(
    said: tuple[str, str], component: str
) -> None:
    (found,) = step(raises("permute", *said)).culprits
    assert (found.module, found.component, found.cascades) == (ENVIRONMENT, component, ("permute",))
    others = step(raises("permute", *said), fails("attention", "bf16.gqa4.d64.forward")).culprits
    assert {culprit.module for culprit in others} == {ENVIRONMENT, "attention"}
