"""The rules of the release gate: which receipt counts for each required cell, and which rules it breaks. Pure.

The newest receipt of a cell counts: an older good receipt never replaces a newer bad one. Limits of speed and memory
are `slowdown`, `memory` and `memory_floor_mib` of matrix/gate.toml.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Final

from ..catalog.policies import BREAKAGES, IMPORTS, GateRule, GateRules
from ..diagnosis.diagnose import find_host_fault
from ..diagnosis.rows import JOB_ENDS
from ..evidence.history import DIRTY
from ..evidence.receipt import DEVICE_CLOCK, Outcome, Receipt, cell_id, hash_code, memory_limit, read_time
from ..evidence.store import ReceiptFile
from ..text import count
from .fp8 import find_refused_run

CLOCK_SKEW: Final = timedelta(minutes=5)  # between two machines
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")
_CONTRADICTS: Final = (Outcome.FAIL, Outcome.ERROR, Outcome.IMPORT_ERROR)
_DISOWNING: Final = (GateRule.STACK, GateRule.TARGET, GateRule.AGE)
UNKNOWN: Final = "unknown"  # code of a receipt without a code hash
PLAIN: Final = frozenset({"native", "sdpa"})  # names of backends of plain PyTorch
OLDEST: Final = datetime.min.replace(tzinfo=UTC)
_HARD: Final = (Outcome.BLOCKED, Outcome.IMPORT_ERROR, Outcome.NOT_RUN)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(-dirty)?")
_RELEASE: Final = re.compile(r"te(\d+(?:\.\d+)+.*)")  # in the name of a stack
# Texts that no waiver covers: failed imports, and numbers that are not finite, also within a name (`grad_nan`,
# `hasNaN`); not info, nano, tenant.
_HARD_WORDS: Final = re.compile(
    r"(?<![a-z])(?:(?:is_?)?(?:[qs]?nans?|infs?)|is_?finite|infinit\w*)(?![a-z])"
    r"|(?<![a-z])(?:non[- _]?finite|not (?:finite|a number))(?![a-z])"
    r"|(?-i:NaN|Inf(?:s|inity)?(?![a-z]))|(?:Import|ModuleNotFound)Error|undefined symbol|cannot open shared object",
    re.IGNORECASE,
)
_DENIES: Final = re.compile(r"(?i:\w error(?!\w)|out of bounds?|fail(?:ed|ure)?(?!\w))|\w(?:Error|Exception)(?!\w)")
# Faults for which a launcher repeats a cell: names of `environments.slurm` and `diagnosis.diagnose.find_retry_fault`.
_RETRIED: Final = {named.partition(":")[0] for named in JOB_ENDS.values()} | {
    "killed", "disk-full", "not-started", "no-receipt", "gone", "timeout"
}  # fmt: skip
_MEMORY: Final = "peak memory"


@dataclass(frozen=True)
class GateOptions:
    """What is judged, by the user's words; `release_folder` fills in what they leave to the receipts and the matrix.

    Attributes:
        store: folder of the receipts.
        release: kind of release.
        at: time of the decision.
        target, stack: ids; empty for those that all receipts share.
        commit, image, lock: required in every receipt; empty for any value that all receipts share.
        baseline: folder of receipts to compare speed and memory with.
        signers: file of the allowed signers.
        unsigned: go on without a signature if there are no signers.
        accept_code: prefixes of code hashes that are accepted beside the hash of this checkout.
        image_lock, locked: hash of the lock of the target's image, and its distributions -> versions; empty where
            `lock` is given or the release has no image.
    """

    store: Path
    release: str
    at: datetime
    target: str = ""
    stack: str = ""
    commit: str = ""
    image: str = ""
    lock: str = ""
    baseline: Path | None = None
    signers: Path | None = None
    unsigned: bool = False
    accept_code: tuple[str, ...] = ()
    image_lock: str = ""
    locked: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> str:
        """Prefix of the cell ids of the judged stack and target."""
        return f"{self.stack}-{self.target}-"


@dataclass(frozen=True)
class Reason:
    """Why a receipt is rejected.

    Attributes:
        hard: no waiver covers it: an import, NaN or Inf, or missing evidence.
        component: at fault below Transformer Engine; empty for none.
    """

    rule: GateRule
    text: str
    hard: bool = False
    component: str = ""

    @property
    def breaks(self) -> bool:
        """Whether the rule is a breakage; otherwise evidence is missing."""
        return self.rule in BREAKAGES


NO_FILE: Final = ReceiptFile("", "", None)


@dataclass
class Entry:
    """A file of the store, or a required cell without any, on its way to a verdict.

    Attributes:
        cell: id of the cell, or the name of an unreadable file.
        file: `NO_FILE` for a cell without a receipt.
        run: folder below the store.
        whole: the receipt, if it counts, or if it is red and closes the gate.
        required: whether it counts for a required cell.
        reasons: broken rules; empty for an accepted receipt.
        standing: reasons that no waiver covers.
        closes: whether it keeps the gate closed.
    """

    cell: str
    file: ReceiptFile = NO_FILE
    run: str = ""
    probe: str = ""
    whole: Receipt | None = None
    required: bool = False
    reasons: list[Reason] = field(default_factory=list)
    standing: list[Reason] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    closes: bool = False
    waived_by: str = ""

    def refuse(self, rule: GateRule, text: str, *, closes: bool = False, hard: bool = True) -> None:
        """Refuse the entry for this reason alone."""
        self.reasons, self.closes = [Reason(rule, text, hard)], closes

    def is_refused_by(self, *rules: GateRule) -> bool:
        """Whether the first reason has one of these rules."""
        return bool(self.reasons) and self.reasons[0].rule in rules

    def stands_against(self, *rules: GateRule) -> bool:
        """Whether a reason that no waiver covers has one of these rules."""
        return any(reason.rule in rules for reason in self.standing)

    @property
    def disowned(self) -> bool:
        """Whether the receipt belongs to another stack, target or time, so that it proves no breakage."""
        return self.stands_against(*_DISOWNING)

    @property
    def breaks(self) -> bool:
        """Whether a breakage closes the gate."""
        return self.closes and not self.disowned and any(reason.breaks for reason in self.standing)


# --- Which receipt counts. ---


def select_receipts(files: Iterable[ReceiptFile], rules: GateRules, order: GateOptions) -> list[Entry]:
    """An entry for every file, sorted by file; entries that count are `required` and have no reasons yet."""
    required = {order.own + probe for probe in rules.probes}
    entries, groups = [], dict[str, list[Entry]]()
    for one in sorted(files, key=lambda one: one.file):
        entry = Entry(one.cell, one, one.run, one.head.probe if one.head is not None else "")
        entries.append(entry)
        fault = next(_find_misfits(one, required, rules, order), None)
        if fault is not None:
            entry.refuse(fault[0], fault[1], closes=fault[2])
        else:
            groups.setdefault(one.cell, []).append(entry)
    for group in groups.values():
        *older, newest = sorted(group, key=rank_by_time)
        newest.required = True
        for entry in older:
            if not _contradict(entry, newest, rules):
                entry.refuse(GateRule.SUPERSEDED, f"{newest.file.file} is younger")
    if rules.kind.others == "close":
        _close_by_others(entries, rules, order)
    return entries


def rank_by_time(entry: Entry) -> tuple[datetime, bool, str]:
    """Sort key: the newest receipt is last; of the same second, the red one."""
    started = read_time(entry.file.head.started) if entry.file.head is not None else None
    return started or datetime.max.replace(tzinfo=UTC), _is_red(entry.file), entry.file.file


def _find_misfits(
    one: ReceiptFile, required: set[str], rules: GateRules, order: GateOptions
) -> Iterator[tuple[GateRule, str, bool]]:
    """Rules for which a file alone is no receipt of a required cell: rule, text, and whether it closes the gate.

    It closes the gate where it may hide the result of a required cell.
    """
    head, hides = one.head, one.hides or not required.isdisjoint((one.stem, one.cell))
    if head is None:
        yield GateRule.UNREADABLE, one.problem or "it is not a receipt", hides
        return
    names = head.stack, head.target, head.probe
    if odd := [name for name in names if not _NAME.fullmatch(name)]:
        yield GateRule.NAME, f"it has the invalid name {odd[0][:80]!r}", hides
    if not one.stem == head.cell == cell_id(*names):
        text = f"it holds the cell {head.cell[:120]!r} of {cell_id(*names)[:120]!r}, and its file is {one.stem[:120]!r}"
        yield GateRule.NAME, text, hides
    reason = find_refused_run(rules.low_precision, head.preset, head.precision, head.model)
    if reason and (head.stack, head.target) == (order.stack, rules.target.id):
        yield GateRule.PRESET, f"its training run is refused: {reason}", True
    image = order.image or head.image_digest
    for rule, has, wants in (
        (GateRule.STACK, head.stack, order.stack),
        (GateRule.TARGET, head.target, rules.target.id),
        (GateRule.NOT_REQUIRED, head.probe, head.probe if head.probe in rules.probes else f"no {head.probe}"),
        (GateRule.COMMIT, head.commit, order.commit or head.commit),
        (GateRule.IMAGE, head.image_digest.rpartition("@")[2], image.rpartition("@")[2]),
        (GateRule.LOCK, head.lock_hash, order.lock or head.lock_hash),
    ):
        if has != wants:
            yield rule, f"{rule.value}: this receipt has {has or 'none'}, and {rules.kind.id} requires {wants}", False
    if head.only_timed:
        yield GateRule.ONLY_TIMED, "it timed its module, and judged nothing of it", False
    started = read_time(head.started)
    if started is None:
        yield GateRule.CLOCK, f"its time of start is {head.started!r}, which is not a time with a zone", True
    elif started > order.at + CLOCK_SKEW:
        yield (
            GateRule.CLOCK,
            f"it started at {head.started}, after this decision at {order.at.isoformat()}. Likely cause: --at is too "
            "early, or the clock of one machine is wrong; which receipt is the newest is unknown",
            True,
        )


def _contradict(older: Entry, newest: Entry, rules: GateRules) -> bool:
    """Refuse an older red receipt that contradicts the newest one of the same commit and environment.

    A commit with local changes does not identify the sources: the fault may have been fixed since.
    """
    old, now, age = older.file.claims, newest.file.claims, rank_by_time(newest)[0] - rank_by_time(older)[0]
    same = all(getattr(old, name) == getattr(now, name) for name in ("commit", "environment", "image_digest"))
    red = old.outcome in _CONTRADICTS and old.outcome is not now.outcome
    if not (same and red and age <= timedelta(days=rules.kind.max_age_days)) or old.commit.endswith(DIRTY):
        return False
    text = (
        f"it is {old.outcome.value}, and {newest.file.file} of the same commit and environment is "
        f"{now.outcome.value}: an intermittent failure counts as a failure"
    )
    older.refuse(GateRule.CONTRADICTED, text, closes=True, hard=False)
    return True


def _close_by_others(entries: Sequence[Entry], rules: GateRules, order: GateOptions) -> None:
    """A cell that is not required closes the gate if it is unreadable, red or contradicted.

    Receipts of another commit, cells that were not run, and cells that were only timed do not count.
    """
    counting = [entry for entry in entries if entry.required]
    commit = order.commit or (max(counting, key=rank_by_time).file.claims.commit if counting else "")
    about: dict[str, list[Entry]] = {}
    for entry in entries:
        head = entry.file.head
        if entry.is_refused_by(GateRule.UNREADABLE, GateRule.NAME):
            entry.closes |= entry.file.stem.startswith(order.own) or entry.cell.startswith(order.own)
        elif head is not None and entry.is_refused_by(GateRule.NOT_REQUIRED):
            judged = head.outcome is not Outcome.NOT_RUN and not head.only_timed
            if judged and head.commit.removesuffix(DIRTY) == commit.removesuffix(DIRTY):
                about.setdefault(entry.cell, []).append(entry)
    for group in about.values():
        *older, newest = sorted(group, key=rank_by_time)
        if _is_red(newest.file):
            text = f"{newest.file.claims.outcome.value}, and {rules.kind.id} requires every cell green"
            newest.refuse(GateRule.OUTCOME, text, closes=True)
        for entry in older:
            _contradict(entry, newest, rules)


def _is_red(one: ReceiptFile) -> bool:
    return one.head is not None and not one.head.outcome.is_good and one.head.outcome is not Outcome.NOT_RUN


# --- What is wrong with a receipt that counts. ---


@dataclass(frozen=True)
class Baseline:
    """Receipts with which speed and memory are compared.

    Attributes:
        stack: id.
        receipts: good receipts by probe.
        sha256: of the manifest of its store.
    """

    stack: str
    receipts: Mapping[str, Receipt]
    sha256: str


Finding = Reason | str
"""A reason, or a warning."""


def find_faults(
    receipt: Receipt, rules: GateRules, order: GateOptions, counting: Mapping[str, Receipt], baseline: Baseline | None
) -> Iterator[Finding]:
    """Broken rules of a receipt, and warnings.

    Args:
        counting: every receipt that counts, by cell: one may block another, and all must share the commit, image and
            environment of the newest.
        baseline: None for no comparison of speed and memory.
    """
    newest = find_newest(counting) or receipt
    imageless = not (receipt.image_digest or newest.image_digest)
    for reason in (Reason(rule, text) for rule, broken, text in _compare(receipt, rules, order, newest) if broken):
        yield _allow(reason, "none", receipt, rules) if imageless and reason.rule is GateRule.IMAGE else reason
    yield from _find_code(receipt, rules, order)
    yield from _find_outcome(receipt, rules, counting)
    yield from _find_compiles(receipt, rules)
    yield from _find_copies(receipt, rules)
    yield from _find_fallbacks(receipt, rules)
    for found in _find_growth(receipt, rules, baseline):
        if found.breaks or (receipt.outcome.is_good and rules.kind.baseline == "required"):
            yield found
        elif receipt.outcome.is_good:  # a red receipt may lack measurements
            yield found.text


def find_newest(receipts: Mapping[str, Receipt]) -> Receipt | None:
    """The newest receipt; of the same second, the last by cell."""
    return max(receipts.values(), key=lambda one: (read_time(one.started) or OLDEST, one.cell), default=None)


def _compare(
    receipt: Receipt, rules: GateRules, order: GateOptions, newest: Receipt
) -> Iterator[tuple[GateRule, object, str]]:
    """Rule, whether the receipt breaks it, and text: stack, target, age and one environment."""
    kind, arch, machine, first = rules.kind, rules.target.arch, receipt.machine, newest.machine
    good = receipt.outcome.is_good
    age = order.at - (read_time(receipt.started) or OLDEST)
    text = f"it is {age.days} days old, and at most {kind.max_age_days} are allowed"
    yield GateRule.AGE, age > timedelta(days=kind.max_age_days), text
    text = f"it requested {receipt.requested}, and {rules.requested} is judged"
    yield GateRule.REQUESTED, receipt.requested != rules.requested, text

    form = _RELEASE.fullmatch(receipt.stack)
    named = rules.stacks.get(receipt.stack) or (form[1] if form else "")  # other names contain no release
    loaded = {row.version.partition("+")[0] for row in receipt.packages if row.name == "transformer_engine"}
    te = receipt.requested == "te"
    unloaded = te and receipt.outcome is Outcome.PASS and not loaded
    yield GateRule.STACK, unloaded, "it is good, and Transformer Engine was not loaded"
    others = sorted(loaded - {named}) if te and named else []
    yield GateRule.STACK, others, f"it loaded Transformer Engine {', '.join(others)}, and {named} is judged"

    ran = f"sm_{machine.capability.replace('.', '')}" if machine.capability else ""
    text = f"it ran on {machine.gpu or 'no GPU'} {ran}, and {rules.target.id} is {arch}"
    yield GateRule.TARGET, arch and ran != arch and (ran or good), text
    blank = ", ".join(name for name, value in vars(machine).items() if not (value or name == "load"))
    yield GateRule.ENVIRONMENT, good and arch and blank, f"it does not record the {blank} of its machine"
    for rule, applies, what, has, wants in (
        (GateRule.TARGET, arch, "card", machine.gpu, first.gpu),
        (GateRule.ENVIRONMENT, kind.environment == "one", "driver", machine.driver, first.driver),
        (GateRule.ENVIRONMENT, kind.environment == "one", "torch", machine.torch, first.torch),
    ):
        text = f"it ran with the {what} {has}, and the newest receipt with {wants}"
        yield rule, applies and has and wants and has != wants, text
    loads = _list_versions(newest)
    for name, version in _list_versions(receipt).items():
        text = f"it loaded {name} {version}, and the newest receipt {loads.get(name)}"
        yield GateRule.ENVIRONMENT, loads.get(name, version) != version, text
        wants = order.locked.get(name.replace("_", "-"), version)
        yield (
            GateRule.LOCK,
            kind.lock == "one" and wants != version,
            f"it loaded {name} {version}, and the lock has {wants}",
        )

    whole = _COMMIT.fullmatch(receipt.commit)
    yield GateRule.COMMIT, not whole, f"{receipt.commit[:60]!r} is not a commit"
    text = f"its commit is {receipt.commit[:12]}, and that of the newest receipt is {newest.commit[:12]}"
    yield GateRule.COMMIT, whole and receipt.commit != newest.commit, text
    dirty = kind.commit == "clean" and receipt.commit.endswith(DIRTY)
    yield GateRule.COMMIT, dirty, f"files differed from the commit {receipt.commit[:12]} when it ran"
    for rule, wanted, has, wants in (
        (GateRule.ENVIRONMENT, kind.environment, receipt.environment, newest.environment),
        (GateRule.IMAGE, kind.image, receipt.image_digest, newest.image_digest),
        (GateRule.LOCK, kind.lock, receipt.lock_hash, order.image_lock or newest.lock_hash),
    ):
        whose = "the image" if rule is GateRule.LOCK and order.image_lock else "the newest receipt"
        text = f"its {rule.value} is {has[:40] or 'not recorded'}, that of {whose} {wants[:40] or 'none'}"
        yield rule, wanted == "one" and (not has or has != wants), text


def _list_versions(receipt: Receipt) -> dict[str, str]:
    """Package or library -> version as loaded, without what a build adds; of second copies another rule speaks."""
    versions = {row.name: row.version for row in receipt.packages if not row.other_copies}
    versions |= {row.name: row.version for row in receipt.libraries if len(row.files) == 1}
    return {name: version.partition("+")[0] for name, version in versions.items() if version}


def _find_code(receipt: Receipt, rules: GateRules, order: GateOptions) -> Iterator[Reason]:
    """Receipts of other code than this checkout's, and what a run of this code leaves and a receipt lacks."""
    code, own = receipt.code or UNKNOWN, hash_code()
    if code == own:
        known = rules.evidence.get(receipt.probe)
        if known is not None and receipt.outcome.is_good:
            parts = {check.name: len(check.parts) for check in receipt.checks}
            lacking = [f"check {name}" for name, number in known.checks.items() if parts.get(name, -1) < number]
            lacking += [f"backend of {path}" for path in {*known.backends} - {row.path for row in receipt.backends}]
            if lacking:
                text = f"{len(lacking)} checks, parts of checks or backends of this cell are not in it: {min(lacking)}"
                yield Reason(GateRule.CHECKS, text, hard=True)
    elif not any(
        code.startswith(accepted) for accepted in order.accept_code
    ):  # of accepted code the checks are unknown
        text = f"code {code[:12]} produced it, and this checkout has {own[:12]}; --accept-code {code[:12]} accepts it"
        yield Reason(GateRule.CODE, text, hard=True)


