"""`release-gate`: open or closed, and why."""

from datetime import datetime, time
from pathlib import Path
from typing import Annotated

import typer

from .app import Context, Result, fill, verb
from .options import Store

_FORMS = ["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M%z", "%Y-%m-%dT%H:%M:%S%z"]


def _end_of_day(moment: datetime | None) -> datetime | None:
    """A day alone means its end."""
    return datetime.combine(moment, time(23, 59, 59)) if moment and moment.time() == time() else moment


@verb("gate:describe_gate")
def release_gate(
    context: Context,
    store: Store,
    /,
    release: Annotated[str, "Kind of release: a row of gate.toml."] = "te-upgrade",
    target: Annotated[str, "Default: that of the receipts, if they share one."] = "",
    stack: Annotated[str, "Default: that of the receipts, if they share one."] = "",
    commit: Annotated[str, "Whole commit that receipts must be of."] = "",
    image: Annotated[str, "Digest that receipts must carry; default: the stack's."] = "",
    lock: Annotated[str, "SHA-256 of the lock; default: of the stack's lock."] = "",
    baseline: Annotated[Path | None, "Receipts to compare speed and memory with."] = None,
    accept_code: Annotated[tuple[str, ...], "Hash of other code that may have produced receipts; repeated."] = (),
    signers: Annotated[Path | None, "Who may sign: an allowed_signers file of ssh-keygen(1)."] = None,
    at: Annotated[
        datetime | None,
        typer.Option(formats=_FORMS, metavar="TIME", help="Time of the decision, UTC; a day means its end."),
        _end_of_day,
    ] = None,
) -> Result:
    """Decide whether receipts prove every cell that a release requires.

    Exit code 0: open. 1: closed by a breakage. 2: the matrix or an argument is wrong. 4: closed, because evidence is
    missing, stale, of something else, or not what was signed. 6: a run writes to the folder.
    """
    from ..gate.release_folder import GateOptions, decide_folder
    from .output import require_apart

    options = fill(GateOptions, locals())
    for folder in filter(None, (store, baseline)):
        require_apart(folder, context.output, "--output")
    return decide_folder(options, context.matrix)
