"""The bundle that is measured is one that is restored: what a restore asks of bundles grows, and the sample with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import bundle


def test_the_sample_is_restored_and_every_competitor_has_its_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "LARGE_BYTES", bundle.MB)
    monkeypatch.setattr(bundle, "SMALL", 3)
    monkeypatch.setattr(bundle.os, "sync", lambda: None)  # of a whole machine; no time is looked at here
    caches, made = tmp_path / "caches", tmp_path / "bundle"
    for folder in (caches, made):
        folder.mkdir()
    bundle.write_sample(caches, made)
    found = bundle.measure(caches, made, 1)
    assert {state: [len(values) for values in runs.values()] for state, runs in found.items()} == {
        "cold": [1] * 4, "warm": [1] * 4,
    }  # fmt: skip
