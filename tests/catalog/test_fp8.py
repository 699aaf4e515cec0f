"""The policy of low precision: what is shipped reads clean, and a wrong file is refused with every fault in it."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest
from megacpp_validate.catalog.fp8 import POLICY, PRESETS, WAIVERS, Fp8Policy, PartsRule, read_fp8_policy

from megacpp_validate.bridge.linear_walker import ALIGNMENT
from megacpp_validate.catalog.bridge import Catalog
from tests.catalog.refusals import copy_matrix, edit, faults_of

WAIVER = """
[[waiver]]
rule = "auxiliary-heads"
preset = "production"
owner = "somebody"
reason = "a trial"
link = "https://example.org/1"
expires = 2026-11-21
"""


def read(catalog: Catalog, folder: Path | None = None) -> Fp8Policy:
    return read_fp8_policy(catalog.targets, folder)


def test_what_is_shipped_reads_clean(catalog: Catalog) -> None:
    policy = read(catalog)
    runs = [preset for preset in policy.presets if not preset.refused_by]
    assert [preset.id for preset in runs] == ["production", "dense", "experts", "blackwell"]
    assert policy.waivers == ()
    named = {part for rule in policy.rules.rules if isinstance(rule, PartsRule) for part in rule.parts}
    low = {part for preset in runs for row in preset.low for part in row.parts}
    assert named | low == {part.id for part in policy.rules.parts}  # each part is used or refused
    assert not named & low


def test_multiples_are_those_that_the_bridge_holds_layers_to(catalog: Catalog) -> None:
    assert {row.recipe: row.widths for row in read(catalog).rules.multiples} == dict(ALIGNMENT)


def test_a_waiver_is_read_whether_or_not_it_has_expired(catalog: Catalog, tmp_path: Path) -> None:
    """The gate decides whether it holds, with the preset that it is for."""
    (copy_matrix(tmp_path, POLICY, PRESETS) / WAIVERS).write_text(WAIVER)
    (waiver,) = read(catalog, tmp_path).waivers
    assert waiver.expires == date(2026, 11, 21)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (POLICY, 'kind = "zones"', 'kind = "zone"', "zone"),
        (POLICY, "least = 1", "least = 0", "(no-history)"),
        (POLICY, "least = 1", "last = 1", "least"),
        (POLICY, 'parts = ["mtp_head"]', 'parts = ["mtp"]', "rule auxiliary-heads: parts names 'mtp', which does not"),
        (POLICY, 'id = "routers"', 'id = "no-history"', "rule 'no-history' appears 2 times"),
        (POLICY, 'recipe = "current"', 'recipe = "delayed"', "no multiple of current"),
        (PRESETS, 'parts = ["attention_mlp"]', 'parts = ["attention"]', "names 'attention', which does"),
        (PRESETS, 'refused_by = ["routers"]', 'refused_by = ["router"]', "refused_by names 'router', which does"),
        (PRESETS, '"AEMEAEMEAEMR"', '"AEAE"', "low names mamba_in_projection, and no block of AEAE is M"),
        (PRESETS, '"AEMEAEMEAEMR"', '"AEMX"', "pattern"),
        (PRESETS, 'targets = ["h200"]', 'targets = ["h100"]', "targets names 'h100'"),
        (PRESETS, 'recipe = "delayed"', 'recipe = "fp8"', "recipe"),
        (PRESETS, "bf16_first = 1", "bf16_first = 12", "overlap"),
        (WAIVERS, "waiver = []", WAIVER.replace("auxiliary-heads", "heads"), "rule names 'heads'"),
        (WAIVERS, "waiver = []", WAIVER.replace("auxiliary-heads", "no-history"), "cannot be waived"),
        (WAIVERS, "waiver = []", WAIVER.replace('"production"', '"trial"'), "preset names 'trial'"),
        (WAIVERS, "waiver = []", WAIVER.replace("https://", "see "), "link"),
        (WAIVERS, "waiver = []", WAIVER.replace("2026-11-21", '"soon"'), "expires"),
        (WAIVERS, "waiver = []", WAIVER.replace("expires = 2026-11-21", ""), "expires"),
        (WAIVERS, "waiver = []", WAIVER + WAIVER, "appears 2 times"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_refused(file: str, old: str, new: str, said: str, catalog: Catalog, tmp_path: Path) -> None:
    edit(copy_matrix(tmp_path, POLICY, PRESETS, WAIVERS) / file, (old, new))
    faults = faults_of(lambda: read(catalog, tmp_path))
    assert any(fault.startswith(f"{file}: ") and said in fault for fault in faults)


def test_all_faults_of_all_files_are_named_at_once(catalog: Catalog, tmp_path: Path) -> None:
    copy_matrix(tmp_path, POLICY, PRESETS)
    edit(tmp_path / POLICY, ('parts = ["mtp_head"]', 'parts = ["mtp"]'))
    edit(tmp_path / PRESETS, ('targets = ["h200"]', 'targets = ["h100"]'), ('["attention_mlp"]', '["attention"]'))
    wrong = WAIVER.replace('"production"', '"trial"').replace("auxiliary-heads", "heads")
    (tmp_path / WAIVERS).write_text(wrong)
    assert len(faults_of(lambda: read(catalog, tmp_path))) == 5
    (tmp_path / PRESETS).unlink()
    (tmp_path / POLICY).unlink()
    assert [fault.partition(":")[0] for fault in faults_of(lambda: read(catalog, tmp_path))] == [POLICY, PRESETS]
