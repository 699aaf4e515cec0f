"""Orders and runs of the suite's own score as text: what host and environment exchange."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Final

from pydantic import TypeAdapter, ValidationError

from .selftest import SelftestOrder, SelftestRun

_RUN: Final = TypeAdapter(SelftestRun)


class RunInvalid(ValueError):
    """A line that is no run; the text says which and why."""


def order_text(order: SelftestOrder) -> str:
    """An order as the environment reads it."""
    return json.dumps(asdict(order))


def read_runs(text: str) -> tuple[SelftestRun, ...]:
    """Every run, one a line.

    Raises:
        RunInvalid: a line that is none.
    """
    runs = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            runs.append(_RUN.validate_json(line, strict=True))
        except ValidationError as fault:
            said = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the line'}: {e['msg']}" for e in fault.errors())
            raise RunInvalid(
                f"line {number} is no run of the selftest: {said}. Likely cause: it was cut short, or written by "
                "another version. Next step: run the selftest again."
            ) from fault
    return tuple(runs)
