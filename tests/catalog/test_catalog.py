"""The matrix: what is shipped reads clean, and a wrong file is refused with every fault in it."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacpp_validate.catalog.bridge import Catalog, MatrixInvalid, matrix_folder, read_catalog

MODULES = ["imports", "attention", "linear_walker", "permute", "expert_gemm", "native_block", "layer_spec"]


def test_the_shipped_matrix_reads_clean(catalog: Catalog) -> None:
    assert [module.id for module in catalog.modules] == MODULES
    assert catalog.pinned in catalog.stacks
    assert {target.id for target in catalog.targets} == {"h200", "b200", "gb10", "cpu"}
    planted = Counter(mutant.module for mutant in catalog.mutants)
    assert set(planted) == set(MODULES)
    assert min(planted.values()) >= 8


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    """A copy of the shipped matrix that a test may damage."""
    return Path(shutil.copytree(matrix_folder(), tmp_path / "matrix"))


def edit(matrix: Path, file: str, *edits: tuple[str, str]) -> None:
    text = (matrix / file).read_text()
    for before, after in edits:
        assert before in text
        text = text.replace(before, after, 1)
    (matrix / file).write_text(text)


def faults_of(matrix: Path) -> tuple[str, ...]:
    with pytest.raises(MatrixInvalid) as refused:
        read_catalog(matrix)
    assert f"{len(refused.value.faults)} fault(s)" in str(refused.value)
    assert "Next step" in str(refused.value)
    assert all(fault in str(refused.value) for fault in refused.value.faults)
    return refused.value.faults


def test_three_faults_of_a_file_are_told_at_once_with_the_rows_id(matrix: Path) -> None:
    edit(
        matrix,
        "targets.toml",
        ('machine = "x86_64"', 'machine = "sparc"'),
        ("deep_gemm = true", 'deep_gemm = "yes"'),
        ('arch = "sm_100"', 'arch = "sm_100"\ncolour = "green"'),
    )
    faults = faults_of(matrix)
    assert len(faults) == 3
    assert all(fault.startswith("targets.toml: target.") for fault in faults)
    assert "machine (h200)" in faults[0]
    assert "'sparc'" in faults[0]
    assert "deep_gemm (h200)" in faults[1]
    assert "colour (b200)" in faults[2]


def test_faults_of_several_files_are_told_at_once(matrix: Path) -> None:
    edit(matrix, "targets.toml", ('machine = "x86_64"', 'machine = "sparc"'))
    edit(matrix, "stacks.toml", ('te = "2.12.0"', "te = 2.12"))
    edit(matrix, "bridge.toml", ('depends_on = ["imports"]', 'depends_on = ["import"]'))
    assert sorted({fault.partition(":")[0] for fault in faults_of(matrix)}) == [
        "bridge.toml",
        "stacks.toml",
        "targets.toml",
    ]


FAULTS: dict[str, tuple[str, str, str, list[str]]] = {
    "dangling-pin": ("stacks.toml", 'pinned = "te2.20.2"', 'pinned = "te9"', ["pinned", "te9"]),
    "dangling-dependency": ("bridge.toml", 'depends_on = ["imports"]', 'depends_on = ["nowhere"]', ["nowhere"]),
    "out-of-order": ("bridge.toml", "depends_on = []", 'depends_on = ["permute"]', ["imports", "permute"]),
    "depends-on-itself": ("bridge.toml", "depends_on = []", 'depends_on = ["imports"]', ["imports"]),
    "missing-file": ("bridge.toml", "bridge/permute.py", "bridge/gone.py", ["permute", "bridge/gone.py"]),
    "double-module": ("bridge.toml", 'id = "permute"', 'id = "expert_gemm"', ["expert_gemm", "2 times"]),
    "double-stack": ("stacks.toml", 'id = "te2.12.0"', 'id = "te2.14.1"', ["te2.14.1", "2 times"]),
    "double-target": ("targets.toml", 'id = "b200"', 'id = "h200"', ["h200", "2 times"]),
    "unknown-key-at-the-top": ("stacks.toml", "pinned =", "colour = 1\npinned =", ["colour"]),
    "unknown-table": ("stacks.toml", "[[stack]]", "[[stak]]", ["stak"]),
    "missing-key": ("stacks.toml", 'te = "2.12.0"\n', "", ["te (te2.12.0)", "required"]),
    "not-a-version": ("stacks.toml", 'te = "2.12.0"', 'te = "latest"', ["te (te2.12.0)", "latest"]),
    "wrong-type": ("stacks.toml", 'te = "2.12.0"', "te = 212", ["te (te2.12.0)", "212"]),
    "image-with-a-tag-only": (
        "stacks.toml", 'te = "2.12.0"', 'te = "2.12.0"\nimage = "pytorch:26.09-py3"', ["image (te2.12.0)", "26.09-py3"]
    ),
    "half-a-digest": (
        "stacks.toml", 'te = "2.12.0"', 'te = "2.12.0"\nimage = "a@sha256:12"', ["image (te2.12.0)"]
    ),
    "lock-out-of-the-house": (
        "stacks.toml", 'te = "2.12.0"', 'te = "2.12.0"\nlock = "/etc/lock.txt"', ["lock (te2.12.0)", "/etc/lock.txt"]
    ),
    "double-cell": ("fp8.toml", 'id = "fp8_current"', 'id = "fp8_delayed"', ["fp8_delayed", "2 times"]),
    "cell-without-a-probe": ("fp8.toml", '"fp8.graphs"', '"fp8.graph"', ["fp8_graphs", "no probe 'fp8.graph'"]),
    "cell-on-nothing": ("fp8.toml", '"layer_spec"', '"layerspec"', ["fp8_loss", "stands_on names 'layerspec'"]),
    "cell-with-a-name-of-its-own": ("fp8.toml", 'id = "fp8_loss"', 'id = "loss"', ["id (loss)"]),
    "cell-without-bridge": (
        "fp8.toml", 'stands_on = ["layer_spec", "fp8_scope"]', "stands_on = []", ["stands_on (fp8_loss)"]
    ),
    "cell-with-a-setting-that-nothing-reads": (
        "fp8.toml", '{ recipe = "current" }', '{ recipies = "current" }', ["(fp8_current)", "recipies"]
    ),
    "cell-of-no-recipe": (
        "fp8.toml", 'settings = { recipe = "current" }', 'settings = { recipe = "curent" }', ["fp8_current", "'curent'"]
    ),
    "cell-that-trains-no-recipe": (
        "fp8.toml", 'recipes = "delayed current"', 'recipes = "delayed,current"', ["fp8_loss", "'delayed,current'"]
    ),
    "empty-id": ("stacks.toml", 'id = "te2.12.0"', 'id = ""', ["id"]),
    "a-string-for-a-list": ("bridge.toml", "depends_on = []", 'depends_on = "imports"', ["depends_on (imports)"]),
    "an-empty-list": ("bridge.toml", 'files = ["bridge/permute.py"]', "files = []", ["files (permute)"]),
    "unknown-recipe": ("targets.toml", '"mxfp8", "nvfp4"', '"mxfp9"', ["recipes", "(b200)", "mxfp9"]),
    "recipe-not-offered": ("targets.toml", 'recipe = "mxfp8"', 'recipe = "fp6"', ["b200", "production_recipe 'fp6'"]),
    "mutant-of-nobody": (
        "mutants.toml", 'module = "permute"', 'module = "permutation"', ["module names 'permutation'"]
    ),
    "unknown-fault": ("mutants.toml", 'fault = "nan"', 'fault = "inf"', ["fault (attention-nan)", "inf"]),
    "unreachable-mutant": (
        "mutants.toml", 'where = "vendor"\nrequested = "te"', 'where = "vendor"\nrequested = "native"', ["not reached"]
    ),
    "parameter-missing": (
        "mutants.toml", "parameters = { factor = 0.5 }\n", "", ["attention-halved", "needs the parameter 'factor'"]
    ),
    "parameter-unknown": (
        "mutants.toml", "{ factor = 0.5 }", "{ factor = 0.5, hue = 1 }", ["attention-halved", "no parameter 'hue'"]
    ),
    "parameter-of-no-type": ("mutants.toml", "{ factor = 0.5 }", "{ factor = [] }", ["parameters", "attention-halved"]),
    "double-mutant": ("mutants.toml", 'id = "attention-nan"', 'id = "attention-zeros"', ["attention-zeros", "2 times"]),
    "no-patch-point": ("mutants.toml", 'at = "zones.Zones', 'at = "zones.', ["at (imports-zone"]),
    "not-toml": ("bridge.toml", "[[module]]", "[[module]", ["cannot be read"]),
    "the-same-key-twice": ("bridge.toml", 'id = "permute"', 'id = "permute"\nid = "permute"', ["cannot be read"]),
}  # fmt: skip


@pytest.mark.parametrize(("file", "before", "after", "told"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_told_with_its_file_and_row(
    file: str, before: str, after: str, told: list[str], matrix: Path
) -> None:
    edit(matrix, file, (before, after))
    faults = faults_of(matrix)
    (fault,) = [fault for fault in faults if all(word in fault for word in told)][:1]
    assert fault.startswith(f"{file}: ")


@pytest.mark.parametrize("file", ["bridge.toml", "fp8.toml", "stacks.toml", "targets.toml", "mutants.toml"])
def test_a_missing_file_is_told_by_name(file: str, matrix: Path) -> None:
    (matrix / file).unlink()
    assert [fault.partition(":")[0] for fault in faults_of(matrix)] == [file]


def test_a_file_that_is_no_text_is_told_by_name(matrix: Path) -> None:
    (matrix / "stacks.toml").write_bytes(b"\xff\xfe\x00")
    (matrix / "targets.toml").unlink()
    (matrix / "targets.toml").mkdir()
    assert [fault.partition(":")[0] for fault in faults_of(matrix)] == ["stacks.toml", "targets.toml"]


@pytest.mark.parametrize(
    ("file", "rows"),
    [("bridge", "module"), ("fp8", "cell"), ("stacks", "stack"), ("targets", "target"), ("mutants", "mutant")],
)
def test_a_file_without_rows_is_refused(file: str, rows: str, matrix: Path) -> None:
    pinned = 'pinned = "te2.20.2"\n' if rows == "stack" else ""
    (matrix / f"{file}.toml").write_text(f"{pinned}{rows} = []\n")
    assert faults_of(matrix)[0].startswith(f"{file}.toml: {rows}: ")


def test_faults_of_cells_and_compositions_are_told_by_their_rows(matrix: Path) -> None:
    edit(matrix, "moe_smoke.toml", ('targets = ["cpu"]', 'targets = ["laptop"]'), ("smoke.reproduce", "smoke.nothing"))
    edit(matrix, "bridge.toml", ('id = "moe_smoke"', 'id = "imports"'), ('code = "smoke.comp', 'code = "smoke.nocomp'))
    faults = faults_of(matrix)
    assert "moe_smoke.toml: cell smoke_tiny_train: targets names 'laptop', which there is not" in faults
    assert "moe_smoke.toml: cell smoke_tiny_experts: there is no probe 'smoke.nothing'" in faults
    assert "bridge.toml: composition imports: a bridge module has this id" in faults
    assert "bridge.toml: composition imports: there is no probe 'smoke.nocomposition'" in faults


def test_a_folder_without_a_matrix_is_refused(tmp_path: Path) -> None:
    assert len(faults_of(tmp_path / "nowhere")) == 6


@given(cut=st.floats(0, 1))
def test_a_file_that_was_cut_short_is_read_whole_or_refused(
    cut: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(shutil.copytree(matrix_folder(), tmp_path_factory.mktemp("cut") / "matrix"))
    text = (folder / "bridge.toml").read_text()
    (folder / "bridge.toml").write_text(text[: int(len(text) * cut)])
    faults: tuple[str, ...] = ()
    try:
        assert read_catalog(folder).modules
    except MatrixInvalid as refused:
        faults = refused.faults
    # A module that was cut off is also missed by the mutants that are planted in it.
    assert all(fault.startswith("bridge.toml: ") or "which there is not" in fault for fault in faults)


def test_a_wrong_type_hides_neither_a_double_id_nor_a_dangling_one(matrix: Path) -> None:
    edit(
        matrix,
        "stacks.toml",
        ('pinned = "te2.20.2"', 'pinned = "te9"'),
        ('te = "2.12.0"', "te = 2"),
        ('id = "te2.17.1"', 'id = "te2.14.1"'),
    )
    faults = faults_of(matrix)
    assert len(faults) == 3
    assert any("te (te2.12.0)" in fault for fault in faults)
    assert any("'te2.14.1' is there 2 times" in fault for fault in faults)
    assert any("no stack 'te9'" in fault for fault in faults)


def test_a_row_says_how_its_stack_is_made(matrix: Path) -> None:
    """The locks lie in a checkout, and not beside a matrix that was installed: there one is not missed."""
    image = f"nvcr.io/nvidia/pytorch@sha256:{'a' * 64}"
    edit(
        matrix,
        "stacks.toml",
        ('te = "2.12.0"', 'te = "2.12.0"\nlock = "containers/locks/te2.12.0.txt"'),
        ('te = "2.20.2"', f'te = "2.20.2"\nimage = "{image}"'),
    )
    stacks = {stack.id: stack for stack in read_catalog(matrix).stacks}
    assert stacks["te2.12.0"].lock == "containers/locks/te2.12.0.txt"
    assert (stacks["te2.20.2"].lock, stacks["te2.20.2"].image) == ("", image)
    locks = matrix.parent / "containers" / "locks"
    locks.mkdir(parents=True)
    assert faults_of(matrix) == ("stacks.toml: stack te2.12.0: there is no lock containers/locks/te2.12.0.txt",)
    (locks / "te2.12.0.txt").touch()
    assert read_catalog(matrix)