def _find_outcome(receipt: Receipt, rules: GateRules, counting: Mapping[str, Receipt]) -> Iterator[Finding]:
    outcome, unsupported = receipt.outcome, receipt.probe in rules.unsupported
    if outcome is Outcome.EXPECTED_UNSUPPORTED and not unsupported:
        text = f"it is unsupported on {rules.target.id}, and no row of {rules.kind.id} allows that"
        yield Reason(GateRule.OUTCOME, f"{text}: {receipt.reason}")
    elif outcome is Outcome.NOT_RUN:
        yield Reason(GateRule.NOT_RUN, f"it was not run: {receipt.reason}")
    elif fault := find_host_fault(find_root(receipt, counting) or receipt):
        text = f"{outcome.value} by a fault of the host, which is no evidence about its module: {fault}"
        yield Reason(GateRule.NOT_RUN, f"{text}: {receipt.reason}", hard=True)
    elif outcome.value not in rules.kind.counts:
        yield Reason(GateRule.OUTCOME, f"{outcome.value}: {receipt.reason}", hard=is_hard(receipt, counting))
    if outcome is Outcome.PASS:
        if unsupported:
            yield f"the rules expect {rules.target.id} not to support it, and it passes: update the rules"
        if _DENIES.search(receipt.reason) or _HARD_WORDS.search(receipt.reason):
            yield Reason(GateRule.CONTRADICTED, f"it passes, and its reason denies that: {receipt.reason}", hard=True)
    for retry in receipt.retries:
        if retry.partition(":")[0] in _RETRIED:
            yield f"it was retried: {retry}"
        else:
            yield Reason(GateRule.CONTRADICTED, f"it was retried after a failure that is not the host's: {retry}")


