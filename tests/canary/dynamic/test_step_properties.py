"""Any culprits, any cascades, any loss, any order of receipts: the culprits are named, and nobody else is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacpp_validate.canary.dynamic.slowdown import TimingChange
from megacpp_validate.canary.dynamic.step import StackReceipts, StepResult, compare_stacks
from megacpp_validate.catalog.bridge import Catalog, read_catalog
from megacpp_validate.diagnosis.blame import Change
from megacpp_validate.evidence.receipt import Backend, Check, Failure, Machine, Outcome, Package, Part, Receipt
from megacpp_validate.evidence.values import ENVIRONMENT, Cause
from tests.diagnosis.planted import (
    CUBLAS,
    KNOWN,
    MODULES,
    REACHED,
    STANDS_ON,
    blocked,
    cannot_import,
    clean,
    dies,
    fails,
    keyword,
    not_run,
    raises,
    stack_of,
)

CATALOG = read_catalog()
KINDS = ("keyword", "numbers", "crash", "hang")
CAUSES = {"keyword": Cause.API, "numbers": Cause.NUMERICS, "crash": Cause.BINARY, "hang": Cause.PERFORMANCE}
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def step(before: StackReceipts, after: StackReceipts, timings: tuple[TimingChange, ...] = ()) -> StepResult:
    return compare_stacks(before, after, CATALOG.modules, timings)


def shows(module: str, culprit: str, kind: str) -> Receipt:
    """How a fault of a culprit looks in a module that it reaches, itself included."""
    if kind == "numbers":
        return fails(module, *(KNOWN[culprit][2] if module == culprit else REACHED[culprit][module]))
    if kind == "crash":
        return dies(module, "SIGSEGV", KNOWN[culprit][1])
    if kind == "hang":
        return dies(module, "timeout", KNOWN[culprit][1])
    return raises(module, *keyword(culprit))


@st.composite
def one_fault(draw: st.DrawFn) -> tuple[str, str, tuple[Receipt, ...]]:
    culprit, kind = draw(st.sampled_from(MODULES)), draw(st.sampled_from(KINDS))
    reached = draw(st.sets(st.sampled_from(sorted(REACHED[culprit])))) if REACHED[culprit] else set()
    return culprit, kind, tuple(shows(module, culprit, kind) for module in (culprit, *sorted(reached)))


@given(one_fault())
@QUICK
def test_one_culprit_is_named_alone_whatever_its_cascade(fault: tuple[str, str, tuple[Receipt, ...]]) -> None:
    culprit, kind, receipts = fault
    result = step(clean("te1"), stack_of("te2", *receipts))
    assert [(found.module, found.cause) for found in result.culprits] == [(culprit, CAUSES[kind])]
    assert sorted(result.culprits[0].cascades) == sorted(receipt.probe for receipt in receipts[1:])
    assert result.lost == {}


@given(one_fault(), st.sets(st.sampled_from(MODULES)), st.sets(st.sampled_from(MODULES)), st.randoms())
@QUICK
def test_loss_duplicates_and_order_change_no_verdict(
    fault: tuple[str, str, tuple[Receipt, ...]], missing: set[str], unrun: set[str], random: object
) -> None:
    culprit, _, receipts = fault
    red = {receipt.probe for receipt in receipts}
    kept = [r for r in stack_of("te2", *receipts).receipts if r.probe in red or r.probe not in missing]
    kept = [not_run(r.probe) if r.probe in unrun - red else r for r in kept]
    shuffled = [*kept, *kept[: len(kept) // 2]]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    result = step(clean("te1"), StackReceipts("te2", tuple(kept)))
    assert [found.module for found in result.culprits] == [culprit]
    assert step(clean("te1"), StackReceipts("te2", tuple(shuffled))) == result
    gone = {f"te2-h200-{name}" for name in (missing | unrun) - red}
    assert set(result.lost) == gone
    assert all(row.change is Change.LOST for row in result.modules if f"te2-h200-{row.module}" in gone)


@given(st.sets(st.sampled_from(MODULES[1:])), st.sets(st.sampled_from(MODULES[1:])))
@QUICK
def test_what_an_import_blocks_is_its_cascade(held: set[str], missing: set[str]) -> None:
    left = [module for module in MODULES[1:] if module not in missing]
    receipts = [cannot_import(), *(blocked(module) for module in left)]
    result = step(clean("te1"), StackReceipts("te2", tuple(receipts)))
    assert [(c.module, c.cause, c.component) for c in result.culprits] == [("imports", Cause.BINARY, "cuBLAS")]
    assert result.culprits[0].cascades == tuple(left)
    assert set(result.lost) == {f"te2-h200-{name}" for name in missing}
    assert held is not None


@given(st.sets(st.sampled_from(("attention", "linear_walker", "permute", "expert_gemm")), min_size=2))
@QUICK
def test_one_component_in_modules_that_stand_apart_is_the_environments(modules: set[str]) -> None:
    receipts = [raises(module, "RuntimeError", f"/TE/{module}.cu:{len(module)}: {CUBLAS}") for module in modules]
    result = step(clean("te1"), stack_of("te2", *receipts))
    apart = any(a != b and a not in STANDS_ON[b] and b not in STANDS_ON[a] for a in modules for b in modules)
    wanted = ENVIRONMENT if apart else min(modules, key=MODULES.index)
    (culprit,) = result.culprits
    assert (culprit.module, culprit.cause, culprit.component) == (wanted, Cause.ENVIRONMENT, "cuBLAS")
    assert "nvidia-cublas" in culprit.next_step


# --- anything at all ------------------------------------------------------------------------------------

words = st.one_of(
    st.text(max_size=40),
    st.sampled_from((
        "", "RuntimeError: x", CUBLAS, "bf16.a.forward", "accessor.linear", "in 1.2.3 [4, 5] 0x6 /a/b.py:7 te2-h200-x",
        "Transformer Engine cannot be used: OSError: a.so: undefined symbol: b (at c:1). Likely cause: d",
        "importing a ends the interpreter (signal 11) in b/c.py:1 (d)",
        "The above exception was the direct cause of the following exception:",
        'File "/x/transformer_engine/a.py", line 3 in f', "TypeError instead of ValueError: y", "SIGSEGV", "timeout",
    )),
)  # fmt: skip
probes = st.sampled_from((*MODULES, "moe_smoke", ""))
cells = st.sampled_from([f"te2-h200-{name}" for name in MODULES] + ["", "elsewhere"])
checks = st.builds(
    Check, words, st.booleans(),
    st.lists(st.builds(Part, words, st.none() | st.floats(), st.none() | st.floats(), st.booleans(), words), max_size=2)
    .map(tuple), words,
)  # fmt: skip


@st.composite
def anything(draw: st.DrawFn) -> Receipt:
    probe, stack = draw(probes), draw(st.sampled_from(("te2", "te3", "native")))
    return Receipt(
        f"{stack}-h200-{probe}", stack, draw(st.sampled_from(("h200", "h200", "cpu"))), probe,
        draw(st.sampled_from(Outcome)), draw(words), "te",
        checks=tuple(draw(st.lists(checks, max_size=3))),
        backends=tuple(draw(st.lists(st.builds(Backend, words, words, words), max_size=1))),
        packages=tuple(draw(st.lists(st.builds(Package, words, words, words), max_size=1))),
        machine=draw(st.builds(Machine, torch=words, cuda=words)),
        failure=draw(st.none() | st.builds(Failure, words, words, words, words)),
        blocked_by=draw(cells),
    )  # fmt: skip


timings = st.builds(
    TimingChange, module=probes, name=words, before_ms=st.just(1.0), after_ms=st.just(2.0),
    ratio=st.floats(0.5, 4.0), noise=st.sampled_from((0.0, 1.0, 1.1)), slower=st.booleans(), derivation=words,
)  # fmt: skip
sides = st.lists(anything(), max_size=8)


@given(sides, sides, st.lists(timings, max_size=5), st.randoms())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_nothing_raises_and_nobody_without_a_receipt_is_named(
    before: list[Receipt], after: list[Receipt], rows: list[TimingChange], random: object
) -> None:
    one, other = StackReceipts("te2", tuple(before)), StackReceipts("te3", tuple(after), {"te3-h200-permute": "torn"})
    result = step(one, other, tuple(rows))
    assert StepResult.model_validate_json(result.model_dump_json()) == result
    seen = {receipt.probe for receipt in after} | {row.module for row in rows}
    red = {r.probe for r in after if not r.outcome.is_good and r.outcome is not Outcome.NOT_RUN}
    for culprit in result.culprits:
        assert culprit.module in seen | {ENVIRONMENT}
        assert culprit.next_step
        assert culprit.summary
        if culprit.cause is not Cause.PERFORMANCE:
            assert set(culprit.cascades) <= red
            assert culprit.module in red | {ENVIRONMENT}
    named = [culprit.module for culprit in result.culprits if culprit.module != ENVIRONMENT]
    assert len(named) == len(set(named))
    random.shuffle(after)  # type: ignore[attr-defined]
    random.shuffle(before)  # type: ignore[attr-defined]
    again = step(replace(one, receipts=tuple(before)), replace(other, receipts=tuple(after)), tuple(rows))
    assert again == result


@pytest.mark.parametrize("outcome", Outcome)
def test_no_receipts_at_all(outcome: Outcome, catalog: Catalog) -> None:
    nothing = StackReceipts("te2")
    result = step(nothing, nothing)
    assert result.culprits == ()
    assert len(result.lost) == len(catalog.modules)
    alone = replace(not_run("attention"), outcome=outcome)
    assert step(StackReceipts("te1", (alone,)), nothing).culprits == ()
