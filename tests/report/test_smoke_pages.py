"""What the README shows of the smoke run is what its receipts say."""

from __future__ import annotations

import pytest

from tests.report.smoke_pages import EXAMPLES, WIDTH, make_pages


def test_the_pages_are_those_of_the_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", WIDTH)
    for name, page in make_pages().items():
        assert (EXAMPLES / name).read_text(encoding="utf-8") == page, f"{name}: python tests/report/smoke_pages.py"
