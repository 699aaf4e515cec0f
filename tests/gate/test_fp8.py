"""What the policy of low precision refuses: each rule by name, with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.bridge.features import ROLLED_BACK
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.policies import Fp8Policy, LowParts, Preset, read_fp8_policy
from megacpp_validate.gate.fp8 import AGREED, PresetOutcome, decide_preset, find_refused_run
from tests.catalog.refusals import copy_matrix, edit
from tests.command_line import make_run


@pytest.fixture(scope="module")
def policy(catalog: Catalog) -> Fp8Policy:
    return read_fp8_policy(catalog)


def low(*parts: str, recipe: str = "delayed", widths: tuple[int, ...] = (4096, 1024)) -> LowParts:
    return LowParts.model_validate({"parts": list(parts), "recipe": recipe, "widths": list(widths)})


def changed(policy: Fp8Policy, **fields: Any) -> Preset:
    """The production preset with other fields, checked as a file's would be."""
    production = policy.presets[0]
    return Preset.model_validate({**dict(production), "measured": "1%", **fields})


def test_every_rule_has_a_preset_that_it_refuses_for_no_other_reason(policy: Fp8Policy) -> None:
    """A rule that is taken out, or that loses a part, is missed by name."""
    alone = set()
    for preset in policy.presets:
        decision = decide_preset(preset, policy)
        assert decision.outcome in AGREED
        assert {refusal.rule.id for refusal in decision.refusals} == set(preset.refused_by), preset.id
        alone |= {rule for rule in preset.refused_by if len(preset.refused_by) == 1}
    assert alone == {rule.id for rule in policy.rules}


@pytest.mark.parametrize(
    ("refused_by", "outcome"),
    [
        ([], PresetOutcome.REFUSED),
        (["auxiliary-heads"], PresetOutcome.ROLLED_BACK),
        (["routers"], PresetOutcome.NOT_REFUSED),
    ],
)
def test_the_decision_on_a_preset(policy: Fp8Policy, refused_by: list[str], outcome: PresetOutcome) -> None:
    assert decide_preset(changed(policy, low=[low("mtp_head")], refused_by=refused_by), policy).outcome is outcome


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"bf16_last": 0}, "every-layer"),
        ({"owners": {"amax": "x", "graphs": " ", "recompute": "x"}}, "graphs-and-recompute-unowned"),
    ],
)
def test_each_part_of_a_rule_refuses(policy: Fp8Policy, fields: dict[str, Any], rule: str) -> None:
    assert [refusal.rule.id for refusal in decide_preset(changed(policy, **fields), policy).refusals] == [rule]


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
    assert decide_preset(changed(policy, **fields), policy).outcome is PresetOutcome.ALLOWED


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (("every-layer", "delayed", ""), "rolled back by the rule every-layer"),
        (("production", "delayed current", "small bf16_first=0"), "is refused by the rule every-layer"),
        (("every-layer", "deep_gemm", ""), "rolled back by the rule every-layer"),
        (("production", "deep_gemm", "small bf16_first=0"), "is refused by the rule every-layer"),
        (("production", "delayed", "small batch=4"), ""),
        (("every-layer", "bf16", ""), ""),
        (("off", "delayed", ""), ""),  # the bridge's to refuse
    ],
)
def test_a_run_in_a_refused_preset_is_refused_with_reason_and_measurement(
    policy: Fp8Policy, run: tuple[str, str, str], said: str
) -> None:
    text = find_refused_run(policy, *run)
    assert said in text
    assert not said or all(word in text for word in ("Reason:", "Measured:", "Next step:"))
    weak = [
        rule.model_copy(update={"first": 0, "last": 0}) for rule in policy.rules
    ]  # what it refuses is rolled back still
    lost = policy.model_copy(update={"rules": weak})
    assert bool(find_refused_run(lost, *run)) == (run[0] == "every-layer" and run[1] != "bf16")


def test_the_bridge_refuses_the_presets_that_were_rolled_back(policy: Fp8Policy) -> None:
    measured = {preset.id: preset.measured.partition(" (")[0] for preset in policy.presets if preset.refused_by}
    assert measured == ROLLED_BACK


@pytest.mark.parametrize(
    ("file", "row", "verb"),
    [
        ("moe_smoke.toml", 'size = "small", precision = "delayed"', "moe-smoke"),
        ("fp8.toml", 'recipes = "delayed current"', "fp8"),
    ],
)
def test_no_cell_starts_in_a_preset_that_was_rolled_back(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, row: str, verb: str
) -> None:
    edit(copy_matrix(tmp_path) / file, (row, f'features = "every-layer", {row}'))
    run = make_run(capfd, monkeypatch, verb, "--matrix", tmp_path, "--target", "h200")
    code, _, err = run()
    assert (code, "does not start: the FP8 preset every-layer was rolled back" in " ".join(err.split())) == (2, True)
