"""The verbs of the release gate: what they read, and the exit code of each answer."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

import typer

from ...catalog.bridge import Catalog, read_catalog
from ...catalog.file import matrix_folder
from ...catalog.gate import GateRules, UnknownRelease, read_gate_policy
from ...catalog.needs import read_needs
from ...evidence.receipt import Receipt
from ...evidence.receipt_time import read_time
from ...evidence.receipts_manifest import ManifestInvalid, NoSshKeygen, hash_manifest, sign_folder, verify_folder
from ...evidence.release_gate import GateDecision
from ...evidence.store import ReceiptFile, ReceiptInvalid, ReceiptStore, list_folders, read_store
from ...gate.release import decide_release
from ...gate.release_asked import Asked, Baseline, SignedFolder
from ...gate.release_baseline import choose_baseline
from ..app import TOOL, Exit, Format, foreseen, refuse
from ..output import refuse_among
from .release_gate_blame import make_blame
from .release_gate_telling import tell_release_gate

_COMMIT: Final = re.compile(r"[0-9a-f]{40}(-dirty)?")
_YEARS: Final = (2000, 2200)
RUN_LOCK: Final = ".lock"  # that a run holds in the folder of its receipts


@dataclass(frozen=True)
class GateAsked:
    """The arguments, as they were given; empty or None for what the receipts or the matrix say."""

    store: Path
    release: str
    target: str = ""
    stack: str = ""
    commit: str = ""
    image: str = ""
    lock: str = ""
    baseline: Path | None = None
    signers: Path | None = None
    at: datetime | None = None


@foreseen({UnknownRelease: Exit.WRONG_ARGUMENTS, NoSshKeygen: Exit.INFRASTRUCTURE})
def run_release_gate(asked: GateAsked, matrix: Path | None, fmt: Format, output: Path | None, *, verbose: bool) -> None:
    """Decide and tell."""
    for folder in filter(None, (asked.store, asked.baseline)):
        refuse_among(folder, output, "--output")
    if asked.commit and not _COMMIT.fullmatch(asked.commit):
        refuse(
            f"{asked.commit!r} is no whole commit, and no receipt would be of it. Next step: `git rev-parse HEAD`.",
            Exit.WRONG_ARGUMENTS,
        )
    with own_store(asked.store):
        if asked.baseline is not None:
            refuse_while_run(asked.baseline)
        decision = decide_store(asked, matrix)
    tell_release_gate(decision, fmt, output, verbose=verbose)
    raise typer.Exit(decision.exit_code)


def decide_store(asked: GateAsked, matrix: Path | None) -> GateDecision:
    """What the rules say of a store.

    Raises:
        MatrixInvalid: with every fault of a file of the matrix.
        UnknownRelease: a kind of release or a target that there is no rule for.
        NoSshKeygen: signers were named, and there is no ssh-keygen.
    """
    catalog = read_catalog(matrix)
    policy = read_gate_policy(catalog, matrix)
    store = _read(asked.store)
    target = asked.target or _one_of("target", store)
    rules = policy.choose(asked.release, target)
    stack = asked.stack or _one_of("stack", store, target)
    at = _read_clock(asked.at)
    image, lock = _read_pins(catalog, stack, matrix, asked.lock)
    return decide_release(
        store.files,
        store.load,
        rules,
        Asked(stack, at, TOOL, asked.commit, asked.image or image, lock),
        blame=make_blame(catalog, read_needs([module.id for module in catalog.modules], matrix)),
        baseline=_read_baseline(asked.baseline, rules, _hashes_of(store, stack), at) if asked.baseline else None,
        signed=None if asked.signers is None else read_signed(asked.store, asked.signers, at),
    )


@foreseen({NoSshKeygen: Exit.INFRASTRUCTURE, ManifestInvalid: Exit.WRONG_ARGUMENTS})
def run_receipts_sign(folder: Path, key: Path) -> None:
    """Sign every receipt of a folder; one that cannot be read is not signed over."""
    with own_store(folder):
        store = _read(folder)
        if wrong := [f"{one.shown}: {why}" for one in store.files if (why := one.problem or _find_fault(store, one))]:
            refuse(
                f"{folder} was not signed: {'; '.join(wrong[:5])}. Next step: take what is no receipt out of the "
                "folder, and run damaged cells again.",
                Exit.EVIDENCE_MISSING,
            )
        try:
            sign_folder(folder, store.hashes, key, os.environ)
        except OSError as fault:
            if isinstance(fault, NoSshKeygen):
                raise
            _refuse_unwritten(folder, fault)
    typer.echo(f"{folder}: {len(store.files)} receipts signed, sha256 {hash_manifest(store.hashes)}")


def _find_fault(store: ReceiptStore, one: ReceiptFile) -> str:
    """What only the whole of a receipt tells: that it contradicts itself."""
    try:
        store.load(one)
    except ReceiptInvalid as fault:
        return fault.reason
    return ""


def _refuse_unwritten(folder: Path, fault: OSError) -> NoReturn:
    full = fault.errno in (errno.ENOSPC, errno.EDQUOT)
    refuse(
        f"{folder} was not signed, for it cannot be written: {fault.strerror or fault}. "
        + (
            "Likely cause: its disk is full. Next step: make room and sign it again; until then a signature that was "
            "there may no longer fit."
            if full
            else "Likely cause: it is not yours, or is kept from being written. Next step: sign a copy that is yours."
        ),
        Exit.INFRASTRUCTURE if full else Exit.WRONG_ARGUMENTS,
    )


@contextmanager
def own_store(folder: Path) -> Iterator[None]:
    """Hold a folder while it is judged: no second gate, and no run that writes it. Nothing is left in it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        refuse(f"there is no folder {folder}. Next step: name a folder of receipts.", Exit.WRONG_ARGUMENTS)
    except OSError as fault:
        refuse(
            f"{folder} cannot be read: {fault.strerror or fault}. Next step: look at its mode.", Exit.WRONG_ARGUMENTS
        )
    try:
        _hold(handle, f"another gate judges {folder}, or somebody signs it. Next step: wait for it.")
        refuse_while_run(folder)
        yield
    finally:
        os.close(handle)


