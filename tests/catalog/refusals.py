"""Copies of the matrix that a test may damage, and the faults that a reader names then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog, read_catalog
from megacpp_validate.catalog.file import MatrixInvalid, matrix_folder


def copy_matrix(folder: Path, *files: str) -> Path:
    """The folder with these files of the matrix, or with all of them."""
    if not files:
        shutil.copytree(matrix_folder(), folder, dirs_exist_ok=True)
    for name in files:
        shutil.copy(matrix_folder() / name, folder / name)
    return folder


def at(folder: Path) -> Catalog:
    """The project's own matrix, of which the other files are read from a folder."""
    return read_catalog().model_copy(update={"folder": folder})


def edit(file: Path, *edits: tuple[str, str]) -> None:
    text = file.read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    file.write_text(text)


def faults_of(read: Callable[[], object]) -> tuple[str, ...]:
    """The faults with which a read is refused, each of them also in its message."""
    with pytest.raises(MatrixInvalid) as refused:
        read()
    assert refused.value.exit == 2
    assert "Next step" in str(refused.value)
    assert all(fault in str(refused.value) for fault in refused.value.faults)
    return refused.value.faults
