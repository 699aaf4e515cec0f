"""The matrix: what is shipped reads clean, and a wrong file is refused by the names of its rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog, read_catalog
from tests.catalog.refusals import copy_matrix, edit, faults_of

MODULES = ["imports", "attention", "linear_walker", "permute", "expert_gemm", "native_block", "layer_spec"]
FILES = ("bridge.toml", "fp8.toml", "moe_smoke.toml", "stacks.toml", "targets.toml", "mutants.toml")
TE, VENDOR = 'te = "2.12.0"', 'where = "vendor"\nrequested = '
FAULTS = {
    "dangling-pin": ("stacks.toml", 'pinned = "te2.20.2"', 'pinned = "te9"', ["pinned names 'te9'"]),
    "dangling-dependency": ("bridge.toml", 'depends_on = ["imports"]', 'depends_on = ["nowhere"]', ["'nowhere'"]),
    "out-of-order": ("bridge.toml", "depends_on = []", 'depends_on = ["permute"]', ["imports", "'permute', on which"]),
    "depends-on-itself": ("bridge.toml", "depends_on = []", 'depends_on = ["imports"]', ["'imports', on which"]),
    "missing-file": ("bridge.toml", "bridge/permute.py", "bridge/gone.py", ["permute", "bridge/gone.py"]),
    "double-module": ("bridge.toml", 'id = "permute"', 'id = "expert_gemm"', ["'expert_gemm' appears 2 times"]),
    "double-stack": ("stacks.toml", 'id = "te2.12.0"', 'id = "te2.14.1"', ["'te2.14.1' appears 2 times"]),
    "double-target": ("targets.toml", 'id = "b200"', 'id = "h200"', ["'h200' appears 2 times"]),
    "double-cell": ("fp8.toml", 'id = "fp8_current"', 'id = "fp8_delayed"', ["'fp8_delayed' appears 2 times"]),
    "double-mutant": ("mutants.toml", '"attention-nan"', '"attention-zeros"', ["'attention-zeros' appears 2 times"]),
    "a-module-s-id": ("bridge.toml", 'id = "moe_smoke"', 'id = "imports"', ["composition imports: a bridge module"]),
    "missing-key": ("stacks.toml", f"{TE}\n", "", ["te (te2.12.0)", "required"]),
    "not-a-version": ("stacks.toml", TE, 'te = "latest"', ["te (te2.12.0)", "latest"]),
    "wrong-type": ("stacks.toml", TE, "te = 212", ["te (te2.12.0)", "212"]),
    "image-with-a-tag-only": ("stacks.toml", TE, f'{TE}\nimage = "pytorch:26.09-py3"', ["image (te2.12.0)"]),
    "half-a-digest": ("stacks.toml", TE, f'{TE}\nimage = "a@sha256:12"', ["image (te2.12.0)"]),
    "lock-elsewhere": ("stacks.toml", TE, f'{TE}\nlock = "/etc/lock.txt"', ["lock (te2.12.0)", "/etc/lock.txt"]),
    "empty-id": ("stacks.toml", 'id = "te2.12.0"', 'id = ""', ["id"]),
    "cell-without-a-probe": ("fp8.toml", '"fp8.graphs"', '"fp8.graph"', ["fp8_graphs", "no probe 'fp8.graph'"]),
    "cell-on-nothing": ("fp8.toml", '"layer_spec"', '"layerspec"', ["fp8_loss: stands_on names 'layerspec'"]),
    "cell-with-another-name": ("fp8.toml", 'id = "fp8_loss"', 'id = "loss"', ["id (loss)"]),
    "cell-without-bridge": ("fp8.toml", '["layer_spec", "fp8_scope"]', "[]", ["stands_on (fp8_loss)"]),
    "cell-with-an-unread-setting": ("fp8.toml", '{ recipe = "cur', '{ recipies = "cur', ["(fp8_current)", "recipies"]),
    "cell-of-no-recipe": ("fp8.toml", '{ recipe = "current" }', '{ recipe = "cur" }', ["fp8_current", "'cur'"]),
    "cell-of-no-recipes": ("fp8.toml", '"delayed current"', '"delayed,current"', ["fp8_loss", "'delayed,current'"]),
    "cell-of-no-target": ("moe_smoke.toml", 'targets = ["cpu"]', 'targets = ["pc"]', ["smoke_tiny_train", "'pc'"]),
    "a-string-for-a-list": ("bridge.toml", "depends_on = []", 'depends_on = "imports"', ["depends_on (imports)"]),
    "an-empty-list": ("bridge.toml", 'files = ["bridge/permute.py"]', "files = []", ["files (permute)"]),
    "unknown-recipe": ("targets.toml", '"mxfp8", "nvfp4"', '"mxfp9"', ["recipes", "(b200)", "mxfp9"]),
    "recipe-not-offered": ("targets.toml", 'recipe = "mxfp8"', 'recipe = "fp6"', ["b200", "production_recipe 'fp6'"]),
    "mutant-of-nobody": ("mutants.toml", 'module = "permute"', 'module = "perm"', ["module names 'perm'"]),
    "unknown-fault": ("mutants.toml", 'fault = "nan"', 'fault = "inf"', ["fault (attention-nan)", "inf"]),
    "unreachable-mutant": ("mutants.toml", f'{VENDOR}"te"', f'{VENDOR}"native"', ["does not reach"]),
    "parameter-missing": ("mutants.toml", "parameters = { factor = 0.5 }\n", "", ["(attention-halved)", "'factor'"]),
    "parameter-unknown": ("mutants.toml", "{ factor = 0.5 }", "{ factor = 0.5, hue = 1 }", ["no parameter 'hue'"]),
    "parameter-of-no-type": ("mutants.toml", "{ factor = 0.5 }", "{ factor = [] }", ["parameters", "attention-halved"]),
    "no-patch-point": ("mutants.toml", 'at = "zones.Zones', 'at = "zones.', ["at (imports-zone"]),
    "not-toml": ("bridge.toml", "[[module]]", "[[module]", ["cannot be read"]),
}  # fmt: skip


def test_the_shipped_matrix_reads_clean(catalog: Catalog) -> None:
    assert [module.id for module in catalog.modules] == MODULES
    assert catalog.pinned in catalog.stacks
    assert {target.id for target in catalog.targets} == {"h200", "b200", "gb10", "cpu"}
    planted = Counter(mutant.module for mutant in catalog.mutants)
    assert set(planted) == set(MODULES)
    assert min(planted.values()) >= 8


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
    edit(matrix / "stacks.toml", ('pinned = "te2.20.2"', 'pinned = "te9"'), (TE, "te = 2"))
    edit(matrix / "bridge.toml", ("bridge/permute.py", "bridge/gone.py"))
    places = [fault.partition(":")[0] for fault in faults_of(lambda: read_catalog(matrix))]
    assert sorted(places) == ["bridge.toml", "stacks.toml", "targets.toml", "targets.toml"]


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_the_only_fault(file: str, tmp_path: Path) -> None:
    matrix = copy_matrix(tmp_path)
    (matrix / file).unlink()
    assert [fault.partition(":")[0] for fault in faults_of(lambda: read_catalog(matrix))] == [file]
    assert len(faults_of(lambda: read_catalog(tmp_path / "nowhere"))) == len(FILES)


def test_a_row_says_how_its_stack_is_made(tmp_path: Path) -> None:
    """The locks lie in a checkout, and not beside an installed matrix: there the reader does not miss one."""
    matrix = copy_matrix(tmp_path / "matrix")
    image = f"nvcr.io/nvidia/pytorch@sha256:{'a' * 64}"
    edit(
        matrix / "stacks.toml",
        (TE, f'{TE}\nlock = "containers/locks/a.txt"'),
        ('"2.20.2"', f'"2.20.2"\nimage = "{image}"'),
    )
    stacks = {stack.id: stack for stack in read_catalog(matrix).stacks}
    assert stacks["te2.12.0"].lock == "containers/locks/a.txt"
    assert (stacks["te2.20.2"].lock, stacks["te2.20.2"].image) == ("", image)
    locks = tmp_path / "containers" / "locks"
    locks.mkdir(parents=True)
    assert faults_of(lambda: read_catalog(matrix)) == (
        "stacks.toml: stack te2.12.0: there is no lock containers/locks/a.txt",
    )
    (locks / "a.txt").touch()
    assert read_catalog(matrix)
