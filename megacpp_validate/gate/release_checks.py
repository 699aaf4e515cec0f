"""What one receipt that counts is held to, by itself and beside the others of its release. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Final

from ..catalog.gate import IMPORTS, PLAIN, Fallback, GateRules, SecondCopy
from ..diagnosis.host_faults import find_host_fault
from ..evidence.receipt import Backend, Library, Outcome, Receipt
from ..evidence.receipt_time import read_time
from ..evidence.release_gate import GateRule
from .release_asked import DIRTY, Asked, Reason

_OLDEST: Final = datetime.min.replace(tzinfo=UTC)
_HARD: Final = (Outcome.BLOCKED, Outcome.IMPORT_ERROR, Outcome.NOT_RUN)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(-dirty)?")
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
_RELEASE: Final = re.compile(r"te(\d+(?:\.\d+)+.*)")  # what a stack is called after


@dataclass(frozen=True)
class Bound:
    """What every receipt of one release must carry: of the newest of them, where nothing else was asked for."""

    commit: str
    environment: str
    image: str
    lock: str
    gpu: str = ""
    driver: str = ""
    torch: str = ""


Found = Reason | str
"""A reason, or a warning."""


def find_faults(
    receipt: Receipt, rules: GateRules, asked: Asked, bound: Bound, counting: Mapping[str, Receipt]
) -> Iterator[Found]:
    """Everything that the rules refuse of a receipt, and what they let pass as a warning.

    Args:
        counting: every receipt that counts, by cell: what blocks one may be another.
    """
    yield from _find_binding(receipt, rules, asked, bound)
    yield from _find_outcome(receipt, rules, counting)
    for look in _LOOKS:
        yield from look(receipt, rules)


def read_bound(receipts: Mapping[str, Receipt]) -> Bound:
    """Of the newest receipt; of several of one second, the last by cell."""
    newest = max(receipts.values(), key=lambda each: (read_time(each.started) or _OLDEST, each.cell), default=None)
    if newest is None:
        return Bound("", "", "", "")
    machine = newest.machine
    return Bound(
        newest.commit,
        newest.environment,
        newest.image_digest,
        newest.lock_hash,
        machine.gpu,
        machine.driver,
        machine.torch,
    )


def _find_binding(receipt: Receipt, rules: GateRules, asked: Asked, bound: Bound) -> Iterator[Found]:
    """Whether it is about what is judged, and young enough."""
    kind = rules.kind
    started = read_time(receipt.started) or _OLDEST
    if (age := asked.at - started) > timedelta(days=kind.max_age_days):
        yield Reason(GateRule.AGE, f"it is {age.days} days old, and {kind.max_age_days} days are the most")
    number = int(receipt.schema_id.rpartition("/")[2])
    if number < kind.least_schema:
        yield Reason(
            GateRule.SCHEMA, f"its schema is {number}, and {kind.id} asks what {kind.least_schema} tells first"
        )
    if receipt.requested != rules.requested:
        yield Reason(GateRule.REQUESTED, f"it asked for {receipt.requested}, and {rules.requested} is judged")
    yield from _find_release(receipt, rules)
    yield from _find_machine(receipt, rules, bound)
    yield from _find_apart(receipt, rules, bound)


def _find_release(receipt: Receipt, rules: GateRules) -> Iterator[Found]:
    """A stack that says one release in its name and loaded another is not that stack."""
    form = _RELEASE.fullmatch(receipt.stack)
    named = rules.stacks.get(receipt.stack) or (form[1] if form else "")  # a person's own name says none
    loaded = {row.version.partition("+")[0] for row in receipt.packages if row.name == "transformer_engine"}
    if receipt.requested == "te" and receipt.outcome is Outcome.PASS and not loaded:
        yield Reason(GateRule.STACK, "it is good, and Transformer Engine was not loaded")
    if receipt.requested == "te" and named and (other := sorted(loaded - {named})):
        yield Reason(
            GateRule.STACK, f"it loaded Transformer Engine {other[0] or 'of no version'}, and {named} is judged"
        )


def _find_machine(receipt: Receipt, rules: GateRules, bound: Bound) -> Iterator[Found]:
    """The architecture that is judged, and one kind of card, driver and torch: half of each proves neither."""
    arch, capability = rules.target.arch, receipt.machine.capability
    ran = f"sm_{capability.replace('.', '')}" if capability else ""
    if arch and ran != arch and (ran or receipt.outcome.is_good):
        seen = f"{receipt.machine.gpu or 'a GPU'} of {ran}" if ran else "no GPU"
        yield Reason(GateRule.TARGET, f"it ran on {seen}, and {rules.target.id} is {arch}")
    machine = receipt.machine
    if arch and machine.gpu and bound.gpu and machine.gpu != bound.gpu:
        yield Reason(GateRule.TARGET, f"it ran on {machine.gpu}, and the newest on {bound.gpu}")
    if rules.kind.environment != "one":
        return
    for what, has, wants in (("driver", machine.driver, bound.driver), ("torch", machine.torch, bound.torch)):
        if has and wants and has != wants:
            yield Reason(GateRule.ENVIRONMENT, f"it ran with the {what} {has}, and the newest with {wants}")


def _find_apart(receipt: Receipt, rules: GateRules, bound: Bound) -> Iterator[Found]:
    """Commit, environment, image and lock: there, and the same in all."""
    kind = rules.kind
    if not _COMMIT.fullmatch(receipt.commit):
        yield Reason(GateRule.COMMIT, f"it says {receipt.commit[:60]!r} where its commit belongs")
    elif receipt.commit != bound.commit:
        yield Reason(
            GateRule.COMMIT, f"it is of the commit {receipt.commit[:12]}, and the newest of {bound.commit[:12]}"
        )
    if kind.commit == "clean" and receipt.commit.endswith(DIRTY):
        yield Reason(GateRule.COMMIT, f"files differed from the commit {receipt.commit[:12]} when it ran")
    if kind.environment == "one" and not receipt.environment:
        yield Reason(GateRule.ENVIRONMENT, "it names no environment")
    elif kind.environment == "one" and receipt.environment != bound.environment:
        has, wants = receipt.environment[:12], bound.environment[:12] or "none"
        yield Reason(GateRule.ENVIRONMENT, f"it ran in the environment {has}, and the newest in {wants}")
    rows = (
        (GateRule.IMAGE, kind.image, "image", receipt.image_digest, bound.image),
        (GateRule.LOCK, kind.lock, "lock", receipt.lock_hash, bound.lock),
    )
    for rule, wanted, what, has, wants in rows:
        if wanted == "one" and not has:
            yield Reason(rule, f"it names no {what}")
        elif wanted == "one" and has != wants:
            yield Reason(rule, f"it is of the {what} {has}, and the newest of {wants}")


def _find_outcome(receipt: Receipt, rules: GateRules, counting: Mapping[str, Receipt]) -> Iterator[Found]:
    outcome = receipt.outcome
    if outcome is Outcome.EXPECTED_UNSUPPORTED and receipt.probe not in rules.unsupported:
        text = f"it says that {rules.target.id} does not support it, and {rules.kind.id} knows nothing of that"
        yield Reason(GateRule.OUTCOME, f"{text}: {receipt.reason}")
    elif outcome is Outcome.NOT_RUN:
        yield Reason(GateRule.NOT_RUN, f"it was not run: {receipt.reason}")
    elif fault := find_host_fault(find_root(receipt, counting) or receipt):
        text = f"{outcome.value} by a fault of the host, which says nothing of its module: {fault}: {receipt.reason}"
        yield Reason(GateRule.NOT_RUN, text, hard=True)
    elif outcome.value not in rules.kind.counts:
        yield Reason(GateRule.OUTCOME, f"{outcome.value}: {receipt.reason}", hard=is_hard(receipt, counting))
    if outcome is Outcome.PASS and receipt.probe in rules.unsupported:
        yield f"{rules.target.id} is said not to support it, and it passes: a surprise that the rules should know"
    for retry in receipt.retries:
        if has_failed(retry):
            yield Reason(GateRule.CONTRADICTED, f"it was retried after a failure, which is none of the host: {retry}")
        else:
            yield f"it was retried: {retry}"


def has_failed(retry: str) -> bool:
    """Whether what was retried is an outcome of the probe itself, not a fault of what it ran on."""
    said = retry.partition("; its last words: ")[0]  # what a job wrote last may be of anything
    return bool(_FAILED.search(said) or _NO_NUMBER.search(said) or _NO_IMPORT.search(said))


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
    return has_no_number(root) or cannot_import(root)


def cannot_import(receipt: Receipt) -> bool:
    """Whether what was raised, also within the probe or in a check that failed, is an import or a symbol not found."""
    failure = receipt.failure
    raised = f"{failure.type}: {failure.message}" if failure else ""
    said = (receipt.reason, raised, *(check.detail for check in receipt.checks if not check.passed))
    return any(_NO_IMPORT.search(text) for text in said)


def has_no_number(receipt: Receipt) -> bool:
    """Whether a check that failed saw NaN or Inf, or what was raised says so."""
    for check in receipt.checks:
        if check.passed:
            continue
        if check.name.endswith("finite") or _NO_NUMBER.search(check.detail):
            return True
        if any(part.name == "finite" or part.observed is None for part in check.parts if not part.passed):
            return True
    said = f"{receipt.reason} {receipt.failure.message if receipt.failure else ''}"
    return bool(_NO_NUMBER.search(said))


def _find_compiles(receipt: Receipt, rules: GateRules) -> Iterator[Found]:
    jit = receipt.jit
    after = {name: number for name, number in jit.after.items() if number > 0}
    listed: dict[str, int] = {}
    for row in jit.compiled:
        if row.when == "after":
            listed[row.library] = listed.get(row.library, 0) + 1
    for name, number in listed.items():  # training ranks are in the list alone
        after[name] = max(after.get(name, 0), number)
    if sum(after.values()) > rules.kind.jit_after:
        told = ", ".join(f"{name} {number}" for name, number in sorted(after.items()))
        kernels = sorted({row.kernel for row in jit.compiled if row.when == "after"})[:3]
        which = f" ({', '.join(kernels)})" if kernels else ""
        yield Reason(GateRule.JIT, f"compiled after warm-up: {told}{which}; at most {rules.kind.jit_after} may be")
    for library, why in sorted(jit.unwatched.items()):
        leave = next((row for row in rules.unwatched if row.library == library and _is_for(row.probes, receipt)), None)
        said = f"what {library} compiles was not watched: {why}"
        yield f"{said}. It may be so: {leave.reason}" if leave else Reason(GateRule.UNWATCHED, said)
    if receipt.outcome.is_good and int(receipt.schema_id.rpartition("/")[2]) < 5:
        yield "its schema does not tell which libraries were not watched while they compiled"


def _find_copies(receipt: Receipt, rules: GateRules) -> Iterator[Found]:
    for package in receipt.packages:
        if package.other_copies:
            others = ", ".join(package.other_copies)
            said = f"{package.name} was loaded from {package.file}, and is also at {others}"
            yield Reason(GateRule.SECOND_COPY, said, component=package.name)
    for library in receipt.libraries:
        if len(library.files) < 2:
            continue
        said = f"{library.name} is mapped from {' and '.join(library.files)}"
        said += f", which answer {library.version}" if library.version else ""
        leave = next((row for row in rules.second_copies if _is_known(row, library, receipt)), None)
        if leave is None:
            yield Reason(GateRule.SECOND_COPY, said, component=library.name)
        else:
            yield f"{said}. It may be so: {leave.reason}"


def _is_known(row: SecondCopy, library: Library, receipt: Receipt) -> bool:
    """Every file fits a pattern of its own, and they answer as the row says."""
    if row.library != library.name or not _is_for(row.probes, receipt) or len(row.files) != len(library.files):
        return False
    answers = [answer for answer in library.version.split(", ") if answer]
    versions = "unknown" if not answers else "one" if len(set(answers)) == 1 else "differ"
    left = list(library.files)
    for pattern in row.files:
        file = next((file for file in left if fnmatchcase(file, pattern)), None)
        if file is None:
            return False
        left.remove(file)
    return versions == row.versions


def _find_fallbacks(receipt: Receipt, rules: GateRules) -> Iterator[Found]:
    if receipt.requested == "native":  # what takes Transformer Engine there is refused where a receipt is read
        return
    shows = {row.claimed: {row.claimed, *row.observed} for row in rules.shows}
    for path in receipt.backends:
        known, ran = shows.get(path.claimed, {path.claimed}), set(path.observed)
        # What runs plain PyTorch beside its own backend fell back in part; a vendor's kernels call no such function.
        fits = not ran or (bool(known & ran) and not (PLAIN & ran) - known)
        if path.requested == path.claimed and fits:
            yield from _tell_kernels(path, receipt, rules)
            continue
        seen = f", and ran {', '.join(path.observed)}" if path.observed else ""
        said = f"{path.path} asked for {path.requested}, says {path.claimed or 'nothing'}{seen}"
        leave = next((row for row in rules.fallbacks if _is_for(row.probes, receipt) and _falls(row, path)), None)
        yield f"{said}. It may be so: {leave.reason}" if leave else Reason(GateRule.FALLBACK, said)


def _tell_kernels(path: Backend, receipt: Receipt, rules: GateRules) -> Iterator[Found]:
    for row in rules.kernels:
        if row.observed in path.observed and _is_for(row.probes, receipt) and fnmatchcase(path.path, row.path):
            yield f"{path.path} ran {', '.join(path.observed)}: {row.reason}"


def _falls(row: Fallback, path: Backend) -> bool:
    same = (row.requested, row.claimed, tuple(row.observed)) == (path.requested, path.claimed, path.observed)
    return same and fnmatchcase(path.path, row.path)


def _is_for(probes: list[str], receipt: Receipt) -> bool:
    return not probes or receipt.probe in probes


_LOOKS: Final[tuple[Callable[[Receipt, GateRules], Iterator[Found]], ...]] = (
    _find_compiles, _find_copies, _find_fallbacks,
)  # fmt: skip
