"""A receipt as a file: written aside and renamed, so that there is a whole one or none.

Standard library only: it is written inside the environment that is judged.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .receipt import Receipt
from .whole_file import write_whole


def receipt_text(receipt: Receipt) -> str:
    """The receipt as JSON: two spaces, keys in the order of `Receipt`; the same text for the same receipt.

    JSON has no NaN and no Inf: such a number becomes null. What a vendor library says may hold half a character, which
    must not cost the receipt: it is written as its escape.
    """
    return json.dumps(_plain(asdict(receipt)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_receipt(receipt: Receipt, path: Path) -> None:
    """Write a receipt, whatever dies half way.

    Raises:
        OSError: the place cannot be written.
    """
    write_whole(path, receipt_text(receipt))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
