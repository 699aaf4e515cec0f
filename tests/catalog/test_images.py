"""The rows of images: what is shipped reads clean, and a wrong file is told as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog, matrix_folder
from megacpp_validate.catalog.images import FILE, Images, read_images
from tests.catalog.refusals import copy_matrix, edit, faults_of


@pytest.fixture(scope="module")
def targets(catalog: Catalog) -> dict[str, str]:
    return {target.id: target.machine for target in catalog.targets}


def test_the_rows_that_are_shipped(targets: dict[str, str]) -> None:
    images = read_images(targets)
    assert {image.target for image in images.image} == set(targets)
    assert all(claim.digest.startswith("sha256:") for claim in images.claim)
    for image in images.image:
        assert set(image.sources) <= {source.id for source in images.source}
        assert (matrix_folder().parent / image.lock).is_file()
    h200 = images.image[0]
    assert h200.te == h200.pinned["transformer-engine-torch"] == "2.20.2"
    assert images.find_base(h200.base).provided["nccl"] == "2.30.7"


def test_every_image_names_why_it_goes_over_its_base(targets: dict[str, str]) -> None:
    images: Images = read_images(targets)
    gpu = [image for image in images.image if image.te]
    assert len({(tuple(image.over), tuple(image.removes)) for image in gpu}) == 1  # one base, one answer
    over = {row.name: row.why for row in gpu[0].over}
    removed = {row.name: row.why for row in gpu[0].removes}
    assert "4.6.2" in removed["nvidia-cutlass-dsl"]
    assert "hides" in removed["flash-attn"]
    assert not set(over) & set(removed)
    assert not {"torch", "triton", "numpy"} & (set(over) | set(removed))
    assert not images.image[-1].over + images.image[-1].removes  # a base without a stack has nothing to go over


FAULTS = [
    ('target = "h200"', 'target = "x100"', "target names 'x100', which does not exist"),
    ('target = "b200"', 'target = "h200"', "image 'h200' appears 2 times"),
    ('platform = "linux/arm64"\ncache', 'platform = "linux/amd64"\ncache', "is not the aarch64 of targets.toml"),
    ('base = "ngc-26.07"\nplatform = "linux/amd64"', 'base = "x"\nplatform = "linux/amd64"', "base names 'x'"),
    ('sources = ["deep-gemm"]', 'sources = ["deepgemm"]', "sources names 'deepgemm', which does not exist"),
    ('lock = "containers/locks/b200.txt"', 'lock = "/etc/passwd"', "image.1.lock"),
    ('["triton", "3.7.1+gitf797708c.nv26.7"]', '["triton", "three"]', "Invalid version: 'three'"),
    ('"nox>=2025.5"', '"nox>>2025.5"', "nox>>2025.5"),
    ('needs = ">=2.30.4"', 'needs = "2.30.4 or so"', "'2.30.4 or so'"),
    ('with = "cuda>=13"', 'with = "cuda 13"', "cuda 13"),
    ('commit = "891d57b4', 'commit = "main', "source.1.commit"),
    ('base = "debian-bookworm"\nplatform = ""', 'base = "debian"\nplatform = ""', "base names 'debian'"),
    ('targets = ["b200"]', 'targets = ["b300"]', "targets names 'b300', which does not exist"),
    ('"deep_gemm", "project"', '"project"', "'deep-gemm' is in one of"),
    ('sources = ["deep-gemm"]', "sources = []", "image b200: 'deep-gemm' is in one of"),
    ('cache_arch = "sm_100a"', 'cache_arch = "sm_90a"', "cache_arch 'sm_90a' is not the 'sm_100a' of its target"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "says"), FAULTS, ids=[says for *_, says in FAULTS])
def test_a_wrong_file(tmp_path: Path, targets: dict[str, str], catalog: Catalog, old: str, new: str, says: str) -> None:
    edit(copy_matrix(tmp_path, FILE) / FILE, (old, new))
    assert any(says in fault for fault in faults_of(lambda: read_images(targets, tmp_path, catalog.targets)))
