"""What matched pairs show: noise is noise, a shift is found, a drift helps nobody, and no evidence is no verdict."""

from __future__ import annotations

import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.catalog.postures import Feature, read_postures
from megacpp_validate.gate.ablation import (
    ARMS,
    LEAST_MEMORY,
    AblationRun,
    Change,
    FeatureAblation,
    ObservedPart,
    Verdict,
    compare,
    compare_losses,
    decide_feature,
)

STEPS, WARM = 40, 5
DRAWS = 40
FEATURE = Feature.model_validate({
    "id": "thing", "title": "It is there", "plain": "it is not", "source": "here",
    "off": {"forms": {"recompute": False}, "parts": {"layers.*.block": ["native"]}},
    "on": {"forms": {"recompute": True}, "parts": {"layers.*.block": ["te", "native"]}},
})  # fmt: skip
ORDERS: dict[Any, dict[str, Any]] = {
    arm: {"steps": STEPS, "forms": {"recompute": arm == "on"}, "changes": {}, "features": {}} for arm in ARMS
}


def draw_runs(
    seed: int,
    *,
    shift: float = 0.0,
    noise: float = 0.01,
    between: float = 0.0,
    follow: float = 0.5,
    drift: float = 0.0,
    pairs: int = 2,
) -> list[AblationRun]:
    """Runs whose step times are 0.1 s, times noise that follows itself (AR(1)), noise between runs, and a drift."""
    draw = random.Random(seed)
    runs = []
    for place in range(2 * pairs):
        level = 0.1 * math.exp(between * draw.gauss(0, 1) + drift * place) * (1 + shift * (place % 2))
        off, times = draw.gauss(0, noise), []
        for _ in range(STEPS):
            off = follow * off + math.sqrt(1 - follow * follow) * draw.gauss(0, noise)
            times.append(level * math.exp(off))
        losses = tuple(3 - 0.01 * step for step in range(STEPS))
        runs.append(see(place, times, losses))
    return runs


def see(place: int, times: Any, losses: Any, **more: Any) -> AblationRun:
    arm = ARMS[place % 2]
    said: dict[str, Any] = {
        "arm": arm, "place": place, "ending": "done", "step_seconds": tuple(times), "losses": tuple(losses),
        "tokens": 1000, "peak_bytes": 100, "forms": {"recompute": arm == "on"},
        "parts": {"layers.0.block": ObservedPart(requested="te", observed="native")},
    }  # fmt: skip
    return AblationRun(**{**said, **more})


def compare_step_times(runs: list[AblationRun], warm: int) -> Change:
    return compare([statistics.median(run.step_seconds[warm:]) for run in runs])


def count(verdict: Verdict, draws: int = DRAWS, **how: Any) -> int:
    return sum(compare_step_times(draw_runs(seed, **how), WARM).verdict is verdict for seed in range(draws))


@pytest.mark.parametrize(
    "how",
    [{"follow": 0.5}, {"follow": 0.9}, {"between": 0.005}, {"between": 0.02, "pairs": 3}],
    ids=["within", "slow-noise", "between", "three-pairs"],
)
def test_two_arms_of_one_distribution_are_noise(how: dict[str, Any]) -> None:
    assert count(Verdict.NOISE, **how) >= 0.95 * DRAWS


def test_a_shift_of_3_percent_is_found_under_noise_of_1_percent() -> None:
    assert count(Verdict.TAX, shift=0.03) >= 0.9 * DRAWS
    assert count(Verdict.WIN, shift=-0.03) >= 0.9 * DRAWS
    assert count(Verdict.TAX, shift=0.03, follow=0.0) == DRAWS


@pytest.mark.parametrize("drift", [0.003, 0.02, -0.02])
def test_a_machine_that_drifts_makes_neither_a_tax_nor_a_win(drift: float) -> None:
    """Each run is slower than the one before, so that "on" is slower in each pair: it is no doing of the feature."""
    runs = draw_runs(1, drift=drift)
    plain = [math.fsum(run.step_seconds) for run in runs]
    assert drift == 0.003 or all((on > off) is (drift > 0) for off, on in zip(plain[::2], plain[1::2], strict=True))
    assert count(Verdict.NOISE, draws=30, drift=drift) >= 29


