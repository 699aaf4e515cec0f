"""Goes with the last test that reads what the first edition printed."""

from __future__ import annotations

from tests.report.page import Page

__all__ = ["Page", "flat"]


def flat(text: str) -> str:
    """Text without what formats add or take: line ends, runs of spaces, backticks."""
    return " ".join(text.replace("`", "").split())