def find_root(receipt: Receipt, counting: Mapping[str, Receipt]) -> Receipt | None:
    """The receipt that blocks a blocked one, None if it is missing; any other receipt itself."""
    return counting.get(receipt.blocked_by) if receipt.outcome is Outcome.BLOCKED else receipt


def is_hard(receipt: Receipt, counting: Mapping[str, Receipt]) -> bool:
    """Whether no waiver covers the failure: failed imports, what they block, numbers that are not finite."""
    root = find_root(receipt, counting)
    if root is None or root.probe == IMPORTS or root.outcome in _HARD:
        return True
    failed = [check for check in root.checks if not check.passed]
    texts = [root.reason, *(check.detail for check in failed)]
    texts += [f"{root.failure.type}: {root.failure.message}"] if root.failure else []
    parts = [part for check in failed for part in check.parts if not part.passed]
    return (
        any(part.name == "finite" or part.observed is None for part in parts)
        or any(check.name.endswith("finite") for check in failed)
        or any(_HARD_WORDS.search(text) for text in texts)
    )


def _find_compiles(receipt: Receipt, rules: GateRules) -> Iterator[Finding]:
    late = Counter((row.library, row.kernel) for row in receipt.jit.compiled if row.when != "warm-up")
    for (library, kernel), number in sorted(late.items()):
        reason = Reason(GateRule.JIT, f"{library} compiled {kernel} after warm-up, {count(number, 'time')}")
        if (found := _allow(reason, f"{library} {kernel}", receipt, rules)) is not reason:
            yield found
            del late[library, kernel]
    listed = Counter(library for library, _ in late.elements())  # of training ranks too, which `jit.after` lacks
    after = listed | Counter(receipt.jit.after)
    if after:
        numbers = ", ".join(f"{name} {number}" for name, number in sorted(after.items()))
        kernels = ", ".join(sorted({kernel for _, kernel in late})[:3])
        yield Reason(GateRule.JIT, f"compiled after warm-up: {numbers} ({kernels or 'unnamed'}); none is allowed")
    for library, why in sorted(receipt.jit.unwatched.items()):
        reason = Reason(GateRule.UNWATCHED, f"compiles of {library} were not watched: {why}")
        yield _allow(reason, library, receipt, rules)


