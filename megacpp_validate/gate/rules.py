"""The rules of the release gate on one receipt that counts, beside the newest of its release and the one before. Pure.

How much slower or larger than the release before is too much is a rule, too: `slowdown`, `memory` and
`memory_floor_mib` of matrix/gate.toml.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Final

from ..catalog.gate import BREAKAGES, IMPORTS, PLAIN, Fallback, GateRule, GateRules, Kernel, SecondCopy, Unwatched
from ..diagnosis.diagnose import find_host_fault
from ..evidence.history import DIRTY
from ..evidence.receipt import Library, Outcome, Part, Receipt, read_time
from ..evidence.store import ReceiptFile

_OLDEST: Final = datetime.min.replace(tzinfo=UTC)
_HARD: Final = (Outcome.BLOCKED, Outcome.IMPORT_ERROR, Outcome.NOT_RUN)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(-dirty)?")
_RELEASE: Final = re.compile(r"te(\d+(?:\.\d+)+.*)")  # what a stack is called after
# A word for a number that is none, also within a name (`grad_nan`, `isnan`, `hasNaN`), and none of info, nano, tenant.
_NO_NUMBER: Final = re.compile(
    r"(?<![a-z])(?:(?:is_?)?(?:[qs]?nans?|infs?)|is_?finite|infinit\w*)(?![a-z])"
    r"|(?<![a-z])(?:non[- _]?finite|not (?:finite|a number))(?![a-z])"
    r"|(?-i:NaN|Inf(?:s|inity)?(?![a-z]))",
    re.IGNORECASE,
)
_NO_IMPORT: Final = re.compile(
    r"(?<!\w)(?:ImportError|ModuleNotFoundError)(?!\w)|undefined symbol|cannot open shared object file"
)
# What a probe says of numbers, at the start or within: the name of an outcome, a check, a bound.
_FAILED: Final = re.compile(
    r"^(?:fail|failed|error|import-error)(?![\w-])|AssertionError|(?<!\w)(?:out of bounds?|beyond (?:its |the )?bound|"
    r"tolerance|(?:not|all) ?close|relative error|mismatch(?:ed)?|diverged?|numeric\w*)(?!\w)",
    re.IGNORECASE,
)
# Bounds follow the error of native PyTorch, which a release of Transformer Engine does not change: those of 2.12.0 and
# 2.20.2 on one H200 differ by a factor of 1.13 at most.
_WIDER: Final = 2.0
_MEMORY: Final = "peak memory"


@dataclass(frozen=True)
class Order:
    """What is judged.

    Attributes:
        stack: id.
        at: time of the decision; the gate has no clock of its own.
        commit, image, lock: that receipts must carry; empty for whatever they carry, but the same in all.
    """

    stack: str
    at: datetime
    commit: str = ""
    image: str = ""
    lock: str = ""


@dataclass(frozen=True)
class Baseline:
    """What speed and memory are compared with.

    Attributes:
        stack: id.
        receipts: by probe, those that are good.
        sha256: of the manifest of its store.
    """

    stack: str
    receipts: Mapping[str, Receipt]
    sha256: str


@dataclass(frozen=True)
class Reason:
    """Why a receipt is rejected.

    Attributes:
        hard: no waiver holds it off: an import, NaN or Inf, or no evidence.
        component: below Transformer Engine that it is about; empty where it is none.
    """

    rule: GateRule
    text: str
    hard: bool = False
    component: str = ""

    @property
    def breaks(self) -> bool:
        """Whether it is a breakage, and not a lack of evidence."""
        return self.rule in BREAKAGES


Finding = Reason | str
"""A reason, or a warning."""
_Leave = Unwatched | SecondCopy | Fallback | Kernel
"""A row of the rules that lets something pass, or names it."""


def find_faults(
    receipt: Receipt, rules: GateRules, order: Order, counting: Mapping[str, Receipt], baseline: Baseline | None
) -> Iterator[Finding]:
    """Everything that the rules refuse of a receipt, and what they let pass with a warning.

    Args:
        counting: every receipt that counts, by cell: what blocks one may be another, and what the newest carries, every
            other one must carry.
        baseline: to compare speed and memory with; None where there is none.
    """
    newest = find_newest(counting) or receipt
    yield from (Reason(rule, text) for rule, broken, text in _compare(receipt, rules, order, newest) if broken)
    yield from _find_outcome(receipt, rules, counting)
    yield from _find_compiles(receipt, rules)
    yield from _find_copies(receipt, rules)
    yield from _find_fallbacks(receipt, rules)
    for found in _find_growth(receipt, rules, baseline):
        # What a red receipt did not come to measure is no fault.
        if isinstance(found, Reason) and found.breaks:
            yield found
        elif receipt.outcome.is_good:
            lenient = isinstance(found, Reason) and rules.kind.baseline != "required"
            yield found.text if isinstance(found, Reason) and lenient else found


def find_newest(receipts: Mapping[str, Receipt]) -> Receipt | None:
    """The newest receipt; of several of one second, the last by cell."""
    return max(receipts.values(), key=lambda one: (read_time(one.started) or _OLDEST, one.cell), default=None)


def _compare(
    receipt: Receipt, rules: GateRules, order: Order, newest: Receipt
) -> Iterator[tuple[GateRule, object, str]]:
    """Rule, whether the receipt breaks it, and how: it is of what is judged, young enough, and of one environment."""
    kind, arch, machine, first = rules.kind, rules.target.arch, receipt.machine, newest.machine
    age = order.at - (read_time(receipt.started) or _OLDEST)
    text = f"it is {age.days} days old, and at most {kind.max_age_days} are allowed"
    yield GateRule.AGE, age > timedelta(days=kind.max_age_days), text
    number, least = _schema(receipt), kind.least_schema
    yield GateRule.SCHEMA, number < least, f"its schema is {number}, and {kind.id} needs what schema {least} records"
    text = f"it requested {receipt.requested}, and {rules.requested} is judged"
    yield GateRule.REQUESTED, receipt.requested != rules.requested, text

    form = _RELEASE.fullmatch(receipt.stack)
    named = rules.stacks.get(receipt.stack) or (form[1] if form else "")  # a person's own name has no release in it
    loaded = {row.version.partition("+")[0] for row in receipt.packages if row.name == "transformer_engine"}
    te = receipt.requested == "te"
    unloaded = te and receipt.outcome is Outcome.PASS and not loaded
    yield GateRule.STACK, unloaded, "it is good, and Transformer Engine was not loaded"
    others = sorted(loaded - {named}) if te and named else []
    yield GateRule.STACK, others, f"it loaded Transformer Engine {others}, and {named} is judged"

    ran = f"sm_{machine.capability.replace('.', '')}" if machine.capability else ""
    elsewhere = arch and ran != arch and (ran or receipt.outcome.is_good)
    text = f"it ran on {machine.gpu or 'no GPU'} {ran}, and {rules.target.id} is {arch}"
    yield GateRule.TARGET, elsewhere, text
    one = kind.environment == "one"
    for rule, applies, what, has, wants in (
        (GateRule.TARGET, arch, "card", machine.gpu, first.gpu),
        (GateRule.ENVIRONMENT, one, "driver", machine.driver, first.driver),
        (GateRule.ENVIRONMENT, one, "torch", machine.torch, first.torch),
    ):
        text = f"it ran with the {what} {has}, and the newest receipt with {wants}"
        yield rule, applies and has and wants and has != wants, text

    whole = _COMMIT.fullmatch(receipt.commit)
    yield GateRule.COMMIT, not whole, f"{receipt.commit[:60]!r} is not a commit"
    text = f"its commit is {receipt.commit[:12]}, and that of the newest receipt is {newest.commit[:12]}"
    yield GateRule.COMMIT, whole and receipt.commit != newest.commit, text
    dirty = kind.commit == "clean" and receipt.commit.endswith(DIRTY)
    yield GateRule.COMMIT, dirty, f"files differed from the commit {receipt.commit[:12]} when it ran"
    for rule, wanted, has, wants in (
        (GateRule.ENVIRONMENT, kind.environment, receipt.environment, newest.environment),
        (GateRule.IMAGE, kind.image, receipt.image_digest, newest.image_digest),
        (GateRule.LOCK, kind.lock, receipt.lock_hash, newest.lock_hash),
    ):
        text = f"its {rule.value} is {has[:40] or 'not recorded'}, that of the newest receipt {wants[:40] or 'none'}"
        yield rule, wanted == "one" and (not has or has != wants), text


def _schema(receipt: Receipt) -> int:
    return int(receipt.schema_id.rpartition("/")[2])


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
    if outcome is Outcome.PASS and unsupported:
        yield f"the rules expect {rules.target.id} not to support it, and it passes: update the rules"
    for retry in receipt.retries:
        said = retry.partition("; its last words: ")[0]  # what a job wrote last may be of anything
        if any(pattern.search(said) for pattern in (_FAILED, _NO_NUMBER, _NO_IMPORT)):
            yield Reason(GateRule.CONTRADICTED, f"it was retried after a failure that is not the host's: {retry}")
        else:
            yield f"it was retried: {retry}"


def find_root(receipt: Receipt, counting: Mapping[str, Receipt]) -> Receipt | None:
    """What stands in a blocked one's way in the end; itself where it is not blocked; None where that is not there."""
    met: set[str] = set()
    root: Receipt | None = receipt
    while root is not None and root.outcome is Outcome.BLOCKED and root.cell not in met:
        met.add(root.cell)
        root = counting.get(root.blocked_by)
    return root


