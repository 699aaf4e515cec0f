"""The bundle that is measured is one that is restored: what a restore asks of bundles grows, and the sample with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bundle


def test_the_sample_is_restored_and_every_competitor_has_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "SIZES", {"image.tar": 3 * bundle.MB, "jit.tar": bundle.MB})
    monkeypatch.setattr(bundle, "SMALL", 3)
    monkeypatch.setattr(bundle.os, "sync", lambda: None)  # of a whole machine; no time is looked at here
    (tmp_path / "bundle").mkdir()
    bundle.write_sample(tmp_path / "bundle")
    found = bundle.measure(tmp_path / "bundle", 1)
    assert {state: [len(values) for values in runs.values()] for state, runs in found.items()} == {
        "cold": [1, 1, 1], "warm": [1, 1, 1],
    }  # fmt: skip
