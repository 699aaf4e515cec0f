"""The page of one cell: its newest receipt in full, and every receipt of it in a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup, escape

from megacpp_validate.evidence.receipt import Check, Receipt

from ..drawings.step_times import draw_step_times
from ..html.pages import draw_breakable, draw_sentence
from ..marks import Mark
from ..summaries import count, first_sentence
from ..words.parity import find_failed
from ..words.smoke import HEADINGS, Trained, say_phases, say_row, say_state
from .losses import draw_losses
from .marks import mark_history
from .trends import find_trends
from .values import CellHistory

MOST_ROWS: Final = 200  # receipts of the history on its page, the newest; the verb `history` tells all
NO_NUMBER: Final = "–"  # noqa: RUF001 - a dash
_MOST_KERNELS: Final = 100
_MOST_FILES: Final = 5
_LONGEST: Final = 180  # characters of a reason in the answer; all of it stands below
_HELD: Final = Mark("✓", "-", "held", "good")
_OUT: Final = Mark("✗", "X", "out", "bad")


@dataclass(frozen=True)
class TrainedRun:
    """One training run as pages show it; `row` stands under `HEADINGS` from the second on."""

    cell: str
    stack: str
    target: str
    probe: str
    started: str
    mark: Mark
    name: str
    said: str
    state: str
    row: tuple[str, ...]
    losses: Markup
    times: Markup


def draw_trained(history: CellHistory, receipt: Receipt) -> tuple[TrainedRun, ...]:
    """Every training run of the newest receipt of a cell, drawn; it looks no better than the cell."""
    mark = mark_history(history)
    runs = []
    for record in receipt.training:
        row = say_row(Trained(receipt, record))[1:]
        told = "; ".join(f"{name} {value}" for name, value in zip(HEADINGS[1:], row, strict=True) if value)
        runs.append(
            TrainedRun(
                cell=receipt.cell,
                stack=receipt.stack,
                target=receipt.target,
                probe=receipt.probe,
                started=receipt.started,
                mark=mark,
                name=f"{record.name} of {receipt.cell}",
                said=f"Run {record.name}: {told}",
                state=f"Where the time of run {record.name} went: {say_phases(record)}. {say_state(record)}",
                row=row,
                losses=draw_losses(record),
                times=Markup(draw_step_times(record)),  # noqa: S704 - the drawing escapes what it shows
            )
        )
    return tuple(runs)


def cell_values(history: CellHistory, receipt: Receipt | None, trained: tuple[TrainedRun, ...]) -> dict[str, Any]:
    """What the template of a cell shows.

    Args:
        history: every receipt of the cell in a row.
        receipt: the newest, in full; None where its file can no longer be read.
        trained: its training runs.
    """
    mark = mark_history(history)
    values: dict[str, Any] = {
        "history": history,
        "receipt": receipt,
        "tone": "risk" if mark.tone == "quiet" and not history.newest.outcome.is_good else mark.tone,
        "said": _say(history, receipt),
        "trends": find_trends(history),
        "trained": trained,
        "most_rows": MOST_ROWS,
        "most_files": _MOST_FILES,
    }
    if values["tone"] == "quiet":
        values["tone"] = "good"
    if receipt is not None:
        failed = find_failed(receipt)
        values |= {
            "failed": draw_checks(failed),
            "held": draw_checks(check for check in receipt.checks if check.passed),
            "held_number": len(receipt.checks) - len(failed),
            "identity": _identity(history, receipt),
            "jit": _tell_jit(receipt),
        }
    return values


def draw_checks(checks: Iterable[Check]) -> Markup:
    """Rows of a table: a row a part, the name of the check in the first.

    The only rows of a site that no template makes: a store has ten thousands of them. Every text is escaped here.
    """
    return Markup("".join(row for check in checks for row in _draw_rows(check)))  # noqa: S704


def number(value: float | None) -> str:
    """A number as a table shows it; a dash where there is none."""
    return NO_NUMBER if value is None else f"{value:,.4g}"


def _draw_rows(check: Check) -> Iterator[str]:
    mark = _HELD if check.passed else _OUT
    head = (
        f'<td><span class="badge {mark.tone}"><span aria-hidden="true">{mark.symbol}</span> {mark.word}</span></td>'
        f'<th scope="row">{draw_breakable(check.name)}</th>'
    )
    told = bool(check.detail) or not check.parts
    for place, part in enumerate(check.parts):
        more = "" if place == len(check.parts) - 1 and not told else ' class="more"'
        name = escape(part.name) if part.passed else f"<b>{escape(part.name)}, out</b>"
        side = "at least" if part.at_least else "at most"
        yield (
            f"<tr{more}>{'<td></td><td></td>' if place else head}<td>{name}</td><td>{_value(part.observed)}</td>"
            f"<td>{side} {_value(part.bound)}</td><td>{escape(part.derivation)}</td></tr>\n"
        )
    if told:
        head = "<td></td><td></td>" if check.parts else head
        yield f"<tr>{head}<td>seen</td><td>{draw_sentence(check.detail)}</td><td>{NO_NUMBER}</td><td></td></tr>\n"


def _value(value: float | None) -> str:
    if value is None:
        return "not a number"
    return f"{value:.4g}" if math.isfinite(value) else "not finite"


def _say(history: CellHistory, receipt: Receipt | None) -> str:
    word = mark_history(history).word
    said = f"{word[0].upper()}{word[1:]}"
    if receipt is not None and receipt.reason:
        said += f": {shorten(first_sentence(receipt.reason.partition(' Next step:')[0]))}"
    elif receipt is not None and receipt.checks:
        said += f": {count(len(receipt.checks), 'check')} held"
    bad = sum(not row.outcome.is_good for row in history.earlier)
    before = f" {bad} of {count(len(history.earlier), 'earlier receipt')} not good." if bad else ""
    return f"{said}{before}" if said.endswith("…") else f"{said.rstrip('.')}.{before}"


def shorten(text: str) -> str:
    """A text as it fits into an answer, cut between words where it is long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rpartition(' ')[0] or text[:_LONGEST]} …"


def _identity(history: CellHistory, receipt: Receipt) -> list[tuple[str, str]]:
    told = [
        ("file", history.newest.path),
        ("sha256", history.newest.sha256),
        ("schema", receipt.schema_id),
        ("image digest", receipt.image_digest),
        ("lock hash", receipt.lock_hash),
        ("environment", receipt.environment),
        ("commit", receipt.commit),
        ("tool", receipt.tool),
        ("compilers", ", ".join(f"{one.library} by {one.mode}" for one in receipt.compilers)),
    ]
    return [(name, value) for name, value in told if value]


def _tell_jit(receipt: Receipt) -> dict[str, Any]:
    """Compiles by library up to the second use and in it: the latter should not be."""
    jit = receipt.jit
    late = sum(jit.after.values())
    by_library = ", ".join(f"{library} {amount}" for library, amount in sorted(jit.warm_up.items()) if amount)
    hits = sum(jit.hits.values())
    said = f"{sum(jit.warm_up.values())} up to the second use{f' ({by_library})' if by_library else ''}, {late} in it"
    said += f"; {hits} came from a cache on disk" if hits else ""
    if receipt.schema_id.endswith(("/1", "/2", "/3")):
        said += "; a receipt of this schema tells no single kernel"
    mark = Mark("✗", "X", "compiled late", "bad") if late else Mark("✓", "-", "nothing late", "good")
    shown = sorted(jit.compiled, key=lambda one: (one.when != "after", -one.seconds))[:_MOST_KERNELS]
    return {"said": f"{said}.", "mark": mark, "shown": shown}
