"""Whether planted code ran and changed anything: what was never reached has neither been caught nor missed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class PlantPointGone(LookupError):
    """There is nothing to patch where a mutant says, or it is not what the fault works on; the text says what to do."""


@dataclass
class Trace:
    """What became of planted code.

    Attributes:
        reached: how often it changed something.
        gone: why it could not do its work, found out when it was called; the run then says nothing about the probes.
        absent: what one of the calls did not have. Another may have had it.
    """

    reached: int = 0
    gone: str = ""
    absent: str = ""

    @property
    def why_gone(self) -> str:
        """Why the run says nothing about the probes; empty where it does."""
        return self.gone or ("" if self.reached else self.absent)

    def note(self, before: Any, after: Any) -> None:
        """Count it if the two differ."""
        if _differ(before, after):
            self.reached += 1

    def note_use(self) -> None:
        """Count it: the planted thing was used, and differs by what it is."""
        self.reached += 1

    def is_gone(self, why: str) -> PlantPointGone:
        """Keep why planted code could not do its work, as an exception to raise: a probe would swallow that."""
        self.gone = why
        return PlantPointGone(why)


def _differ(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before.shape != after.shape or not torch.equal(before.detach(), after.detach())
    try:
        return bool(before != after)
    except (RuntimeError, ValueError, TypeError):
        return before is not after
