"""Shared by every room's tests: the real release sources."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.canary.sources import Sources, SourceUnavailable
from megacpp_validate.canary.surface import Surface
from megacpp_validate.canary.sweep import read_surface
from megacpp_validate.catalog import Catalog, read_catalog


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return read_catalog()


@pytest.fixture(scope="session")
def surface(catalog: Catalog) -> Surface:
    return read_surface(catalog)


@pytest.fixture(scope="session")
def sources() -> Sources:
    """Real releases from the index, kept in the user's cache between runs."""
    return Sources()


@pytest.fixture(scope="session")
def wheel_of(sources: Sources) -> Callable[[str], Path]:
    """The real wheel of a release; a test that cannot have it is not run."""

    def fetch(version: str) -> Path:
        try:
            return sources.wheel(version)
        except SourceUnavailable as fault:
            pytest.skip(f"not-run: {fault}")

    return fetch


@pytest.fixture
def unpacked(wheel_of: Callable[[str], Path], tmp_path: Path) -> Callable[[str, str], Path]:
    """A copy of a release's sources that a test may change; nothing that a torch bridge cannot reach."""

    def unpack(version: str, name: str) -> Path:
        folder = tmp_path / name
        with zipfile.ZipFile(wheel_of(version)) as archive:
            kept = [n for n in archive.namelist() if n.startswith("transformer_engine/") and "/jax/" not in n]
            archive.extractall(folder, kept)
        return folder

    return unpack


@pytest.fixture
def copy_of() -> Callable[[Path, Path], Path]:
    """A copy of a folder."""

    def copy(source: Path, target: Path) -> Path:
        shutil.copytree(source, target)
        return target

    return copy
