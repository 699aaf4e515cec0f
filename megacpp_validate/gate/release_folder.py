"""The release gate on a folder: what is judged there, by which rules, and who may sign it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..catalog.bridge import Catalog, read_catalog
from ..catalog.file import matrix_folder
from ..catalog.gate import GateRules, read_gate_policy
from ..catalog.needs import read_needs
from ..errors import EvidenceMissing, InfrastructureFailed, WrongArguments
from ..evidence.receipt import Receipt
from ..evidence.receipt_time import read_time
from ..evidence.receipts_manifest import ManifestInvalid, hash_manifest, sign_folder, verify_folder
from ..evidence.store import ReceiptInvalid, ReceiptStore, list_folders, read_store
from .baseline import Baseline, choose_baseline
from .decision import GateDecision
from .release import SignedFolder, decide_release
from .rules import Order

_COMMIT: Final = re.compile(r"[0-9a-f]{40}(-dirty)?")
_YEARS: Final = (2000, 2200)
RUN_LOCK: Final = ".lock"  # that a run holds in the folder of its receipts


@dataclass(frozen=True)
class GateOptions:
    """What the user gave; empty or None for what the receipts or the matrix say."""

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


def decide_folder(options: GateOptions, matrix: Path | None = None) -> GateDecision:
    """What the rules say of a store, which is held meanwhile.

    Raises:
        WrongArguments: an argument or the matrix is wrong.
        EvidenceMissing: there is no receipt, or none of the baseline.
        InfrastructureFailed: a run or another gate has the folder, or there is no ssh-keygen.
    """
    if options.commit and not _COMMIT.fullmatch(options.commit):
        raise WrongArguments(
            f"{options.commit!r} is not a whole commit, and no receipt is of it. Next step: give the output of "
            "`git rev-parse HEAD`."
        )
    with hold_folder(options.store):
        if options.baseline is not None:
            _refuse_run(options.baseline)
        return _decide(options, matrix)


def sign_receipts(folder: Path, key: Path) -> str:
    """Sign every receipt of a folder, in words; an invalid one is not signed over.

    Raises:
        ReceiptInvalid: a file is not a receipt.
        ToolError: the key is wrong, or the folder cannot be written.
    """
    with hold_folder(folder):
        store = _read(folder)
        for one in store.files:
            store.load(one)
        sign_folder(folder, store.hashes, key, os.environ)
    return f"{folder}: {len(store.files)} receipts signed, sha256 {hash_manifest(store.hashes)}"


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold a folder while it is judged: no second gate, and no run that writes it. Nothing is left in it.

    Raises:
        WrongArguments: there is no such folder.
        InfrastructureFailed: somebody else has it.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as fault:
        raise WrongArguments(
            f"the folder {folder} cannot be read: {fault.strerror or fault}. Next step: give a folder of receipts."
        ) from fault
    with ExitStack() as closing:
        closing.callback(os.close, handle)
        _lock(handle, f"another gate judges {folder}, or somebody signs it. Next step: wait for it.", fcntl.LOCK_EX)
        _refuse_run(folder)
        yield


def _refuse_run(folder: Path) -> None:
    """End where a run writes its receipts into a folder, into one below it, or into the one around it."""
    place = os.path.realpath(folder)
    for each in (os.path.dirname(place), *list_folders(place)):  # noqa: PTH120 - hundreds of them
        with suppress(OSError):  # nobody ran there, or the lock is another user's, or a link
            handle = os.open(f"{each}/{RUN_LOCK}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            with ExitStack() as closing:
                closing.callback(os.close, handle)
                # Shared: another gate that looks at this moment is not a run.
                _lock(handle, f"a run writes its receipts to {each}. Next step: wait for it.", fcntl.LOCK_SH)


def _lock(handle: int, why: str, how: int) -> None:
    """filelock would write a file: a store may be read-only."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError as fault:
        raise InfrastructureFailed(why) from fault
    except OSError:  # a file system without locks, or one that locks no folder
        return


