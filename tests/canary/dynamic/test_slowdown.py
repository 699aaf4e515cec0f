"""Slower than the noise of the card, or not; and what no check shows: a slower kernel, late compiles, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import pytest

from megacpp_validate.canary.dynamic.slowdown import (
    DEVICE_NOISE,
    MEMORY_RATIO,
    MEMORY_RISE_MIB,
    UNMEASURED_NOISE,
    Noise,
    Slowness,
    TimingChange,
    compare_timings,
    measure_noise,
    split_slowness,
)
from megacpp_validate.canary.dynamic.step import StepResult, compare_stacks
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.catalog.policies import read_gate_policy
from megacpp_validate.diagnosis.culprits import Culprit
from megacpp_validate.evidence.receipt import (
    Backend,
    JitCompile,
    JitCompiles,
    Machine,
    Outcome,
    Receipt,
    Timing,
    cell_id,
)
from megacpp_validate.evidence.values import ENVIRONMENT, Cause
from tests.diagnosis.planted import MACHINE, MODULES, falls_back, good, stack_of

H200 = Machine(host="node1", gpu="NVIDIA H200", driver="580.1")
DEVICE, WALL = "cuda-events", "perf_counter"
STEADY = [1.0, 1.001, 1.002, 0.999, 1.0]


def receipt(module: str, timings: tuple[Timing, ...], stack: str = "te2.12.0", machine: Machine = H200) -> Receipt:
    cell = cell_id(stack, "h200", module)
    return Receipt(cell, stack, "h200", module, Outcome.PASS, "", "te", machine=machine, timings=timings)


def timing(factor: float, clock: str = DEVICE, name: str = "use") -> Timing:
    rounds = tuple(factor * value for value in STEADY)
    return Timing(name, clock, rounds, factor, 0.003, 20)


def run(**factors: float) -> dict[str, Receipt]:
    """Modules by how many times as long each takes, on the device and on the host."""
    return {name: receipt(name, (timing(factor), timing(factor, WALL, "use.host"))) for name, factor in factors.items()}


def one(factor: float = 1.0, clock: str = DEVICE, machine: Machine = H200, stack: str = "te1") -> dict[str, Receipt]:
    return {"attention": receipt("attention", (timing(factor, clock),), stack, machine)}


TWICE = measure_noise(one(), one())


# --- what all share ---------------------------------------------------------------------------------------------------

ALL = dict.fromkeys(MODULES, 1.0)
MATRICES = ("linear_walker", "expert_gemm", "native_block", "layer_spec")
# How many times as long modules take, the modules that are slower by themselves, whether the rest share a factor.
SHARED: dict[str, tuple[dict[str, float], set[str], bool]] = {
    "nothing": (ALL, set(), False),
    "one module": (ALL | {"permute": 1.6}, {"permute"}, False),
    "a lower clock": (dict.fromkeys(MODULES, 1.3), set(), True),
    "one does not follow the clock": (dict.fromkeys(MODULES, 1.3) | {"permute": 1.0}, set(), True),
    "one is slower beyond it": (dict.fromkeys(MODULES, 1.3) | {"attention": 2.6}, {"attention"}, True),
    "two do not follow": (ALL | dict.fromkeys(MATRICES, 1.6), set(MATRICES), False),
    "two are not all": ({"attention": 1.6, "permute": 1.6}, {"attention", "permute"}, False),
}


@pytest.mark.parametrize(("factors", "own", "shared"), SHARED.values(), ids=SHARED)
def test_a_factor_is_shared_by_all_modules_but_one(factors: dict[str, float], own: set[str], shared: bool) -> None:
    before = run(**dict.fromkeys(factors, 1.0))
    found = split_slowness(compare_timings(before, run(**factors), measure_noise(before, before)))
    assert ({change.module for change in found.own}, bool(found.shared)) == (own, shared)
    assert found.factor == pytest.approx(1.3 if shared else 1.0)
    assert all(factors[module] > 1.0 for module in found.modules)


# --- the noise of a card ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beyond", "slower"), [(0.8, False), (0.99, False), (1.01, True), (2.0, True)])
def test_a_module_is_slower_beyond_what_healthy_runs_differ_by(beyond: float, slower: bool) -> None:
    (row,) = compare_timings(one(), one(DEVICE_NOISE * beyond), TWICE)
    assert (row.slower, row.noise, row.ratio) == (slower, DEVICE_NOISE, pytest.approx(DEVICE_NOISE * beyond))


def test_two_runs_of_one_stack_that_lie_further_apart_are_the_bound() -> None:
    (row,) = compare_timings(one(), one(2.0), measure_noise(one(), one(3.0)))
    assert (row.noise, row.slower) == (pytest.approx(3.0), False)


@pytest.mark.parametrize(("ratio", "slower"), [(1.15, False), (1.22, True)])
def test_where_nothing_was_run_twice_device_times_of_three_modules_are_compared(ratio: float, slower: bool) -> None:
    others = {name: receipt(name, (timing(1.0),)) for name in ("permute", "expert_gemm")}
    row = compare_timings(one() | others, one(ratio) | others, {})[0]
    assert (row.slower, row.noise) == (slower, UNMEASURED_NOISE)
    # Two modules cannot tell a card with a lower clock from a slower module.
    del others["permute"]
    row = compare_timings(one() | others, one(ratio) | others, {})[0]
    assert (row.slower, row.noise) == (False, 0.0)


ELSEWHERE = replace(H200, host="node2")
SHORT = {"attention": receipt("attention", (replace(timing(2.0), rounds_ms=(2.0, 2.0)),))}
UNKNOWN: dict[str, tuple[dict[str, Receipt], Noise, str]] = {
    "another host": (one(2.0, machine=ELSEWHERE), TWICE, "now on"),
    "another driver": (one(2.0, machine=replace(H200, driver="590")), TWICE, "590"),
    "noise of another card": (one(2.0), measure_noise(*[one(machine=ELSEWHERE)] * 2), "run twice"),
    "two runs on two cards": (one(2.0), measure_noise(one(), one(machine=ELSEWHERE)), "run twice"),
    "two stacks are no second run": (one(2.0), measure_noise(one(), one(stack="te2")), "run twice"),
    "too few rounds": (SHORT, TWICE, "rounds"),
    "two clocks": (one(2.0, WALL), TWICE, "timed by cuda-events, now by perf_counter"),
}


@pytest.mark.parametrize(("after", "noise", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_without_the_noise_of_this_card_nothing_is_slower_and_the_row_says_why(
    after: dict[str, Receipt], noise: Noise, words: str
) -> None:
    (row,) = compare_timings(one(), after, noise)
    assert (row.slower, row.noise, row.ratio) == (False, 0.0, 2.0)
    assert row.derivation.startswith("not compared")
    assert words in row.derivation
    assert split_slowness((row,)) == Slowness(())


def test_a_time_on_the_host_names_nobody() -> None:
    """On a clean step of one H200 a scope took 1.71 times as long on the host."""
    (row,) = compare_timings(one(clock=WALL), one(3.0, WALL), measure_noise(one(clock=WALL), one(clock=WALL)))
    assert (row.slower, row.noise) == (False, 0.0)


def test_a_use_that_took_no_time_is_no_row() -> None:
    assert compare_timings(one(0.0), one(), TWICE) == compare_timings(one(), one(0.0), TWICE) == ()


def test_one_long_round_of_before_is_doubt_enough() -> None:
    before = one()["attention"]
    doubtful = replace(before, timings=(replace(before.timings[0], rounds_ms=(1.0, 1.0, 1.62, 1.0, 1.0)),))
    (row,) = compare_timings({"attention": doubtful}, one(1.6), TWICE)
    assert (row.noise < row.ratio, row.slower) == (True, False)


# --- what two receipts show -------------------------------------------------------------------------------------------

CATALOG = read_catalog()
FUSED, UNFUSED, NATIVE = (("te", "cudnn"), ("te", "unfused"), ("sdpa",))
KERNEL = JitCompile("triton", "_permute_kernel", "bf16", 0.2, "after")
LATE = JitCompiles(after={"triton": 1}, compiled=(KERNEL,))
IN_A_RANK = JitCompiles(compiled=(replace(KERNEL, rank=1),))  # `after` is of the probe's own process


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
    "compiles-that-no-kernel-is-named-for": ({}, {"jit": JitCompiles(after={"deep_gemm": 1})}),
    "compiles-in-warm-up": ({}, {"jit": JitCompiles({"triton": 9}, compiled=(replace(KERNEL, when="warm-up"),))}),
    "compiles-that-nobody-watched-before": ({"jit": JitCompiles(unwatched={"triton": "too late"})}, {"jit": LATE}),
    # docs/evidence: healthy releases.
    "a-workspace": ({"peak_memory_mib": 94.1}, {"peak_memory_mib": 139.2}),
    "a-few-percent": ({"peak_memory_mib": 4000.0}, {"peak_memory_mib": 4300.0}),
    "memory-of-another-card": (
        {"peak_memory_mib": 1376.0}, {"peak_memory_mib": 2752.0, "machine": replace(MACHINE, gpu="NVIDIA H100")}),
    "memory-of-the-process-where-there-is-no-gpu": (
        {"peak_memory_mib": 1376.0, "machine": replace(MACHINE, gpu="")},
        {"peak_memory_mib": 2752.0, "machine": replace(MACHINE, gpu="")}),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after"), NOTHING.values(), ids=NOTHING)
def test_it_is_none(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    assert not step("permute", before, after).culprits


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


def test_the_gate_goes_by_the_same_memory() -> None:
    kinds = read_gate_policy(CATALOG).release
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


UNCHANGED: dict[str, float] = dict.fromkeys(MODULES, 1.0)


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
    (found,) = name(UNCHANGED | {"attention": 1.5}, attention=after)
    assert (found.module, found.cause, found.cascades) == ("attention", cause, ())
    assert said in found.summary
    assert "1.50 times the time of `bf16.forward`" in found.summary
    assert any("ratio 1.500" in line for line in found.evidence)
    assert len(found.evidence) > 1
    assert not found.is_slowdown  # a page that leaves the lines of a slowdown to its times would leave these out
