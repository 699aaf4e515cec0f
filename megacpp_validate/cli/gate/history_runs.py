"""The verb of cells over runs: what it reads, and the exit code of each answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

import typer

from ...canary.static.sources import Sources
from ...evidence.history import CellHistory, HistoryResult
from ...evidence.index import Index, IndexNotOurs, IndexSummary, read_store
from ...gate.flakes import rate_flakes
from ...report.markdown.history import tell_history
from ...report.terminal.history import render_history
from ..app import TOOL, Exit, refuse
from ..output import refuse_among
from ..told_options import PageFormat
from ..whole_telling import tell_whole


@dataclass(frozen=True)
class Asked:
    """The arguments; `cells` and `quantities` are patterns: None or empty for all."""

    store: Path
    cells: tuple[str, ...] | None
    quantities: tuple[str, ...]
    last: int
    database: Path | None
    rebuild: bool


def run_history(asked: Asked, fmt: PageFormat, output: Path | None, *, verbose: bool) -> None:
    """Bring the index up to the store, ask it, and tell."""
    if not os.path.isdir(asked.store):  # noqa: PTH112 - what cannot be asked is none
        refuse(
            f"there is no folder {asked.store}. Likely cause: nothing has run here, or the receipts lie elsewhere. "
            "Next step: name the folder: history STORE --cell ...",
            Exit.WRONG_ARGUMENTS,
        )
    refuse_among(asked.store, asked.database, "--database")
    refuse_among(asked.store, output, "--output")
    if asked.cells is not None and not asked.cells:
        refuse("no cell is named. Next step: name one, or leave --cell out for all.", Exit.NOTHING_SELECTED)
    result = read_history(asked)
    if not result.cells:
        _refuse_nothing(asked, result)
    tell_whole(
        result,
        fmt,
        output,
        render=lambda console: render_history(result, last=asked.last, verbose=verbose, console=console),
        markdown=lambda: tell_history(result, last=asked.last),
    )
    readable = any(row.outcome is not None for history in result.cells for row in history.rows)
    raise typer.Exit(Exit.OPEN if readable else Exit.EVIDENCE_MISSING)


def read_history(asked: Asked) -> HistoryResult:
    """What a store says of cells."""
    database = asked.database or find_database(asked.store)
    try:
        index, summary = read_store(
            asked.store, database, rebuild=asked.rebuild, replace=asked.database is None, validate=asked.cells or ()
        )
    except IndexNotOurs as fault:
        refuse(f"{fault}.", Exit.WRONG_ARGUMENTS)
    except OSError as fault:
        refuse(
            f"{asked.store} cannot be looked into: {fault.strerror or fault}. Likely cause: it is not yours to read. "
            "Next step: run it as one who may read the receipts.",
            Exit.WRONG_ARGUMENTS,
        )
    try:
        return _ask(index, summary, asked)
    finally:
        index.close()


def find_database(store: Path) -> Path:
    """Where the index of a store is kept: in the user's cache, for a store may be read-only, by the store's place."""
    place = sha256(os.fsencode(store.resolve())).hexdigest()[:16]
    return Sources().cache / "index" / f"{place}.sqlite"


def _ask(index: Index, summary: IndexSummary, asked: Asked) -> HistoryResult:
    names = index.cells(asked.cells or ())
    return HistoryResult(
        tool=TOOL,
        store=str(asked.store),
        asked=asked.cells or (),
        cells=tuple(_ask_cell(index, name, asked.quantities) for name in names),
        receipts=summary.receipts,
        unreadable=summary.unreadable,
        runs=summary.runs,
        lost={row.path: row.fault for row in index.unreadable() if row.cell not in names},
        notes=(summary.not_kept,) if summary.not_kept else (),
    )


def _ask_cell(index: Index, cell: str, patterns: tuple[str, ...]) -> CellHistory:
    wanted = [
        name
        for name in index.quantities(cell)
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    rows = index.history(cell)
    trends = index.trends(cell, wanted) if wanted else ()
    return CellHistory(cell=cell, rows=rows, trends=trends, flakes=rate_flakes(cell, rows))


def _refuse_nothing(asked: Asked, result: HistoryResult) -> None:
    lost = "".join(f"\n  {path}: {why}" for path, why in list(result.lost.items())[:5])
    what = f"no cell of {asked.store} is {' or '.join(asked.cells)}" if asked.cells else f"{asked.store} has no receipt"
    refuse(
        f"{what}; it has {result.receipts} receipts in {result.runs} runs, and {result.unreadable} files that should "
        f"be some and are unreadable.{lost} Likely cause: another folder, or another name. Next step: leave --cell "
        "out, which lists every cell.",
        Exit.NOTHING_SELECTED,
    )