def _decide(options: GateOptions, matrix: Path | None) -> GateDecision:
    catalog = read_catalog(matrix)
    policy = read_gate_policy(catalog, matrix)
    store = _read(options.store)
    target = options.target or _choose_one(store, "target", "")
    rules = policy.choose(options.release, target)
    stack = options.stack or _choose_one(store, "stack", target)
    order = _make_order(options, stack, catalog, matrix)
    signed = baseline = None
    if options.signers is not None:
        try:
            signed = SignedFolder(*verify_folder(options.store, options.signers, order.at, os.environ))
        except ManifestInvalid as fault:
            signed = SignedFolder(problem=str(fault))
    if options.baseline is not None:
        judged = {one.sha256 for one in store.files if one.head is not None and one.head.stack == stack}
        baseline = _read_baseline(options.baseline, rules, judged, order.at)
    known = catalog, read_needs([module.id for module in catalog.modules], matrix)
    return decide_release(store.files, store.load, rules, order, known, baseline=baseline, signed=signed)


def _read(folder: Path) -> ReceiptStore:
    try:
        store = read_store(folder)
    except OSError as fault:
        raise WrongArguments(
            f"the folder {folder} cannot be read: {fault.strerror or fault}. Next step: give a folder of receipts."
        ) from fault
    if not store.files:
        raise EvidenceMissing(
            f"{folder} has no receipt. Likely cause: its run never began, or a typing error. Next step: run what is to "
            "be released, and give the folder of its receipts."
        )
    return store


def _choose_one(store: ReceiptStore, what: str, target: str) -> str:
    """The stack or target that all receipts share."""
    heads = [one.head for one in store.files if one.head is not None and target in ("", one.head.target)]
    names = sorted({head.target if what == "target" else head.stack for head in heads})
    if len(names) == 1:
        return names[0]
    step = f"Next step: choose one with --{what}."
    if names:
        raise WrongArguments(f"the receipts are of {len(names)} {what}s: {', '.join(names[:6])}. {step}")
    raise EvidenceMissing(f"the receipts are of no {what} that can be read. {step}")


def _make_order(options: GateOptions, stack: str, catalog: Catalog, matrix: Path | None) -> Order:
    """With the time of the decision in UTC, and the image digest and lock that the row of the stack pins."""
    at = datetime.now(UTC).replace(microsecond=0) if options.at is None else options.at
    if not _YEARS[0] <= at.year <= _YEARS[1]:
        raise WrongArguments(f"--at {at.isoformat()} is not the time of a decision. Next step: give another --at.")
    at = (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    row = next((row for row in catalog.stacks if row.id == stack), None)
    if row is None:
        return Order(stack, at, options.commit, options.image, options.lock)
    lock, file = options.lock, (matrix or matrix_folder()).parent / row.lock
    if row.lock and not lock:
        try:
            lock = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as fault:
            raise WrongArguments(
                f"the lock {file} of {stack} cannot be read: {fault.strerror or fault}. Likely cause: the matrix was "
                "copied without containers/locks. Next step: give --lock its SHA-256, or --matrix of a checkout."
            ) from fault
    return Order(stack, at, options.commit, options.image or row.image.rpartition("@")[2], lock)


def _read_baseline(folder: Path, rules: GateRules, judged: set[str], at: datetime) -> Baseline:
    """The newest good receipt of each probe of another run, whatever its stack, if it is one and asked for the same."""
    store, target = _read(folder), rules.target.id
    chosen = choose_baseline(store.files, target)
    stacks = sorted({one.claims.stack for one in chosen})
    if not stacks:
        raise EvidenceMissing(f"the baseline {folder} has no good receipt of {target}. Next step: give another folder.")
    if len(stacks) > 1:
        raise WrongArguments(
            f"the receipts of the baseline {folder} are of {len(stacks)} stacks: {', '.join(stacks)}. Next step: give "
            "the folder of one stack."
        )
    receipts: dict[str, Receipt] = {}
    for one in chosen:
        started = read_time(one.claims.started)
        why = "is one of the receipts that are judged" if one.sha256 in judged else ""
        if started is not None and started > at:
            why = why or f"started at {started.isoformat()}, after this decision at {at.isoformat()}"
        if why:
            raise WrongArguments(
                f"{one.shown} of the baseline {folder} {why}. Likely cause: --baseline or --at is wrong. Next step: "
                "give the receipts of the release before."
            )
        with suppress(ReceiptInvalid):  # nothing to compare with, which the gate says of that cell
            receipts[one.claims.probe] = store.load(one)
    if odd := sorted({receipt.requested for receipt in receipts.values()} - {rules.requested}):
        raise WrongArguments(
            f"the baseline {folder} requested {odd[0]}, and {rules.requested} is judged: their times cannot be "
            "compared. Next step: give the receipts of the release before."
        )
    return Baseline(stacks[0], receipts, hash_manifest(store.hashes))
