"""What a session of the smoke run observed: a receipt a cell, with the training runs in it."""

from __future__ import annotations

from typing import Literal

from ..evidence.receipt import Receipt
from ..evidence.training import TrainingRecord
from .session_result import SessionResult


class SmokeSession(SessionResult):
    """One session."""

    schema_id: Literal["megacpp-validate/moe-smoke/1"] = "megacpp-validate/moe-smoke/1"


def main_record(receipt: Receipt) -> TrainingRecord | None:
    """The run that a cell is about, which it trains first; None where none ended well."""
    return next((record for record in receipt.training if record.name == "plan"), None)
