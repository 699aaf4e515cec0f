"""What attempts leave, brought home: a receipt into the folder of receipts, and what lies beside it."""

from __future__ import annotations

import glob
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ...evidence.receipt import Receipt
from ...evidence.receipt_file import write_receipt
from .decide import with_retries
from .launcher import BATCH_LOG
from .state import Fault


def forget_cell(cell: str, folder: Path) -> None:
    """Remove what an earlier run left of a cell."""
    for left in folder.glob(f"{glob.escape(cell)}.*"):
        if left.is_file():
            left.unlink()


def bring_home(receipt: Receipt, faults: Sequence[Fault], attempt: Path, folder: Path) -> Receipt:
    """Put an attempt's receipt, with the faults before it, into the folder, after what lies beside it.

    Raises:
        OSError: the folder cannot be written; the attempt is whole still.
    """
    cell = receipt.cell
    for left in sorted(attempt.glob(f"{glob.escape(cell)}.*")):
        if left.name != f"{cell}.json" and left.is_file() and not left.is_symlink():
            _copy_whole(left, folder / left.name)
    kept = with_retries(receipt, faults)
    write_receipt(kept, folder / f"{cell}.json")
    shutil.rmtree(attempt, ignore_errors=True)
    return kept


def keep_words(cell: str, number: int, attempt: Path, folder: Path) -> None:
    """Keep what an attempt that came to nothing has said; a disk that is full costs those words alone."""
    said = b""
    for log in (attempt / BATCH_LOG, attempt / f"{cell}.log"):
        with suppress(OSError):
            said += log.read_bytes()
    with suppress(OSError):
        if said:
            (folder / f"{cell}.attempt-{number}.log").write_bytes(said)
    shutil.rmtree(attempt, ignore_errors=True)


def _copy_whole(source: Path, target: Path) -> None:
    aside = target.with_name(f".{target.name}.part")
    shutil.copyfile(source, aside)
    aside.replace(target)
