"""What a report site is written from, read from a folder: rows of the index, results of verbs, gate decisions."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

from pydantic import ValidationError

from ...canary.dynamic.score import Evidence, Rate, SuiteScore, score_selftest
from ...canary.dynamic.slowdown import CardNoise, compare_timings, measure_noise
from ...canary.dynamic.step import StackReceipts, compare_stacks
from ...canary.dynamic.upgrade_result import StepResult
from ...catalog.bridge import Catalog
from ...catalog.needs import Needs
from ...environments.stacks import AGAIN
from ...evidence.history import HistoryRow, list_rows
from ...evidence.receipt import Outcome, Receipt
from ...evidence.receipts_manifest import hash_manifest
from ...evidence.release_gate import GateDecision
from ...evidence.selftest import SelftestResult
from ...evidence.store import ReceiptInvalid, read_receipt, read_store
from ...report import machine
from ...report.results import Result
from ...report.site.score_words import say_partly
from ...report.site.values import SiteRow, read_instant
from ...report.site.whole import StackSeen

_SCORE: Final = "megacpp-validate/score/1"
_LARGEST: Final = 16 << 20  # bytes; the largest result of a verb that was seen has less than one


class DecisionInvalid(ValueError):
    """A file that is no decision of the release gate."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(
            f"{file} is no decision of the release gate: {reason}. Likely cause: it is told in another form, or was "
            "cut short. Next step: write it again with `release-gate --format json --output FILE`."
        )


def read_rows(store: Path) -> tuple[list[SiteRow], dict[str, str], dict[str, list[str]]]:
    """Every receipt of a store in a row; files that are none with why; and those files by the cell that they name.

    Args:
        store: the folder.

    Raises:
        OSError: the store cannot be looked into.
    """
    found = list_rows(read_store(store))
    unreadable = {row.path: row.fault for row in found if row.outcome is None}
    by_cell: dict[str, list[str]] = {}
    for row in found:
        if row.outcome is None and row.cell:
            by_cell.setdefault(row.cell, []).append(row.path)
    return [made for row in found if (made := _row(row)) is not None], unreadable, by_cell


def read_results(store: Path, known: Iterable[str]) -> tuple[dict[str, str], dict[str, Result | SuiteScore]]:
    """Results of verbs that lie beside receipts: file below the store -> schema, and those that this tool reads.

    Args:
        store: the folder.
        known: files below it that are receipts, or should be.
    """
    receipts = set(known)
    results: dict[str, str] = {}
    read: dict[str, Result | SuiteScore] = {}
    for name in sorted(one.file for one in read_store(store).files if one.sha256):
        path = store / name
        if name in receipts:
            continue
        try:
            text = path.read_bytes() if path.stat().st_size <= _LARGEST else b""
            data = json.loads(text)
        except (OSError, ValueError, RecursionError):
            continue  # the index has it among the unreadable, if it says that it is a receipt
        schema = data.get("schema_id") if isinstance(data, dict) else None
        if not (isinstance(schema, str) and schema.startswith("megacpp-validate/")):
            continue  # a cache of kernels has thousands
        results[name] = schema
        with suppress(
            ValueError, TypeError, AttributeError, ArithmeticError, RecursionError
        ):  # of another version, or none that is told
            made = SuiteScore.model_validate(data) if schema == _SCORE else machine.read_json(text.decode())
            if isinstance(made, SelftestResult):
                score_selftest(made, Evidence(source=name))  # its numbers can contradict each other
            read[name] = made
    return results, read


def find_scores(read: Mapping[str, Result | SuiteScore]) -> dict[str, SelftestResult]:
    """Kill tables by file, the one that was finished last first."""
    tables = {file: result for file, result in read.items() if isinstance(result, SelftestResult)}
    return dict(sorted(tables.items(), key=lambda item: read_instant(item[1].finished_at), reverse=True))


