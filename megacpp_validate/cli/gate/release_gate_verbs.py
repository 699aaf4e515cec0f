"""The verbs of the release gate: decide, and sign what is decided over."""

from __future__ import annotations

from contextlib import suppress
from datetime import date, datetime, time
from pathlib import Path
from typing import Annotated

import typer

from ..app import Format, MatrixOption, OutputOption, app
from ..told_options import LogFormat, LogFormatOption

StoreArgument = Annotated[Path, typer.Argument(help="Folder of receipts; every folder below it is one run.")]


def parse_clock(text: str) -> datetime:
    """A time of ISO 8601; a day alone is over when it is judged.

    Raises:
        typer.BadParameter: it is none.
    """
    with suppress(ValueError):
        return datetime.combine(date.fromisoformat(text), time(23, 59, 59))
    try:
        return datetime.fromisoformat(text)
    except ValueError as fault:
        raise typer.BadParameter(f"{text!r} is no time, as 2026-11-22 or 2026-11-22T12:00+00:00 is one") from fault


@app.command()
def release_gate(
    store: StoreArgument,
    release: Annotated[str, typer.Option("--release", help="Kind of release: a row of gate.toml.")] = "te-upgrade",
    target: Annotated[str, typer.Option("--target", help="Else that of the receipts, if it is one.")] = "",
    stack: Annotated[str, typer.Option("--stack", help="Else that of the receipts, if it is one.")] = "",
    commit: Annotated[
        str, typer.Option("--commit", help="That receipts must be of, whole; else any, but the same in all.")
    ] = "",
    image: Annotated[
        str, typer.Option("--image", help="Digest that receipts must carry; else that of the stack's row.")
    ] = "",
    lock: Annotated[
        str, typer.Option("--lock", help="SHA-256 of the lock that they must carry; else of the stack's lock.")
    ] = "",
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="Receipts to compare speed and memory with.")
    ] = None,
    signers: Annotated[
        Path | None, typer.Option("--signers", help="Who may sign: an allowed_signers file of ssh-keygen(1).")
    ] = None,
    at: Annotated[
        datetime | None,
        typer.Option(
            "--at",
            parser=parse_clock,
            metavar="TIME",
            help="Time of the decision, UTC where it has no zone; a day alone means its end; else now.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Whole reasons, and every receipt that does not count.")
    ] = False,
    fmt: LogFormatOption = LogFormat.TABLE,
    output: OutputOption = None,
    matrix: MatrixOption = None,
) -> None:
    """May we release: which cells do the receipts prove, and what is missing or broken?

    Exit code 0: open. 1: closed by a breakage. 2: the matrix or an argument is wrong. 4: closed, because evidence is
    missing, stale, of something else, or not what was signed. 6: another gate or a run has the folder.
    """
    from .release_gate_runs import GateAsked, run_release_gate

    asked = GateAsked(store, release, target, stack, commit, image, lock, baseline, signers, at)
    run_release_gate(asked, matrix, Format(fmt), output, verbose=verbose)


@app.command()
def receipts_sign(
    store: StoreArgument,
    key: Annotated[Path, typer.Option("--key", help="Private Ed25519 key, or the .pub of one that ssh-agent holds.")],
) -> None:
    """Sign what a folder of receipts holds, so that the gate refuses what is edited, added or lost afterwards.

    Exit code 0: signed. 2: the folder or the key is wrong. 4: a file in it is no receipt. 6: there is no ssh-keygen.
    """
    from .release_gate_runs import run_receipts_sign

    run_receipts_sign(store, key)
