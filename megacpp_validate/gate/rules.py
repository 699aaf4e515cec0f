"""The rules of the release gate: what one receipt that counts is held to, beside the newest of its release. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Final

from ..catalog.gate import BREAKAGES, IMPORTS, PLAIN, Fallback, GateRule, GateRules, SecondCopy
from ..diagnosis.diagnose import find_host_fault
from ..evidence.history import DIRTY
from ..evidence.receipt import Backend, Library, Outcome, Receipt
from ..evidence.receipt_time import read_time

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
    def disowns(self) -> bool:
        """Whether it says that the receipt is of something else, so that whatever it shows is no breakage of this."""
        return self.rule in (GateRule.STACK, GateRule.TARGET, GateRule.AGE, GateRule.SCHEMA)

    @property
    def breaks(self) -> bool:
        """Whether it is a breakage, and not a lack of evidence."""
        return self.rule in BREAKAGES


Finding = Reason | str
"""A reason, or a warning."""


def find_faults(
    receipt: Receipt, rules: GateRules, order: Order, newest: Receipt, counting: Mapping[str, Receipt]
) -> Iterator[Finding]:
    """Everything that the rules refuse of a receipt, and what they let pass with a warning.

    Args:
        newest: of all that count; what it carries, every other one must carry.
        counting: every receipt that counts, by cell: what blocks one may be another.
    """
    yield from (Reason(rule, text) for rule, broken, text in _compare(receipt, rules, order, newest) if broken)
    yield from _find_outcome(receipt, rules, counting)
    yield from _find_compiles(receipt, rules)
    yield from _find_copies(receipt, rules)
    yield from _find_fallbacks(receipt, rules)


def find_newest(receipts: Mapping[str, Receipt]) -> Receipt | None:
    """The newest receipt; of several of one second, the last by cell."""
    return max(receipts.values(), key=lambda one: (read_time(one.started) or _OLDEST, one.cell), default=None)


def _compare(
    receipt: Receipt, rules: GateRules, order: Order, newest: Receipt
) -> Iterator[tuple[GateRule, object, str]]:
    """Rule, whether the receipt breaks it, and how: it is of what is judged, young enough, and of one environment."""
    kind, arch, target, machine, first = rules.kind, rules.target.arch, rules.target.id, receipt.machine, newest.machine
    te, one = receipt.requested == "te", kind.environment == "one"
    age, most = order.at - (read_time(receipt.started) or _OLDEST), kind.max_age_days
    yield GateRule.AGE, age > timedelta(days=most), f"it is {age.days} days old, and at most {most} are allowed"
    number, least = int(receipt.schema_id.rpartition("/")[2]), kind.least_schema
    yield GateRule.SCHEMA, number < least, f"its schema is {number}, and {kind.id} needs what schema {least} records"
    text = f"it requested {receipt.requested}, and {rules.requested} is judged"
    yield GateRule.REQUESTED, receipt.requested != rules.requested, text

    form = _RELEASE.fullmatch(receipt.stack)
    named = rules.stacks.get(receipt.stack) or (form[1] if form else "")  # a person's own name has no release in it
    loaded = {row.version.partition("+")[0] for row in receipt.packages if row.name == "transformer_engine"}
    unloaded = te and receipt.outcome is Outcome.PASS and not loaded
    yield GateRule.STACK, unloaded, "it is good, and Transformer Engine was not loaded"
    other = next(iter(sorted(loaded - {named})), None) if te and named else None
    text = f"it loaded Transformer Engine {other or 'of unknown version'}, and {named} is judged"
    yield GateRule.STACK, other is not None, text

    ran = f"sm_{machine.capability.replace('.', '')}" if machine.capability else ""
    seen = f"{machine.gpu or 'a GPU'} of {ran}" if ran else "no GPU"
    elsewhere = arch and ran != arch and (ran or receipt.outcome.is_good)
    yield GateRule.TARGET, elsewhere, f"it ran on {seen}, and {target} is {arch}"
    differs = arch and machine.gpu and first.gpu and machine.gpu != first.gpu
    yield GateRule.TARGET, differs, f"it ran on {machine.gpu}, and the newest receipt on {first.gpu}"
    for what, has, wants in (("driver", machine.driver, first.driver), ("torch", machine.torch, first.torch)):
        text = f"it ran with the {what} {has}, and the newest receipt with {wants}"
        yield GateRule.ENVIRONMENT, one and has and wants and has != wants, text

    commit = receipt.commit
    whole = _COMMIT.fullmatch(commit)
    yield GateRule.COMMIT, not whole, f"{commit[:60]!r} is not a commit"
    text = f"it is of the commit {commit[:12]}, and the newest receipt of {newest.commit[:12]}"
    yield GateRule.COMMIT, whole and commit != newest.commit, text
    dirty = kind.commit == "clean" and commit.endswith(DIRTY)
    yield GateRule.COMMIT, dirty, f"files differed from the commit {commit[:12]} when it ran"
    for rule, wanted, has, wants in (
        (GateRule.ENVIRONMENT, kind.environment, receipt.environment, newest.environment),
        (GateRule.IMAGE, kind.image, receipt.image_digest, newest.image_digest),
        (GateRule.LOCK, kind.lock, receipt.lock_hash, newest.lock_hash),
    ):
        text = (
            f"its {rule.value} is {has[:40] or 'not recorded'}, and that of the newest receipt {wants[:40] or 'none'}"
        )
        yield rule, wanted == "one" and (not has or has != wants), text


def _find_outcome(receipt: Receipt, rules: GateRules, counting: Mapping[str, Receipt]) -> Iterator[Finding]:
    outcome, unsupported = receipt.outcome, receipt.probe in rules.unsupported
    if outcome is Outcome.EXPECTED_UNSUPPORTED and not unsupported:
        text = f"it reports that {rules.target.id} does not support it, which {rules.kind.id} has no row for"
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
        if has_failed(retry):
            yield Reason(GateRule.CONTRADICTED, f"it was retried after a failure that is not the host's: {retry}")
        else:
            yield f"it was retried: {retry}"


def has_failed(retry: str) -> bool:
    """Whether what was retried is an outcome of the probe itself, not a fault of what it ran on."""
    said = retry.partition("; its last words: ")[0]  # what a job wrote last may be of anything
    return any(pattern.search(said) for pattern in (_FAILED, _NO_NUMBER, _NO_IMPORT))


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
    raised = root.failure.message if root.failure else ""
    kind = f"{root.failure.type}: {raised}" if root.failure else ""
    if any(_NO_IMPORT.search(text) for text in (root.reason, kind, *(check.detail for check in failed))):
        return True
    if any(check.name.endswith("finite") or _NO_NUMBER.search(check.detail) for check in failed):
        return True
    parts = (part for check in failed for part in check.parts if not part.passed)
    return any(part.name == "finite" or part.observed is None for part in parts) or bool(
        _NO_NUMBER.search(f"{root.reason} {raised}")
    )


def _find_compiles(receipt: Receipt, rules: GateRules) -> Iterator[Finding]:
    late = [row for row in receipt.jit.compiled if row.when == "after"]
    listed = Counter(row.library for row in late)  # training ranks are in the list alone
    after = {name: max(receipt.jit.after.get(name, 0), listed[name]) for name in receipt.jit.after.keys() | listed}
    if sum(after.values()) > rules.kind.jit_after:
        numbers = ", ".join(f"{name} {number}" for name, number in sorted(after.items()) if number > 0)
        kernels = ", ".join(sorted({row.kernel for row in late})[:3])
        which = f"{numbers} ({kernels})" if kernels else numbers
        yield Reason(GateRule.JIT, f"compiled after warm-up: {which}; at most {rules.kind.jit_after} may be")
    for library, why in sorted(receipt.jit.unwatched.items()):
        leave = next((row for row in rules.unwatched if row.library == library and _is_for(row.probes, receipt)), None)
        yield _allow(Reason(GateRule.UNWATCHED, f"compiles of {library} were not watched: {why}"), leave)
    if receipt.outcome.is_good and int(receipt.schema_id.rpartition("/")[2]) < 5:
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
            leave = next((row for row in rules.second_copies if _is_known(row, library, receipt)), None)
            yield _allow(Reason(GateRule.SECOND_COPY, text, component=library.name), leave)


def _is_known(row: SecondCopy, library: Library, receipt: Receipt) -> bool:
    """Every file fits a pattern of its own, and their versions are as the row says."""
    if row.library != library.name or not _is_for(row.probes, receipt) or len(row.files) != len(library.files):
        return False
    answers = {answer for answer in library.version.split(", ") if answer}
    left = list(library.files)
    for pattern in row.files:
        file = next((file for file in left if fnmatchcase(file, pattern)), None)
        if file is None:
            return False
        left.remove(file)
    return row.versions == ("unknown" if not answers else "one" if len(answers) == 1 else "differ")


def _find_fallbacks(receipt: Receipt, rules: GateRules) -> Iterator[Finding]:
    if receipt.requested == "native":  # what takes Transformer Engine there is refused where a receipt is read
        return
    shows = {row.claimed: {row.claimed, *row.observed} for row in rules.shows}
    for path in receipt.backends:
        known, ran = shows.get(path.claimed, {path.claimed}), set(path.observed)
        # What runs plain PyTorch beside its own backend fell back in part; a vendor's kernels call no such function.
        if path.requested == path.claimed and (not ran or (known & ran and not (PLAIN & ran) - known)):
            for row in rules.kernels:
                if row.observed in ran and _is_for(row.probes, receipt) and fnmatchcase(path.path, row.path):
                    yield f"{path.path} ran {', '.join(path.observed)}: {row.reason}"
            continue
        seen = f", and ran {', '.join(path.observed)}" if path.observed else ""
        text = f"{path.path} requested {path.requested}, reports {path.claimed or 'nothing'}{seen}"
        leave = next((row for row in rules.fallbacks if _is_for(row.probes, receipt) and _falls(row, path)), None)
        yield _allow(Reason(GateRule.FALLBACK, text), leave)


def _falls(row: Fallback, path: Backend) -> bool:
    same = (row.requested, row.claimed, tuple(row.observed)) == (path.requested, path.claimed, path.observed)
    return same and fnmatchcase(path.path, row.path)


def _allow(reason: Reason, leave: SecondCopy | Fallback | object | None) -> Finding:
    """The reason, or a warning where a row of the rules lets it pass."""
    return reason if leave is None else f"{reason.text}. The rules allow it: {getattr(leave, 'reason', '')}"


def _is_for(probes: Sequence[str], receipt: Receipt) -> bool:
    return not probes or receipt.probe in probes
