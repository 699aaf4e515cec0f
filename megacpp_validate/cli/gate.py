"""Decisions from evidence."""

from __future__ import annotations

from datetime import UTC, datetime, time
from pathlib import Path
from typing import Annotated

import typer

from .app import Context, Result, fill, split_names, verb
from .options import Store


def _read_moment(text: str) -> datetime:
    """The time of the decision, in UTC where it names no zone; a day alone means its end."""
    if text == "now":
        return datetime.now(UTC).replace(microsecond=0)
    moment = datetime.fromisoformat(text)
    if moment.time() == time():
        moment = datetime.combine(moment, time(23, 59, 59))
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


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
    unsigned: Annotated[bool, "Go on without a signature; the decision shows it."] = False,
    at: Annotated[
        datetime,
        typer.Option(parser=_read_moment, metavar="TIME", help="Time of the decision, UTC; a day means its end."),
    ] = "now",  # type: ignore[assignment]  # as typer reads it
) -> Result:
    """Decide whether receipts prove every cell that a release requires.

    Exit code 0: open. 1: closed by a breakage. 2: the matrix or an argument is wrong. 4: closed, because evidence is
    missing, stale, of something else, or not what was signed. 6: a run writes to the folder.
    """
    from ..gate.release_folder import decide_folder
    from ..gate.rules import GateOptions

    return decide_folder(context.catalog, fill(GateOptions, locals()))


@verb()
def receipts_sign(
    store: Store, /, key: Annotated[Path, "Private Ed25519 key, or the .pub of one that ssh-agent holds."]
) -> str:
    """Sign the receipts of a folder, so that the gate refuses what is edited, added or lost afterwards.

    Exit code 0: signed. 2: the folder or the key is wrong. 4: a file in it is not a receipt. 6: there is no ssh-keygen.
    """
    from ..gate.release_folder import sign_receipts

    return sign_receipts(store, key)


@verb("session:describe_losses")
def loss_gate(folder: Annotated[Path, "Folder of curves, as `fp8` leaves them beside its receipts."], /) -> Result:
    """Compare the loss of each FP8 recipe with BF16 on the same data and seeds.

    Exit code 0: every recipe follows. 1: one does not. 2: there is no such folder. 4: curves are missing, cannot be
    read, or cannot be compared.
    """
    from ..gate.loss import judge_folder

    return judge_folder(folder)


@verb("gate:describe_policy")
def fp8_policy(
    context: Context,
    preset: Annotated[tuple[str, ...], "Rows of fp8_presets.toml, with commas or repeated.", split_names] = (),
) -> Result:
    """Decide what may run in low precision, what may not, and why.

    Exit code 0: presets that are meant to run are let through, and those that were rolled back are refused by the rules
    that must refuse them. 1: one of them is not so. 2: a file of the matrix, or an argument, is wrong.
    """
    from ..gate.fp8 import decide_policy

    return decide_policy(context.catalog, preset)
