"""What no probe writes: a good outcome over a bad check, a cell under another name, a median of other rounds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from .receipt import READABLE, SCHEMA_ID, Check, Outcome, Part, Receipt, cell_id
from .training import find_record_faults

# `probes.stopwatch.new_timing` rounds to 1e-6 ms: each round errs by half of that, and so does the median of those
# before they were rounded. The mean of the two rounds in the middle of an even number is rounded once more in fp64.
_ROUNDED_MS: Final = 1e-6
_RELATIVE: Final = 2.0**-50


def find_contradictions(receipt: Receipt, path: Path) -> Iterator[str]:
    """Everything in a receipt that cannot be true of one cell, in words."""
    if receipt.schema_id not in READABLE:
        yield f"schema_id is {receipt.schema_id!r} instead of {SCHEMA_ID!r}"
    if receipt.cell != cell_id(receipt.stack, receipt.target, receipt.probe):
        yield f"cell {receipt.cell!r} is not stack, target and probe joined"
    if path.stem != receipt.cell:
        yield f"it holds the cell {receipt.cell!r}, which its name does not say"
    failed = [check.name for check in receipt.checks if not check.passed]
    if receipt.outcome.is_good and (failed or not receipt.checks):
        yield f"outcome {receipt.outcome} with {'the failed check ' + failed[0] if failed else 'no check at all'}"
    if receipt.outcome.is_good and receipt.failure is not None:
        yield f"outcome {receipt.outcome} over the failure {receipt.failure.type}"
    if receipt.outcome.is_good and receipt.blocked_by:
        yield f"outcome {receipt.outcome}, and blocked by {receipt.blocked_by}"
    if receipt.outcome is Outcome.FAIL and not failed:
        yield "outcome fail without a failed check"
    if receipt.outcome is Outcome.BLOCKED and not receipt.blocked_by:
        yield "outcome blocked, and not by which cell"
    yield from _find_impossible_numbers(receipt)
    for check in receipt.checks:
        yield from _find_false_verdicts(check)
    for record in receipt.training:
        yield from find_record_faults(record)
    if receipt.outcome is Outcome.PASS:
        yield from _find_false_backends(receipt)


def _find_impossible_numbers(receipt: Receipt) -> Iterator[str]:
    """Counts, times and sizes below nothing, and what is loaded listed twice: it has one entry, with all files."""
    for where in ("warm_up", "after", "hits"):
        counts: dict[str, int] = getattr(receipt.jit, where)
        yield from (f"jit.{where} counts {number} of {name}" for name, number in counts.items() if number < 0)
    if receipt.peak_memory_mib < 0:
        yield f"a peak memory of {receipt.peak_memory_mib:g} MiB"
    yield from (f"seconds.{phase} is {seconds:g}" for phase, seconds in receipt.seconds.items() if seconds < 0)
    yield from _find_timing_faults(receipt)
    for kind, rows in (("library", receipt.libraries), ("package", receipt.packages)):
        listed = Counter(row.name for row in rows)
        yield from (f"the {kind} {name} is listed {times} times" for name, times in listed.items() if times > 1)


def _find_timing_faults(receipt: Receipt) -> Iterator[str]:
    """Medians that are not those of their rounds, and what is timed twice by one clock: nobody knows which counts."""
    met: set[tuple[str, str]] = set()
    for row in receipt.timings:
        if (row.name, row.clock) in met:
            yield f"{row.name} is timed twice by {row.clock}"
        met.add((row.name, row.clock))
        median = statistics.median(row.rounds_ms) if row.rounds_ms else 0.0
        if not row.rounds_ms or abs(median - row.median_ms) > _ROUNDED_MS + _RELATIVE * abs(median):
            yield (
                f"{row.name}: median_ms is {row.median_ms:g}, and the median of its {len(row.rounds_ms)} rounds is "
                f"{median:g}"
            )


def _find_false_verdicts(check: Check) -> Iterator[str]:
    """Verdicts that are not those of the numbers beside them, as `probes.bounds` decides them."""
    bad = [part.name for part in check.parts if not part.passed]
    if check.passed and bad:
        yield f"check {check.name} passed over its part {bad[0]}, which did not"
    for part in check.parts:
        if part.observed is None or part.bound is None:
            # NaN, or Inf in both: where the check failed its other parts tell, and a floor holds for Inf.
            if check.passed:
                yield f"check {check.name} passed over its part {part.name}, which has no number"
        elif part.name == "relative-error" and part.bound >= 1.0:
            yield f"check {check.name}: its bound {part.bound:g} of a relative error lets zeros pass"
        elif part.name == "relative-error" and part.observed < 0.0:
            yield f"check {check.name}: a relative error of {part.observed:g}"
        elif part.passed is not _holds(part, part.observed, part.bound):
            verb, side = ("passed", "beyond") if part.passed else ("failed", "within")
            yield (
                f"check {check.name}: its part {part.name} {verb}, and {part.observed:g} is {side} its "
                f"{'floor' if part.at_least else 'bound'} {part.bound:g}"
            )


def _holds(part: Part, observed: float, bound: float) -> bool:
    return observed >= bound if part.at_least else observed <= bound


def _find_false_backends(receipt: Receipt) -> Iterator[str]:
    """Paths that took another side than was asked for, in a cell that passed: `Bench.ran_on` fails those."""
    looked = [check.name for check in receipt.checks if check.name.endswith(".backend")]
    if looked and not receipt.backends:
        yield f"{len(looked)} checks of the path that was taken, the first is {looked[0]}, and no path is on record"
    for row in receipt.backends:
        shown = f"claims {row.claimed or 'nothing'} and shows {', '.join(row.observed) or 'nothing'}"
        if row.requested == "te" and not (row.claimed == "te" and "te" in row.observed):
            yield f"outcome pass, and the path {row.path} asked for te, {shown}"
        if "native" in row.observed and len(row.observed) > 1:
            yield f"the path {row.path} {shown}: native is what shows where nothing else does"
        if receipt.requested == "native" and "te" in (row.requested, row.claimed, *row.observed):
            yield f"outcome pass where native was requested, and the path {row.path} asked for {row.requested}, {shown}"
