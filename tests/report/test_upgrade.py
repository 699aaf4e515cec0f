"""The upgrade canary's answer in every format: who, why, what with it, what next, and what nobody knows."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from megacpp_validate.canary.dynamic.upgrade_result import (
    Change,
    Culprit,
    ModuleChange,
    StepResult,
    TimingChange,
    UpgradeResult,
    VersionChange,
)
from megacpp_validate.canary.firewall.result import FirewallCase, FirewallOutcome, FirewallResult
from megacpp_validate.environments.session_result import SupportCell, SupportGrid, SupportRow
from megacpp_validate.environments.stacks import StackRun
from megacpp_validate.evidence.receipt import Machine, Outcome
from megacpp_validate.evidence.values import ENVIRONMENT, Cause
from megacpp_validate.report import machine
from megacpp_validate.report.words.upgrade import mark_change, summarize_step, summarize_upgrade
from tests.report.reading import READERS, flat, print_terminal, write_annotations, write_junit
from tests.report.results import PERMUTE

CULPRIT = Culprit(
    module="attention",
    cause=Cause.ENVIRONMENT,
    component="cuDNN",
    signature="cudnnGraphNotSupportedError",
    summary="attention raises in cuDNN: set_attribute on a reshape operation",
    evidence=("libcudnn 9.19.0 is mapped", "transformer_engine/pytorch/cpp_extensions/fused_attn.py:420 in fused_attn"),
    entry_points=("DotProductAttention",),
    next_step="pin nvidia-cudnn-cu13 to a release newer than 9.19.0, or stay on 2.12.0",
    cascades=("native_block",),
)
SLOW = TimingChange(
    module="permute",
    name="permute.bf16.forward",
    before_ms=1.0,
    after_ms=1.5,
    ratio=1.5,
    noise=1.04,
    slower=True,
    derivation="A/A runs of te2.12.0 on the same card",
)
STEADY = SLOW.model_copy(update={"name": "permute.bf16.backward", "after_ms": 1.01, "ratio": 1.01, "slower": False})


def change(module: str, before: Outcome | None, after: Outcome | None, change: Change, **more: str) -> ModuleChange:
    return ModuleChange(module=module, before=before, after=after, change=change, **more)  # type: ignore[arg-type]


BROKEN = StepResult(
    target="h200",
    before="te2.12.0",
    after="te2.17.1",
    modules=(
        change("imports", Outcome.PASS, Outcome.PASS, Change.UNCHANGED),
        change("attention", Outcome.PASS, Outcome.ERROR, Change.REGRESSED, reason="cuDNN error"),
        change("permute", Outcome.PASS, Outcome.PASS, Change.UNCHANGED),
        change("native_block", Outcome.PASS, Outcome.ERROR, Change.REGRESSED, under="attention", reason="cuDNN error"),
        change("layer_spec", Outcome.PASS, None, Change.LOST),
    ),
    culprits=(CULPRIT,),
    timings=(SLOW, STEADY),
    versions=(VersionChange(name="triton", before="3.5.0", after="3.6.0"),),
    lost={"te2.17.1-h200-layer_spec": "there is no receipt"},
)
FIXED = StepResult(
    target="h200",
    before="te2.17.1",
    after="te2.20.2",
    modules=(
        change("imports", Outcome.PASS, Outcome.PASS, Change.UNCHANGED),
        change("attention", Outcome.ERROR, Outcome.PASS, Change.FIXED),
        change("permute", Outcome.ERROR, Outcome.ERROR, Change.SAME_FAILURE),
    ),
)
GRID = SupportGrid(
    modules=("imports", "attention"),
    rows=(
        SupportRow(
            stack="te2.17.1",
            target="h200",
            machine=Machine(gpu="NVIDIA H200"),
            started="2026-11-21T10:00:00+00:00",
            cells=(
                SupportCell(module="imports", outcome=Outcome.PASS, passed=3, total=3),
                SupportCell(module="attention", outcome=Outcome.ERROR, reason="cuDNN error"),
            ),
        ),
    ),
    unreadable={"te2.17.1-h200-x.json": "cut short"},
)
FIREWALL = FirewallResult(
    tool="t",
    python="3.11.7",
    torch="2.13.0",
    cases=(
        FirewallCase(
            case="absent", damage="no install", release="2.20.2", compiled="none", outcome=FirewallOutcome.PASS
        ),
        FirewallCase(
            case="undefined-symbol",
            damage="a symbol is gone",
            release="2.20.2",
            compiled="stand-in",
            outcome=FirewallOutcome.FAIL,
            problems=("the reason is empty",),
        ),
    ),
)
UPGRADE = UpgradeResult(
    tool="megacpp-validate 0.1.0",
    target="h200",
    tiers=("static", "firewall", "gpu"),
    static=(PERMUTE,),
    firewall=FIREWALL,
    grid=GRID,
    stacks=(
        StackRun(stack="te2.12.0", environment="overlay /x", folder="r/te2.12.0", ran=("a", "b"), reused=("c",)),
        StackRun(stack="te2.16.0", environment="", folder="", problem="there is no overlay of 2.16.0"),
    ),
    steps=(BROKEN, FIXED),
    seconds={"static": 3.0, "firewall": 20.0, "gpu": 200.0},
)


@pytest.mark.parametrize("reader", READERS)
def test_every_format_names_the_culprit_the_evidence_and_the_next_step(reader: str) -> None:
    told = READERS[reader](UPGRADE)
    for said in (CULPRIT.module, "cuDNN", CULPRIT.summary, *CULPRIT.evidence, CULPRIT.next_step):
        assert flat(said) in told
    for said in ("te2.12.0", "te2.17.1", "te2.20.2", "native_block", "there is no receipt", "the reason is empty"):
        assert said in told


@pytest.mark.parametrize("reader", READERS)
def test_what_could_not_be_made_is_told(reader: str) -> None:
    assert "there is no overlay of 2.16.0" in READERS[reader](UPGRADE)


@pytest.mark.parametrize("reader", ["terminal", "html", "summary", "json"])
def test_what_could_not_be_read_is_told(reader: str) -> None:
    assert "cut short" in READERS[reader](UPGRADE)


def test_a_slow_use_is_told_with_the_noise_and_a_steady_one_is_counted() -> None:
    told = flat(print_terminal(UPGRADE, verbose=False))
    assert "1 → 1.5 ms (1.50 x; two runs of one stack are apart by up to 1.04 x): slower" in told
    assert "permute.bf16.backward" not in told
    assert "permute.bf16.backward" in flat(print_terminal(UPGRADE, verbose=True))


def test_a_slowdown_is_told_once_and_nothing_is_called_red_by_it() -> None:
    line = "permute permute.bf16.forward: 1 -> 1.5 ms, ratio 1.500; believed of noise: 1.040"
    slower = {"module": "permute", "cause": Cause.PERFORMANCE, "component": "", "evidence": (line,),
              "signature": "slower: permute.bf16.forward", "cascades": ("expert_gemm",)}  # fmt: skip
    step = BROKEN.model_copy(update={"culprits": (CULPRIT.model_copy(update=slower),)})
    result = UPGRADE.model_copy(update={"steps": (step,), "static": (), "firewall": None})
    told = flat(print_terminal(result, verbose=False))
    assert "slower because of this, not culprits of their own: expert_gemm" in told
    assert "red because of this" not in told
    assert line not in told
    assert line in flat(print_terminal(result, verbose=True))
    hangs = step.culprits[0].model_copy(update={"signature": "timeout"})
    hung = result.model_copy(update={"steps": (step.model_copy(update={"culprits": (hangs,)}),)})
    assert line in flat(print_terminal(hung, verbose=False))
    assert "red because of this" in flat(print_terminal(hung, verbose=False))


def test_sentences() -> None:
    assert summarize_step(BROKEN) == (
        "Breaks attention (environment: cuDNN), and with it native_block; no evidence on te2.17.1-h200-layer_spec."
    )
    assert summarize_step(FIXED) == "Breaks nothing; fixes attention; leaves red what was red: permute."
    shared = BROKEN.model_copy(update={"culprits": (CULPRIT.model_copy(update={"module": ENVIRONMENT}),), "lost": {}})
    assert summarize_step(shared).startswith("Breaks the environment, not a module (environment: cuDNN)")
    nobody = BROKEN.model_copy(update={"culprits": ()})
    assert summarize_step(nobody) == "Nobody is to blame by what was seen; no evidence on te2.17.1-h200-layer_spec."
    assert "dynamic: 1 of 2 steps breaks something: te2.17.1 attention. te2.16.0 could not" in summarize_upgrade(
        UPGRADE
    )


def test_what_was_not_seen_before_is_not_said_to_hold() -> None:
    new = change("permute", None, Outcome.PASS, Change.NEW, reason="nothing on te2.17.1 to compare it with: a full GPU")
    red = change("expert_gemm", None, Outcome.FAIL, Change.NEW)  # it is told as a culprit, or as a cascade
    step = FIXED.model_copy(update={"modules": (*FIXED.modules[:2], new, red)})
    assert summarize_step(step) == (
        "Nobody is to blame by what was seen; fixes attention; nothing on te2.17.1 to compare permute with."
    )
    assert "a full GPU" in write_junit(UPGRADE.model_copy(update={"steps": (step,)}))


def test_lost_evidence_is_never_good() -> None:
    lost = change("permute", Outcome.PASS, None, Change.LOST)
    assert mark_change(lost).tone == "risk"
    assert mark_change(change("permute", None, None, Change.UNCHANGED)).tone == "risk"
    only = UPGRADE.model_copy(
        update={"steps": (BROKEN.model_copy(update={"culprits": ()}),), "static": (), "firewall": None}
    )
    assert only.lacks
    assert not only.breaks
    assert "bad" not in {mark_change(row).tone for row in FIXED.modules if row.change is Change.FIXED}


def test_junit_fails_the_culprit_and_skips_what_is_lost() -> None:
    cases = {
        (case.get("classname"), case.get("name")): case
        for case in ET.fromstring(write_junit(UPGRADE).encode()).iter("testcase")
    }
    step = "upgrade.te2_17_1.h200"
    assert cases[step, "attention"].find("failure") is not None
    assert cases[step, "native_block"].find("error").get("type") == "cascade"  # type: ignore[union-attr]
    assert cases[step, "layer_spec"].find("skipped") is not None
    assert cases["upgrade.te2_20_2.h200", "permute"].find("error") is not None
    assert [child.tag for child in cases[step, "imports"]] == ["system-out"]


@pytest.mark.parametrize("after", [Outcome.EXPECTED_UNSUPPORTED, Outcome.ERROR, Outcome.BLOCKED])
def test_junit_skips_a_receipt_that_is_no_evidence_with_its_reason(after: Outcome) -> None:
    row = change("permute", Outcome.PASS, after, Change.LOST, reason="refused")
    lost = {"te2.20.2-h200-permute": "a fault of the host: the GPU failed"}
    step = FIXED.model_copy(update={"modules": (*FIXED.modules[:2], row), "lost": lost})
    suites = ET.fromstring(write_junit(UPGRADE.model_copy(update={"steps": (step,), "static": (), "firewall": None})))
    assert (suites.get("skipped"), suites.get("failures")) == ("1", "0")
    assert [skipped.get("message") for skipped in suites.iter("skipped")] == list(lost.values())


def test_annotations_hold_one_error_a_culprit() -> None:
    lines = write_annotations(UPGRADE).splitlines()
    assert sum(line.startswith("::error") and "attention (environment" in line for line in lines) == 1
    assert any(line.startswith("::warning") and "layer_spec" in line for line in lines)


def test_json_goes_both_ways() -> None:
    assert machine.read_json(machine.to_json(UPGRADE)) == UPGRADE
