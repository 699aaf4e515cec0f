"""What the policy of low precision refuses: each rule by name, with its reason, waived or not."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.fp8 import Fp8Policy, LowParts, PartsRule, Preset, Waiver, read_fp8_policy
from megacpp_validate.gate.decision import WaiverState
from megacpp_validate.gate.fp8_policy import PresetDecision, PresetOutcome, decide_preset, list_waivers

TODAY = date(2026, 11, 21)
OWNERS = {"amax": "somebody", "graphs": "somebody", "recompute": "somebody"}


@pytest.fixture(scope="module")
def policy(catalog: Catalog) -> Fp8Policy:
    return read_fp8_policy(catalog.targets)


def low(*parts: str, recipe: str = "delayed", widths: tuple[int, ...] = (4096, 1024)) -> LowParts:
    return LowParts.model_validate({"parts": list(parts), "recipe": recipe, "widths": list(widths)})


def changed(policy: Fp8Policy, **fields: Any) -> Preset:
    """The production preset with other fields, checked as a file's would be."""
    production = policy.presets[0]
    return Preset.model_validate({**dict(production), **fields})


def decide(policy: Fp8Policy, preset: Preset, *waivers: Waiver, today: date = TODAY) -> PresetDecision:
    return decide_preset(preset, policy.rules, waivers, today)


def test_policy_and_shipped_presets_agree_today(policy: Fp8Policy) -> None:
    """A waiver that expires closes this on the next day, and that is what it is for."""
    for preset in policy.presets:
        decision = decide_preset(preset, policy.rules, policy.waivers, date.today())
        assert decision.outcome.is_good, decision.refusals


def test_every_rule_has_a_preset_that_it_refuses_for_no_other_reason(policy: Fp8Policy) -> None:
    """A rule that is taken out, or that loses a part, is missed by name."""
    alone = set()
    for preset in policy.presets:
        decision = decide_preset(preset, policy.rules, (), TODAY)
        assert {refusal.rule for refusal in decision.refusals} == set(preset.refused_by), preset.id
        alone |= {rule for rule in preset.refused_by if len(preset.refused_by) == 1}
    assert alone == {rule.id for rule in policy.rules.rules}


def test_every_part_that_a_rule_names_is_in_a_preset_that_it_refuses(policy: Fp8Policy) -> None:
    for rule in policy.rules.rules:
        if isinstance(rule, PartsRule):
            asked = {
                part for row in policy.presets if rule.id in row.refused_by for low in row.low for part in low.parts
            }
            assert set(rule.parts) <= asked, rule.id


# What the project has tried and rolled back, by the words of its plan: held here too, so that taking a preset and its
# rule out together is seen.
ROLLED_BACK = {
    "every-layer": "FP8 for all layers",
    "mamba-scan": "scan-heavy paths of Mamba",
    "tied-embeddings": "tied embeddings",
    "routers": "routers",
    "score-projections": "score projections",
    "graphs-and-recompute": "graphs and selective recompute, all at once, without named owners",
}


@pytest.mark.parametrize(("name", "words"), ROLLED_BACK.items(), ids=ROLLED_BACK.keys())
def test_what_was_rolled_back_stands_in_the_matrix_and_is_refused(policy: Fp8Policy, name: str, words: str) -> None:
    (preset,) = (preset for preset in policy.presets if preset.id == name)
    decision = decide_preset(preset, policy.rules, policy.waivers, TODAY)
    assert decision.outcome is PresetOutcome.ROLLED_BACK
    assert any(words in refusal.refuses for refusal in decision.refusals if refusal.waived_until is None)


def test_a_rule_that_is_taken_out_is_missed(policy: Fp8Policy) -> None:
    """Also where another rule refuses the preset still."""
    (preset,) = (preset for preset in policy.presets if preset.id == "mamba-scan")
    kept = replace(policy.rules, rules=tuple(rule for rule in policy.rules.rules if rule.id != "scan-heavy"))
    for odd, refusals in ((preset, 0), (preset.model_copy(update={"tokens": 7}), 1)):
        decision = decide_preset(odd, kept, (), TODAY)
        assert decision.outcome is PresetOutcome.NOT_REFUSED
        assert (decision.not_refused_by, bool(decision.refusals)) == (("scan-heavy",), bool(refusals))


