"""Shared by the tests of probes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_stays_open() -> Iterator[None]:
    """Some faults leave a scope open."""
    from megacpp_validate.bridge import fp8_scope

    yield
    fp8_scope._around.set(())
    fp8_scope._claims.clear()
