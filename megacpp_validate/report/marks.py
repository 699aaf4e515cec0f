"""How verdicts look: a symbol, a word and a tone; one table for every enum of the results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Tone(StrEnum):
    """What a mark means, whatever it is called; the worst first."""

    BAD = "bad"
    MISSING = "missing"  # nothing was seen: never good
    RISK = "risk"
    QUIET = "quiet"
    GOOD = "good"


@dataclass(frozen=True, slots=True)
class Mark:
    """How a verdict looks: a symbol, a letter where symbols cannot be shown, a word, and a tone for the colour."""

    symbol: str
    letter: str
    word: str
    tone: Tone


def bad(word: str) -> Mark:
    """A breakage, under the word that this result has for one."""
    return Mark("✗", "X", word, Tone.BAD)


def cascade(word: str) -> Mark:
    """Red because of another one."""
    return Mark("↳", ">", word, Tone.BAD)


def risk(word: str) -> Mark:
    """Something that a person should read."""
    return Mark("▲", "!", word, Tone.RISK)


def missing(word: str = "not run") -> Mark:
    """No evidence."""
    return Mark("○", "?", word, Tone.MISSING)


def good(word: str) -> Mark:
    """Proven."""
    return Mark("✓", "-", word, Tone.GOOD)


def quiet(word: str) -> Mark:
    """Neither good nor bad."""
    return Mark("·", ".", word, Tone.QUIET)


_VALUES: Final = {
    bad: "fail failed error import-error timeout breaks breaking regressed same-failure bad refused not-refused "
    "expired changed compiled silent wrong-module wrong-cause others-too misnamed by-another missed false-alarm",
    cascade: "blocked cascade",
    risk: "risk fails-before tax warned holds",  # what holds is a waiver
    missing: "not-run not-judged undecided unknown cannot-build cannot-tell lost not-planted elsewhere",
    quiet: "note no-effect kept harmless expected-unsupported not-needed rolled-back",
    good: "pass good verified win fits done warm clean new allowed fixed right caught quiet",
}
_MARKS: Final = {value: make(value.replace("-", " ")) for make, values in _VALUES.items() for value in values.split()}


def mark_of(value: StrEnum) -> Mark:
    """The mark of a verdict, an outcome or a state."""
    return _MARKS[value.value]


def mark_exit(code: int, *, open_: str = "open", closed: str = "closed", otherwise: str = "evidence missing") -> Mark:
    """The mark of a result by its exit code."""
    return good(open_) if code == 0 else bad(closed) if code == 1 else missing(otherwise)


def find_worst_mark(marks: Iterable[Mark], otherwise: Mark) -> Mark:
    """The first mark of the worst tone; `otherwise` where there is none."""
    return min(marks, key=lambda mark: list(Tone).index(mark.tone), default=otherwise)
