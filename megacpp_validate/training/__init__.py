"""Training of the hybrid model, and what training refuses."""

from __future__ import annotations


class TrainingError(Exception):
    """Anything that training refuses; the text has what happened, the likely cause and the next step."""


class WrongSize(TrainingError, ValueError):
    """Numbers of a model, a language, a plan or a run that do not go together."""