def is_hard(receipt: Receipt, counting: Mapping[str, Receipt]) -> bool:
    """An import that fails, what it blocks, and a number that is none: no waiver holds these off."""
    root = find_root(receipt, counting)
    if root is None or root.probe == IMPORTS or root.outcome in _HARD:
        return True
    failed = [check for check in root.checks if not check.passed]
    texts = [root.reason, *(check.detail for check in failed)]
    texts += [f"{root.failure.type}: {root.failure.message}"] if root.failure else []
    parts = [part for check in failed for part in check.parts if not part.passed]
    return (
        any(_NO_IMPORT.search(text) or _NO_NUMBER.search(text) for text in texts)
        or any(check.name.endswith("finite") for check in failed)
        or any(part.name == "finite" or part.observed is None for part in parts)
    )


def _find_compiles(receipt: Receipt, rules: GateRules) -> Iterator[Finding]:
    late = [row for row in receipt.jit.compiled if row.when == "after"]
    after = Counter(row.library for row in late) | Counter(receipt.jit.after)  # training ranks are in the list alone
    if after.total() > rules.kind.jit_after:
        numbers = ", ".join(f"{name} {number}" for name, number in sorted(after.items()))
        kernels = ", ".join(sorted({row.kernel for row in late})[:3])
        which = f"{numbers} ({kernels})" if kernels else numbers
        yield Reason(GateRule.JIT, f"compiled after warm-up: {which}; at most {rules.kind.jit_after} allowed")
    for library, why in sorted(receipt.jit.unwatched.items()):
        reason = Reason(GateRule.UNWATCHED, f"compiles of {library} were not watched: {why}")
        yield _allow(reason, receipt, (row for row in rules.unwatched if row.library == library))
    if receipt.outcome.is_good and _schema(receipt) < 5:
        yield "its schema does not record which libraries were not watched while they compiled"


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
            yield _allow(reason, receipt, (row for row in rules.second_copies if _is_known(row, library)))


