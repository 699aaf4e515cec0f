"""Slower than the noise of the card, or not; and what no check shows: a slower kernel, late compiles, memory."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest

from megacpp_validate.canary.dynamic.slowdown import (
    MEMORY_RATIO,
    MEMORY_RISE_MIB,
    CardNoise,
    Slowness,
    TimingChange,
    compare_timings,
    measure_noise,
    split_slowness,
)
from megacpp_validate.canary.dynamic.step import StackReceipts, StepResult, compare_stacks
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
# Uses of the seven modules, milliseconds on the device and on the host; None where nothing runs on the device.
USES: Mapping[str, Mapping[str, tuple[float | None, float]]] = {
    "imports": {"scope": (None, 1.2)},
    "attention": {"forward": (0.25, 0.33), "both": (1.07, 1.3)},
    "linear_walker": {"bf16": (0.6, 0.8), "fp8": (0.4, 0.9)},
    "expert_gemm": {"bf16": (0.7, 1.1), "fp8": (0.6, 1.4)},
    "permute": {"bf16": (0.35, 0.6)},
    "native_block": {"bf16": (1.9, 2.6), "fp8": (1.4, 2.9)},
    "layer_spec": {"bf16": (0.7, 0.9), "fp8": (0.5, 1.0)},
}
DEVICE, WALL = "cuda-events", "perf_counter"


@dataclass(frozen=True)
class Noise:
    """Deviations of logarithms: of a round, of a process, of a use within a process; and how much the host has more."""

    rounds: float = 0.01
    process: float = 0.005
    use: float = 0.004
    host: float = 3.0


def timing(name: str, clock: str, rounds: list[float]) -> Timing:
    median = statistics.median(rounds)
    return Timing(name, clock, tuple(rounds), median, (max(rounds) - min(rounds)) / median, 20)


def receipt(module: str, timings: tuple[Timing, ...], stack: str = "te2.12.0", machine: Machine = H200) -> Receipt:
    cell = cell_id(stack, "h200", module)
    return Receipt(cell, stack, "h200", module, Outcome.PASS, "", "te", machine=machine, timings=timings)


def simulate(
    dice: random.Random,
    noise: Noise,
    slower: Mapping[str, float] | None = None,
    *,
    stack: str = "te2.12.0",
    modules: tuple[str, ...] = tuple(USES),
) -> dict[str, Receipt]:
    """Receipts of one run: every module is a process with a speed of its own; lognormal throughout."""
    made = {}
    for module in modules:
        factor = (slower or {}).get(module, 1.0)
        rows = []
        speeds = {clock: dice.gauss(0, noise.process * more) for clock, more in ((DEVICE, 1.0), (WALL, noise.host))}
        for name, (device, host) in USES[module].items():
            for suffix, clock, base, more in (("", DEVICE, device, 1.0), (".host", WALL, host, noise.host)):
                if base is None:
                    continue
                middle = math.log(base * factor) + speeds[clock] + dice.gauss(0, noise.use * more)
                rounds = [math.exp(middle + dice.gauss(0, noise.rounds * more)) for _ in range(5)]
                rows.append(timing(name + suffix, clock, rounds))
        made[module] = receipt(module, tuple(rows), stack)
    return made


def grid(
    seed: int, noise: Noise, slower: Mapping[str, float] | None = None, modules: tuple[str, ...] = tuple(USES)
) -> tuple[TimingChange, ...]:
    """A stack run twice, and the next one."""
    dice = random.Random(seed)
    first, again = (simulate(dice, noise, modules=modules) for _ in range(2))
    after = simulate(dice, noise, slower, stack="te2.14.1", modules=modules)
    return compare_timings(first, after, measure_noise(first, again))


def slow_modules(changes: tuple[TimingChange, ...]) -> set[str]:
    return {change.module for change in split_slowness(changes).own}


# --- noise is no slowdown ---------------------------------------------------------------------------------------------

USUAL = Noise()


# --- a slowdown is found ----------------------------------------------------------------------------------------------


def draws(number: int, low: float, high: float) -> list[tuple[int, float]]:
    """Seeds, and factors that are even on a logarithmic scale: the same ones at every run."""
    dice = random.Random(number)
    return [(seed, math.exp(dice.uniform(math.log(low), math.log(high)))) for seed in range(number)]


def test_the_module_that_became_slower_is_named_and_no_other() -> None:
    modules = sorted(USES.keys() - {"imports"})
    wrong = 0
    for seed, factor in draws(300, 1.3, 50.0):
        module = modules[seed % len(modules)]
        changes = grid(seed, USUAL, {module: factor})
        wrong += slow_modules(changes) != {module}
        device = [change for change in changes if change.module == module and not change.name.endswith(".host")]
        assert all(change.slower and change.noise < change.ratio for change in device)
    assert wrong <= 3  # a use of the host's, once in a hundred grids


# --- what all share ---------------------------------------------------------------------------------------------------


def test_a_clock_that_was_lowered_is_nobodys_fault() -> None:
    blamed = 0
    for seed, factor in draws(300, 1.05, 3.0):
        found = split_slowness(grid(seed, USUAL, dict.fromkeys(USES, factor)))
        blamed += bool(found.own)
        if factor > 1.15:
            assert found.factor == pytest.approx(factor, rel=0.05)
            assert len(found.modules) == found.timed == 6  # nothing of `imports` runs on the device
    assert blamed <= 3  # once in a hundred grids, at factors that barely leave the noise


ALL = tuple(USES)
MATRICES = ("linear_walker", "expert_gemm", "native_block", "layer_spec")
# Seed, modules that are timed, how many times as long they take, the modules that are slower by themselves, is shared.
SHARED: dict[str, tuple[int, tuple[str, ...], dict[str, float], set[str], bool]] = {
    "one does not follow the clock": (1, ALL, {name: 1.3 for name in ALL if name != "permute"}, set(), True),
    "one is slower beyond it": (2, ALL, dict.fromkeys(ALL, 1.3) | {"attention": 2.6}, {"attention"}, True),
    "two do not follow": (4, ALL, dict.fromkeys(MATRICES, 1.4), set(MATRICES), False),
    "two are not all": (
        4,
        ("attention", "permute"),
        {"attention": 1.5, "permute": 1.5},
        {"attention", "permute"},
        False,
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_factor_is_shared_by_all_modules_but_one(name: str) -> None:
    seed, modules, slower, own, shared = SHARED[name]
    found = split_slowness(grid(seed, USUAL, slower, modules))
    assert ({change.module for change in found.own}, bool(found.shared)) == (own, shared)
    assert all(slower.get(module) for module in found.modules)


# --- where nothing can be said ----------------------------------------------------------------------------------------


def one(
    rounds: list[float], *, machine: Machine = H200, name: str = "use", stack: str = "te2.12.0"
) -> dict[str, Receipt]:
    return {"attention": receipt("attention", (timing(name, DEVICE, rounds),), stack, machine)}


STEADY = [1.0, 1.001, 1.002, 0.999, 1.0]
TWICE = [2.0, 2.01, 1.99, 2.0, 2.0]
ELSEWHERE = replace(H200, host="node2")
UNKNOWN: dict[str, tuple[dict[str, Receipt], dict[str, Receipt], CardNoise, str]] = {
    "another host": (one(STEADY), one(TWICE, machine=ELSEWHERE), measure_noise(one(STEADY), one(STEADY)), "now on"),
    "another driver": (
        one(STEADY), one(TWICE, machine=replace(H200, driver="590")), measure_noise(one(STEADY), one(STEADY)), "590",
    ),
    "no second run, time of the host": (
        {"attention": receipt("attention", (timing("use", WALL, STEADY),))},
        {"attention": receipt("attention", (timing("use", WALL, TWICE),))}, measure_noise(one(STEADY), {}), "run twice",
    ),
    "noise of another card": (
        one(STEADY), one(TWICE),
        measure_noise(one(STEADY, machine=ELSEWHERE), one(STEADY, machine=ELSEWHERE)), "run twice",
    ),
    "two runs on two cards": (
        one(STEADY), one(TWICE), measure_noise(one(STEADY), one(STEADY, machine=ELSEWHERE)), "run twice",
    ),
    "two stacks are no second run": (
        one(STEADY), one(TWICE), measure_noise(one(STEADY), one(STEADY, stack="te2.14.1")), "run twice",
    ),
    "too few rounds": (one(STEADY), one([2.0, 2.0]), measure_noise(one(STEADY), one(STEADY)), "rounds"),
    "two clocks": (
        one(STEADY), {"attention": receipt("attention", (timing("use", "cuda-events, not held", TWICE),))},
        measure_noise(one(STEADY), one(STEADY)), "timed by cuda-events, now by cuda-events, not held",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("before", "after", "noise", "words"), UNKNOWN.values(), ids=UNKNOWN)
def test_without_the_noise_of_this_card_nothing_is_slower_and_the_row_says_why(
    before: dict[str, Receipt], after: dict[str, Receipt], noise: CardNoise, words: str
) -> None:
    (row,) = compare_timings(before, after, noise)
    assert (row.slower, row.noise, row.ratio) == (False, 0.0, 2.0)
    assert row.derivation.startswith("not compared")
    assert words in row.derivation
    assert split_slowness((row,)) == Slowness(())


@pytest.mark.parametrize(("ratio", "slower"), [(1.03, False), (1.15, False), (1.19, False), (1.22, True), (2.0, True)])
def test_where_nothing_was_run_twice_device_time_is_held_to_what_is_believed_of_any_card(
    ratio: float, slower: bool
) -> None:
    """exp(8.610 x 0.015 x sqrt(2)) = 1.200: Student's t of four degrees of freedom, beyond which one in 2000 is."""
    others = {name: receipt(name, (timing("use", DEVICE, STEADY),)) for name in ("permute", "expert_gemm")}
    after = one([value * ratio for value in STEADY])
    noise = measure_noise(one(STEADY), {})
    rows = {row.module: row for row in compare_timings(one(STEADY) | others, after | others, noise)}
    row = rows["attention"]
    assert row.slower is slower
    assert row.noise == pytest.approx(math.exp(8.610 * 0.015 * math.sqrt(2.0)))
    assert "0 modules run twice" in row.derivation
    # Two modules cannot tell a card with a lower clock from a slower module.
    two = {name: others[name] for name in ("permute",)}
    rows = {row.module: row for row in compare_timings(one(STEADY) | two, after | two, noise)}
    assert not rows["attention"].slower
    assert rows["attention"].derivation.startswith("not compared")


