"""What is looked at in a training run: each check passes on what ranks leave, and fails on what they must not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.evidence.receipt import Quantizer
from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.smoke.runs import Run, Runs, check_parts, open_runs, record_of
from megacpp_validate.probes.smoke.train import (
    check_low_precision,
    check_run,
    judge_learning,
    look_at_audit,
)
from megacpp_validate.training.parallel.goodput import PHASES
from megacpp_validate.training.parallel.launch import RunEnd
from megacpp_validate.training.sizes import read_size
from megacpp_validate.training.smoke.order import SmokeOrder, run_smoke
from tests.probes.planting import failed

STEPS = 10
SIZE = read_size("tiny")
PHASES_NS = {phase: 1_000_000_000 if phase in ("start-up", "step", "data") else 0 for phase in PHASES}


def new_bench(requested: str = "native", target: str = "cpu", **settings: str) -> Bench:
    given = {"size": "tiny", "plan": "data=2 expert_parallel=2", **settings}
    return Bench(
        Order("smoke_tiny", "s", Target(target, ""), requested, stands_on=("imports",), settings=given, once=True)
    )


def refused(code: str) -> dict[str, str]:
    return {"backend": "te", "code": code, "reason": "not here"}


def left_by(rank: int) -> dict[str, Any]:
    """What a rank of a good run leaves."""
    steps = [
        {"step": step, "loss": 3.4 - 0.1 * step, "perfect": 2.0, "aux_loss": 0.0, "grad_norm": 1.0, "seconds": 0.1}
        for step in range(STEPS)
    ]
    goodput = {"whole_s": 3.0, "phases_ns": dict(PHASES_NS), "peak_bytes": {"step": 100 + rank},
               "tokens": 2560, "tokens_per_second": 2560.0}  # fmt: skip
    return {
        "rank": rank, "steps": steps, "goodput": goodput, "flop_utilisation": None,
        "choices": {
            "layers.0.block": {"requested": "te", "observed": "native", "refusals": [refused("other")]}
        },
        "replicas": 0, "alike": 0, "unmoved": [], "scales": 0, "quantizers": None,
        "dispatches": STEPS * SIZE.letters.count("E"), "experts_without_gradient": [],
        "topology": {"device": "cpu"}, "forms": {"moe": "bridge"}, "features": {"preset": "production"},
        "model": {"parameters": 40_000}, "check": "", "where": {}, "fault": "",
    }  # fmt: skip


def run_of(*receipts: dict[str, Any], ending: str = "done", words: str = "") -> Run:
    order = SmokeOrder(steps=STEPS, plan={"data": 2, "expert_parallel": 2})
    ranks = tuple({"rank": receipt["rank"], "receipt": receipt} for receipt in receipts)
    return Run("plan", order, RunEnd(ending, (), words, ranks, 3.75))


def test_a_good_run_passes_every_check() -> None:
    bench = new_bench()
    check_run(bench, run_of(left_by(0), left_by(1)))
    assert failed(bench) == set()
    assert len(bench.checks) > 10


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    *way, value = path

    def change(receipt: dict[str, Any]) -> None:
        place: Any = receipt
        for key in way[:-1]:
            place = place[key]
        place[way[-1]] = value

    return change


def without_steps(receipt: dict[str, Any]) -> None:
    """An account that adds up, with no time for steps."""
    goodput = receipt["goodput"]
    goodput["phases_ns"]["step"] = 0
    goodput["whole_s"] = sum(goodput["phases_ns"].values()) / 1e9


PLANTED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a-step-not-finite": (put("steps", 3, "grad_norm", "nan"), "plan.steps.rank1"),
    "a-step-missing": (lambda receipt: receipt["steps"].pop(), "plan.steps.rank1"),
    "a-value-found-by-the-watch": (put("check", "watch"), "plan.steps.rank1"),
    "an-expert-without-gradient": (put("experts_without_gradient", ["layers.2 expert 3"]), "plan.experts.rank1"),
    "tokens-counted-in-some-steps": (put("dispatches", STEPS - 1), "plan.tokens.rank1"),
    "replicas-that-nobody-compared": (put("alike", 1), "plan.replicas.rank1"),
    "an-expert-that-never-moved": (put("unmoved", ["layers.2.up expert 3"]), "plan.moved.rank1"),
    "tokens-that-were-not-counted": (put("goodput", "tokens", 2559), "plan.counted.rank1"),
    "an-account-that-lacks-time": (put("goodput", "whole_s", 3.5), "plan.account.rank1"),
    "an-account-without-steps": (without_steps, "plan.account.rank1"),
}


@pytest.mark.parametrize(("change", "check"), PLANTED.values(), ids=PLANTED)
def test_a_fault_of_one_rank_is_seen(change: Callable[[dict[str, Any]], None], check: str) -> None:
    second = left_by(1)
    change(second)
    bench = new_bench()
    check_run(bench, run_of(left_by(0), second))
    assert failed(bench) == {check}


# Of A M E in the middle of tiny, and A and R at its ends, which are zones; a row of the receipt is an operand.
LAYERS = {"layers.1.mixer.in_projection": "layers.1.in_projection", "layers.2.up.bank.inner": "layers.2.up",
          "layers.2.down.bank.inner": "layers.2.down", "layers.3.block.mlp": "layers.3.block"}  # fmt: skip
FORMATS = {"input": "e4m3", "weight": "e4m3", "gradient": "e5m2"}


def cast_by(rank: int) -> dict[str, Any]:
    """What a rank of a good run in FP8 leaves."""
    took = {"requested": "te", "observed": "te", "refusals": []}
    rows = [
        {"layer": layer, "tensor": tensor, "kind": "Float8Quantizer", "format": form}
        for layer in LAYERS
        for tensor, form in FORMATS.items()
    ]
    choices = dict.fromkeys(("layers.0.block", *LAYERS.values(), "layers.2.norm"), took)
    return {**left_by(rank), "choices": choices, "quantizers": rows, "scales": 6}


def low_checks(change: Callable[[dict[str, Any]], object], **changes: Any) -> Bench:
    bench, second = new_bench("te"), cast_by(1)
    change(second)
    run = run_of(cast_by(0), second)
    order = replace(run.order, precision="delayed", **changes)
    check_low_precision(bench, replace(run, order=order), "delayed")
    return bench


def gradient_in_bf16(receipt: dict[str, Any]) -> None:
    cast = [row for row in receipt["quantizers"] if (row["layer"], row["tensor"]) != ("layers.3.block.mlp", "gradient")]
    receipt["quantizers"] = cast


def with_row(**row: str) -> Callable[[dict[str, Any]], None]:
    return lambda receipt: receipt["quantizers"].append({**receipt["quantizers"][0], **row})


LOW: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "nothing-was-cast": (put("quantizers", []), "casts", "layers.1.in_projection has no quantizer of gradient, input"),
    "a-gradient-in-bf16": (gradient_in_bf16, "casts", "layers.3.block has no quantizer"),
    "another-recipe": (put("quantizers", 0, "kind", "Float8BlockQuantizer"), "casts", "wanted Float8Quantizer"),
    "another-format": (put("quantizers", 2, "format", "e4m3"), "casts", "wanted Float8Quantizer float8_e5m2"),
    "a-zone-that-casts": (with_row(layer="layers.0.block.qkv"), "casts", "layers.0.block.qkv stays in BF16"),
    "nothing-took-it": (lambda one: (one["choices"].clear(), put("quantizers", [])(one)), "casts", "no part"),
    "scales-that-nobody-compared": (put("scales", 0), "scales", "0 scales"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "check", "said"), LOW.values(), ids=LOW)
def test_low_precision_that_did_not_run_is_seen(
    change: Callable[[dict[str, Any]], object], check: str, said: str
) -> None:
    bench = low_checks(change)
    assert failed(bench) == {f"plan.{check}.rank1"}
    assert said in next(one.detail for one in bench.checks if not one.passed)


def test_low_precision_that_ran_passes_and_is_told() -> None:
    bench = low_checks(lambda _: None)
    assert failed(bench) == set()
    assert {one.name for one in bench.checks} == {f"plan.{of}.rank{n}" for of in ("casts", "scales") for n in (0, 1)}
    assert len(bench.quantizers) == len(LAYERS) * len(FORMATS)
    assert bench.quantizers[2] == Quantizer(
        "plan.layers.1.mixer.in_projection", "gradient", "Float8Quantizer", "float8_e5m2", "tensor"
    )
    # Experts that the form keeps out of it may not cast.
    assert "plan.casts.rank0" in failed(low_checks(lambda _: None, forms={"low_precision_experts": False}))


def test_a_rank_that_left_nothing_and_a_run_that_died_are_no_success() -> None:
    for run in (run_of(left_by(0)), run_of(left_by(0), left_by(1), ending="died", words="rank 1 died")):
        bench = new_bench()
        check_run(bench, run)
        assert "plan.ended" in failed(bench)


def learning(losses: list[float | str]) -> bool:
    steps = [{"step": n, "loss": loss, "perfect": 2.0, "grad_norm": 1.0} for n, loss in enumerate(losses)]
    return judge_learning("plan", steps, SIZE.grammar, SIZE.length, SIZE.batch).passed


LNV = math.log(32)


@pytest.mark.parametrize(("losses", "passes"), [
    ([LNV - 0.05 * n for n in range(20)], True),
    ([LNV] * 20, False),  # learned nothing
    ([LNV - 0.001 * n for n in range(20)], False),  # so little that it is the luck of the batch
    ([3.07] * 20, False),  # what one token back tells, and no more: 3.079
    ([2.1] * 15 + [LNV] * 5, False),  # learned, and forgot
    ([LNV - 0.05 * n for n in range(19)] + ["nan"], False),
    ([1.99] * 20, True),
    ([1.5] * 20, False),  # better than a perfect model
])  # fmt: skip
def test_a_loss_that_does_not_fall_is_seen(losses: list[float | str], passes: bool) -> None:
    assert learning(losses) is passes


@pytest.mark.parametrize(("pattern", "passes"), [
    ("AEMR", True),
    ("EEEE", False),  # experts alone, as if attention, scans and recurrences passed nothing on
])  # fmt: skip
def test_a_model_that_sees_one_token_back_has_not_learned(tmp_path: Path, pattern: str, passes: bool) -> None:
    order = SmokeOrder(
        size="tiny", changes={"pattern": pattern}, steps=80, precision="fp32", device="cpu", target="cpu",
        features={"preset": "off"}, learning_rate=1e-2, warm_up=8, audit=False,
    )  # fmt: skip
    assert run_smoke(order, tmp_path, limit_s=300).ending == "done"
    steps = json.loads((tmp_path / "rank-0.json").read_text(encoding="utf-8"))["steps"]
    assert judge_learning("plan", steps, SIZE.grammar, SIZE.length, SIZE.batch).passed is passes


def took(observed: str, *codes: str) -> dict[str, Any]:
    return {"requested": "te", "observed": observed, "refusals": [refused(code) for code in codes]}


@pytest.mark.parametrize(("choices", "wanted"), [
    ({}, {"plan.parts"}),  # ranks that report no backend are no evidence
    ({"layers.0.block": took("native")}, {"plan.layers.0.block.backend"}),  # a fallback that was not asked for
    ({"layers.0.block": took("native", "flag-off")}, set()),
    ({"layers.0.block": took("te"), "layers.1.in_projection": took("native", "tensor-parallel")}, set()),
])  # fmt: skip
def test_what_the_ranks_ran_on_is_on_record(choices: dict[str, Any], wanted: set[str]) -> None:
    bench = new_bench("te")
    check_parts(bench, run_of(left_by(0) | {"choices": choices}))
    assert failed(bench) == wanted
    assert len(bench.backends) == len(choices)


def test_the_record_has_what_the_report_tells() -> None:
    broken = left_by(0)
    broken["steps"][2]["loss"] = "inf"
    record = record_of(run_of(broken, left_by(1)))
    assert (record.ranks, record.topology["expert_parallel"], record.peak_bytes) == (2, "2", {"step": 101})
    assert record.steps[2].loss is None
    assert record.goodput == pytest.approx(1 / 3)
    assert sum(record.phases_ns.values()) == record.whole_ns
    assert [step.step for step in record.steps] == list(range(len(record.steps)))
    json.dumps(asdict(record), allow_nan=False)


def test_settings_become_an_order(tmp_path: Path) -> None:
    runs = Runs(new_bench(changes="num_experts=8", steps="7", learning_rate="1e-2", forms="moe=padded"), tmp_path)
    with pytest.raises(Exception, match="padded"):  # which knows no other ranks
        runs.order()
    alone = Runs(new_bench(plan="", changes="num_experts=8", steps="7", forms="moe=padded"), tmp_path).order()
    assert (alone.steps, alone.read_size().num_experts, alone.read_forms().moe) == (7, 8, "padded")
    assert alone.read_plan().world == 1
    with pytest.raises(TypeError, match="'colour'"):
        Runs(new_bench(plan="", forms="colour=red"), tmp_path).order()


@pytest.mark.parametrize(
    ("order", "check", "passes"),
    [
        ({"plan": {}, "forms": {"moe": "bridge"}}, "tokens", False),
        ({"plan": {}, "forms": {"moe": "jagged"}}, "tokens", True),  # whose rows nobody can count on one rank
        ({"plan": {"tensor_parallel": 2}}, "replicas", False),
        ({"plan": {"data": 2}}, "replicas", False),
    ],
)
def test_a_plan_says_what_must_be_looked_at(order: dict[str, Any], check: str, passes: bool) -> None:
    run = run_of(left_by(0) | {"dispatches": 0})
    found = look_at_audit(replace(run, order=replace(run.order, **order)), run.first)
    assert {name: passed for name, passed, _ in found}[check] is passes


def test_a_cell_without_its_gpus_does_not_run() -> None:
    bench = new_bench(plan="data=64")
    with open_runs(bench):  # gloo takes any number
        pass
    bench.device = "cuda"
    with pytest.raises(CannotRun, match=r"takes 64 GPUs.*Next step"), open_runs(bench):
        pass
