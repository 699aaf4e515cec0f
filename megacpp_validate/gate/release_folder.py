"""The release gate on a folder: what is judged there, by which rules, and who may sign it."""

from __future__ import annotations

import fcntl
import hashlib
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from ..catalog.bridge import Catalog
from ..catalog.images import read_images, read_needs
from ..catalog.policies import GateRules, read_gate_policy
from ..errors import EvidenceMissing, InfrastructureFailed, WrongArguments
from ..evidence.history import DIRTY
from ..evidence.receipt import Receipt, read_time
from ..evidence.receipts_manifest import ManifestInvalid, hash_manifest, sign_folder, verify_folder
from ..evidence.store import ReceiptInvalid, ReceiptStore, read_store
from .release import GateContext, GateDecision, SignedFolder, decide_release
from .rules import OLDEST, UNKNOWN, Baseline, GateOptions

_CODE: Final = re.compile(rf"[0-9a-f]{{12,64}}|{UNKNOWN}")
_LOCKED: Final = re.compile(r"^([a-z0-9.-]+)==(\S+)", re.MULTILINE)
RUN_LOCK: Final = ".lock"  # that a run holds in the folder of its receipts


def decide_folder(catalog: Catalog, options: GateOptions) -> GateDecision:
    """What the rules say of a store.

    Raises:
        WrongArguments: an argument or the matrix is wrong.
        EvidenceMissing: there is no receipt, or none of the baseline.
        InfrastructureFailed: a run writes to the folder, or there is no ssh-keygen.
    """
    for code in options.accept_code:
        if not _CODE.fullmatch(code):
            raise WrongArguments(f"{code!r} is not the hash of code. Next step: give 12 to 64 digits, or {UNKNOWN!r}.")
    for option, value, digits in (("commit", options.commit, 40), ("lock", options.lock, 64)):
        if value and not re.fullmatch(f"[0-9a-f]{{{digits}}}({DIRTY})?", value):
            raise WrongArguments(f"--{option} {value!r} is no whole hash. Next step: give its {digits} hex digits.")
    store = _read(options.store)
    policy = read_gate_policy(catalog)
    target = options.target or _choose_one(store, "target", "")
    rules = policy.choose(options.release, target)
    stack = options.stack or _choose_one(store, "stack", target)
    order = _complete(replace(options, target=target, stack=stack), rules, catalog)
    signed = baseline = None
    if options.signers is not None:
        try:
            signed = SignedFolder(*verify_folder(options.store, options.signers, order.at))
        except ManifestInvalid as fault:
            signed = SignedFolder(problem=str(fault))
    elif not options.unsigned:
        signed = SignedFolder(
            problem="a signature is required, and --signers is missing. Next step: name who may sign, or give "
            "--unsigned, which the decision shows"
        )
    if options.baseline is not None:
        judged = {one.sha256 for one in store.files if one.head is not None and one.head.stack == order.stack}
        baseline = _read_baseline(options.baseline, rules, judged, order)
    context = GateContext(store.load, rules, order, catalog.modules, read_needs(catalog), baseline, signed)
    return decide_release(store.files, context)


def sign_receipts(folder: Path, key: Path) -> str:
    """Sign every receipt of a folder, in words; an invalid one is not signed over.

    Raises:
        ReceiptInvalid: a file is not a receipt.
        ToolError: the key is wrong, the folder cannot be written, or a run writes to it.
    """
    store = _read(folder)
    for one in store.files:
        store.load(one)
    sign_folder(folder, store.hashes, key)
    return f"{folder}: {len(store.files)} receipts signed, sha256 {hash_manifest(store.hashes)}"


def _refuse_run(folder: Path) -> None:
    """Raise where a run writes its receipts to a folder, to a folder below it, or to its parent.

    A run holds a lock of filelock. Taking that lock would create a file, and a store may be read-only.
    """
    place = folder.resolve()
    for lock in (place.parent / RUN_LOCK, *place.rglob(RUN_LOCK)):
        with suppress(OSError), lock.open("rb") as stream:  # no run wrote there, or the lock is another user's
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as fault:
                text = f"a run writes its receipts to {lock.parent}. Next step: try again when that run has ended."
                raise InfrastructureFailed(text) from fault


def _read(folder: Path) -> ReceiptStore:
    _refuse_run(folder)
    store = read_store(folder)
    if all(one.head is None for one in store.files):
        why = "".join(f"\n  {one.file}: {one.problem}" for one in store.files)
        raise EvidenceMissing(f"{folder} has no valid receipt.{why}\nNext step: run its cells, or give another folder.")
    return store


def _choose_one(store: ReceiptStore, what: str, target: str) -> str:
    """The stack or target that all receipts share."""
    heads = [one.head for one in store.files if one.head is not None and target in ("", one.head.target)]
    names: list[str] = sorted({getattr(head, what) for head in heads})
    if len(names) == 1:
        return names[0]
    text = f"{len(names)} {what}s have receipts{target and f' of {target}'}: {', '.join(names[:40]) or 'none'}. "
    step = f"choose one with --{what}" if names else "run its cells"
    raise (WrongArguments if names else EvidenceMissing)(f"{text}Next step: {step}.")


def _complete(options: GateOptions, rules: GateRules, catalog: Catalog) -> GateOptions:
    """With the image digest and the lock that the row of the stack pins, or else the lock of the image."""
    row = next((row for row in catalog.stacks if row.id == options.stack), None)
    if row is None:
        return options
    lock = options.lock
    if row.lock and not lock:
        lock = hashlib.sha256(_read_lock(catalog, row.lock)).hexdigest()
    options = replace(options, image=options.image or row.image.rpartition("@")[2], lock=lock)
    images = [one for one in read_images(catalog).image if one.target == options.target]
    if lock or rules.kind.lock != "one" or not images:
        return options
    text = _read_lock(catalog, images[0].with_release(rules.stacks[row.id]).lock)
    return replace(options, image_lock=hashlib.sha256(text).hexdigest(), locked=dict(_LOCKED.findall(text.decode())))


def _read_lock(catalog: Catalog, name: str) -> bytes:
    file = catalog.folder.parent / name
    if not file.is_file():
        raise WrongArguments(
            f"there is no lock {file}. Likely cause: the matrix was copied alone, or no image has this release. "
            "Next step: give --lock its SHA-256, or --matrix a checkout."
        )
    return file.read_bytes()


def _read_baseline(folder: Path, rules: GateRules, judged: set[str], order: GateOptions) -> Baseline:
    """The newest good receipt of each probe of another run, whatever its stack, if it is one and requested the same.

    Where receipts must be signed, those of the baseline must be, too.
    """
    store, at = _read(folder), order.at
    if order.signers is not None:
        try:
            held = verify_folder(folder, order.signers, at)[1]
        except ManifestInvalid as fault:
            raise EvidenceMissing(f"the baseline {folder} is not signed: {fault}") from fault
        if loose := sorted(dict(store.hashes.items() - held.items())):
            raise EvidenceMissing(
                f"the signature of the baseline {folder} does not cover {len(loose)} files: {', '.join(loose[:3])}. "
                "Next step: sign the folder again with `nox -s receipts_sign`."
            )
    good = [
        (read_time(one.head.started) or OLDEST, one) for one in store.files
        if one.head is not None and one.head.target == rules.target.id and one.stem == one.head.cell
        and one.head.outcome.is_good and not one.head.only_timed
    ]  # fmt: skip
    newest = {one.cell: (started, one) for started, one in sorted(good, key=lambda pair: pair[0])}
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
