"""The rows of matrix/te_faults.toml: read strictly, and fitting the real sources of the releases they are for."""

from __future__ import annotations

import ast
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog, MatrixInvalid
from megacpp_validate.catalog.te_faults import FILE, Edit, EditDoesNotFit, TeFault, read_te_faults
from megacpp_validate.evidence.values import Cause

ROW = """
[[fault]]
id = "one"
module = "attention"
cause = "numerics"
releases = ["2.20.2"]
says = "It is wrong."
[[fault.edit]]
file = "pytorch/a.py"
old = "x"
new = "y"
"""
WRONG = {
    "unknown key": (ROW + 'colour = "red"\n', "Extra inputs"),
    "unknown module": (ROW.replace('"attention"', '"atention"'), "names 'atention', which is no bridge module"),
    "unknown cause": (ROW.replace('"numerics"', '"luck"'), "cause"),
    "no release": (ROW.replace('["2.20.2"]', "[]"), "releases"),
    "twice": (ROW + ROW, "is there more than once"),
    "two deeds": (ROW + "delete = true\n", "an edit does one thing"),
    "no deed": (ROW.replace('old = "x"\nnew = "y"\n', ""), "an edit does one thing"),
    "nothing changed": (ROW.replace('"y"', '"x"'), "old and new are the same"),
    "new alone": (ROW.replace('old = "x"\n', 'append = "z"\n'), "new without old"),
    "outside of the copy": (ROW.replace("pytorch/a.py", "../../evil.py"), "file"),
    "an absolute path": (ROW.replace("pytorch/a.py", "/etc/a.py"), "file"),
    "moved outside": (ROW.replace('old = "x"\nnew = "y"\n', 'rename = "../a.py"\n'), "rename"),
    "a release of its own": (ROW + 'releases = ["2.19.0"]\n', "is for 2.19.0, and the fault is not"),
    "a release without an edit": (
        ROW.replace('["2.20.2"]', '["2.20.2", "2.12.0"]') + 'releases = ["2.20.2"]\n',
        "has no edit for 2.12.0",
    ),
    "no text": ("[[fault]", "cannot be read"),
}


@pytest.fixture(scope="module")
def faults(catalog: Catalog) -> tuple[TeFault, ...]:
    return read_te_faults(module.id for module in catalog.modules)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_refused_and_named(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    (tmp_path / FILE).write_text(text)
    with pytest.raises(MatrixInvalid) as refused:
        read_te_faults(["attention"], tmp_path)
    assert said in str(refused.value)
    assert "Next step" in str(refused.value)


def test_a_right_row_is_read(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(ROW)
    (row,) = read_te_faults(["attention"], tmp_path)
    assert row.names == {"attention"}
    assert row.causes == {Cause.NUMERICS}
    assert row.edits_for("2.20.2") == tuple(row.edit)


def test_an_edit_wants_its_text_once() -> None:
    edit = Edit(file="a.py", old="x = 1\n", new="x = 2\n")
    assert edit.change("x = 1\ny\n") == "x = 2\ny\n"
    for text in ("", "x = 1\nx = 1\n"):
        with pytest.raises(EditDoesNotFit, match="Next step"):
            edit.change(text)


def test_every_module_has_five_faults_and_every_class_is_there(faults: tuple[TeFault, ...], catalog: Catalog) -> None:
    count = Counter(fault.module for fault in faults if "2.20.2" in fault.releases)
    assert set(count) == {module.id for module in catalog.modules}
    assert min(count.values()) >= 5
    # What lies between modules is nobody's: it is planted in the smoke run (matrix/smoke_faults.toml).
    assert {fault.cause for fault in faults} == set(Cause) - {Cause.BOUNDARY}
    timed = {fault.id for fault in faults if fault.times}
    # Two of this class are seen without a clock: one never ends, and one keeps memory.
    untimed = {"held-expert-backward-hangs", "held-expert-activations-kept"}
    assert timed == {fault.id for fault in faults if fault.cause is Cause.PERFORMANCE} - untimed


@pytest.mark.parametrize("release", ["2.20.2", "2.12.0"])
def test_every_edit_fits_the_real_sources_and_compiles(
    release: str, faults: tuple[TeFault, ...], wheel_of: Callable[[str], Path]
) -> None:
    with zipfile.ZipFile(wheel_of(release)) as wheel:
        names = set(wheel.namelist())

        def read(file: str) -> str:
            return wheel.read(f"transformer_engine/{file}").decode()

        planted = [fault for fault in faults if release in fault.releases]
        assert planted
        for fault in planted:
            changed: dict[str, str] = {}
            for edit in fault.edits_for(release):
                assert f"transformer_engine/{edit.file}" in names, fault.id
                before = changed.get(edit.file) or read(edit.file)
                if edit.delete or edit.rename:
                    assert f"transformer_engine/{edit.rename}" not in names, fault.id
                    continue
                changed[edit.file] = edit.change(before)
                assert _code(edit.old) != _code(edit.new + edit.append), f"{fault.id}: only comments differ"
            for file, text in changed.items():
                ast.parse(text, file)


def _code(text: str) -> list[str]:
    """Lines without what is only a comment."""
    return [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
