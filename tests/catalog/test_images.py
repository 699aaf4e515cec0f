"""The rows of images: what is shipped reads clean, and a wrong file is told as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from megacpp_validate.catalog.images import FILE, MACHINES, NEEDS, read_images, read_needs
from tests.catalog.refusals import at, copy_matrix, edit, faults_of


def test_the_rows_that_are_shipped(catalog: Catalog) -> None:
    targets = {target.id: target for target in catalog.targets}
    images = read_images(catalog)
    assert {image.target for image in images.image} == set(targets)
    for image in images.image:
        assert set(image.sources) <= {source.id for source in images.source}
        assert (matrix_folder().parent / image.lock).is_file()
        target = targets[image.target]
        assert target.machine in ("", MACHINES[image.platform])
        assert image.cache_arch == (f"{target.arch}a" if target.arch else "cpu")
        assert all(source.replace("-", "_") in image.steps for source in image.sources)
    h200 = images.image[0]
    assert h200.te == h200.pinned["transformer-engine-torch"] == "2.20.2"
    assert images.find_base(h200.base).provided["nccl"] == "2.30.7"


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
