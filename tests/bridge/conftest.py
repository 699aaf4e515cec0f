"""Shared by the tests of the bridge: the low-precision scope on both of its paths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def on_te(te_double: None) -> Iterator[None]:
    """The double of Transformer Engine."""
    from tests.bridge.scope_paths import on_path

    with on_path("te"):
        yield


@pytest.fixture(params=["native", "te"])
def either(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both paths: what a program may do does not depend on which one it is on."""
    from tests.bridge.scope_paths import on_path

    if request.param == "te":
        request.getfixturevalue("te_double")
    with on_path(request.param) as path:
        yield path
