"""What a report site is written from, read from a folder: rows of the index, results of verbs, gate decisions."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from ..canary.dynamic.slowdown import CardNoise, compare_timings, measure_noise
from ..canary.dynamic.step import StackReceipts, compare_stacks
from ..catalog import Catalog
from ..catalog_needs import Needs
from ..environments.stacks import AGAIN
from ..evidence.history import HistoryRow
from ..evidence.index import read_store
from ..evidence.receipt import Receipt
from ..evidence.release_gate import GateDecision
from ..evidence.results import Result
from ..evidence.score import Evidence, Rate, SuiteScore, score_selftest
from ..evidence.selftest import SelftestResult
from ..evidence.store import ReceiptInvalid, read_receipt
from ..evidence.upgrade import StepResult
from ..report import machine
from ..report.site import StackSeen
from ..report.site_values import SiteRow
from .history_runs import find_database

_SCORE: Final = "megacpp-validate/score/1"
_LARGEST: Final = 16 << 20  # bytes; the largest result of a verb that was seen has less than one


class DecisionInvalid(ValueError):
    """A file that is no decision of the release gate."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(
            f"{file} is no decision of the release gate: {reason}. Likely cause: it is told in another form, or was "
            "cut short. Next step: write it again with `release-gate --format json --output FILE`."
        )


def read_rows(store: Path, database: Path | None) -> tuple[list[SiteRow], dict[str, str], dict[str, list[str]]]:
    """Every receipt of a store in a row; files that are none with why; and those files by the cell that they name.

    Args:
        store: the folder.
        database: of its index, which is brought up to the files; in the user's cache without it.

    Raises:
        OSError: the store cannot be looked into.
    """
    index, _ = read_store(store, database or find_database(store))
    found = index.rows()
    index.close()
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
    for path in _list_files(store):
        name = str(path.relative_to(store))
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
        with suppress(ValueError, TypeError, AttributeError):  # of another version, or none that is told
            read[name] = SuiteScore.model_validate(data) if schema == _SCORE else machine.read_json(text.decode())
    return results, read


def find_rates(read: Mapping[str, Result | SuiteScore]) -> tuple[Rate, ...]:
    """The suite's score as it is published; of the kill table where there is none."""
    for result in read.values():
        if isinstance(result, SuiteScore):
            return result.rates
    tables = [(file, result) for file, result in read.items() if isinstance(result, SelftestResult)]
    return tuple(rate for file, table in tables[:1] for rate in score_selftest(table, Evidence(source=file)))


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
        twice = [row for row in of_target if row.only_times]
        newest = max(twice, key=lambda row: (row.started, row.run), default=None)
        if newest is None:
            return measure_noise({}, {})
        first = newest.run.rpartition("/")[0] or "."
        runs = [
            {row.probe: receipt for row in of_target if row.run == run and (receipt := self._read(row)) is not None}
            for run in (first, newest.run)
        ]
        return measure_noise(*runs)

    def _read(self, row: SiteRow) -> Receipt | None:
        try:
            return read_receipt(self._store / row.path)
        except ReceiptInvalid:
            return None


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
        only_times=row.run.rpartition("/")[2] == AGAIN,
        contradicts=row.contradicts,
    )


def _list_files(store: Path) -> Iterator[Path]:
    """Files as the index finds them: no links, and nothing whose name begins with a dot."""
    for place, folders, names in os.walk(store):
        folder = Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not (folder / name).is_symlink())
        for name in sorted(names):
            path = folder / name
            if name.endswith(".json") and not name.startswith(".") and not path.is_symlink():
                yield path
