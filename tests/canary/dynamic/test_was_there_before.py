"""A failure that was there before explains no module that held then; and a module of which less is seen shows less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, compare_stacks
from megacpp_validate.canary.dynamic.upgrade_result import Change, StepResult
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.evidence.receipt import Backend, Check, Receipt
from tests.diagnosis.planted import CUDNN, MODULES, blocked, cannot_import, dies, fails, good, keyword, raises, stack_of

CATALOG = read_catalog()


def step(before: StackReceipts, *now: Receipt) -> StepResult:
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
    found = step(old, *now)
    assert [(culprit.module, culprit.cascades) for culprit in found.culprits] == [("native_block", ("layer_spec",))]
    assert not step(old, now[0]).culprits


def test_what_had_another_failure_hands_on_none_that_was_there_before() -> None:
    old = stack_of("te1", _raises("attention", "te1"), fails("native_block", "bf16.small.forward", stack="te1"))
    found = step(old, *(_raises(module, "te2") for module in ("attention", "native_block", "layer_spec")))
    assert [culprit.module for culprit in found.culprits] == ["layer_spec"]


def test_what_is_blocked_by_a_failure_of_before_is_lost() -> None:
    found = step(stack_of("te1", cannot_import("te1")), cannot_import(), *(blocked(module) for module in MODULES[1:]))
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
    return step(stack_of("te1", before), replace(good("attention"), **(COMMIT | {"checks": left} | changes)))


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