@pytest.mark.parametrize(
    ("refused_by", "expires", "outcome", "state"),
    [
        ([], None, PresetOutcome.REFUSED, None),
        ([], TODAY, PresetOutcome.WAIVED, WaiverState.HOLDS),
        ([], date(2026, 11, 20), PresetOutcome.REFUSED, WaiverState.EXPIRED),
        (["auxiliary-heads"], None, PresetOutcome.ROLLED_BACK, None),
        (["auxiliary-heads"], TODAY, PresetOutcome.WAIVED, WaiverState.HOLDS),
        (["auxiliary-heads"], date(2026, 11, 20), PresetOutcome.ROLLED_BACK, WaiverState.EXPIRED),
        (["routers"], TODAY, PresetOutcome.NOT_REFUSED, WaiverState.HOLDS),
    ],
)
def test_what_becomes_of_a_preset(
    policy: Fp8Policy, refused_by: list[str], expires: date | None, outcome: PresetOutcome, state: WaiverState | None
) -> None:
    waivers = [waiver(expires)] if expires else []
    decision = decide(policy, changed(policy, low=[low("mtp_head")], refused_by=refused_by), *waivers)
    assert decision.outcome is outcome
    assert [row.state for row in list_waivers(waivers, [decision], TODAY)] == ([state] if state else [])


def test_a_waiver_that_nothing_needs_is_reported(policy: Fp8Policy) -> None:
    decision = decide(policy, changed(policy))
    waivers = [waiver(date(2026, 12, 1)), waiver(TODAY, preset="another")]
    (row,) = list_waivers(waivers, [decision], TODAY)
    assert row.state is WaiverState.NOT_NEEDED
    assert decision.outcome is PresetOutcome.ALLOWED


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no-first-zone": ({"bf16_first": 0}, "every-layer", "the first 0 and the last 1"),
    "no-last-zone": ({"bf16_last": 0}, "every-layer", "the first 1 and the last 0"),
    "mamba-scan": ({"low": [low("mamba_scan")]}, "scan-heavy", "mamba_scan runs in delayed"),
    "mamba-conv": ({"low": [low("mamba_conv", recipe="current")]}, "scan-heavy", "mamba_conv runs in current"),
    "mamba-state": ({"low": [low("mamba_state")]}, "scan-heavy", "mamba_state"),
    "recurrent-scan": ({"low": [low("recurrent_scan")]}, "scan-heavy", "recurrent_scan"),
    "embedding": ({"low": [low("token_embedding")]}, "tied-embeddings", "token_embedding"),
    "lm-head": ({"low": [low("lm_head")]}, "tied-embeddings", "lm_head"),
    "mtp-head": ({"low": [low("mtp_head")]}, "auxiliary-heads", "mtp_head"),
    "moe-router": ({"low": [low("moe_router")]}, "routers", "moe_router"),
    "mod-router": ({"low": [low("mod_router")]}, "routers", "mod_router"),
    "scores": ({"low": [low("score_projections")]}, "score-projections", "score_projections"),
    "no-owners": ({"owners": {}}, "graphs-and-recompute-unowned", "amax, graphs, recompute"),
    "one-owner-missing": (
        {"owners": {**OWNERS, "graphs": " "}}, "graphs-and-recompute-unowned", "no owner is named for graphs",
    ),
    "no-history": ({"amax_history": 0}, "no-history", "amax_history is 0; at least 1"),
    "mxfp8-on-hopper": (
        {"low": [low("expert_products", recipe="mxfp8")]}, "recipe-of-the-target",
        "h200 has no mxfp8 (it has delayed, current, block); targets that have it: b200",
    ),
    "fp8-on-the-cpu": (
        {"targets": ["cpu"], "low": [low("expert_products")]}, "recipe-of-the-target",
        "cpu has no delayed (it has none); targets that have it: h200, b200",
    ),
    "odd-width": (
        {"low": [low("expert_products", widths=(4096, 1000))]}, "dimensions",
        "width 1000; delayed takes multiples of 16",
    ),
    "odd-tokens": ({"tokens": 8190}, "dimensions", "tokens 8190; delayed takes multiples of 16"),
    "odd-tokens-mxfp8": (
        {"targets": ["b200"], "tokens": 8200, "low": [low("expert_products", recipe="mxfp8")]}, "dimensions",
        "tokens 8200; mxfp8 takes multiples of 32",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "rule", "found"), REFUSED.values(), ids=REFUSED.keys())
