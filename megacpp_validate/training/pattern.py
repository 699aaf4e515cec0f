"""The pattern of a hybrid model: one letter a layer, such as AEMEAEMEAEMR."""

from __future__ import annotations

from typing import Final, Literal, get_args

from .errors import WrongPattern

Letter = Literal["A", "M", "E", "R"]
LETTERS: Final[tuple[Letter, ...]] = get_args(Letter)
NAMES: Final[dict[Letter, str]] = {"A": "attention", "M": "Mamba", "E": "mixture of experts", "R": "recurrent"}


def read_pattern(text: str) -> tuple[Letter, ...]:
    """The kind of each layer, from the first to the last.

    Raises:
        WrongPattern: no text, no letters, or a letter that is no kind; the first such letter and its place, counted
            from 1, are named.
    """
    kinds = ", ".join(f"{letter} ({NAMES[letter]})" for letter in LETTERS)
    if not isinstance(text, str) or not text:
        raise WrongPattern(
            f"the pattern is {text!r}, and a model has one layer or more. Next step: write one letter a layer: {kinds}."
        )
    for place, letter in enumerate(text, start=1):
        if letter not in LETTERS:
            cause = "letters are written large" if letter.upper() in LETTERS else "a slip of the pen"
            raise WrongPattern(
                f"the pattern {text!r} has {letter!r} at place {place} of {len(text)}, which is no kind of block. "
                f"Likely cause: {cause}. Next step: write one letter a layer: {kinds}."
            )
    return tuple(text)  # type: ignore[arg-type]
