"""The rows of what releases need: they are read, and a wrong one is refused with all of its faults."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.catalog.needs import read_needs
from tests.catalog.refusals import copy_matrix, edit, faults_of

CUTE = {f"flash-attn-4-cute-{name}" for name in ("guarded", "b20", "b16", "b3")}


def modules(catalog: Catalog) -> list[str]:
    return [module.id for module in catalog.modules]


@pytest.mark.parametrize(
    ("te", "needs"),
    [
        ("2.12.0", {"one-cuda-runtime", "cudnn-least-documented", "torch-least"}),
        ("2.14.1", {"cublas-grouped-layout", "one-cuda-runtime", "cudnn-least-documented", "torch-least"}),
        ("2.14.0+f031cf8", {"cublas-grouped-layout", "one-cuda-runtime", "cudnn-least-documented", "torch-least"}),
        (
            "2.17.1",
            {
                "cublas-grouped-gemm", "one-cuda-runtime-warned", "cudnn-reshape-mode", "cudnn-least-documented",
                "flash-attn-4-cute", "torch-least", *CUTE,
            },
        ),
        (
            "2.20.2",
            {
                "cublas-grouped-gemm", "one-cuda-runtime-warned", "cudnn-least", "cudnn-frontend",
                "flash-attn-4-cute-b24", "torch-least", *CUTE,
            },
        ),
    ],
)  # fmt: skip
def test_each_release_has_its_needs(te: str, needs: set[str], catalog: Catalog) -> None:
    found = read_needs(modules(catalog))
    assert {need.id for need in found.need if need.holds_for(Version(te))} == needs
    assert all(need.source for need in found.need)


FAULTS = [
    ('te = ">=2.13.0,<2.17.0"', 'te = "newer"', "'newer'"),
    ('of = "libcudnn"', 'of = "libcudn"', "of names 'libcudn', which does not exist"),
    ('breaks = ["expert_gemm"]', 'breaks = ["expert_gem"]', "'expert_gem'"),
    ('kind = "library"', 'kind = "wish"', "kind"),
    ('id = "cudnn-least"', 'id = "cudnn-frontend"', "appears 2 times"),
    ('with = "flash-attn-4"', 'with = "flash-attn-4 of old"', "flash-attn-4 of old"),
    ('cuda = ">=13"', 'cuda = "13 or so"', "'13 or so'"),
    ('torch = ">=2.13,<2.14"', 'torch = "2.13 or so"', "'2.13 or so'"),
]


@pytest.mark.parametrize(("old", "new", "says"), FAULTS)
def test_a_wrong_row_is_refused(old: str, new: str, says: str, catalog: Catalog, tmp_path: Path) -> None:
    edit(copy_matrix(tmp_path, "needs.toml") / "needs.toml", (old, new))
    assert any(says in fault for fault in faults_of(lambda: read_needs(modules(catalog), tmp_path)))
