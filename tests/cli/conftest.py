"""Verbs called in this process, on a host without a GPU or with an H200."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.canary.static.sources import CACHE_VARIABLE
from tests.canary.static.small_index import BRIDGED, use_index, write_index
from tests.command_line import Run, make_run_in, use_bare_host
from tests.environments.places import make_h200_host


@pytest.fixture
def session(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Run]:
    """A verb, called on a host without a GPU, in a folder of the test's own."""
    use_bare_host(monkeypatch)
    return lambda verb: make_run_in(tmp_path, verb, capfd, monkeypatch)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Gives the host an H200 and TE 2.17.1 whose probes do what a test says; the folder of its interpreter."""

    def make(main: str) -> Path:
        host = make_h200_host(tmp_path, main)
        monkeypatch.setenv("MEGACPP_PYTHON", str(host / "python3"))
        monkeypatch.setenv("PATH", f"{host}:/usr/bin:/bin")
        return host

    return make


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """An index of six releases, and a cache that all tests share."""
    folder = tmp_path_factory.mktemp("shop")
    return write_index(folder / "index", BRIDGED), str(folder / "cache")


@pytest.fixture
def index(shop: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """That index; what one test has fetched from it, the next one need not."""
    use_index(monkeypatch, shop[0])
    monkeypatch.setenv(CACHE_VARIABLE, shop[1])