def test_one_slow_run_makes_no_tax() -> None:
    """What happened once is seen in the other run of that arm, which was not slow."""
    runs = draw_runs(3)
    slow = runs[3].model_copy(update={"step_seconds": tuple(2 * seconds for seconds in runs[3].step_seconds)})
    assert compare_step_times([*runs[:3], slow], WARM).verdict is Verdict.NOISE


def test_steps_that_compile_do_not_count() -> None:
    runs = [
        run.model_copy(update={"step_seconds": (30.0 * (1 + run.place % 2),) * WARM + run.step_seconds[WARM:]})
        for run in draw_runs(0)
    ]
    assert compare_step_times(runs, WARM) == compare_step_times(draw_runs(0), WARM)


def test_a_linear_trend_is_taken_out_of_the_estimate() -> None:
    change = compare([math.exp(0.01 * place + (0.03 if place % 2 else 0.0)) for place in range(4)])
    assert change.ratio == pytest.approx(math.exp(0.03))
    assert change.low < 1  # twice the drift lies between equal arms, and is spread


def test_more_tokens_a_second_are_better() -> None:
    assert compare([1.0, 1.1, 1.001, 1.101], lower_is_better=False).verdict is Verdict.WIN
    assert compare([1.0, 1.1, 1.001, 1.101]).verdict is Verdict.TAX


def test_losses_of_the_same_bits_and_others() -> None:
    runs = draw_runs(0)
    same = compare_losses(runs, "fp32")
    assert (same.identical, same.changes, same.steps) == (True, False, 10)
    worse = [see(run.place, run.step_seconds, [loss + 0.01 * (run.place % 2) for loss in run.losses]) for run in runs]
    assert compare_losses(worse, "fp32").changes
    assert compare_losses(worse, "fp32").difference == pytest.approx(0.01)
    # Runs of one arm that lie as far apart as the arms do: the loss is what it is from run to run.
    apart = [see(run.place, run.step_seconds, [loss + 0.01 * run.place for loss in run.losses]) for run in runs]
    assert not compare_losses(apart, "fp32").changes
    # A difference that has no sign.
    draw = random.Random(0)
    off = [draw.gauss(0, 0.01) for _ in range(STEPS)]
    wild = [
        see(run.place, run.step_seconds, [a + b * (run.place % 2) for a, b in zip(run.losses, off, strict=True)])
        for run in runs
    ]
    assert not compare_losses(wild, "fp32").changes


@pytest.mark.parametrize(("shift", "changes"), [(0.0, False), (0.05, True)])
def test_two_runs_that_agree_by_luck_change_no_loss(shift: float, changes: bool) -> None:
    """On an H200 a feature that changes no sum had 3.995, 4.009, 3.990, 4.001: its arms overlap but for luck."""
    ends = (3.99506, 4.00916 + shift, 3.98951, 4.00106 + shift)
    runs = [see(place, [0.1] * STEPS, [end] * STEPS, tokens=0) for place, end in enumerate(ends)]
    assert compare_losses(runs, "bf16").changes is changes


@pytest.mark.parametrize(("shift", "changes"), [(0.002, False), (0.05, True)])
def test_arms_that_always_give_the_same_bits_are_held_to_what_rounding_does(shift: float, changes: bool) -> None:
    """24 steps of 8192 tokens through 12 layers in bf16: 0.00099 * sqrt(24) of a loss of 4 are 0.019 nats."""
    runs = [
        see(place, [0.1] * 24, [4 + shift * (place % 2)] * 24, tokens=8192, pattern="AEMEAEMEAEMR")
        for place in range(4)
    ]
    seen = compare_losses(runs, "bf16")
    assert (seen.half, seen.changes) == (0, changes)
    assert seen.rounding == pytest.approx(0.0194, rel=0.02)
    assert compare_losses(runs, "fp32").rounding < 1e-3


