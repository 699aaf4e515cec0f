"""Shared by the tests of probes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_stays_open() -> Iterator[None]:
    """Some faults leave a scope open."""
    from megacpp_validate.bridge import open_scopes

    yield
    open_scopes._around.set(())
    open_scopes._claims.clear()
