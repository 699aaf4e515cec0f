"""Shared by the tests of probes."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def what_is_old_rests() -> Iterator[None]:
    """The collector looks at what the tests of a file make, and not at half a million objects of the whole suite.

    A stopwatch collects before every run: that was a second, and a run by a hand-wound clock is none.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def nothing_stays_open() -> Iterator[None]:
    """Some faults leave a scope open."""
    from megacpp_validate.bridge import open_scopes

    yield
    open_scopes._threads.stack.clear()
    open_scopes._claims.clear()
