"""What became of a run as one JSON file in its folder: the verdict, and every rank's end with its receipt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...evidence.whole_file import write_whole
from .launch import RunEnd


def end_path(folder: Path) -> Path:
    """Where the end of a run is."""
    return folder / "run.json"


def write_end(folder: Path, end: RunEnd) -> None:
    """Write the end of a run, receipts included."""
    ranks = [
        {
            "rank": rank.rank,
            "code": rank.code,
            "fault": rank.fault,
            "last": rank.last.words() if rank.last else "",
            "step": rank.step,
            "receipt": rank.receipt,
            "log": str(rank.log),
        }
        for rank in end.ranks
    ]
    value = {"ending": end.ending, "culprits": end.culprits, "words": end.words, "seconds": end.seconds, "ranks": ranks}
    write_whole(end_path(folder), json.dumps(value, indent=1))


def read_end(folder: Path) -> Mapping[str, Any] | None:
    """The end of a run as JSON; None where there is none."""
    try:
        value = json.loads(end_path(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
