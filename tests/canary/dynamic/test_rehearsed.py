"""What the real probes left of faults planted in copies of the double of Transformer Engine: each has its blame.

`rehearsed.json` keeps, of every fault, the red receipts alone, and of their failed checks one of each kind; all other
modules passed. Made on a CPU, with the double under the names of two releases: numbers in it say nothing about a GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.canary.dynamic.step import StackReceipts, StepResult, compare_stacks
from megacpp_validate.catalog.bridge import read_catalog
from megacpp_validate.evidence.receipt import Check, Failure, Outcome, Part, Receipt
from tests.diagnosis.planted import MODULES, good

BEFORE, AFTER = "te2.12.0", "te2.17.1"
CATALOG = read_catalog()
KEPT: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("rehearsed.json").read_text(encoding="utf-8"))
LAYER = (
    "{'self_attention.layernorm_qkv.layer_norm_weight': (64,), 'self_attention.layernorm_qkv.weight': (128, 64), "
    "'self_attention.proj.weight': (64, 64), 'layernorm_mlp.layer_norm_weight': (64,), "
    "'layernorm_mlp.fc1_weight': (192, 64), 'layernorm_mlp.fc2_weight': (64, 96)}"
)
# What a good receipt says that blame looks at.
SHOWN: dict[str, tuple[Check, ...]] = {
    "expert_gemm": (Check("fp8.delayed.all-busy.forward.rounded", True),),
    "layer_spec": (Check("A.parameters", True, (), LAYER),),
}


def held(module: str, stack: str) -> Receipt:
    made = good(module, stack, stack.removeprefix("te"))
    return replace(made, checks=(*made.checks, *SHOWN.get(module, ())))


def red(module: str, kept: dict[str, Any]) -> Receipt:
    checks = tuple(
        Check(name, False, tuple(Part(part, 0.5, 0.01, False, "derived") for part in parts), detail)
        for name, detail, parts in kept["checks"]
    )
    outcome = Outcome(kept["outcome"])
    failure = Failure(*kept["failure"]) if "failure" in kept else None
    made = replace(held(module, AFTER), outcome=outcome, reason=kept["reason"], failure=failure)
    by = f"{AFTER}-h200-{kept['blocked_by']}" if "blocked_by" in kept else ""
    return replace(made, checks=(Check("seen", True), *checks), blocked_by=by)


@cache
def before() -> StackReceipts:
    return StackReceipts(BEFORE, tuple(held(module, BEFORE) for module in MODULES))


def step(reds: dict[str, Receipt]) -> StepResult:
    return compare_stacks(before(), StackReceipts(AFTER, tuple(reds.get(m) or held(m, AFTER) for m in MODULES)),
                          CATALOG.modules)  # fmt: skip


@pytest.mark.parametrize("fault", KEPT)
def test_a_planted_fault_has_its_blame(fault: str) -> None:
    found = step({module: red(module, kept) for module, kept in KEPT[fault]["red"].items()})
    told = {one.module: [one.cause.value, one.component, list(one.cascades)] for one in found.culprits}
    assert told == KEPT[fault]["culprits"]
    for culprit in found.culprits:
        assert culprit.next_step
        assert len(set(culprit.evidence)) == len(culprit.evidence)
        assert BEFORE in culprit.next_step or culprit.component == "GPU memory"
