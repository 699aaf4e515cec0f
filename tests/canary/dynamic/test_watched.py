"""What no check holds and two receipts show: a slower kernel, late compiles, memory; and what is none of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, compare_stacks
from megacpp_validate.canary.dynamic.upgrade_result import Culprit, StepResult, TimingChange
from megacpp_validate.canary.dynamic.watched import MEMORY_RATIO, MEMORY_RISE_MIB
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.catalog.gate import read_gate_policy
from megacpp_validate.evidence.receipt import Backend, Check, JitCompile, JitCompiles, Outcome, Receipt
from megacpp_validate.evidence.values import ENVIRONMENT, Cause
from tests.diagnosis.planted import MACHINE, MODULES, clean, fails, falls_back, good, stack_of

CATALOG = read_catalog()
FUSED, UNFUSED, NATIVE = (("te", "cudnn"), ("te", "unfused"), ("sdpa",))
KERNEL = JitCompile("triton", "_permute_kernel", "bf16", 0.2, "after")
LATE = JitCompiles(after={"triton": 1}, compiled=(KERNEL,))
IN_A_RANK = JitCompiles(compiled=(replace(KERNEL, rank=1),))  # `after` is of the probe's own process
OLDER = "megacpp-validate/receipt/4"  # the last that names no kernel


def ran(*observed: str, path: str = "bf16.block", claimed: str = "te") -> dict[str, Any]:
    return {"backends": (Backend(path, claimed, claimed, observed),)}


def second(*observed: str, why: str = "") -> dict[str, Any]:
    """A second backend beside the first: one that ran, or one that says why it cannot."""
    reasons = (f"fa3: FlashAttention 3 cannot be used: {why}. Likely cause: x. Next step: y",) if why else ()
    row = Backend("attention.fa3", "fa3", "fa3" if observed else "", observed, reasons)
    return {"backends": (*ran(*FUSED)["backends"], row)}


DAMAGED: Final = "ImportError: /x/_C.abi3.so: undefined symbol: aoti_torch_create_device_guard"


def step(module: str, before: Mapping[str, Any], after: Mapping[str, Any], *others: Receipt) -> StepResult:
    sides = [
        good(module, stack, te, **changes) for stack, te, changes in (("te1", "1.0", before), ("te2", "2.0", after))
    ]
    return compare_stacks(
        stack_of("te1", sides[0], te="1.0"), stack_of("te2", sides[1], *others, te="2.0"), CATALOG.modules
    )


CHANGED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], Cause, str]] = {
    "kernel": (ran(*FUSED), ran(*UNFUSED), Cause.SILENT_FALLBACK, "ran by cudnn and runs by unfused now"),
    "a-second-backend-that-cannot-be-loaded": (
        second("fa3"), second(why=DAMAGED), Cause.SILENT_FALLBACK, "ran by fa3 too, which cannot be loaded now"),
    "late-compile": ({}, {"jit": LATE}, Cause.PERFORMANCE, "compiles in its second use"),
    "late-compile-in-a-rank": ({}, {"jit": IN_A_RANK}, Cause.PERFORMANCE, "compiles in its second use"),
    "late-compile-of-another-library": (
        {"jit": JitCompiles(unwatched={"cuda": "in memory"})}, {"jit": LATE}, Cause.PERFORMANCE, "triton 1"),
    "memory": (
        {"peak_memory_mib": 1376.0}, {"peak_memory_mib": 2752.0}, Cause.PERFORMANCE, "2.00 times the GPU memory"),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "cause", "words"), CHANGED.values(), ids=CHANGED)
def test_it_is_named(before: Mapping[str, Any], after: Mapping[str, Any], cause: Cause, words: str) -> None:
    (found,) = step("permute", before, after).culprits
    assert (found.module, found.cause, found.cascades) == ("permute", cause, ())
    assert words in found.summary
    assert "te1" in found.next_step
    assert found.evidence
    assert not step("permute", after, before).culprits  # the other way round it is better, or the same
    assert not step("permute", after, after).culprits


NOTHING: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "another-fused-kernel": (ran(*FUSED), ran("te", "fa3")),
    "no-kernel-was-seen": (ran("te"), ran(*UNFUSED)),
    # docs/evidence/h200-fa4: an environment with one more package.
    "a-second-backend-that-is-not-installed": (
        second("fa3"), second(why="ModuleNotFoundError: No module named 'flash_attn_interface'")),
    "a-second-backend-that-never-answered": (second(why=DAMAGED), second(why=DAMAGED)),
    "a-second-backend-on-another-card": (
        second("fa3"), second(why=DAMAGED) | {"machine": replace(MACHINE, gpu="NVIDIA L40S")}),
    "another-request": (ran(*NATIVE, claimed="sdpa"), ran(*UNFUSED)),
    "another-card": (ran(*FUSED), ran(*UNFUSED) | {"machine": replace(MACHINE, capability="10.0")}),
    "one-name-for-two-paths": (ran(*FUSED), {"backends": ran(*UNFUSED)["backends"] * 2}),
    "compiles-that-no-kernel-is-named-for": ({}, {"jit": JitCompiles(after={"deep_gemm": 1})}),
    "compiles-in-warm-up": ({}, {"jit": JitCompiles({"triton": 9}, compiled=(replace(KERNEL, when="warm-up"),))}),
    "compiles-in-a-rank-as-before": ({"jit": IN_A_RANK}, {"jit": IN_A_RANK}),
    "compiles-that-nobody-watched-before": ({"jit": JitCompiles(unwatched={"triton": "too late"})}, {"jit": LATE}),
    "compiles-that-no-receipt-of-before-could-name": ({"schema_id": OLDER}, {"jit": LATE}),
    # docs/evidence: healthy releases.
    "a-workspace": ({"peak_memory_mib": 94.1}, {"peak_memory_mib": 139.2}),
    "a-few-percent": ({"peak_memory_mib": 4000.0}, {"peak_memory_mib": 4300.0}),
    "memory-of-another-card": (
        {"peak_memory_mib": 1376.0}, {"peak_memory_mib": 2752.0, "machine": replace(MACHINE, gpu="NVIDIA H100")}),
    "memory-of-another-seed": ({"peak_memory_mib": 1376.0}, {"peak_memory_mib": 2752.0, "seed": 1}),
    "memory-of-the-process-where-there-is-no-gpu": (
        {"peak_memory_mib": 1376.0, "machine": replace(MACHINE, gpu="")},
        {"peak_memory_mib": 2752.0, "machine": replace(MACHINE, gpu="")}),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), NOTHING.values(), ids=NOTHING)
def test_it_is_none(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    assert not step("permute", before, after).culprits


def test_other_checks_take_other_memory() -> None:
    more = replace(
        good("permute", "te2", "2.0", peak_memory_mib=2752.0), checks=(Check("seen", True), Check("new", True))
    )
    before = stack_of("te1", good("permute", "te1", "1.0", peak_memory_mib=1376.0), te="1.0")
    assert not compare_stacks(before, stack_of("te2", more, te="2.0"), CATALOG.modules).culprits


def test_what_stands_on_a_red_module_takes_another_path_by_it() -> None:
    found = step("native_block", ran(*FUSED), ran(*UNFUSED), falls_back("attention", "bf16.gqa4.d64"))
    assert [culprit.module for culprit in found.culprits] == ["attention"]


def test_modules_that_change_alike_are_one_case_of_the_first() -> None:
    sides = [
        stack_of(
            stack, *(good(m, stack, te, **ran(*kernel)) for m in ("attention", "native_block", "layer_spec")), te=te
        )
        for stack, te, kernel in (("te1", "1.0", FUSED), ("te2", "2.0", UNFUSED))
    ]
    (found,) = compare_stacks(*sides, CATALOG.modules).culprits
    assert (found.module, found.cascades) == ("attention", ("native_block", "layer_spec"))


def test_where_a_library_alone_is_new_it_is_named() -> None:
    newer = {"machine": replace(MACHINE, torch="2.12.0+cu130")}
    before = stack_of("te1", *(good(m, "te1", "1.0") for m in MODULES), te="1.0")
    after = StackReceipts("te2", tuple(good(m, "te2", "1.0", **newer) for m in MODULES))
    changed = tuple(replace(r, jit=LATE) if r.probe == "permute" else r for r in after.receipts)
    (found,) = compare_stacks(before, StackReceipts("te2", changed), CATALOG.modules).culprits
    assert (found.module, found.component, found.cascades) == ("environment", "torch", ("permute",))


def test_what_passed_and_is_not_supported_now_is_lost() -> None:
    unsupported = replace(good("expert_gemm"), outcome=Outcome.EXPECTED_UNSUPPORTED, reason="needs sm_100")
    found = compare_stacks(clean("te1"), stack_of("te2", unsupported), CATALOG.modules)
    assert (found.culprits, found.lost) == ((), {"te2-h200-expert_gemm": "needs sm_100"})


def test_a_red_module_is_told_by_what_is_red() -> None:
    red = fails("permute", "bf16.aligned.rows", jit=LATE)
    (found,) = compare_stacks(clean("te1"), stack_of("te2", red), CATALOG.modules).culprits
    assert found.cause is Cause.NUMERICS


def test_the_gate_goes_by_the_same_memory() -> None:
    kinds = read_gate_policy(CATALOG).file.release
    assert {(kind.memory, kind.memory_floor_mib) for kind in kinds} == {(MEMORY_RATIO, MEMORY_RISE_MIB)}


# --- what is slower as well -----------------------------------------------------------------------------

HELD: dict[str, Any] = {"peak_memory_mib": 1000.0}


def timed(module: str, ratio: float, *, slower: bool = True) -> TimingChange:
    return TimingChange(module=module, name="bf16.forward", before_ms=1.0, after_ms=ratio, ratio=ratio, noise=1.05,
                        slower=slower, derivation="two runs of one stack")  # fmt: skip


def name(times: Mapping[str, float], **after: Mapping[str, Any]) -> list[Culprit]:
    """Culprits where modules take so many times as long, and are so; before, all ran fused, and with 1000 MiB."""
    sides = [
        stack_of(stack, *(good(m, stack, te, **(HELD | ran(*FUSED) | change.get(m, {}))) for m in MODULES), te=te)
        for stack, te, change in (("te1", "1.0", {}), ("te2", "2.0", after))
    ]
    rows = [timed(module, ratio, slower=ratio > 1.05) for module, ratio in times.items()]
    return list(compare_stacks(*sides, CATALOG.modules, rows).culprits)


def test_a_clock_that_all_share_hides_no_kernel_no_compile_and_no_memory() -> None:
    found = name(
        dict.fromkeys(MODULES, 1.25),
        attention=ran(*UNFUSED),
        permute={"jit": LATE},
        layer_spec={"peak_memory_mib": 3e3},
    )
    assert [(culprit.module, culprit.cause) for culprit in found] == [
        (ENVIRONMENT, Cause.PERFORMANCE), ("attention", Cause.SILENT_FALLBACK), ("permute", Cause.PERFORMANCE),
        ("layer_spec", Cause.PERFORMANCE),
    ]  # fmt: skip


STEADY: dict[str, float] = dict.fromkeys(MODULES, 1.0)


@pytest.mark.parametrize(
    ("after", "cause", "said"),
    [
        (ran(*UNFUSED), Cause.SILENT_FALLBACK, "runs by unfused now"),
        ({"jit": LATE}, Cause.PERFORMANCE, "compiles in its second use"),
        ({"peak_memory_mib": 3e3}, Cause.PERFORMANCE, "3.00 times the GPU memory"),
        ({"peak_memory_mib": 3e3} | ran(*UNFUSED), Cause.SILENT_FALLBACK, "3.00 times the GPU memory"),
    ],
    ids=["kernel", "late-compile", "memory", "both"],
)
def test_one_module_is_one_culprit_with_its_time_and_what_changed(
    after: Mapping[str, Any], cause: Cause, said: str
) -> None:
    (found,) = name(STEADY | {"attention": 1.5}, attention=after)
    assert (found.module, found.cause, found.cascades) == ("attention", cause, ())
    assert said in found.summary
    assert "1.50 times the time of `bf16.forward`" in found.summary
    assert any("ratio 1.500" in line for line in found.evidence)
    assert len(found.evidence) > 1
    assert not found.is_slowdown  # a page that leaves the lines of a slowdown to its times would leave these out


def test_modules_that_changed_alike_stay_filed_where_the_first_is_slower() -> None:
    unfused = ran(*UNFUSED)
    (found,) = name(STEADY | {"attention": 1.5}, attention=unfused, native_block=unfused, layer_spec=unfused)
    assert (found.module, found.cascades) == ("attention", ("native_block", "layer_spec"))


def test_one_that_is_slower_by_what_the_first_changed_to_is_filed_with_its_time() -> None:
    (found,) = name(STEADY | {"native_block": 1.5}, attention=ran(*UNFUSED), native_block=ran(*UNFUSED))
    assert (found.module, found.cause, found.cascades) == ("attention", Cause.SILENT_FALLBACK, ("native_block",))
    assert "native_block takes 1.50 times" in found.summary


def test_a_change_of_what_another_one_slows_is_its_own() -> None:
    slower = STEADY | {"attention": 1.5, "native_block": 1.5}
    found = name(slower, native_block={"peak_memory_mib": 3e3})
    assert [(culprit.module, culprit.cascades) for culprit in found] == [
        ("attention", ("native_block",)), ("native_block", ()),
    ]  # fmt: skip
