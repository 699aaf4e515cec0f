"""The rules of the release gate: what is shipped reads clean, and a wrong file is refused with every fault in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from megacpp_validate.catalog.gate import RULES, WAIVABLE, WAIVERS, read_gate_policy

from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from tests.catalog.refusals import copy_matrix, edit, faults_of

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


def test_what_is_shipped_reads_clean(catalog: Catalog) -> None:
    policy = read_gate_policy(catalog)
    rules = policy.choose("te-upgrade", "h200")
    assert rules.probes == tuple(module.id for module in catalog.modules)
    assert set(policy.choose("release", "h200").probes) > {cell.id for cell in catalog.fp8}
    assert rules.sha256 != policy.choose("nightly", "h200").sha256
    assert policy.waivers == ()
    # A golden image has nothing twice, and no rule lets it.
    assert not policy.choose("release", "h200").second_copies
    lacks = next(target for target in catalog.targets if target.id == "h200").recipes
    assert policy.choose("release", "h200").unsupported == tuple(
        cell.id for cell in catalog.fp8 if cell.settings.get("recipe", lacks[0]) not in lacks
    )


@pytest.mark.parametrize(
    ("release", "target", "says"),
    [("weekly", "h200", "choose one of te-upgrade of h200"), ("te-upgrade", "cpu", "open for anything")],
)
def test_what_there_is_no_rule_for_is_refused(release: str, target: str, says: str, catalog: Catalog) -> None:
    with pytest.raises(match=says):
        read_gate_policy(catalog).choose(release, target)


DAMAGE = (
    ('groups = ["modules"]', 'groups = ["modules"]\nprobes = ["fp8_of_tomorrow"]', "probes names 'fp8_of_tomorrow'"),
    ('groups = ["modules"]', "groups = []", "it requires nothing"),
    ('groups = ["modules"]', 'groups = ["models"]', "groups.0"),
    ('target = "h200"', 'target = "h300"', "target names 'h300'"),
    ('target = "b200"', 'target = "h200"', "h200' appears 2 times"),
    ('release = "te-upgrade"', 'release = "te-update"', "release names 'te-update'"),
    ('counts = ["pass"]', 'counts = ["pass", "not-run"]', "counts.1"),
    ('unsupported = ["fp8_mxfp8", "fp8_nvfp4"]', 'unsupported = ["fp8_block"]', "h200 has block"),
    ("slowdown = 1.10", "slowdown = 0.9", "greater than 1"),
    ("slowdown = 1.10", "slowdown = nan", "finite"),
    ("memory = 1.10", "memory = inf", "finite"),
    ("least_schema = 2", "least_schema = 9", "least_schema"),
    ('observed = "unfused"', 'observed = ""', "observed"),
    ('probes = ["attention"]', 'probes = ["atention"]', "probes names 'atention'"),
    ('releases = ["te-upgrade", "nightly"]', 'releases = ["daily"]', "releases names 'daily'"),
    ('claimed = "current"', 'claimed = "delayed"', "shows 'delayed' appears 2 times"),
    ("max_age_days = 30", "max_age_days = 9999999999", "max_age_days"),
    ('claimed = "delayed"', 'claimed = "te"\nobserved = ["native"]\n[[shows]]\nclaimed = "delayed"', "a fallback"),
    ('releases = ["te-upgrade", "nightly"]', 'releases = ["release"]', "release is a golden image"),
    ("*/nvidia/cudnn/lib/libcudnn.so.9", "*", "other than libcudnn"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "says"), DAMAGE, ids=[says for _, _, says in DAMAGE])
def test_a_wrong_rule_is_refused_by_name(old: str, new: str, says: str, catalog: Catalog, tmp_path: Path) -> None:
    edit(copy_matrix(tmp_path, RULES, WAIVERS) / RULES, (old, new))
    assert any(says in fault for fault in faults_of(lambda: read_gate_policy(catalog, tmp_path)))


BAD_WAIVERS = (
    ('rule = "slower"', 'rule = "missing"', "cannot be waived into being"),
    ('rule = "slower"', 'rule = "everything"', "rule"),
    ('attention"\nrule = "slower"', 'imports"\nrule = "outcome"', "an import cannot"),
    ('attention"\nrule = "slower"', 'imports"\nrule = "contradicted"', "an import cannot"),
    ("te2.17.1-h200-attention", "*-h200-attention", "cell: "),
    ("te2.17.1-h200-attention", "not a stack-h200-attention", "cell: "),
    ("te2.17.1-h200-attention", "-h200-attention", "cell: "),
    ('release = "te-upgrade"', 'release = "te-update"', "release names 'te-update'"),
    ('owner = "somebody"', "", "owner"),
    ('owner = "somebody"', 'owner = " "', "owner"),
    ('reason = "known"', 'reason = "\\t\\u200b"', "reason"),
    ("https://example.org/1", "ask me", "link"),
    ("2026-12-31", '"soon"', "expires"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "says"), BAD_WAIVERS, ids=[new[:30] for _, new, _ in BAD_WAIVERS])
def test_a_wrong_waiver_is_refused_by_name(old: str, new: str, says: str, catalog: Catalog, tmp_path: Path) -> None:
    (copy_matrix(tmp_path, RULES) / WAIVERS).write_text(WAIVER)
    assert len(read_gate_policy(catalog, tmp_path).choose("te-upgrade", "h200").waivers) == 1
    edit(tmp_path / WAIVERS, (old, new))
    assert any(says in fault for fault in faults_of(lambda: read_gate_policy(catalog, tmp_path)))
    (tmp_path / WAIVERS).write_text(WAIVER * 2)
    assert "appears 2 times" in faults_of(lambda: read_gate_policy(catalog, tmp_path))[0]


def test_what_can_be_waived_stands_in_the_file_of_waivers() -> None:
    text = (matrix_folder() / WAIVERS).read_text()
    assert all(rule.value in text for rule in WAIVABLE)
