"""Shared by every room's tests: the real release sources."""

from __future__ import annotations

import gc
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from megacpp_validate.canary.static.project import Source
from megacpp_validate.canary.static.release import Release
from megacpp_validate.canary.static.sources import Sources, SourceUnavailable
from megacpp_validate.canary.static.sweep import read_bridge
from megacpp_validate.catalog.bridge import Catalog, read_catalog
from tests.kept_commands import keep_commands
from tests.kept_double import keep_double, put_double

# Two workers on two cores, each with a thread a core, wait for each other: a probe then takes up to 20 times as long.
# Set before torch is imported, and inherited by every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples at every run: what is red is red again. HYPOTHESIS_PROFILE=default looks for new ones.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

keep_commands()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="take the second looks too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough") or "::" in " ".join(config.args):
        return
    later = [item for item in items if item.get_closest_marker("thorough")]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return read_catalog()


@pytest.fixture(scope="session")
def bridge_source(catalog: Catalog) -> Source:
    return read_bridge(catalog)


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


@pytest.fixture(scope="module")
def release_of(sources: Sources) -> Callable[[str], Release]:
    """A real release, with what comparisons have worked out about it; the last ones are kept for a module.

    A release is a million objects: kept for longer, they slow each garbage collection of every later test.
    """

    @lru_cache(maxsize=3)
    def read(version: str) -> Release:
        try:
            return sources.release(version)
        except SourceUnavailable as fault:
            pytest.skip(f"not-run: {fault}")

    return read


@pytest.fixture(scope="session")
def unpack(wheel_of: Callable[[str], Path]) -> Callable[[str, Path], Path]:
    """A copy of a release's sources that a test may change; nothing that a torch bridge cannot reach."""

    def extract(version: str, folder: Path) -> Path:
        with zipfile.ZipFile(wheel_of(version)) as archive:
            kept = [n for n in archive.namelist() if n.startswith("transformer_engine/") and "/jax/" not in n]
            archive.extractall(folder, kept)
        return folder

    return extract


@pytest.fixture(scope="module")
def what_is_old_rests() -> Iterator[None]:
    """The collector looks at what the tests of a file make, and not at half a million objects of the whole suite.

    A stopwatch collects before every run: that was a second, and a run by a hand-wound clock is none.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def te_double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Transformer Engine is the double in `tests/te_double`, and wrappers take it for CPU tensors, with recipes.

    What the bridge has decided, cached and recorded is set aside for the test, and put back after it.
    """
    from megacpp_validate.bridge import backends, features, recipes
    from megacpp_validate.bridge import imports as te
    from megacpp_validate.selftest.plant import FOLDER, entries, use_te_double

    def set_aside() -> dict[str, ModuleType]:
        for name, module in list(sys.modules.items()):
            if name.startswith("megacpp_validate.bridge."):  # what wrappers keep of the vendor's objects
                for clear in [getattr(value, "cache_clear", None) for value in vars(module).values()]:
                    if clear is not None:
                        clear()
        names = [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]
        return {name: sys.modules.pop(name) for name in names}

    real = set_aside()
    with monkeypatch.context() as patch:
        for variable in ("MEGACPP_DISABLE_TE", "MEGACPP_TE_TRIAL_SECONDS"):
            patch.delenv(variable, raising=False)
        patch.setattr(te.TE, "_verdict", None)
        patch.setattr(te.TE, "_presets", {})
        for entry in entries().values():
            patch.setattr(entry, "_found", None)
        patch.setattr(features, "TE_DEVICES", features.TE_DEVICES)
        patch.setitem(recipes.TARGETS, "cpu", recipes.TARGETS["cpu"])
        patch.setattr(backends, "_record", type(backends._record)())
        patch.setattr(sys, "path", [*sys.path])
        put_double()
        use_te_double()
        assert te.is_te_available(), te.why_te_is_unavailable()
        assert str(sys.modules["transformer_engine"].__file__).startswith(str(FOLDER))
        keep_double()
        yield
        monkeypatch.undo()  # what the test patched of the double is not put back after it
    set_aside()
    sys.modules.update(real)
