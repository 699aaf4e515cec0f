"""The double of Transformer Engine has every entry point and no keyword of its own; cells of `imports` hold its FP8."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.selftest.plant import entries  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


def test_every_accessor_finds_its_entry_point() -> None:
    assert {name: entry.why_missing() for name, entry in entries().items() if entry() is None} == {}
