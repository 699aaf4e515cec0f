"""Until the site of the first edition is gone: the suite's own score as it is shown."""

from __future__ import annotations

from typing import Literal

from ...evidence.selftest import SelftestResult, wilson_interval
from ...evidence.values import Frozen
from .scores import Rate, SuiteScore


class Evidence(Frozen):
    """A file of evidence: where it lies, and the day of the commit that it came with."""

    source: str
    committed: str = ""


def score_selftest(result: SelftestResult, of: Evidence) -> tuple[Rate, ...]:
    """Kill rate, blame accuracy and false-alarm rate of one full run of the selftest."""
    planted = f"faults planted in the wrappers and in what Transformer Engine returns ({len(result.modules)} modules)"
    rows: tuple[tuple[str, str, Literal["high", "low"], int, int], ...] = (
        ("kill-rate", f"{planted} that turn a probe red", "high", result.killed, len(result.mutants)),
        ("blame-accuracy", "of these, blamed on their own module", "high", result.blamed_rightly, result.killed),
        ("false-alarms", "probe runs without a fault, each with a fresh seed, that are red", "low",
         len(result.false_alarms), result.clean_runs),
    )  # fmt: skip
    day = result.finished_at[:10]
    return tuple(
        _rate(*row, day=day or of.committed, day_of="run" if day else "commit", source=of.source) for row in rows
    )


def _rate(
    name: str, says: str, good: Literal["high", "low"], hits: int, trials: int,
    *, day: str, day_of: Literal["run", "commit"], source: str,
) -> Rate:  # fmt: skip
    low, high = wilson_interval(hits, trials)
    return Rate(
        id=name,
        says=says,
        good=good,
        hits=hits,
        trials=trials,
        low=low,
        high=high,
        day=day,
        day_of=day_of,
        source=source,
    )


__all__ = ["Evidence", "Rate", "SuiteScore", "score_selftest"]
