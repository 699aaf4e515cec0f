"""What a JSON text may hide, and a text that no reader can read: refused by every reader in the way of its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.evidence.loss_curves import CurveInvalid, read_curve
from megacpp_validate.evidence.store import ReceiptInvalid, read_receipt
from megacpp_validate.evidence.strict_json import read_strict_json

# Deeper than pydantic reads, and than Python does in each of its versions.
DEEP = {
    "a list of lists": "[" * 100_000,
    "whole": '{"a":' * 5_000 + "0" + "}" * 5_000,
    "an unknown key": '{"schema_id": "x", "more": ' + "[" * 500 + "]" * 500 + "}",
}
READERS: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    "curve": (read_curve, CurveInvalid),
    "receipt": (read_receipt, ReceiptInvalid),
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
@pytest.mark.parametrize(("read", "refused"), READERS.values(), ids=READERS)
def test_what_is_nested_too_deep_is_refused(
    read: Callable[[Path], Any], refused: type[Exception], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(refused):
        read(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deep"),
        ('{"a": 1, "b": {"a": 2, "a": 3}}', "the key 'a' appears twice"),
        ("[NaN]", "NaN"),
        ("[1e999]", "1e999"),
    ],
)
def test_what_json_hides_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_strict_json(text)