def refuse_while_run(folder: Path) -> None:
    """End where a run writes its receipts into a folder, into one below it, or into the one around it."""
    place = os.path.realpath(folder)
    for each in (os.path.dirname(place), *list_folders(place)):  # noqa: PTH120 - hundreds of them
        # Where nobody ran there is no such file, and it may be another user's.
        with suppress(OSError):
            _hold_run(each)


def _hold_run(place: str) -> None:
    """Raises OSError where there is no lock of a run, or what is called so is a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # or a pipe waits
    handle = os.open(f"{place}/{RUN_LOCK}", flags)
    try:
        # Shared: another gate that looks at this moment is no run.
        _hold(handle, f"a run writes its receipts to {place}. Next step: wait for it.", fcntl.LOCK_SH)
    finally:
        os.close(handle)


def _hold(handle: int, why: str, how: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        refuse(why, Exit.INFRASTRUCTURE)
    except OSError:  # a file system without locks, or one that locks no folder
        return


def read_signed(folder: Path, signers: Path, at: datetime) -> SignedFolder:
    """What was signed of a folder; where nothing was, why.

    Raises:
        NoSshKeygen: there is none.
    """
    try:
        signer, hashes = verify_folder(folder, signers, at, os.environ)
    except ManifestInvalid as fault:
        return SignedFolder(problem=str(fault))
    return SignedFolder(signer, hashes)


def _read(folder: Path) -> ReceiptStore:
    try:
        store = read_store(folder)
    except OSError as fault:
        refuse(f"{folder} cannot be read: {fault.strerror or fault}. Next step: look at it.", Exit.WRONG_ARGUMENTS)
    if not store.files:
        refuse(
            f"there is no receipt in {folder}. Likely cause: its run never began, or a typing error. Next step: run "
            "what is to be released, and name the folder of its receipts.",
            Exit.EVIDENCE_MISSING,
        )
    return store


def _one_of(what: str, store: ReceiptStore, target: str = "") -> str:
    """The stack or target that all receipts share."""
    heads = [one.head for one in store.files if one.head is not None and target in ("", one.head.target)]
    names = sorted({head.target if what == "target" else head.stack for head in heads})
    shown = ", ".join(names[:6]).replace("\n", "\\n")
    found = f"of {len(names)} {what}s: {shown}" if names else f"of no {what} that can be read"
    if len(names) != 1:
        refuse(
            f"the receipts are {found}. Next step: say with --{what} which one is judged.",
            Exit.WRONG_ARGUMENTS if names else Exit.EVIDENCE_MISSING,
        )
    return names[0]


def _read_clock(at: datetime | None) -> datetime:
    """The time of the decision, UTC; now without one."""
    found = datetime.now(UTC).replace(microsecond=0) if at is None else at
    if not _YEARS[0] <= found.year <= _YEARS[1]:
        refuse(f"{found.isoformat()} is no time of a decision. Next step: give --at another.", Exit.WRONG_ARGUMENTS)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)


def _read_pins(catalog: Catalog, stack: str, matrix: Path | None, lock: str) -> tuple[str, str]:
    """Image digest and lock hash that the stack's row of the matrix pins; empty where it pins none.

    Args:
        lock: hash that was asked for; empty for that of the row's file.
    """
    row = next((row for row in catalog.stacks if row.id == stack), None)
    if row is None:
        return "", lock
    if row.lock and not lock:
        file = (matrix or matrix_folder()).parent / row.lock
        try:
            lock = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as fault:
            refuse(
                f"{stack} is pinned to the lock {row.lock}, and {file} cannot be read: {fault.strerror or fault}. "
                "Likely cause: the matrix was copied or installed without containers/locks. Next step: give --lock its "
                "SHA-256, or --matrix the one of a checkout.",
                Exit.WRONG_ARGUMENTS,
            )
    return row.image.rpartition("@")[2], lock


def _read_baseline(folder: Path, rules: GateRules, judged: frozenset[str], at: datetime) -> Baseline:
    """The newest good receipt of each probe of another run, whatever its stack, if it is one and asked for the same."""
    store, target = _read(folder), rules.target.id
    chosen = choose_baseline(store.files, target)
    stacks = sorted({one.head.stack for one in chosen if one.head is not None})
    if len(stacks) != 1:
        found = f"of {len(stacks)} stacks: {', '.join(stacks)}" if stacks else f"none that is good on {target}"
        refuse(
            f"the receipts of the baseline {folder} are {found}. Next step: name the folder of one stack.",
            Exit.WRONG_ARGUMENTS if stacks else Exit.EVIDENCE_MISSING,
        )
    for one in chosen:
        _refuse_no_baseline(folder, one, judged, at)
    receipts: dict[str, Receipt] = {}
    for one in chosen:
        with suppress(ReceiptInvalid):  # nothing to compare with, which the gate says of that cell
            receipts[one.stem.removeprefix(f"{stacks[0]}-{target}-")] = store.load(one)
    if odd := sorted({receipt.requested for receipt in receipts.values()} - {rules.requested}):
        refuse(
            f"the baseline {folder} asked for {odd[0]}, and {rules.requested} is judged: a time of another side tells "
            "nothing of this one. Next step: name the receipts of the release before.",
            Exit.WRONG_ARGUMENTS,
        )
    return Baseline(stacks[0], receipts, hash_manifest(store.hashes))


def _hashes_of(store: ReceiptStore, stack: str) -> frozenset[str]:
    return frozenset(one.sha256 for one in store.files if one.head is not None and one.head.stack == stack)


def _refuse_no_baseline(folder: Path, one: ReceiptFile, judged: frozenset[str], at: datetime) -> None:
    """End where a receipt of the baseline is one of those that it would be compared with, or from the future."""
    if one.sha256 in judged:
        refuse(
            f"{one.shown} of the baseline {folder} is one of the receipts that are judged: compared with itself "
            "nothing is slower. Next step: name the receipts of the release before.",
            Exit.WRONG_ARGUMENTS,
        )
    started = None if one.head is None else read_time(one.head.started)
    if started is not None and started > at:
        refuse(
            f"{one.shown} of the baseline {folder} started at {started.isoformat()}, after this decision at "
            f"{at.isoformat()}. Likely cause: --at names too early a time, or a clock is wrong. Next step: name an "
            "older baseline.",
            Exit.WRONG_ARGUMENTS,
        )
