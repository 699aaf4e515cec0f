"""Compiles nothing: the answer says what is installed here."""

from __future__ import annotations

from .order import JitOrder


def compile_task(order: JitOrder) -> None:
    """Nothing."""
