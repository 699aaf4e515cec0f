"""What the short form of the suite leaves out is there: a test under another name would run again unnoticed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def read_second_looks() -> list[str]:
    for node in ast.parse((TESTS / "conftest.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "THOROUGH":
            return list(ast.literal_eval(node.value))
    return []


def is_there(look: str) -> bool:
    file, _, name = look.partition("::")
    place = TESTS.parent / file
    return place.exists() and (not name or f"def {name.partition('[')[0]}" in place.read_text())


@pytest.mark.parametrize("look", read_second_looks())
def test_it_is_there(look: str) -> None:
    assert is_there(look)


@pytest.mark.parametrize("look", ["tests/test_gone.py", "tests/test_second_looks.py::test_it_was_renamed"])
def test_one_that_is_gone_is_seen(look: str) -> None:
    assert read_second_looks()
    assert not is_there(look)
