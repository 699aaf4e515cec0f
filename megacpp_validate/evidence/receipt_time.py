"""The time that a receipt says, read in one way by all that order receipts."""

from __future__ import annotations

from datetime import UTC, datetime


def read_time(text: str) -> datetime | None:
    """A time in UTC, of ISO 8601 with its zone; None where it is none: one without a zone can be off by a day."""
    try:
        found = datetime.fromisoformat(text)
        return None if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
