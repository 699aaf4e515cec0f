"""`release-gate`: open or closed, and why."""

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime, time
from pathlib import Path
from typing import Annotated

import typer

from .app import Output, Result, verb
from .options import Matrix, Store


def parse_clock(text: str) -> datetime:
    """A time of ISO 8601; a day alone is over when it is judged.

    Raises:
        typer.BadParameter: the text is neither.
    """
    with suppress(ValueError):
        return datetime.combine(date.fromisoformat(text), time(23, 59, 59))
    try:
        return datetime.fromisoformat(text)
    except ValueError as fault:
        raise typer.BadParameter(f"{text!r} is not a time such as 2026-11-22 or 2026-11-22T12:00+00:00") from fault


@verb("gate:describe_gate", verbose="Every receipt that does not count.")
def release_gate(
    store: Store,
    release: Annotated[str, typer.Option(help="Kind of release: a row of gate.toml.")] = "te-upgrade",
    target: Annotated[str, typer.Option(help="Default: that of the receipts, if they share one.")] = "",
    stack: Annotated[str, typer.Option(help="Default: that of the receipts, if they share one.")] = "",
    commit: Annotated[str, typer.Option(help="Whole commit that receipts must be of.")] = "",
    image: Annotated[str, typer.Option(help="Digest that receipts must carry; default: the stack's.")] = "",
    lock: Annotated[str, typer.Option(help="SHA-256 of the lock; default: of the stack's lock.")] = "",
    baseline: Annotated[Path | None, typer.Option(help="Receipts to compare speed and memory with.")] = None,
    signers: Annotated[
        Path | None, typer.Option(help="Who may sign: an allowed_signers file of ssh-keygen(1).")
    ] = None,
    at: Annotated[
        datetime | None,
        typer.Option(parser=parse_clock, metavar="TIME", help="Time of the decision, UTC; a day means its end."),
    ] = None,
    output: Output = None,
    matrix: Matrix = None,
) -> Result:
    """Decide whether receipts prove every cell that a release requires.

    Exit code 0: open. 1: closed by a breakage. 2: the matrix or an argument is wrong. 4: closed, because evidence is
    missing, stale, of something else, or not what was signed. 6: a run writes to the folder.
    """
    from ..gate.release_folder import GateOptions, decide_folder
    from .output import require_apart

    for folder in filter(None, (store, baseline)):
        require_apart(folder, output, "--output")
    options = GateOptions(store, release, target, stack, commit, image, lock, baseline, signers, at)
    return decide_folder(options, matrix)