@pytest.mark.parametrize("rounds", [[0.0] * 5, [math.nan] * 5, [1.0, 2.0, math.inf, 1.0, 1.0], [-1.0] * 5])
def test_times_that_are_none_are_no_row(rounds: list[float]) -> None:
    noise = measure_noise(one(STEADY), one(STEADY))
    broken = {"attention": receipt("attention", (Timing("use", DEVICE, tuple(rounds), rounds[0], 0.0, 1),))}
    assert compare_timings(broken, one(STEADY), noise) == compare_timings(one(STEADY), broken, noise) == ()
    assert measure_noise(one(STEADY), broken).spreads == {}


# --- each part of the bound can decide --------------------------------------------------------------------------------


def test_the_bound_comes_from_what_is_largest_and_says_so() -> None:
    steady = measure_noise(one(STEADY), one(STEADY))
    apart = measure_noise(one(STEADY), one([value * 3.0 for value in STEADY]))
    rough = [1.0, 1.09, 0.91, 1.05, 0.95]
    rows = {
        "two processes of one stack": compare_timings(one(STEADY), one(STEADY), steady),
        "rounds differ by": compare_timings(one(rough), one(rough), steady),
    }
    for words, (row,) in rows.items():
        assert words in row.derivation
    (row,) = compare_timings(one(STEADY), one(TWICE), apart)
    assert row.noise > 3.0
    assert not row.slower


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
    "another-second-request": ({"backends": (Backend("bf16.block", "fa3", "te", FUSED),)}, ran(*UNFUSED)),
    "another-card": (ran(*FUSED), ran(*UNFUSED) | {"machine": replace(MACHINE, capability="10.0")}),
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


def test_one_long_round_of_before_is_doubt_enough() -> None:
    def on_host(*rounds: float) -> dict[str, Receipt]:
        return {"attention": receipt("attention", (timing("use", WALL, list(rounds)),))}

    before = on_host(*STEADY)
    noise, slow = measure_noise(before, before), on_host(1.6, 1.61, 1.6, 1.6, 1.6)
    assert compare_timings(before, slow, noise)[0].slower
    (row,) = compare_timings(on_host(1.0, 1.0, 1.62, 1.0, 1.0), slow, noise)
    assert (row.noise < row.ratio, row.slower) == (True, False)
