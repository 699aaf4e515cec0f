"""What the phases of a receipt's process tell: whether the module was judged in it, or only timed again."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from .receipt import Outcome

PROBE: Final = "probe"  # the phase of a process in which a module is judged


def is_only_timed(outcome: Outcome, phases: Container[str]) -> bool:
    """Whether a good receipt judged nothing: it is of a run that timed its module again, for the noise of the card.

    A bad one may have ended before its probe began, and is bad all the same.

    Args:
        phases: names in `Receipt.seconds`.
    """
    return outcome.is_good and PROBE not in phases
