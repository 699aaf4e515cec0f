"""The requested backend of a wrapper, the observed backend, and the reasons of a fallback.

A wrapper asks its candidates in order; each returns None (it can) or a `Refusal` with its reason. The outcome is a
`Choice`, kept on the wrapper and recorded; a fallback is logged once. A call that torch.compile traces is not recorded.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .errors import BridgeError, UnknownName

LOG: Final = logging.getLogger("megacpp_validate.bridge")


@dataclass(frozen=True)
class Refusal:
    """Why one backend cannot take one call.

    Attributes:
        backend: the backend that refuses.
        code: short and stable, such as "soft-cap"; what tests and receipts compare.
        reason: for a person: what is the case, and what to do if that is not wanted.
    """

    backend: str
    code: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """What was asked for and what was taken.

    Attributes:
        module: id of the bridge module.
        requested: the first candidate.
        observed: the candidate that was taken.
        refusals: of every candidate before it, in order.
    """

    module: str
    requested: str
    observed: str
    refusals: tuple[Refusal, ...] = ()


class NoBackend(BridgeError, RuntimeError):
    """Every candidate refused; the text has all reasons."""


Candidate = tuple[str, Callable[[], Refusal | None]]

_record: Final[Counter[Choice]] = Counter()


def check_backends(backends: Sequence[str], known: Sequence[str]) -> None:
    """Refuse an order of backends that cannot be asked.

    Args:
        backends: as the caller names them.
        known: all that the wrapper has.

    Raises:
        UnknownName: one that there is not, one twice, or none at all.
    """
    unknown = [name for name in backends if name not in known]
    if unknown or not backends or len(set(backends)) != len(backends):
        raise UnknownName(
            f"backends are {tuple(backends)!r}. Next step: name each at most once, at least one, of {', '.join(known)}."
        )


def choose(module: str, candidates: Sequence[Candidate]) -> Choice:
    """The first candidate that does not refuse, recorded except under torch.compile; a fallback is logged once.

    Raises:
        NoBackend: all of them refuse, or there is none.
    """
    refusals: list[Refusal] = []
    for backend, ask in candidates:
        refusal = ask()
        if refusal is None:
            choice = Choice(module, candidates[0][0], backend, tuple(refusals))
            if not torch.compiler.is_compiling():
                _remember(choice)
            return choice
        refusals.append(refusal)
    reasons = "; ".join(f"{refusal.backend}: {refusal.reason}" for refusal in refusals) or "there is no candidate"
    raise NoBackend(f"no backend of {module} can take this call. {reasons}")


def recorded_choices() -> dict[Choice, int]:
    """Every choice of this process and how often it was made."""
    return dict(_record)


def forget_choices() -> None:
    """Start the record again."""
    _record.clear()


def _remember(choice: Choice) -> None:
    _record[choice] += 1
    if choice.observed != choice.requested and _record[choice] == 1:
        reasons = "; ".join(f"{refusal.backend}: {refusal.reason}" for refusal in choice.refusals)
        LOG.warning("%s takes %s instead of %s. %s", choice.module, choice.observed, choice.requested, reasons)
