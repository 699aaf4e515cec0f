"""One receipt in words, and the receipts of a cell over runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ...diagnosis.next_steps import second_copies
from ...evidence.history import HistoryResult, HistoryRow
from ...evidence.receipt import Backend, Check, Machine, Outcome, Part, Receipt, read_time
from ...text import count, first_sentence
from ..document import Block, Bullets, Content, Diagnostic, Document, Heading, Table
from ..marks import Mark, bad, good, mark_of, missing, quiet

_OF_THE_BOUND: Final = "bound-discriminates"  # this part says how tight the bound is, not how far the tensor is off
_MOST_FAILED: Final = 12  # checks of one cell that are listed by name
# How a cell is run again, by how its probe begins.
_VERBS: Final = {"fp8_": "fp8 --probes", "smoke_": "moe-smoke --cells"}
_COLUMNS: Final = ("run", "outcome", "started", "commit", "stack", "total s", "probe s", "peak MiB", "late")
_FEW: Final = 4  # cells whose history is shown in rows


def describe_receipt(receipt: Receipt, *, group: str = "") -> Diagnostic:
    """One cell: why, the checks that failed, what fell back, the next step; the traceback as output.

    Args:
        group: what the cell belongs to.
    """
    failed, failure = find_failed(receipt), receipt.failure
    more = f"{len(failed) - _MOST_FAILED} more failed checks" if failed[_MOST_FAILED:] else ""
    fields: tuple[tuple[str, Content], ...] = (
        ("raised at", f"`{failure.frame}`" if failure and failure.frame else ""),
        ("out", (*map(describe_check, failed[:_MOST_FAILED]), more)),
        ("fell back", tuple(map(_describe_fallback, find_fallbacks(receipt)))),
    )
    return Diagnostic(
        receipt.probe, mark_of(receipt.outcome), group, find_cause(receipt), fields, _find_next_step(receipt),
        output=failure.traceback if failure else "", seconds=receipt.seconds.get("total", 0.0),
    )  # fmt: skip


def describe_check(check: Check) -> str:
    """A check that failed: the parts that are out of bounds, with what was observed and allowed."""
    parts = (
        f"{part.name} {_show_number(part.observed)}, {_show_bound(part)} = {part.derivation}"
        for part in check.parts
        if not part.passed
    )
    return "; ".join(filter(None, (f"`{check.name}`", *parts, check.detail)))


def tabulate_checks(checks: Iterable[Check]) -> Table:
    """A row a part: check, part, observed, bound, and where the bound comes from."""
    rows = []
    for check in checks:
        for part in check.parts:
            seen = (part.name, _show_number(part.observed), _show_bound(part), part.derivation)
            rows.append((good("held") if part.passed else bad("out"), f"`{check.name}`", *seen))
        if check.detail or not check.parts:
            rows.append((good("held") if check.passed else bad("out"), f"`{check.name}`", "", check.detail, "", ""))
    return Table(("", "check", "part", "observed", "bound", "where the bound comes from"), tuple(rows))


def show_worst(receipt: Receipt) -> str:
    """The largest observed / bound of all parts; empty where nothing was measured against a bound."""
    ratios = [_ratio(part) for check in receipt.checks for part in check.parts if part.name != _OF_THE_BOUND]
    return f"{max(ratios):.2f}" if ratios else ""


def find_failed(receipt: Receipt) -> tuple[Check, ...]:
    """Checks that did not pass."""
    return tuple(check for check in receipt.checks if not check.passed)


def find_fallbacks(receipt: Receipt) -> tuple[Backend, ...]:
    """Paths that took something else than what was requested; of native paths, those whose check says so."""
    failed = tuple(check.name for check in find_failed(receipt))
    return tuple(
        backend
        for backend in receipt.backends
        if (receipt.requested != "native" and backend.requested != backend.claimed)
        or any(name.endswith(f"{backend.path}.backend") for name in failed)
    )


def _describe_fallback(backend: Backend) -> str:
    seen = f", seen {', '.join(backend.observed)}" if backend.observed else ""
    reasons = "; ".join(backend.reasons) or "no reason was recorded"
    return f"`{backend.path}`: requested {backend.requested}, took {backend.claimed or 'nothing'}{seen}. {reasons}"


def find_cause(receipt: Receipt) -> str:
    """Why a cell is not good, without the next step."""
    return receipt.reason.partition(" Next step:")[0]


def find_doubles(receipts: Iterable[Receipt]) -> tuple[str, ...]:
    """Packages and libraries of which a process saw more than one copy, each once."""
    copies = dict.fromkeys(copy for receipt in receipts for copy in second_copies(receipt))
    return tuple(f"{copy.name} has a second copy: {', '.join((copy.kept, *copy.others))}." for copy in copies)


def describe_machine(machine: Machine) -> str:
    """Where a cell ran, in one line."""
    gpu = f"{machine.gpu} (compute capability {machine.capability})" if machine.gpu else ""
    named = {"driver": machine.driver, "CUDA": machine.cuda, "torch": machine.torch, "Python": machine.python}
    parts = [gpu, *(f"{name} {value}" for name, value in named.items() if value)]
    return ", ".join(filter(None, parts)) or "no machine: nothing ran"


def split_reason(reason: str) -> tuple[str, str]:
    """The likely cause and the next step that a reason of the bridge names; its first sentence where it names none."""
    line = " ".join(reason.split())
    cause = re.search(r"Likely cause: (.+?)\.?(?= Next step:| Found:|$)", line)
    step = re.search(r"Next step: (.+?)\.?(?= Found:|$)", line)
    return cause[1] if cause else first_sentence(line), step[1] if step else ""


def _find_next_step(receipt: Receipt) -> str:
    """What to do about a cell that is not good; empty where it is good."""
    named = split_reason(receipt.reason)[1]
    where = receipt.failure.frame if receipt.failure and receipt.failure.frame else "the traceback"
    steps = {
        Outcome.FAIL: _next_step_of_failure(receipt),
        Outcome.ERROR: f"look at {where}; `{receipt.cell}.log` has what was printed",
        Outcome.IMPORT_ERROR: named or f"import it by hand; `{receipt.cell}.log` has what was printed",
        Outcome.BLOCKED: f"fix `{receipt.blocked_by}` first",
        Outcome.TIMEOUT: "look at where it hung; raise --limit if it is only slow",
        Outcome.NOT_RUN: named or "run it on the target",
    }
    return steps.get(receipt.outcome, "")


def _next_step_of_failure(receipt: Receipt) -> str:
    if find_fallbacks(receipt):
        return "fix what the reasons name, or turn the feature's flag off where the native path is wanted"
    verb = next((found for start, found in _VERBS.items() if receipt.probe.startswith(start)), "parity --probes")
    again = f"megacpp-validate {verb} {receipt.probe} --target {receipt.target} --seed {receipt.seed}"
    native = ""
    if receipt.requested == "te" and verb.startswith("parity"):
        native = f"; if it holds with `MEGACPP_DISABLE_TE=1`, {receipt.stack} computes wrong values"
    return f"run `{again} --verbose`: the same seed gives the same numbers; look at that check{native}"


def _ratio(part: Part) -> float:
    if part.observed is None or part.bound is None:
        return 0.0 if part.passed else math.inf
    over, under = (part.bound, part.observed) if part.at_least else (part.observed, part.bound)
    return over / under if under else (0.0 if over == 0.0 and not part.at_least else math.inf)


def _show_bound(part: Part) -> str:
    return f"{'at least' if part.at_least else 'at most'} {_show_number(part.bound)}"


def _show_number(value: float | None) -> str:
    """A number with four digits."""
    return "not a number" if value is None else f"{value:.4g}"


def describe_history(result: HistoryResult, *, last: int = 20, verbose: bool = False) -> Document:
    """A table of cells; few cells row by row, too.

    Args:
        last: newest rows of each cell that are shown; 0 for all.
        verbose: every cell row by row.
    """
    cells = result.cells
    blocks: list[Block] = [
        Table(("cell", "last", "good", "newest"), tuple(_summarize_cell(*one) for one in cells.items()))
    ]
    for cell, kept in cells.items() if verbose or len(cells) <= _FEW else ():
        blocks += [Heading(cell), *describe_rows(kept[-last:] if last else kept)]
    blocks.append(Bullets(tuple(f"{path} is not a valid receipt: {why}" for path, why in result.unreadable.items())))
    mark = missing("unreadable") if result.exit else quiet("history")
    summary = (
        f"{result.store}: {count(result.receipts, 'receipt')} in {count(result.runs, 'run')}, "
        f"{count(result.unreadable, 'unreadable file')}; {count(cells, 'cell')} named {', '.join(result.asked) or '*'}."
    )
    return Document("History of cells", summary, mark, tuple(blocks))


def describe_rows(shown: Sequence[HistoryRow]) -> Iterator[Block]:
    """A table of receipts without the columns that hold nothing, and what is odd about them."""
    rows: list[tuple[str | Mark, ...]] = [(row.run, _mark_row(row), *_list_numbers(row)) for row in shown]
    kept = [n for n in range(len(_COLUMNS)) if any(row[n] for row in rows)]
    numeric = frozenset(place for place, n in enumerate(kept) if n >= 5)
    cells = tuple(tuple(row[n] for n in kept) for row in rows)
    yield Table(tuple(_COLUMNS[n] for n in kept), cells, numeric=numeric)
    yield Bullets(tuple(f"{row.run}: {note}" for row in shown for note in _list_notes(row)))


def _mark_row(row: HistoryRow) -> Mark:
    if row.outcome is None:
        return missing("unreadable")
    return quiet("only timed") if row.only_timed else mark_of(row.outcome)


def _summarize_cell(cell: str, rows: Sequence[HistoryRow]) -> tuple[str, Mark, str, str]:
    """Name, mark and day of the newest row that judged the cell and has a time; good rows."""
    judged = [row for row in rows if not row.only_timed]
    dated = [row for row in judged if row.outcome is not None and read_time(row.started)]
    passed = sum(row.outcome is not None and row.outcome.is_good for row in judged)
    mark = _mark_row(dated[-1]) if dated else missing("unknown")
    return cell, mark, f"{passed} of {len(judged)}", dated[-1].started[:10] if dated else ""


def _list_numbers(row: HistoryRow) -> tuple[str, ...]:
    numbers = (row.seconds.get("total"), row.seconds.get("probe"), row.peak_memory_mib or None)
    shown = ("" if value is None else f"{value:.4g}" for value in numbers)
    started = row.started[:16].replace("T", " ")
    return started, row.commit[:8], row.environment[:8], *shown, str(sum(row.after.values()) or "")


def _list_notes(row: HistoryRow) -> Iterator[str]:
    if row.outcome is not None and not row.outcome.is_good and row.reason:
        yield row.reason
    if row.only_timed:
        yield "the module was timed again and not judged; this receipt counts for no rate"
    if row.same_as:
        yield f"a copy of {row.same_as}, which is not evidence of its own"