def find_rates(read: Mapping[str, Result | SuiteScore], mutants: Collection[str], made_at: str) -> tuple[Rate, ...]:
    """The suite's score: as it was published last, and of the newest kill table of all mutants.

    A published rate gives way to that of the table, unless it is known to be of a later run: what was good once says
    nothing of what a selftest showed since. Only where nothing was published, and there is no table of all mutants, is
    it of the newest one of some, which the pages say.

    Args:
        read: results by file.
        mutants: ids of all of the matrix.
        made_at: the report's clock: what is said to come after it is later than nothing.
    """
    published = _find_published(read)
    tables = sorted(find_scores(read).items(), key=lambda item: bool(say_partly(item[1], mutants)))
    if published and tables and say_partly(tables[0][1], mutants):
        return published
    seen = {rate.id: rate for file, table in tables[:1] for rate in score_selftest(table, Evidence(source=file))}
    if any(rate.day <= made_at[:10] and _is_later(rate, seen[rate.id]) for rate in published if rate.id in seen):
        return published
    if all(_counts(seen.get(rate.id, rate)) == _counts(rate) for rate in published):
        # The same counts of the same day: its source is then the one that was published.
        seen |= {rate.id: rate for rate in published if rate.id in seen and rate.day == seen[rate.id].day}
    return (*seen.values(), *(rate for rate in published if rate.id not in seen))


def find_outdated(read: Mapping[str, Result | SuiteScore], rates: Iterable[Rate]) -> tuple[Rate, ...]:
    """Rates as they were published last that give way to others in `rates`, see `find_rates`."""
    shown = {rate.id: _counts(rate) for rate in rates}
    return tuple(rate for rate in _find_published(read) if shown[rate.id] != _counts(rate))


def _find_published(read: Mapping[str, Result | SuiteScore]) -> tuple[Rate, ...]:
    published = [result for result in read.values() if isinstance(result, SuiteScore)]
    return (
        max(published, key=lambda score: max((rate.day for rate in score.rates), default="")).rates if published else ()
    )


def _is_later(rate: Rate, seen: Rate) -> bool:
    """Whether a rate is known to be of a later run; the day of a commit is only the last day that it can be."""
    return rate.day_of == "run" and bool(seen.day) and rate.day > seen.day


def _counts(rate: Rate) -> tuple[int, int]:
    return rate.hits, rate.trials


def find_lost_rows(
    rows: Iterable[SiteRow], by_cell: Mapping[str, Sequence[str]], targets: Iterable[str]
) -> Iterator[SiteRow]:
    """A row for each cell of which there are only files that are no receipts: what is lost is shown, and not absent.

    Args:
        rows: of the receipts.
        by_cell: files by the cell that they name.
        targets: of the matrix; those of `rows` are known too.
    """
    rows = list(rows)
    known = {row.cell for row in rows}
    # A target's name may end with that of another one: the longest is meant.
    names = sorted({*targets, *(row.target for row in rows)}, key=lambda name: (-len(name), name))
    for cell, files in by_cell.items():
        found = ((target, *cell.rpartition(f"-{target}-")) for target in names if cell not in known)
        for target, stack, _, probe in found:
            if stack and probe:
                yield SiteRow("", cell, stack, target, probe, Outcome.NOT_RUN, "", files[0], lost=True)
                break


def find_foreign(gates: Sequence[GateDecision], store: Path, files: Iterable[Path]) -> tuple[GateDecision, ...]:
    """Decisions that were made of other receipts than the store has, in itself or in a folder below it.

    Args:
        gates: the decisions.
        store: the folder.
        files: of the decisions themselves, which may lie in it.

    Raises:
        OSError: the store cannot be looked into.
    """
    if not gates:
        return ()
    own = {file.resolve() for file in files}
    folders: dict[str, dict[str, str]] = {}
    for file, sha256 in read_store(store).hashes.items():
        if (store / file).resolve() in own:
            continue
        for folder in PurePosixPath(file).parents:
            below = file if str(folder) == "." else file.removeprefix(f"{folder}/")
            folders.setdefault(str(folder), {})[below] = sha256
    known = {hash_manifest(hashes) for hashes in folders.values()}
    return tuple(gate for gate in gates if gate.receipts_sha256 not in known)


