"""What the environment is told: one JSON object on standard input."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from ..evidence.selftest import Fault, Mutant, SelftestOrder


def read_selftest_order(text: str) -> SelftestOrder:
    """An order from its JSON text.

    Raises:
        ValueError: it is no JSON, lacks a key, or has one that is not known.
    """
    try:
        data: dict[str, Any] = json.loads(text)
        _refuse_unknown(data, SelftestOrder)
        rows = data.pop("mutants")
        for row in rows:
            _refuse_unknown(row, Mutant)
        mutants = tuple(Mutant(**{**row, "fault": Fault(row["fault"])}) for row in rows)
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        return SelftestOrder(mutants=mutants, **values)
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as fault:
        raise ValueError(
            f"the order of a selftest cannot be read: {type(fault).__name__}: {fault}. Likely cause: host and "
            "environment have different versions of megacpp-validate. Next step: use one version on both sides."
        ) from fault


def _refuse_unknown(row: dict[str, Any], kind: Any) -> None:
    unknown = set(row) - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
