"""What descriptions of all results share: lists, tallies, reasons that several names have, tables of facts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ..document import Content, Table


def join_same(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(names, reason) of rows (name, reason): a reason of several names is there once."""
    found: dict[str, list[str]] = {}
    for name, reason in rows:
        found.setdefault(reason, []).append(name)
    return [(", ".join(dict.fromkeys(names)), reason) for reason, names in found.items()]


def list_some(names: Sequence[str], most: int) -> str:
    """Names with commas; of more than `most` the first ones and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def tally(words: Iterable[str]) -> str:
    """How often each word occurs: "3 pass, 1 fail"."""
    return ", ".join(f"{number} {word}" for word, number in Counter(words).items())


def tabulate_facts(facts: Mapping[str, Sequence[str]], columns: tuple[str, str] = ("what", "value")) -> Table:
    """A row a fact, whose value is a text or several below each other; a fact without a value is left out."""
    rows: list[tuple[Content, ...]] = []
    for name, value in facts.items():
        if value:
            rows.append((name, value if isinstance(value, str) else tuple(value)))
    return Table(columns, tuple(rows))
