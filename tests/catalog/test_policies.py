"""Policies: what is shipped reads clean, and a wrong row is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.bridge.recipes import ALIGNMENT
from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from megacpp_validate.catalog.policies import (
    BREAKAGES,
    CHECKS,
    GATE,
    GATE_WAIVERS,
    POLICY,
    PRESETS,
    read_fp8_policy,
    read_gate_policy,
)
from tests.catalog.refusals import at, copy_matrix, edit, faults_of

WAIVER = """
[[waiver]]
release = "te-upgrade"
cell = "te2.17.1-h200-attention"
rule = "slower"
owner = "somebody"
reason = "known"
link = "https://example.org/1"
expires = 2026-12-31
"""


def test_the_rules_of_the_gate_that_are_shipped(catalog: Catalog) -> None:
    policy = read_gate_policy(catalog)
    rules, golden = policy.choose("te-upgrade", "h200"), policy.choose("release", "h200")
    recipes = {target.id: target.recipes for target in catalog.targets}
    cells = {cell.id: cell.settings.get("recipe", "") for cell in catalog.fp8}
    for row in policy.require:  # what a target can do is not excused
        assert not {cells.get(name) for name in row.unsupported} & {*recipes[row.target]}
    assert rules.probes == tuple(module.id for module in catalog.modules)
    assert rules.evidence.keys() >= {*rules.probes}
    assert set(golden.probes) > {cell.id for cell in catalog.fp8}
    assert rules.sha256 != policy.choose("nightly", "h200").sha256
    assert policy.waiver == []
    assert not any(row.rule == "second-copy" for row in golden.allowances)  # a golden image has nothing twice
    assert any(row.rule == "second-copy" for row in rules.allowances)
    assert not any(row.rule == "second-copy" for row in policy.choose("te-upgrade", "b200").allowances)
    text = (matrix_folder() / GATE_WAIVERS).read_text()
    assert all(rule.value in text for rule in BREAKAGES)
    for release, target, says in (
        ("weekly", "h200", "choose one of te-upgrade"),
        ("te-upgrade", "cpu", "open for any"),
    ):
        with pytest.raises(match=says):
            policy.choose(release, target)


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (GATE, 'groups = ["modules"]', "groups = []", "it requires nothing"),
        (GATE, 'counts = ["pass"]', 'counts = ["pass", "not-run"]', "counts.1"),
        (GATE, "slowdown = 1.10", "slowdown = 0.9", "greater than 1"),
        (GATE, "memory = 1.10", "memory = inf", "finite"),
        (GATE_WAIVERS, 'rule = "slower"', 'rule = "missing"', "cannot be waived into being"),
        (GATE_WAIVERS, 'rule = "slower"', 'rule = "signature"', "cannot be waived into being"),
        (GATE_WAIVERS, 'attention"\nrule = "slower"', 'imports"\nrule = "outcome"', "an import cannot"),
        (GATE_WAIVERS, "te2.17.1-h200-attention", "*-h200-attention", "cell: "),
        (GATE_WAIVERS, 'owner = "somebody"', 'owner = " "', "owner"),
        (GATE_WAIVERS, "https://example.org/1", "ask me", "link"),
        (GATE_WAIVERS, "2026-12-31", '"soon"', "expires"),
        (POLICY, "least = 1", "least = 0", "(no-history)"),
        (POLICY, 'parts = ["mtp_head"]', 'parts = ["mtp"]', "(auxiliary-heads): Value error, names 'mtp'"),
        (PRESETS, 'refused_by = ["routers"]', 'refused_by = ["router"]', "names 'router', which does"),
    ],
)
def test_a_wrong_row_is_refused_by_name(file: str, old: str, new: str, says: str, tmp_path: Path) -> None:
    (copy_matrix(tmp_path, GATE, CHECKS, POLICY, PRESETS) / GATE_WAIVERS).write_text(WAIVER)
    policy = read_gate_policy(at(tmp_path))
    assert [len(policy.choose(release, "h200").waivers) for release in ("te-upgrade", "nightly")] == [1, 0]
    edit(tmp_path / file, (old, new))
    is_gate = file in (GATE, GATE_WAIVERS)
    faults = faults_of(lambda: read_gate_policy(at(tmp_path)) if is_gate else read_fp8_policy(at(tmp_path)))
    assert any(fault.startswith(f"{file}: ") and says in fault for fault in faults)


def test_a_gate_without_its_list_of_checks_is_refused(tmp_path: Path) -> None:
    copy_matrix(tmp_path, GATE, GATE_WAIVERS)
    assert CHECKS in faults_of(lambda: read_gate_policy(at(tmp_path)))[0]


def test_the_policy_of_low_precision_that_is_shipped(catalog: Catalog) -> None:
    policy = read_fp8_policy(catalog)
    runs = [preset for preset in policy.presets if not preset.refused_by]
    assert [preset.id for preset in runs] == ["production", "dense", "experts", "blackwell"]
    named = {part for rule in policy.rules for part in rule.parts}
    low = {part for preset in runs for row in preset.low for part in row.parts}
    assert named | low == {part.id for part in policy.parts}  # each part is used or refused
    assert not named & low
    assert {row.recipe: row.widths for row in policy.multiples} == dict(ALIGNMENT)
