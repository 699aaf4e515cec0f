"""Shared by the tests of the bridge: both backends, both paths of the low-precision scope, and a world of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(params=["native", "te"])
def backend(request: pytest.FixtureRequest) -> str:
    """What a wrapper takes: plain torch, or the double of Transformer Engine."""
    if request.param == "te":
        request.getfixturevalue("te_double")
    return str(request.param)


@pytest.fixture
def on_te(te_double: None) -> Iterator[None]:
    """The double of Transformer Engine, on a target with recipes."""
    from tests.bridge.scope_paths import on_path

    with on_path("te"):
        yield


@pytest.fixture
def either(backend: str) -> Iterator[str]:
    """Both paths of the scope: what a program may do does not depend on which one it is on."""
    from tests.bridge.scope_paths import on_path

    with on_path(backend) as path:
        yield path


@pytest.fixture
def world() -> Iterator[Any]:
    """The group of four ranks of torch's fake backend, which sends nothing; this is rank 0."""
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()