def test_what_was_rolled_back_is_refused_by_name(
    policy: Fp8Policy, fields: dict[str, Any], rule: str, found: str
) -> None:
    decision = decide(policy, changed(policy, **fields))
    assert decision.outcome is PresetOutcome.REFUSED
    assert {refusal.rule for refusal in decision.refusals} == {rule}
    assert found in decision.refusals[0].found
    assert all(refusal.reason and refusal.next for refusal in decision.refusals)


@pytest.mark.parametrize(
    "fields",
    [
        {"graphs": False, "owners": {}},
        {"recompute": "full", "owners": {}},
        {"recompute": "none", "owners": {}},
        {"low": [], "owners": {}, "bf16_first": 0, "bf16_last": 0, "amax_history": 0, "tokens": 7},
        {"amax_history": 0, "low": [low("expert_products", recipe="current")]},
        {"amax_history": 1, "bf16_first": 4, "bf16_last": 4},
        {"targets": ["b200"], "low": [low("expert_products", recipe="mxfp8")]},
        {"targets": ["h200", "b200"]},
    ],
)
def test_what_no_rule_is_about_is_let_through(policy: Fp8Policy, fields: dict[str, Any]) -> None:
    assert decide(policy, changed(policy, **fields)).outcome is PresetOutcome.ALLOWED


def test_fp8_everywhere_is_refused_for_every_reason_at_once(policy: Fp8Policy) -> None:
    every = low(*(part.id for part in policy.rules.parts), recipe="mxfp8", widths=(4097,))
    decision = decide(policy, changed(policy, low=[every], owners={}, bf16_first=0, bf16_last=0, tokens=1))
    rules = {refusal.rule for refusal in decision.refusals}
    assert rules == {rule.id for rule in policy.rules.rules} - {"no-history"}
    parts = [refusal.found for refusal in decision.refusals if refusal.rule == "scan-heavy"]
    assert len(parts) == 4


def waiver(expires: date, rule: str = "auxiliary-heads", preset: str = "production") -> Waiver:
    return Waiver(
        rule=rule, preset=preset, owner="somebody", reason="a trial", link="https://example.org/1", expires=expires
    )


@pytest.mark.parametrize(
    ("given", "today", "allowed"),
    [
        ([waiver(TODAY)], TODAY, True),
        ([waiver(TODAY)], date(2026, 11, 22), False),
        ([waiver(date(2026, 11, 1)), waiver(date(2026, 12, 1))], TODAY, True),
        ([waiver(date(2026, 12, 1), rule="routers")], TODAY, False),
        ([waiver(date(2026, 12, 1), preset="another")], TODAY, False),
        ([], TODAY, False),
    ],
)
def test_a_waiver_holds_for_its_rule_its_preset_and_its_days(
    policy: Fp8Policy, given: list[Waiver], today: date, allowed: bool
) -> None:
    decision = decide(policy, changed(policy, low=[low("mtp_head")]), *given, today=today)
    assert (decision.outcome is PresetOutcome.WAIVED) is allowed
    (refusal,) = decision.refusals  # it is not hidden
    assert (refusal.waived_until is not None) is allowed


@pytest.mark.parametrize("fields", [{"amax_history": 0}, {"tokens": 8190}, {"targets": ["gb10"]}])
def test_what_does_not_run_at_all_is_not_waived(policy: Fp8Policy, fields: dict[str, Any]) -> None:
    waivers = [waiver(date(2026, 12, 1), rule=rule.id) for rule in policy.rules.rules]
    assert decide(policy, changed(policy, **fields), *waivers).outcome is PresetOutcome.REFUSED


def test_one_waiver_of_two_refusals_is_not_enough(policy: Fp8Policy) -> None:
    preset = changed(policy, low=[low("mtp_head", "lm_head")])
    decision = decide(policy, preset, waiver(date(2026, 12, 1)))
    assert decision.outcome is PresetOutcome.REFUSED
    assert [row.rule for row in decision.refusals if row.waived_until is None] == ["tied-embeddings"]
