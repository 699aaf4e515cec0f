"""What became of cells over the runs of a store: a row a receipt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from ..errors import Exit, NothingSelected, exit_for
from .receipt import Outcome, read_time
from .store import SUFFIXES, ReceiptFile, ReceiptHead, ReceiptStore, read_store
from .values import Frozen

_NEVER: Final = datetime.max.replace(tzinfo=UTC)
DIRTY = "-dirty"  # behind a commit from which files differed


class HistoryRow(ReceiptHead):
    """One file of a store that is a receipt, or should be one; other attributes as of `ReceiptHead`.

    Attributes:
        run: its folder below the store, "." for the store itself.
        cell: its cell; of an unreadable file what its name says. `stack`, `target` and `probe` are then empty.
        outcome: None where the receipt is unreadable, which is never a good outcome.
        sha256, path: of the file, below the store; bytes that are not UTF-8 are escaped.
        fault: why it is unreadable; empty where it is not.
        same_as: path of another file with the same bytes that stands before it: a copy is not evidence twice.
    """

    run: str
    path: str
    sha256: str = ""
    fault: str = ""
    stack: str = ""
    target: str = ""
    probe: str = ""
    schema_id: str = ""
    outcome: Outcome | None = None  # type: ignore[assignment]  # a head that was read has one
    same_as: str = ""


class HistoryResult(Frozen):
    """What the verb `history` answers.

    Attributes:
        store: the folder.
        asked: patterns of cells; empty for all.
        receipts, runs: of the whole store.
        unreadable: path -> fault, of files of `cells`, and of files and folders of which nobody knows the cell.
    """

    schema_id: Literal["megacpp-validate/history/4"] = "megacpp-validate/history/4"
    store: str
    asked: tuple[str, ...] = ()
    cells: dict[str, tuple[HistoryRow, ...]] = Field(default_factory=dict)
    receipts: int = 0
    runs: int = 0
    unreadable: dict[str, str] = Field(default_factory=dict)

    @property
    def exit(self) -> Exit:
        """4 where a file cannot be read; what the outcomes are is an answer, and closes nothing."""
        return exit_for(breaks=False, lacks=bool(self.unreadable))


def read_history(folder: Path, patterns: Sequence[str] | None = None) -> HistoryResult:
    """The history of cells.

    Args:
        patterns: names of cells, with `*`, `?` and `[...]`; None for all cells.

    Raises:
        WrongArguments: there is no such folder.
        NothingSelected: no cell of it has such a name, or none is named.
    """
    rows = list_rows(read_store(folder))
    by_cell: dict[str, list[HistoryRow]] = defaultdict(list)
    for row in rows:
        if row.cell and (patterns is None or any(fnmatchcase(row.cell, pattern) for pattern in patterns)):
            by_cell[row.cell].append(row)
    cells = {name: tuple(of) for name, of in sorted(by_cell.items())}
    unreadable = {row.path: row.fault for row in rows if row.outcome is None and row.cell in (*by_cell, "")}
    receipts = sum(row.outcome is not None for row in rows)
    if not cells:
        listed = "".join(f"\n  {path}: {why}" for path, why in list(unreadable.items())[:5])
        raise NothingSelected(
            f"{folder} has {receipts} receipts, {len(rows) - receipts} unreadable files, and no cell that was selected."
            f"{listed} Next step: {'leave --cell out, which lists all' if patterns else 'give a folder of receipts'}."
        )
    return HistoryResult(
        store=str(folder), asked=tuple(patterns or ()), cells=cells, receipts=receipts,
        runs=len({row.run for row in rows}), unreadable=unreadable,
    )  # fmt: skip


def list_rows(store: ReceiptStore) -> tuple[HistoryRow, ...]:
    """A row for every file that is a receipt or should be one: oldest first, unreadable ones last."""
    rows = [_make_row(one) for one in store.files]
    rows.sort(key=lambda row: (row.outcome is None, read_time(row.started) or _NEVER, row.run, row.path))
    first: dict[str, str] = {}
    return tuple(
        row.model_copy(update={"same_as": first[row.sha256]})
        if row.outcome is not None and first.setdefault(row.sha256, row.path) != row.path
        else row
        for row in rows
    )


def _make_row(one: ReceiptFile) -> HistoryRow:
    head, fault = one.head, one.problem
    if head is not None and one.stem != head.cell:
        fault, head = f"it holds the cell {head.cell!r}, which its name does not say", None
    if head is None:
        cell = one.stem if one.file.endswith(SUFFIXES) else ""  # a folder or a link belongs to no cell
        return HistoryRow(run=one.run, path=one.file, sha256=one.sha256, cell=cell, fault=fault)
    return HistoryRow.model_construct(**dict(head), run=one.run, path=one.file, sha256=one.sha256)
