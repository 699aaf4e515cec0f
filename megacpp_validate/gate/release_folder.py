"""The release gate on a folder: what is judged there, by which rules, and who may sign it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ..catalog.bridge import Catalog, read_catalog
from ..catalog.file import matrix_folder
from ..catalog.images import read_needs
from ..catalog.policies import GateRules, read_gate_policy
from ..errors import EvidenceMissing, InfrastructureFailed, WrongArguments
from ..evidence.receipt import Receipt, read_time
from ..evidence.receipts_manifest import ManifestInvalid, hash_manifest, sign_folder, verify_folder
from ..evidence.store import ReceiptFile, ReceiptInvalid, ReceiptStore, read_store
from .release import GateContext, GateDecision, SignedFolder, decide_release
from .rules import UNKNOWN, Baseline, Order

_COMMIT: Final = re.compile(r"[0-9a-f]{40}(-dirty)?")
_CODE: Final = re.compile(rf"[0-9a-f]{{12,64}}|{UNKNOWN}")
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
    accept_code: tuple[str, ...] = ()


def decide_folder(options: GateOptions, matrix: Path | None = None) -> GateDecision:
    """What the rules say of a store.

    Raises:
        WrongArguments: an argument or the matrix is wrong.
        EvidenceMissing: there is no receipt, or none of the baseline.
        InfrastructureFailed: a run writes to the folder, or there is no ssh-keygen.
    """
    for given, form, what in (
        *((code, _CODE, f"the hash of code, of 12 to 64 digits, or {UNKNOWN!r}") for code in options.accept_code),
        *((commit, _COMMIT, "a full commit hash, the output of `git rev-parse HEAD`") for commit in [options.commit]),
    ):
        if given and not form.fullmatch(given):
            raise WrongArguments(f"{given!r} is not {what}. Next step: give one.")
    store = _read(options.store)
    catalog = read_catalog(matrix)
    policy = read_gate_policy(catalog, matrix)
    target = options.target or _choose_one(store, "target", "")
    rules = policy.choose(options.release, target)
    order = _make_order(options, options.stack or _choose_one(store, "stack", target), catalog, matrix)
    signed = baseline = None
    if options.signers is not None:
        try:
            signed = SignedFolder(*verify_folder(options.store, options.signers, order.at, os.environ))
        except ManifestInvalid as fault:
            signed = SignedFolder(problem=str(fault))
    if options.baseline is not None:
        judged = {one.sha256 for one in store.files if one.head is not None and one.head.stack == order.stack}
        baseline = _read_baseline(options.baseline, rules, judged, order.at)
    known = catalog, read_needs([module.id for module in catalog.modules], matrix)
    return decide_release(store.files, GateContext(store.load, rules, order, known, baseline, signed))


def sign_receipts(folder: Path, key: Path) -> str:
    """Sign every receipt of a folder, in words; an invalid one is not signed over.

    Raises:
        ReceiptInvalid: a file is not a receipt.
        ToolError: the key is wrong, the folder cannot be written, or a run writes to it.
    """
    store = _read(folder)
    for one in store.files:
        store.load(one)
    sign_folder(folder, store.hashes, key, os.environ)
    return f"{folder}: {len(store.files)} receipts signed, sha256 {hash_manifest(store.hashes)}"


def _refuse_run(folder: Path) -> None:
    """End where a run writes its receipts into a folder, into one below it, or into the one around it.

    A run holds a lock that filelock made. To ask filelock for it would write a file, and a store may be read-only.
    """
    place = Path(os.path.realpath(folder))
    for each in (place.parent, *(Path(each) for each, _, _ in os.walk(place))):
        with suppress(OSError):  # nobody ran there, the lock is another user's or a link, or there are no locks
            handle = os.open(each / RUN_LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as fault:
                raise InfrastructureFailed(f"a run writes its receipts to {each}. Next step: wait for it.") from fault
            finally:
                os.close(handle)


def _read(folder: Path) -> ReceiptStore:
    _refuse_run(folder)
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
    text = f"the receipts are of {len(names)} {what}s: {', '.join(names[:6])}. Next step: choose one with --{what}."
    raise (WrongArguments if names else EvidenceMissing)(text)


def _make_order(options: GateOptions, stack: str, catalog: Catalog, matrix: Path | None) -> Order:
    """With the time of the decision in UTC, and the image digest and lock that the row of the stack pins."""
    at = options.at or datetime.now(UTC).replace(microsecond=0)
    if not 2000 <= at.year <= 2200:  # beyond, arithmetic of time overflows
        raise WrongArguments(f"--at {at.isoformat()} is outside the years 2000 to 2200. Next step: give another --at.")
    at = (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    row = next((row for row in catalog.stacks if row.id == stack), None)
    image, lock = options.image, options.lock
    if row is not None:
        image = image or row.image.rpartition("@")[2]
        file = (matrix or matrix_folder()).parent / row.lock
        if row.lock and not lock:
            try:
                lock = hashlib.sha256(file.read_bytes()).hexdigest()
            except OSError as fault:
                raise WrongArguments(
                    f"the lock {file} of {stack} cannot be read: {fault.strerror or fault}. Likely cause: the matrix "
                    "was copied without containers/locks. Next step: give --lock its SHA-256, or --matrix a checkout."
                ) from fault
    return Order(stack, at, options.commit, image, lock, options.accept_code)


def _read_baseline(folder: Path, rules: GateRules, judged: set[str], at: datetime) -> Baseline:
    """The newest good receipt of each probe of another run, whatever its stack, if it is one and requested the same."""
    store, newest = _read(folder), dict[str, tuple[datetime, ReceiptFile]]()
    for one in store.files:
        if (head := one.head) is not None and head.target == rules.target.id and one.stem == head.cell:
            started = read_time(head.started)
            if started and head.outcome.is_good and not head.only_timed:
                newest[head.cell] = max(newest.get(head.cell, (started, one)), (started, one), key=lambda pair: pair[0])
    stacks = sorted({one.claims.stack for _, one in newest.values()})
    if not stacks:
        raise EvidenceMissing(
            f"the baseline {folder} has no good receipt of {rules.target.id}. Next step: give another folder."
        )
    receipts: dict[str, Receipt] = {}
    for _, one in newest.values():
        with suppress(ReceiptInvalid):  # nothing to compare with, which the gate says of that cell
            receipts[one.claims.probe] = store.load(one)
    odd = sorted({receipt.requested for receipt in receipts.values()} - {rules.requested})
    for wrong, text in (
        (len(stacks) > 1, f"is of {len(stacks)} stacks: {', '.join(stacks)}"),
        (any(one.sha256 in judged for _, one in newest.values()), "has receipts that are judged"),
        (any(started > at for started, _ in newest.values()), f"has a receipt later than {at.isoformat()}"),
        (odd, f"requested {' and '.join(odd)}, and {rules.requested} is judged: times cannot be compared"),
    ):
        if wrong:
            raise WrongArguments(f"the baseline {folder} {text}. Next step: give the receipts of the release before.")
    return Baseline(stacks[0], receipts, hash_manifest(store.hashes))