def _find_copies(receipt: Receipt, rules: GateRules) -> Iterator[Finding]:
    for package in receipt.packages:
        if package.other_copies:
            text = f"{package.name} was loaded from {package.file}, and is also at {', '.join(package.other_copies)}"
            yield Reason(GateRule.SECOND_COPY, text, component=package.name)
    for library in receipt.libraries:
        if len(library.files) > 1:
            version = f", version {library.version}" if library.version else ""
            text = f"{library.name} is mapped from {' and '.join(library.files)}{version}"
            reason = Reason(GateRule.SECOND_COPY, text, component=library.name)
            answers = {answer for answer in library.version.split(", ") if answer}
            versions = "unknown versions" if not answers else "one version" if len(answers) == 1 else "versions"
            files = " ".join(sorted(library.files, key=lambda file: (PurePosixPath(file).name, file)))
            yield _allow(reason, f"{library.name} {len(library.files)} files, {versions}: {files}", receipt, rules)


def _find_fallbacks(receipt: Receipt, rules: GateRules) -> Iterator[Finding]:
    if receipt.requested == "native":  # the reader of receipts refuses Transformer Engine there
        return
    for path in receipt.backends:
        known, ran = {path.claimed, *rules.shows.get(path.claimed, ())}, set(path.observed)
        # Plain PyTorch beside the claimed backend is a partial fallback; kernels of vendors call none of its functions.
        if path.requested == path.claimed and (not ran or (known & ran and not (PLAIN & ran) - known)):
            continue
        seen = f", and ran {', '.join(path.observed)}" if path.observed else ""
        text = f"{path.path} requested {path.requested}, reports {path.claimed or 'nothing'}{seen}"
        shown = f"{path.path}: {path.requested}, {path.claimed or 'nothing'}, {'+'.join(path.observed) or 'nothing'}"
        yield _allow(Reason(GateRule.FALLBACK, text), shown, receipt, rules)