def _is_known(row: SecondCopy, library: Library) -> bool:
    """Every file fits a pattern of its own, and their versions are as the row says."""
    left = list(library.files)
    for pattern in row.files:
        file = next((file for file in left if fnmatchcase(file, pattern)), None)
        if file is None:
            return False
        left.remove(file)
    answers = {answer for answer in library.version.split(", ") if answer}
    versions = "unknown" if not answers else "one" if len(answers) == 1 else "differ"
    return row.library == library.name and not left and row.versions == versions


def _find_fallbacks(receipt: Receipt, rules: GateRules) -> Iterator[Finding]:
    if receipt.requested == "native":  # what takes Transformer Engine there is refused where a receipt is read
        return
    shows = {row.claimed: {row.claimed, *row.observed} for row in rules.shows}
    for path in receipt.backends:
        known, ran = shows.get(path.claimed, {path.claimed}), set(path.observed)
        # What runs plain PyTorch beside its own backend fell back in part; a vendor's kernels call no such function.
        if path.requested == path.claimed and (not ran or (known & ran and not (PLAIN & ran) - known)):
            for row in rules.kernels:
                if row.observed in ran and _is_for(row, receipt) and fnmatchcase(path.path, row.path):
                    yield f"{path.path} ran {', '.join(path.observed)}: {row.reason}"
            continue
        seen = f", and ran {', '.join(path.observed)}" if path.observed else ""
        text = f"{path.path} requested {path.requested}, reports {path.claimed or 'nothing'}{seen}"
        wanted = (path.requested, path.claimed, path.observed)
        rows = (
            row
            for row in rules.fallbacks
            if (row.requested, row.claimed, tuple(row.observed)) == wanted and fnmatchcase(path.path, row.path)
        )
        yield _allow(Reason(GateRule.FALLBACK, text), receipt, rows)


def _allow(reason: Reason, receipt: Receipt, rows: Iterable[_Leave]) -> Finding:
    """The reason, or a warning where a row of the rules lets it pass."""
    leave = next((row for row in rows if _is_for(row, receipt)), None)
    return reason if leave is None else f"{reason.text}. The rules allow it: {leave.reason}"


def _is_for(row: _Leave, receipt: Receipt) -> bool:
    return not row.probes or receipt.probe in row.probes


# --- Speed, memory and checks beside those of the release before. ---


