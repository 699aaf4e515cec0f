"""A check that vanishes, changes its bound or its outcome is a difference; one that `renamed.json` names is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from . import compare


def row(*checks: str, outcome: str = "pass", bound: str = "error <= 0.1: derived") -> dict[str, Any]:
    return {"outcome": outcome, "checks": {name: [True, bound] for name in checks}, "backends": [], "losses": {}}


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "same": (row("a", "b"), []),
    "vanished": (row("a"), ["cell: b: vanished"]),
    "new": (row("a", "b", "c"), ["cell: c: new"]),
    "bound": (row("a", "b", bound="error <= 0.2: derived"), ["error <= 0.1: derived -> error <= 0.2: derived"]),
    "outcome": (row("a", "b", outcome="fail"), ["cell: pass -> fail"]),
}


@pytest.mark.parametrize(("after", "said"), CASES.values(), ids=CASES)
def test_what_differs(after: dict[str, Any], said: list[str]) -> None:
    found = "\n".join(compare.differences({"cell": row("a", "b")}, {"cell": after}))
    assert all(words in found for words in said)
    assert bool(found) is bool(said)


def test_a_cell_that_is_gone() -> None:
    assert list(compare.differences({"cell": row("a")}, {})) == ["cell: vanished"]
    assert list(compare.differences({"cell": row("a")}, {}, partly=True)) == []


def test_a_renamed_check_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "read_renamed", lambda: {"*": [{"old": "a", "new": "b", "why": "plainer"}]})
    assert list(compare.differences({"cell": row("a")}, {"cell": row("b")})) == []
    assert list(compare.differences({"cell": row("a")}, {"cell": row("a")})) != []


def test_the_checks_that_the_gate_requires_are_those_of_the_recorded_cells() -> None:
    """Written by `python -m tests.frozen checks`."""
    required = compare.required_evidence()
    assert json.loads(compare.CHECKS.read_text(encoding="utf-8")) == required
    assert {"imports", "attention", "fp8_delayed", "moe_smoke"} <= required["h200"].keys()
    assert min(len(row["checks"]) for row in required["h200"].values()) >= 3
