"""The step from one stack to another: what became of each cell, who is blamed, and what is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, StepResult, compare, compare_stacks
from megacpp_validate.catalog.bridge import Catalog, read_catalog
from megacpp_validate.diagnosis.blame import Change
from megacpp_validate.evidence.receipt import Backend, Check, Outcome, Receipt
from megacpp_validate.evidence.values import Cause
from tests.diagnosis.planted import (
    CUDNN,
    MODULES,
    blocked,
    cannot_import,
    clean,
    dies,
    fails,
    falls_back,
    good,
    keyword,
    not_run,
    raises,
    stack_of,
)

CATALOG = read_catalog()


# --- what became of a cell --------------------------------------------------------------------------------------------

OF_OUTCOME: dict[Outcome | None, Receipt | None] = {
    None: None,
    Outcome.PASS: good("attention"),
    Outcome.EXPECTED_UNSUPPORTED: Receipt("c", "s", "h200", "attention", Outcome.EXPECTED_UNSUPPORTED, "", "te"),
    Outcome.FAIL: fails("attention", "bf16.a.forward"),
    Outcome.ERROR: raises("attention", *keyword("attention")),
    Outcome.IMPORT_ERROR: cannot_import(),
    Outcome.TIMEOUT: dies("attention", "timeout", "pytorch/a.py"),
    Outcome.BLOCKED: blocked("attention"),
    Outcome.NOT_RUN: not_run("attention"),
}
# A row an outcome before, a column an outcome after, in the order of OF_OUTCOME.
OF_CHANGE = dict(zip("UNLFRS", (Change.UNCHANGED, Change.NEW, Change.LOST, Change.FIXED, Change.REGRESSED,
                                Change.SAME_FAILURE), strict=True))  # fmt: skip
CHANGES = (
    "UNNNNNNNU", "LULRRRRRL", "LUURRRRRL", "LFFSNNNLL", "LFFNSNNLL", "LFFNNSNLL", "LFFNNNSLL", "LFFNNNNSL", "UNNNNNNNU",
)  # fmt: skip


def test_the_whole_product() -> None:
    assert set(OF_OUTCOME) == {None, *Outcome}
    for before, row in zip(OF_OUTCOME, CHANGES, strict=True):
        for after, letter in zip(OF_OUTCOME, row, strict=True):
            assert compare(OF_OUTCOME[before], OF_OUTCOME[after]) is OF_CHANGE[letter], (before, after)


@pytest.mark.parametrize(("before", "after", "change"), [
    (raises("attention", "TypeError", "a"), raises("attention", "TypeError", "b"), Change.NEW),
    (raises("attention", "TypeError", "a"), raises("attention", "ValueError", "a"), Change.NEW),
    (raises("attention", "TypeError", "of 3 at 0x1f"), raises("attention", "TypeError", "of 4 at 0x2e"),
     Change.SAME_FAILURE),
    (fails("attention", "bf16.a.forward"), fails("attention", "bf16.b.forward", "bf16.c.forward"), Change.SAME_FAILURE),
    (fails("attention", "bf16.a.forward", "bf16.a.grad.query"), fails("attention", "bf16.a.forward"),
     Change.SAME_FAILURE),
    (fails("attention", "bf16.a.forward"), fails("attention", "bf16.a.forward", "fp32.a.forward"), Change.NEW),
    (fails("attention", "bf16.a.forward"), fails("attention", "bf16.a.dtype"), Change.NEW),
    (dies("attention", "SIGSEGV", "a.py"), dies("attention", "SIGSEGV", "b.py"), Change.NEW),
    (blocked("attention"), blocked("attention", text="another one"), Change.NEW),
])  # fmt: skip
def test_two_failures_are_one_by_their_signature(before: Receipt, after: Receipt, change: Change) -> None:
    assert compare(before, after) is change


# --- a fault of the host ----------------------------------------------------------------------------------------------

ECC = ("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered")


def of_clean(*red: Receipt) -> StepResult:
    return compare_stacks(clean("te1"), stack_of("te2", *red), CATALOG.modules)


@pytest.mark.parametrize("red", [
    raises("attention", *ECC, "transformer_engine/pytorch/attention/backends.py:9 in forward"),
    dies("permute", "SIGTERM"),
], ids=["raised", "killed"])  # fmt: skip
def test_nobody_is_named_and_its_cell_is_lost(red: Receipt) -> None:
    found = of_clean(red)
    assert not found.culprits
    assert found.lost.keys() == {red.cell}
    assert "a fault of the host" in found.lost[red.cell]
    (row,) = (row for row in found.modules if row.module == red.probe)
    assert row.change is Change.LOST


def test_a_fault_of_a_module_beside_it_is_named_and_nothing_else_is_filed_under_it() -> None:
    found = of_clean(raises("attention", *ECC), fails("permute", "bf16.aligned.rows"))
    assert [(culprit.module, culprit.cascades) for culprit in found.culprits] == [("permute", ())]


def test_before_it_says_nothing_either_and_what_is_red_now_is_named() -> None:
    before = stack_of("te1", raises("attention", *ECC, stack="te1"))
    again = compare_stacks(before, stack_of("te2", raises("attention", *ECC)), CATALOG.modules)
    assert (again.culprits, len(again.lost)) == ((), 1)
    now = compare_stacks(before, stack_of("te2", fails("attention", "bf16.gqa4.d64.forward")), CATALOG.modules)
    assert [culprit.module for culprit in now.culprits] == ["attention"]
    assert "attention has no result on" in now.culprits[0].summary


# --- what was there before --------------------------------------------------------------------------------------------


def after(before: StackReceipts, *now: Receipt) -> StepResult:
    return compare_stacks(before, stack_of("te2", *now), CATALOG.modules)


def _dies(module: str, stack: str) -> Receipt:
    return dies(module, "SIGSEGV", "pytorch/cpp_extensions/gemm.py", stack=stack)


def _raises(module: str, stack: str) -> Receipt:
    return raises(module, "RuntimeError", CUDNN, "transformer_engine/pytorch/fused_attn.py:5 in bwd", stack=stack)


def _refuses(module: str, stack: str) -> Receipt:
    return raises(module, *keyword("attention"), stack=stack)


@pytest.mark.parametrize("fault", [_raises, _dies, _refuses], ids=["cudnn", "died", "keyword"])
def test_what_spreads_to_a_module_that_held_is_blamed_on_it(fault: Callable[[str, str], Receipt]) -> None:
    old = stack_of("te1", fault("attention", "te1"))
    now = [fault(module, "te2") for module in ("attention", "native_block", "layer_spec")]
    found = after(old, *now)
    assert [(culprit.module, culprit.cascades) for culprit in found.culprits] == [("native_block", ("layer_spec",))]
    assert not after(old, now[0]).culprits


def test_what_is_blocked_by_a_failure_of_before_is_lost() -> None:
    found = after(stack_of("te1", cannot_import("te1")), cannot_import(), *(blocked(module) for module in MODULES[1:]))
    assert not found.culprits
    assert found.lost.keys() == {f"te2-h200-{module}" for module in MODULES[1:]}
    assert {row.change for row in found.modules} == {Change.SAME_FAILURE, Change.LOST}


# --- less is looked at ------------------------------------------------------------------------------------------------

MADE = tuple(Check(name, True) for name in ("bf16.forward", "fa3.bf16.forward", "speed.bf16.forward.ran", "second-use"))
COMMIT: dict[str, Any] = {"commit": "a" * 40}


def less(*kept: str, **changes: Any) -> StepResult:
    """A step after which attention makes these checks alone."""
    left = tuple(check for check in MADE if check.name in kept)
    before = replace(good("attention", "te1", "1"), **COMMIT, checks=MADE)
    return after(stack_of("te1", before), replace(good("attention"), **(COMMIT | {"checks": left} | changes)))


def test_checks_that_are_gone_from_a_good_cell_are_lost_evidence() -> None:
    found = less("bf16.forward", "second-use")
    assert not found.culprits
    said = "te1 checked fa3.bf16.forward, and this receipt does not"
    assert found.lost == {"te2-h200-attention": said}
    timed = less("speed.bf16.forward.ran", seconds={"speed": 1.0})
    assert (timed.culprits, timed.lost.keys()) == ((), {"te2-h200-attention"})


GONE = (Backend("attention.fa3", "fa3", "", (), ("fa3: it is not installed",)),)


@pytest.mark.parametrize(("kept", "changes"), [
    (("bf16.forward", "fa3.bf16.forward", "second-use"), {}),
    (("bf16.forward", "second-use"), {"backends": GONE}),
    (("bf16.forward",), {"commit": "b" * 40}),
    (("bf16.forward",), {"commit": ""}),
    (("bf16.forward",), {"seed": 1}),
], ids=["not-timed", "backend-not-there", "other-commit", "no-commit", "other-seed"])  # fmt: skip
def test_where_other_checks_are_expected_nothing_is_lost(kept: tuple[str, ...], changes: dict[str, Any]) -> None:
    found = less(*kept, **changes)
    assert (found.culprits, found.lost) == ((), {})


# --- the smoke run as a probe -----------------------------------------------------------------------------------------


SMOKE = "moe_smoke"
NUMBERS = fails(SMOKE, "bf16.train.forward.loss")
COMPOSITION: dict[str, tuple[tuple[Receipt, ...], list[tuple[str, Cause, bool]]]] = {
    "numbers-follow-numbers": (
        (fails("attention", "bf16.gqa4.d64.forward"), NUMBERS), [("attention", Cause.NUMERICS, True)]),
    "falls-back-with-its-module": (
        (falls_back("attention", "attention.bf16.gqa4"), falls_back(SMOKE, "bf16.layers.0.block")),
        [("attention", Cause.SILENT_FALLBACK, True)]),
    "every-module-holds": ((NUMBERS,), [(SMOKE, Cause.BOUNDARY, False)]),
    "a-time-limit-is-not-between-modules": ((dies(SMOKE, "SIGXCPU"),), [(SMOKE, Cause.ENVIRONMENT, False)]),
}  # fmt: skip


@pytest.mark.parametrize(("red", "wanted"), COMPOSITION.values(), ids=COMPOSITION)
def test_a_composition_falls_with_a_module_or_lies_between_them(
    red: tuple[Receipt, ...], wanted: list[tuple[str, Cause, bool]], catalog: Catalog
) -> None:
    sides = [
        stack_of(stack, *({SMOKE: good(SMOKE, stack)} | {row.probe: row for row in rows}).values())
        for stack, rows in (("te1", ()), ("te2", red))
    ]
    found = compare_stacks(*sides, catalog.modules).culprits
    assert [(one.module, one.cause, SMOKE in one.cascades) for one in found] == wanted


def test_a_composition_of_one_side_alone_blames_nobody(catalog: Catalog) -> None:
    with_it = stack_of("te2", good(SMOKE))
    found = compare_stacks(with_it, clean("te3"), catalog.modules)
    assert (found.culprits, list(found.lost)) == ((), ["te3-h200-moe_smoke"])
    assert not compare_stacks(clean("te1"), stack_of("te2", NUMBERS), catalog.modules).culprits
