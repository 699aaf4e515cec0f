"""The score of the suite in words and cells, for every form that tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megacpp_validate.evidence.selftest import Fate, MutantResult, SelftestResult


class ModuleScore(NamedTuple):
    """What became of the mutants of one module."""

    module: str
    mutants: int
    killed: int
    blamed_rightly: int


def score_modules(result: SelftestResult) -> Iterator[ModuleScore]:
    """A score a module, in dependency order."""
    for module in result.modules:
        rows = [row for row in result.mutants if row.mutant.module == module]
        killed = [row for row in rows if row.fate is Fate.KILLED]
        yield ModuleScore(module, len(rows), len(killed), sum(row.blamed_rightly for row in killed))


def find_unsettled(result: SelftestResult) -> list[MutantResult]:
    """Mutants that were not killed, or blamed on another module."""
    return [row for row in result.mutants if row.fate is not Fate.KILLED or not row.blamed_rightly]


def say_kill_rate(result: SelftestResult) -> str:
    """Kill rate in a sentence."""
    return f"Kill rate: {result.killed} of {len(result.mutants)} mutants ({result.kill_rate:.1%})."


def say_blame_accuracy(result: SelftestResult) -> str:
    """Blame accuracy in a sentence."""
    return (
        f"Blame accuracy: {result.blamed_rightly} of {result.killed} killed mutants are blamed on their own module "
        f"({result.blame_accuracy:.1%})."
    )


def say_false_alarms(result: SelftestResult) -> str:
    """False-alarm rate with its bound, in a sentence."""
    return (
        f"False alarms: {len(result.false_alarms)} in {result.clean_runs} clean probe runs with fresh seeds "
        f"({result.false_alarm_rate:.2%}; 95% Wilson upper bound {result.false_alarm_bound:.2%})."
    )


def say_unsettled(row: MutantResult) -> str:
    """What became of a mutant that is not as it should be."""
    if row.fate is Fate.KILLED:
        return f"killed, and blamed on {', '.join(row.blamed)} instead of {row.mutant.module}, by {row.check}"
    return f"{row.fate.value}: {row.reason}" if row.reason else row.fate.value
