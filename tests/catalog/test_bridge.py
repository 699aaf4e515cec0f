"""The matrix: what is shipped reads clean, and a wrong file is refused by the names of its rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import PACKAGE_ROOT, Catalog, read_catalog
from tests.catalog.refusals import copy_matrix, edit, faults_of

MODULES = ["imports", "attention", "linear_walker", "permute", "expert_gemm", "native_block", "layer_spec"]
TE = 'te = "2.12.0"'
FAULTS = {
    "dangling-pin": ("stacks.toml", 'pinned = "te2.20.2"', 'pinned = "te9"', ["pinned: ", "names 'te9'"]),
    "not-a-version": ("stacks.toml", TE, 'te = "latest"', ["te (te2.12.0)", "latest"]),
    "image-with-a-tag-only": ("stacks.toml", TE, f'{TE}\nimage = "pytorch:26.09-py3"', ["image (te2.12.0)"]),
    "cell-on-nothing": ("fp8.toml", '"layer_spec"', '"layerspec"', ["(fp8_loss)", "names 'layerspec'"]),
    "cell-with-an-unread-setting": ("fp8.toml", '{ recipe = "cur', '{ recipies = "cur', ["(fp8_current)", "recipies"]),
}  # fmt: skip


def test_the_shipped_matrix_reads_clean(catalog: Catalog) -> None:
    assert [module.id for module in catalog.modules] == MODULES
    for at, module in enumerate(catalog.modules):  # blame goes through them in dependency order
        assert set(module.depends_on) <= set(MODULES[:at])
    assert catalog.pinned in catalog.stacks
    assert {target.id for target in catalog.targets} == {"h200", "b200", "gb10", "cpu"}
    planted = Counter(mutant.module for mutant in catalog.mutants)
    assert set(planted) == set(MODULES)
    assert min(planted.values()) >= 8
    assert len({mutant.id for mutant in catalog.mutants}) == len(catalog.mutants)
    rows = (*catalog.fp8, *catalog.smoke, *catalog.compositions)
    listed = [file for module in catalog.modules for file in module.files]
    bridge = {path.relative_to(PACKAGE_ROOT).as_posix() for path in (PACKAGE_ROOT / "bridge").rglob("*.py")}
    assert sorted(listed) == sorted(bridge)
    files = set(listed)
    files |= {f"probes/{row.code.replace('.', '/')}.py" for row in rows}
    assert not {file for file in files if not (PACKAGE_ROOT / file).is_file()}


@pytest.mark.parametrize(("file", "old", "new", "says"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_with_its_file_and_row(file: str, old: str, new: str, says: list[str], tmp_path: Path) -> None:
    matrix = copy_matrix(tmp_path)
    edit(matrix / file, (old, new))
    faults = [fault for fault in faults_of(lambda: read_catalog(matrix)) if all(words in fault for words in says)]
    assert faults
    assert faults[0].startswith(f"{file}: ")


def test_faults_of_several_files_are_named_at_once(tmp_path: Path) -> None:
    matrix = copy_matrix(tmp_path)
    edit(matrix / "targets.toml", ('machine = "x86_64"', 'machine = "sparc"'), ("deep_gemm = true", "deep_gemm = 1"))
    edit(matrix / "stacks.toml", (TE, "te = 2"))
    edit(matrix / "bridge.toml", ("seconds = ", "second = "))
    places = [fault.partition(":")[0] for fault in faults_of(lambda: read_catalog(matrix))]
    assert sorted(places) == ["bridge.toml", "stacks.toml", "targets.toml", "targets.toml"]
