"""How much of the selftest a kill table is of: a run of some mutants is never shown as one of all."""

from __future__ import annotations

from collections.abc import Iterable

from megacpp_validate.evidence.selftest import SelftestResult

from .summaries import count


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
