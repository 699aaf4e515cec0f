"""Copies with a fault: whole or not there, apart from the clean folder, and found by what is imported from them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megacpp_validate.catalog.planted import Edit, EditDoesNotFit, TeFault
from megacpp_validate.environments.faulty_overlay import STAMP, make_faulty
from megacpp_validate.evidence.values import Cause

RELEASE = "2.20.2"
EDIT = Edit(file="pytorch/layer.py", old="FACTOR = 1\n", new="FACTOR = 2\n")


def new_fault(*edits: Edit, name: str = "fault") -> TeFault:
    return TeFault(
        id=name, module="attention", cause=Cause.NUMERICS, releases=[RELEASE], says="wrong", edit=list(edits)
    )


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site folder as a release has it: sources, compiled sources beside them, a large library, metadata."""
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    site = tmp_path / "site"
    package = site / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from transformer_engine.pytorch.layer import FACTOR\n")
    (package / "layer.py").write_text("FACTOR = 1\n")
    (package / "other.py").write_text("OTHER = 1\n")
    (package.parent / "libtransformer_engine.so").write_bytes(b"\0" * (2**20 + 1))
    (site / "transformer_engine-2.20.2.dist-info").mkdir()
    (site / "transformer_engine-2.20.2.dist-info" / "METADATA").write_text("Name: transformer_engine\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(site)], check=True)
    return site


def snapshot(site: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(file.relative_to(site)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(site.rglob("*"))
        if file.is_file()
    }


def factor_of(site: Path) -> str:
    words = "import transformer_engine.pytorch as te; print(te.FACTOR, te.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", words], env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_copy_has_the_fault_and_the_clean_folder_has_not(clean: Path, tmp_path: Path) -> None:
    before = snapshot(clean)
    place = make_faulty(clean, RELEASE, new_fault(EDIT), tmp_path / "copies")
    assert factor_of(place) == f"2 {place}/transformer_engine/pytorch/__init__.py"
    assert factor_of(clean).startswith("1 ")
    assert snapshot(clean) == before
    assert not list(place.parent.glob(".*")), "nothing half made is left"


def test_what_is_not_edited_is_the_same_file(clean: Path, tmp_path: Path) -> None:
    place = make_faulty(clean, RELEASE, new_fault(EDIT), tmp_path / "copies")
    for name in ("transformer_engine/libtransformer_engine.so", "transformer_engine/pytorch/other.py"):
        assert (place / name).samefile(clean / name)
        assert not (place / name).is_symlink()
    compiled = {file.name.partition(".")[0] for file in (place / "transformer_engine/pytorch/__pycache__").iterdir()}
    assert compiled == {"__init__", "other"}, "the compiled file of the edited source is gone, the others are kept"


def test_on_another_disk_files_are_copied(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    place = make_faulty(clean, RELEASE, new_fault(EDIT), tmp_path / "copies")
    assert factor_of(place).startswith("2 ")
    other = "transformer_engine/pytorch/other.py"
    assert not (place / other).samefile(clean / other)
    assert (place / other).stat().st_mtime_ns == (clean / other).stat().st_mtime_ns


def test_files_are_deleted_renamed_and_added_to(clean: Path, tmp_path: Path) -> None:
    edits = (
        Edit(file="pytorch/other.py", rename="pytorch/moved.py"),
        Edit(file="pytorch/moved.py", append="MORE = 1\n"),
        Edit(file="pytorch/layer.py", delete=True),
    )
    package = make_faulty(clean, RELEASE, new_fault(*edits), tmp_path / "copies") / "transformer_engine/pytorch"
    assert (package / "moved.py").read_text() == "OTHER = 1\nMORE = 1\n"
    assert not (package / "other.py").exists()
    assert not (package / "layer.py").exists()


FITS_NOT = {
    "text": [Edit(file="pytorch/layer.py", old="FACTOR = 3\n", new="FACTOR = 2\n")],
    "file": [Edit(file="pytorch/gone.py", old="x", new="y")],
    "after its removal": [Edit(file="pytorch/layer.py", delete=True), EDIT],
}


@pytest.mark.parametrize("name", FITS_NOT)
def test_what_does_not_fit_leaves_nothing(name: str, clean: Path, tmp_path: Path) -> None:
    with pytest.raises(EditDoesNotFit, match="Next step"):
        make_faulty(clean, RELEASE, new_fault(*FITS_NOT[name]), tmp_path / "copies")
    assert not (tmp_path / "copies").exists()


def test_a_whole_copy_is_taken_again_and_a_stale_one_is_not(clean: Path, tmp_path: Path) -> None:
    copies = tmp_path / "copies"
    first = make_faulty(clean, RELEASE, new_fault(EDIT), copies)
    made = (first / STAMP).stat().st_ino
    assert make_faulty(clean, RELEASE, new_fault(EDIT), copies) == first
    assert (first / STAMP).stat().st_ino == made
    another = Edit(file="pytorch/layer.py", old="FACTOR = 1\n", new="FACTOR = 3\n")
    assert factor_of(make_faulty(clean, RELEASE, new_fault(another), copies)).startswith("3 ")
    changed = clean / "transformer_engine/pytorch/other.py"
    changed.unlink()
    changed.write_text("OTHER = 22\n")
    place = make_faulty(clean, RELEASE, new_fault(another), copies)
    assert (place / "transformer_engine/pytorch/other.py").read_text() == "OTHER = 22\n"
