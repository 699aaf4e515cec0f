"""What descriptions of all results share: lists, tallies, reasons that several names have, tables of facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from ...environments.fits import Fit
from ...evidence.selftest import wilson_interval
from ..document import Content, Diagnostic, Table
from ..marks import Tone, mark_of


def join_same(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(names, reason) of rows (name, reason): a reason of several names is there once."""
    found: dict[str, list[str]] = {}
    for name, reason in rows:
        found.setdefault(reason, []).append(name)
    return [(", ".join(dict.fromkeys(names)), reason) for reason, names in found.items()]


_MOST_BROKEN: Final = 7  # modules that a requirement breaks: the bridge has seven, a source tree a hundred


def list_some(names: Sequence[str], most: int) -> str:
    """Names with commas; of more than `most` the first ones and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def tally(words: Iterable[str]) -> str:
    """How often each word occurs: "3 pass, 1 fail"."""
    return ", ".join(f"{number} {word}" for word, number in Counter(words).items())


def sum_up(cases: Iterable[Diagnostic]) -> str:
    """Good cases by number and the others by name: "5 pass; error: attention, permute"."""
    listed = list(cases)
    good = tally(case.mark.word for case in listed if case.mark.tone in (Tone.GOOD, Tone.QUIET))
    others = join_same((case.name, case.mark.word) for case in listed if case.mark.tone not in (Tone.GOOD, Tone.QUIET))
    return "; ".join([*filter(None, [good]), *(f"{word}: {list_some(names.split(', '), 7)}" for names, word in others)])


def show_rate(hits: int, trials: int) -> str:
    """Hits of trials, as a share, with what the share may be: the 95% Wilson interval."""
    if not trials:
        return "none ran"
    low, high = wilson_interval(hits, trials)
    return f"{hits} of {trials} ({hits / trials:.1%}; 95% Wilson interval {low:.1%} to {high:.1%})"


def show(value: Any) -> Content:
    """A field of a result as a table shows it: a verdict as its mark, names with commas, other things by number."""
    if isinstance(value, StrEnum):
        return mark_of(value)
    if isinstance(value, bool) or value is None:
        return "yes" if value else "" if value is None else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, Mapping):
        return tuple(f"{name}: {one}" for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(value) if all(isinstance(one, str) for one in value) else str(len(value))
    return str(value)


def tabulate(rows: Iterable[object], names: str, caption: str = "") -> Table:
    """A row an object, a column a field of it: `names` has the fields, with spaces."""
    columns = names.split()
    values = [[getattr(row, name) for name in columns] for row in rows]
    kinds = [[row[at] for row in values] for at in range(len(columns))]
    numeric = frozenset(at for at, kind in enumerate(kinds) if all(isinstance(one, int | float) for one in kind))
    shown = tuple(tuple(map(show, row)) for row in values)
    return Table(tuple(name.replace("_", " ") for name in columns), shown, caption, numeric)


def list_fields(result: object, names: str) -> dict[str, Content]:
    """Fields of a result for a table of facts: `names` has them, with spaces."""
    return {name.replace("_", " "): show(getattr(result, name)) for name in names.split()}


def list_cases(rows: Iterable[Any], group: str, name: str, mark: str) -> tuple[Diagnostic, ...]:
    """A case an object: which fields of it hold the name and the verdict."""
    return tuple(
        Diagnostic(getattr(row, name), mark_of(getattr(row, mark)), group, row.reason, seconds=row.seconds)
        for row in rows
    )


def describe_fit(fit: Fit, group: str = "") -> Diagnostic:
    """A requirement of a release beside what is there; `group` is the module that breaks first if it is empty."""
    message = f"{fit.seen}, wanted {fit.wanted}: {fit.says}"
    group, mark = group or next(iter(fit.breaks), "environment"), mark_of(fit.verdict)
    if mark.tone is Tone.GOOD:
        return Diagnostic(fit.component, mark, group, message, code=fit.need)
    fields = (("needed by", list_some(fit.breaks, _MOST_BROKEN)), ("source", fit.source))
    return Diagnostic(fit.component, mark, group, message, fields, fit.next_step, code=fit.need)


def tabulate_facts(facts: Mapping[str, Content], columns: tuple[str, str] = ("what", "value")) -> Table:
    """A row a fact, whose value is a text or several below each other; a fact without a value is left out."""
    return Table(columns, tuple((name, value) for name, value in facts.items() if value))