@pytest.mark.parametrize(("bytes_on", "verdict"), [(9991, Verdict.NOISE), (9800, Verdict.WIN), (10200, Verdict.TAX)])
def test_memory_that_nobody_would_miss_is_no_change(bytes_on: int, verdict: Verdict) -> None:
    runs = [see(place, [0.1] * STEPS, [3.0] * STEPS, peak_bytes=bytes_on if place % 2 else 10000) for place in range(4)]
    assert compare([float(run.peak_bytes) for run in runs], least=LEAST_MEMORY).verdict is verdict


def decide(runs: list[AblationRun], pairs: int = 2) -> FeatureAblation:
    said: dict[str, Any] = {
        "tool": "test", "feature": "thing", "title": "It", "plain": "not it", "source": "here", "size": "tiny",
        "seed": 0, "steps": STEPS, "pairs": pairs, "ranks": 1, "device": "cpu", "base": "plain", "off": ORDERS["off"],
        "on": ORDERS["on"],
    }  # fmt: skip
    return FeatureAblation(**said, runs=tuple(runs), **decide_feature(FEATURE, ORDERS, runs, pairs))


def test_a_feature_is_judged_and_its_receipt_reads_back() -> None:
    row = decide(draw_runs(0, shift=0.1))
    assert (row.verdict, row.reasons, row.warm) == (Verdict.TAX, (), WARM)
    assert row.memory is not None
    assert (row.memory.verdict, row.memory.ratio) == (Verdict.NOISE, 1.0)
    assert FeatureAblation.model_validate_json(row.model_dump_json()) == row


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"ending": "died", "words": "rank 0 is at fault"}, "it ended as died: rank 0 is at fault"),
        ({"step_seconds": (0.1,) * 39}, "39 times and 40 losses of 40 steps"),
        ({"step_seconds": (0.0,) + (0.1,) * 39}, "a step has no finite loss, or took no time"),
        ({"losses": (3.0,) * 7 + (None,) * 33}, "a step has no finite loss, or took no time"),
        ({"forms": {"recompute": False}}, "forms.recompute was requested as true, and the run reports false"),
        ({"forms": {}}, "forms.recompute was requested as true, and the run reports nothing"),
        ({"parts": {}}, "no part layers.*.block was seen, which must be on te or native"),
        (
            {"parts": {"layers.0.block": ObservedPart(requested="te", observed="sdpa")}},
            "layers.0.block ran on sdpa, and must be on te or native",
        ),
        (
            {
                "parts": {
                    "layers.0.block": ObservedPart(requested="te", observed="te"),
                    "layers.0.block@1": ObservedPart(requested="te", observed="sdpa"),
                }
            },
            "layers.0.block@1 ran on sdpa",
        ),
    ],
)
def test_a_run_that_is_no_evidence_is_reported_and_nothing_is_judged(more: dict[str, Any], said: str) -> None:
    runs = draw_runs(0)
    row = decide([*runs[:3], runs[3].model_copy(update=more)])
    assert row.verdict is Verdict.NOT_JUDGED
    assert any(said in reason and reason.startswith("run 4 (on): ") for reason in row.reasons), row.reasons
    assert len(row.runs) == 4  # what ran stands in the receipt
    assert row.step_time is None


def test_missing_runs_and_a_single_pair_show_nothing() -> None:
    assert "3 of 4 runs are there" in decide(draw_runs(0)[:3]).reasons[0]
    assert "2 of 4 runs are there" in decide(draw_runs(0, pairs=1), pairs=1).reasons[0]


def test_committed_receipts_keep_their_verdicts() -> None:
    folder = Path(__file__).parents[2] / "docs" / "evidence" / "smoke" / "ablation"
    posture, verdicts = read_postures(), {}
    for file in sorted(folder.glob("*.json")):
        row = FeatureAblation.model_validate_json(file.read_text())
        found = decide_feature(posture.find(row.feature), {"off": row.off, "on": row.on}, row.runs, row.pairs)
        assert [found[name].verdict for name in ("step_time", "tokens_per_second", "memory")] == [
            change.verdict for change in (row.step_time, row.tokens_per_second, row.memory) if change
        ]
        assert row.loss is not None
        assert found["loss"].changes == row.loss.changes
        verdicts[row.feature] = found["verdict"].value
    assert {name for name, verdict in verdicts.items() if verdict != "noise"} == {"fp8_experts", "recompute"}
