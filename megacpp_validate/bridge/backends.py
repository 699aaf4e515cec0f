"""Which backend a wrapper was asked for, which one it took, and why: recorded, never silent.

A wrapper asks its candidates in order; each answers with None (it can) or a `Refusal` with its reason. The outcome
is a `Choice`, kept on the wrapper, added to this process's record, and logged once if it is a fallback. A call that
torch.compile traces is not recorded: a graph has no locks and no logs, and the choice is made once for all its runs.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

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

    @property
    def fell_back(self) -> bool:
        """Whether another backend than the requested one was taken."""
        return self.observed != self.requested


class NoBackend(BridgeError, RuntimeError):
    """Every candidate refused; the text has all reasons."""


Candidate = tuple[str, Callable[[], Refusal | None]]

_lock = threading.Lock()
_record: Counter[Choice] = Counter()


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
    """The first candidate that does not refuse, recorded except under torch.compile.

    Raises:
        NoBackend: all of them refuse, or there is none.
    """
    refusals: list[Refusal] = []
    for backend, ask in candidates:
        refusal = ask()
        if refusal is None:
            choice = Choice(module, candidates[0][0], backend, tuple(refusals))
            if not _is_traced():
                _remember(choice)
            return choice
        refusals.append(refusal)
    reasons = "; ".join(f"{refusal.backend}: {refusal.reason}" for refusal in refusals) or "there is no candidate"
    raise NoBackend(f"no backend of {module} can take this call. {reasons}")


def recorded_choices() -> dict[Choice, int]:
    """Every choice of this process and how often it was made."""
    with _lock:
        return dict(_record)


def forget_choices() -> None:
    """Start the record anew."""
    with _lock:
        _record.clear()


def _is_traced() -> bool:
    """Whether torch.compile or torch.export is following this call; without importing torch, which may not be here."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def _remember(choice: Choice) -> None:
    with _lock:
        _record[choice] += 1
        first = _record[choice] == 1
    if first and choice.fell_back:
        reasons = "; ".join(f"{refusal.backend}: {refusal.reason}" for refusal in choice.refusals)
        LOG.warning("%s takes %s instead of %s. %s", choice.module, choice.observed, choice.requested, reasons)
