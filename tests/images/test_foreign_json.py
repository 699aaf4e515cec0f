"""What others wrote as JSON: nested deeper than Python reads, it is refused in the reader's own way."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.evidence.json_text import read_json
from megacpp_validate.images.manifests import NoJson, read_object
from megacpp_validate.images.refusals import ImageRefused
from megacpp_validate.images.registry_login import find_login
from megacpp_validate.images.sbom import read_sbom

DEEP = "[" * 100_000


def test_it_is_no_value() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(DEEP)


def test_it_is_no_manifest_and_no_sbom() -> None:
    with pytest.raises(NoJson):
        read_object(DEEP.encode())
    with pytest.raises(ImageRefused, match="nested too deep"):
        read_sbom(DEEP.encode())


def test_it_is_no_login(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(DEEP)
    assert find_login("registry.example", {"DOCKER_CONFIG": str(tmp_path)}) == ""
