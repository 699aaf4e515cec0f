"""The rows of images: a wrong file is told as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.catalog.images import FILE, NEEDS, read_images, read_needs
from tests.catalog.refusals import at, copy_matrix, edit, faults_of


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (FILE, 'lock = "containers/locks/b200.txt"', 'lock = "/etc/passwd"', "image.1.lock"),
        (FILE, '["triton", "3.7.1+gitf797708c.nv26.7"]', '["triton", "three"]', "Invalid version: 'three'"),
        (FILE, 'commit = "891d57b4', 'commit = "main', "source.1.commit"),
    ],
)
def test_a_wrong_row(file: str, old: str, new: str, says: str, tmp_path: Path) -> None:
    edit(copy_matrix(tmp_path, FILE, NEEDS) / file, (old, new))
    faults = faults_of(lambda: (read_images if file == FILE else read_needs)(at(tmp_path)))
    assert any(fault.startswith(f"{file}: ") and says in fault for fault in faults)