def _allow(reason: Reason, shown: str, receipt: Receipt, rules: GateRules) -> Finding:
    """The reason, or a warning where an [[allow]] row matches."""
    for row in rules.allowances:
        is_for = row.rule == reason.rule and receipt.probe in (row.probes or [receipt.probe])
        if is_for and fnmatchcase(shown, row.shows):
            return f"{reason.text}. The rules allow it: {row.reason}"
    return reason


# --- Speed and memory beside those of the release before. ---


def _find_growth(receipt: Receipt, rules: GateRules, baseline: Baseline | None) -> Iterator[Reason]:
    """Slower or larger than the baseline, or not comparable."""
    before = baseline.receipts.get(receipt.probe) if baseline is not None else None
    if baseline is None or before is None:
        why = "there is no baseline" if baseline is None else f"the baseline {baseline.stack} has no good receipt of it"
        yield Reason(GateRule.BASELINE, f"{why}: its speed and its memory are not compared")
        return
    gpus = receipt.machine.gpu, before.machine.gpu
    if gpus[0] != gpus[1]:
        text = f"it ran on {gpus[0] or 'no GPU'}, the baseline on {gpus[1] or 'no GPU'}: no comparison"
        yield Reason(GateRule.BASELINE, text)
        return
    stack, kind = baseline.stack, rules.kind
    now, old = _measure(receipt), _measure(before)
    anywhere = {name == _MEMORY for one in baseline.receipts.values() for name in _measure(one)}
    if now.keys() != old.keys():
        text = f"{stack} measured {', '.join(sorted(old)) or 'nothing'}, and this receipt {', '.join(sorted(now))}"
        yield Reason(GateRule.BASELINE, text)
    elif rules.target.arch and len(anywhere) < 2:
        yield Reason(GateRule.BASELINE, f"{stack} measured no speed of any cell, or no memory: not compared")
    ratios = {name: now[name] / old[name] for name in now.keys() & old.keys() if name != _MEMORY}
    if slower := [name for name in sorted(ratios, key=lambda name: -ratios[name]) if ratios[name] > kind.slowdown]:
        rows = (f"{name} {now[name]:.4g} ms, {old[name]:.4g} in {stack} (x {ratios[name]:.2f})" for name in slower)
        yield Reason(GateRule.SLOWER, f"slower than x {kind.slowdown:g}: {'; '.join(rows)}")
    peak, held = now.get(_MEMORY, 0.0), old.get(_MEMORY, math.inf)
    if peak > memory_limit(held, kind.memory, kind.memory_floor_mib):
        text = f"its peak is {peak:.0f} MiB, {held:.0f} MiB in {stack} (x {peak / held:.2f}); at most "
        text += f"x {kind.memory:g}, or {kind.memory_floor_mib:g} MiB more, is allowed"
        yield Reason(GateRule.MEMORY, text)


def _measure(receipt: Receipt) -> dict[str, float]:
    """Median device times in ms, and peak memory in MiB; without values that were not measured."""
    rows = {row.name: row.median_ms for row in receipt.timings if row.clock == DEVICE_CLOCK}
    return {name: value for name, value in {**rows, _MEMORY: receipt.peak_memory_mib}.items() if value > 0.0}