def _find_growth(receipt: Receipt, rules: GateRules, baseline: Baseline | None) -> Iterator[Finding]:
    """What is slower, larger or less than in the baseline, and what cannot be compared."""
    before = baseline.receipts.get(receipt.probe) if baseline is not None else None
    if baseline is None or before is None:
        why = "there is no baseline" if baseline is None else f"the baseline {baseline.stack} has no good receipt of it"
        yield _lacks(f"{why}: its speed and its memory are not compared")
        return
    cards = [(one.machine.gpu, one.machine.capability) for one in (receipt, before)]
    if cards[0] != cards[1]:
        yield _lacks(f"it ran on {cards[0][0] or 'no GPU'}, the baseline on {cards[1][0] or 'no GPU'}: no comparison")
        return
    stack, kind = baseline.stack, rules.kind
    yield from _find_looser(receipt, before, stack)
    now, old = _measure(receipt, rules), _measure(before, rules)
    anywhere = {name == _MEMORY for one in baseline.receipts.values() for name in _measure(one, rules)}
    if new := sorted(now.keys() - old.keys()):
        yield _lacks(f"{stack} did not measure {', '.join(new)}: not compared")
    elif rules.target.arch and len(anywhere) < 2:
        yield _lacks(f"{stack} measured no speed of any cell, or no memory: not compared")
    if lost := sorted(old.keys() - now.keys()):
        yield _lacks(f"{stack} measured {', '.join(lost)}, and this receipt does not")
    ratios = {name: now[name] / old[name] for name in now.keys() & old.keys() if name != _MEMORY}
    if slower := [name for name in sorted(ratios, key=lambda name: -ratios[name]) if ratios[name] > kind.slowdown]:
        rows = (f"{name} {now[name]:.4g} ms, {old[name]:.4g} in {stack} (x {ratios[name]:.2f})" for name in slower)
        yield Reason(GateRule.SLOWER, f"slower than x {kind.slowdown:g}: {'; '.join(rows)}")
    peak, held = now.get(_MEMORY, 0.0), old.get(_MEMORY, math.inf)
    if peak > max(kind.memory * held, held + kind.memory_floor_mib):
        text = f"its peak is {peak:.0f} MiB, {held:.0f} MiB in {stack} (x {peak / held:.2f}); at most "
        text += f"x {kind.memory:g}, or {kind.memory_floor_mib:g} MiB more, is allowed"
        yield Reason(GateRule.MEMORY, text)


def _lacks(text: str) -> Reason:
    return Reason(GateRule.BASELINE, text)


def _measure(receipt: Receipt, rules: GateRules) -> dict[str, float]:
    """Median times in ms by the clocks that are compared, and the peak of memory in MiB; 0 was not measured."""
    rows = {row.name: row.median_ms for row in receipt.timings if row.clock in rules.kind.clocks}
    return {name: value for name, value in {**rows, _MEMORY: receipt.peak_memory_mib}.items() if value > 0.0}


def _find_looser(receipt: Receipt, before: Receipt, stack: str) -> Iterator[Finding]:
    """What the baseline looked at and this one does not, and bounds that are far wider than they were.

    The same sources make the same checks, so that one that is lost was edited away, or a branch of the probe that a
    release takes: either way it is not proven. Of another commit the suite itself may have changed.
    """
    known, now = _list_parts(before), _list_parts(receipt)
    if lost := sorted(" ".join(key).strip() for key in known.keys() - now.keys()):
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        text = f"{stack} checked {', '.join(lost[:3])}{more}, and this receipt does not"
        yield _lacks(text) if receipt.commit == before.commit else text
    for key, part in now.items():
        old = known.get(key)
        if part and old and old.bound and part.bound and not part.at_least and part.bound > _WIDER * old.bound:
            yield f"the bound of {' '.join(key)} is {part.bound:.3g}, {old.bound:.3g} in {stack}: check why"
            return


def _list_parts(receipt: Receipt) -> dict[tuple[str, str], Part | None]:
    """Check and part -> the part; every check has a row without a part, too."""
    checks: dict[tuple[str, str], Part | None] = {(check.name, ""): None for check in receipt.checks}
    return checks | {(check.name, part.name): part for check in receipt.checks for part in check.parts}


def choose_baseline(files: Iterable[ReceiptFile], target: str) -> tuple[ReceiptFile, ...]:
    """The newest good receipt of each cell of a target; one that was only timed counts for none."""
    newest: dict[str, ReceiptFile] = {}
    ranked = ((read_time(one.head.started), one.file, one) for one in files if one.head is not None)
    for _, _, one in sorted((row for row in ranked if row[0] is not None), key=lambda row: row[:2]):
        head = one.claims
        if head.target == target and head.outcome.is_good and not head.only_timed and one.stem == head.cell:
            newest[head.cell] = one
    return tuple(sorted(newest.values(), key=lambda one: one.file))