def read_decisions(files: Sequence[Path]) -> tuple[GateDecision, ...]:
    """Decisions of the release gate.

    Raises:
        DecisionInvalid: a file is none.
    """
    decisions = []
    for file in files:
        try:
            decisions.append(GateDecision.model_validate_json(file.read_bytes()))
        except OSError as fault:
            raise DecisionInvalid(file, f"it cannot be read: {fault.strerror or fault}") from fault
        except ValidationError as fault:
            said = (f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in fault.errors()[:5])
            raise DecisionInvalid(file, "; ".join(said)) from fault
    return tuple(decisions)


class Judge:
    """The step between two stacks, held against the noise of the card where a stack was timed twice in one run."""

    def __init__(self, catalog: Catalog, needs: Needs, rows: Sequence[SiteRow], store: Path) -> None:
        self._catalog = catalog
        self._needs = needs
        self._rows = rows
        self._store = store
        self._noise: dict[str, CardNoise] = {}

    def __call__(self, target: str, older: StackSeen, newer: StackSeen) -> StepResult:
        """See `compare_stacks`."""
        if target not in self._noise:
            self._noise[target] = self._measure(target)
        before, after = (
            StackReceipts(side.stack, tuple(side.receipts.values()), side.unreadable) for side in (older, newer)
        )
        timings = compare_timings(older.receipts, newer.receipts, self._noise[target])
        return compare_stacks(before, after, self._catalog.modules, timings, target=target, needs=self._needs)

    def _measure(self, target: str) -> CardNoise:
        """From the newest run that was timed again: the run, and its folder `again`."""
        of_target = [row for row in self._rows if row.target == target]
        known = {(row.run, row.probe): row.sha256 for row in of_target}
        # A copy of the first run, in the place of a second one, would show a card without any noise.
        twice = [
            row for row in of_target if _is_again(row.run) and known.get((_first(row.run), row.probe)) != row.sha256
        ]
        newest = max(twice, key=lambda row: (row.at, row.run), default=None)
        if newest is None:
            return measure_noise({}, {})
        sides = (of_target, _first(newest.run)), (twice, newest.run)
        return measure_noise(*(self._read_run(*side) for side in sides))

    def _read_run(self, rows: Iterable[SiteRow], run: str) -> dict[str, Receipt]:
        read = {row.probe: self._read(row) for row in rows if row.run == run}
        return {probe: receipt for probe, receipt in read.items() if receipt is not None}

    def _read(self, row: SiteRow) -> Receipt | None:
        try:
            return read_receipt(self._store / row.path)
        except ReceiptInvalid:
            return None


def _is_again(run: str) -> bool:
    return run.rpartition("/")[2] == AGAIN


def _first(run: str) -> str:
    """The run that another one timed again."""
    return run.rpartition("/")[0] or "."


def _row(row: HistoryRow) -> SiteRow | None:
    if row.outcome is None:
        return None
    return SiteRow(
        run=row.run,
        cell=row.cell,
        stack=row.stack,
        target=row.target,
        probe=row.probe,
        outcome=row.outcome,
        started=row.started,
        path=row.path,
        sha256=row.sha256,
        commit=row.commit,
        image_digest=row.image_digest,
        lock_hash=row.lock_hash,
        seconds=row.seconds_total,
        probe_seconds=row.seconds_probe,
        step_seconds=row.step_seconds,
        peak_memory_mib=row.peak_memory_mib or None,
        compiles_after=row.compiles_after,
        only_times=row.only_timed or _is_again(row.run),
        same_as=row.same_as,
        contradicts=row.contradicts,
    )
