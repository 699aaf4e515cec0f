"""What training refuses. Every text says what happened, the likely cause and the next step."""

from __future__ import annotations


class TrainingError(Exception):
    """Anything that training refuses."""


class WrongPattern(TrainingError, ValueError):
    """A pattern with a letter that is no kind of block, or without letters."""


class UnknownSize(TrainingError, ValueError):
    """A size that there is not."""


class WrongSize(TrainingError, ValueError):
    """Numbers of a model, a language or a run that cannot be, alone or together."""


class WrongTokens(TrainingError, ValueError):
    """Tokens of another shape, dtype or vocabulary than the model takes."""
