"""How much of the selftest a kill table is of: a run of some mutants is never shown as one of all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from megacpp_validate.evidence.selftest import SelftestResult

from ...canary.dynamic.score import Rate
from ..summaries import count

_OF_SELFTEST: Final = ("kill-rate", "blame-accuracy", "false-alarms")  # see `evidence.score.score_selftest`


def say_partly(result: SelftestResult, known: Iterable[str]) -> str:
    """What of a full run is not in it; empty where nothing is missing.

    Args:
        result: a kill table.
        known: ids of the mutants of the matrix; empty where nobody knows them.
    """
    ran, all_of_them = {row.mutant.id for row in result.mutants}, set(known)
    if not result.mutants:
        return "of no mutant at all"
    if all_of_them - ran:
        return f"of {len(all_of_them & ran)} of {count(len(all_of_them), 'mutant')} of the matrix"
    strange = ran - all_of_them if all_of_them else ()
    return f"of {count(len(strange), 'mutant')} that the matrix does not have" if strange else ""


def falls_short(rates: Iterable[Rate]) -> bool:
    """Whether a rate of the selftest is not as it should be: a fault that nobody saw, a wrong blame, a false alarm."""
    return any(rate.hits != (rate.trials if rate.good == "high" else 0) for rate in rates if rate.id in _OF_SELFTEST)


def find_left_out(
    scores: Mapping[str, SelftestResult], rates: Iterable[Rate], known: Iterable[str]
) -> tuple[str, SelftestResult] | None:
    """The newest kill table, where it is of some mutants, not in the rates, and may be of a later run than they are.

    Args:
        scores: kill tables by file, the newest first.
        rates: that are shown.
        known: ids of the mutants of the matrix.
    """
    shown = [rate for rate in rates if rate.id in _OF_SELFTEST]
    for file, score in list(scores.items())[:1]:
        older = bool(score.finished_at) and any(
            rate.day_of == "run" and rate.day > score.finished_at[:10] for rate in shown
        )
        if say_partly(score, known) and not older and file not in {rate.source for rate in shown}:
            return file, score
    return None
