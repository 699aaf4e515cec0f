"""The smoke run as a probe of the canary: it falls with a module, or lies between them; old receipts lack it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, compare_stacks
from megacpp_validate.canary.dynamic.upgrade_result import Change, StepResult
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.evidence.receipt import Check, Receipt
from megacpp_validate.evidence.values import Cause
from tests.diagnosis.planted import (
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

SMOKE = "moe_smoke"


def with_smoke(stack: str, *changed: Receipt, te: str = "") -> StackReceipts:
    return stack_of(stack, *({SMOKE: good(SMOKE, stack)} | {row.probe: row for row in changed}).values(), te=te)


def step(catalog: Catalog, *red: Receipt, before: StackReceipts | None = None) -> StepResult:
    return compare_stacks(before or with_smoke("te1"), with_smoke("te2", *red), catalog.modules)


CASCADES: dict[str, tuple[tuple[Receipt, ...], str]] = {
    "raises-what-its-module-raises": (
        (raises("permute", *keyword("permute")), raises(SMOKE, *keyword("permute"), bridge="permute")), "permute",
    ),
    "numbers-follow-numbers": (
        (fails("attention", "bf16.gqa4.d64.forward"), fails(SMOKE, "bf16.train.forward.loss")), "attention",
    ),
    "a-gradient-follows-one": (
        (fails("linear_walker", "bf16.bias.grad.weight"), fails(SMOKE, "bf16.train.grad.grad_norm")), "linear_walker",
    ),
    "falls-back-with-its-module": (
        (falls_back("attention", "attention.bf16.gqa4"), falls_back(SMOKE, "bf16.layers.0.block")), "attention",
    ),
    "blocked-by-the-firewall": (
        (cannot_import(), *(blocked(name) for name in ("attention", "linear_walker", "permute", "expert_gemm",
                                                       "native_block", "layer_spec", SMOKE))), "imports",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("red", "culprit"), CASCADES.values(), ids=CASCADES)
def test_it_falls_with_the_module_that_is_broken(red: tuple[Receipt, ...], culprit: str, catalog: Catalog) -> None:
    (found,) = step(catalog, *red).culprits
    assert found.module == culprit
    assert SMOKE in found.cascades


BETWEEN: dict[str, Receipt] = {
    "numbers": fails(SMOKE, "bf16.train.forward.loss"),
    "a-call": raises(SMOKE, "TypeError", "forward() missing 1 required argument: 'rope'", bridge="layer_spec"),
    "a-fallback": falls_back(SMOKE, "bf16.layers.0.block"),
}


@pytest.mark.parametrize("red", BETWEEN.values(), ids=BETWEEN)
def test_where_every_module_holds_it_lies_between_them(red: Receipt, catalog: Catalog) -> None:
    (found,) = step(catalog, red).culprits
    assert (found.module, found.cause) == (SMOKE, Cause.BOUNDARY)
    assert "Every bridge module holds by itself" in found.summary
    assert "stay on te1" in found.next_step


def test_a_machine_that_ends_it_is_none_between_modules(catalog: Catalog) -> None:
    (found,) = step(catalog, dies(SMOKE, "SIGXCPU")).culprits
    assert found.cause is Cause.ENVIRONMENT
    assert not step(catalog, dies(SMOKE, "SIGKILL")).culprits


def test_a_failure_that_another_module_does_not_explain_is_its_own_and_no_boundary(catalog: Catalog) -> None:
    found = step(catalog, fails("permute", "refuses.shape"), fails(SMOKE, "bf16.train.forward.loss"))
    causes = {culprit.module: culprit.cause for culprit in found.culprits}
    assert Cause.BOUNDARY not in causes.values()
    assert "permute" in causes


def test_receipts_that_lack_it_on_both_sides_say_nothing_of_it(catalog: Catalog) -> None:
    found = compare_stacks(clean("te1"), clean("te2"), catalog.modules)
    assert SMOKE not in {row.module for row in found.modules}
    assert not found.lost


def change_of(found: StepResult) -> Change:
    return next(row.change for row in found.modules if row.module == SMOKE)


def test_on_the_new_side_alone_it_is_new_and_nobody_is_to_blame(catalog: Catalog) -> None:
    for red in BETWEEN.values():
        found = step(catalog, red, before=clean("te1"))
        assert change_of(found) is Change.NEW
        assert found.culprits == ()
    unrun = with_smoke("te1", not_run(SMOKE, "te1"))
    assert step(catalog, BETWEEN["numbers"], before=unrun).culprits == ()


def test_on_the_old_side_alone_it_is_lost_and_nobody_is_to_blame(catalog: Catalog) -> None:
    found = compare_stacks(with_smoke("te1"), clean("te2"), catalog.modules)
    assert change_of(found) is Change.LOST
    assert found.culprits == ()
    assert list(found.lost) == ["te2-h200-moe_smoke"]


def test_a_module_that_was_not_run_before_is_still_blamed(catalog: Catalog) -> None:
    before = with_smoke("te1", not_run("permute", "te1"))
    (found,) = step(catalog, fails("permute", "bf16.aligned.rows"), before=before).culprits
    assert found.module == "permute"


def test_what_failed_alike_before_is_no_culprit(catalog: Catalog) -> None:
    old = fails(SMOKE, "bf16.train.forward.loss", stack="te1", te="1")
    assert step(catalog, BETWEEN["numbers"], before=with_smoke("te1", old)).culprits == ()


def test_what_nobody_ran_does_not_hold(catalog: Catalog) -> None:
    smoke = fails(SMOKE, "bf16.train.forward.loss")
    alone = [StackReceipts("te1", (good(SMOKE, "te1"),)), StackReceipts("te2", (smoke,))]
    for modules in (catalog.modules, ()):
        (found,) = compare_stacks(*alone, modules).culprits
        assert (found.module, found.cause) == (SMOKE, Cause.NUMERICS)
        assert "holds by itself" not in found.summary


def test_a_contract_of_its_own_is_between_modules_and_nobody_is_said_to_hold(catalog: Catalog) -> None:
    broken = replace(
        fails(SMOKE), checks=(Check("same-world.loss", False, detail="35 of 35 steps; not the same bits"),)
    )
    alone = [StackReceipts("te1", (good(SMOKE, "te1"),)), StackReceipts("te2", (broken,))]
    (found,) = compare_stacks(*alone, ()).culprits
    assert (found.module, found.cause) == (SMOKE, Cause.BOUNDARY)
    assert "Not every bridge module was run beside it" in found.summary
    assert "run the bridge modules" in found.next_step
