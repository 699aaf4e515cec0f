"""Which modules of a source tree an unmet requirement breaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...diagnosis.checks import FIREWALL, USES, entries_of_symbol
from ...environments.fits import Fit, FitVerdict
from .findings import ModuleResult, ModuleVerdict
from .surface import Surface


def place_requirements(fits: Iterable[Fit], surface: Surface) -> Iterator[Fit]:
    """Requirements with the modules of the tree that they break; what breaks none of them is a warning."""
    for fit in fits:
        rows = tuple(row for row in surface.module_order if _stands_on(row, fit, surface))
        unused = fit.verdict is FitVerdict.REFUSED and not rows
        verdict = FitVerdict.WARNED if unused else fit.verdict
        yield fit.model_copy(update={"breaks": rows, "verdict": verdict})


def _stands_on(row: str, fit: Fit, surface: Surface) -> bool:
    """Whether a requirement breaks a row: by its name, else by what the row uses of what the named modules use."""
    if not fit.breaks or FIREWALL in fit.breaks or row in fit.breaks:
        return True
    if row in USES:  # of the bridge, and not named by the row of the matrix
        return False
    works = {entry for module, used in USES.items() if module not in fit.breaks for entry in used}
    entries = {entry for module in fit.breaks for entry in USES.get(module, ())} - works
    return any(not entries.isdisjoint(entries_of_symbol(use.accessor)) for use in surface.uses if use.module == row)


def blame_requirements(modules: Sequence[ModuleResult], fits: Iterable[Fit]) -> tuple[ModuleResult, ...]:
    """Verdicts with unmet requirements: the first module in order breaks, the others break with it."""
    found = {row.module: row for row in modules}
    for fit in fits:
        broken = [row for row in found if row in fit.breaks] if fit.verdict is FitVerdict.REFUSED else []
        for row in broken:
            if found[row].verdict not in (ModuleVerdict.BREAKS, ModuleVerdict.CASCADE):
                first = row == broken[0]
                verdict = ModuleVerdict.BREAKS if first else ModuleVerdict.CASCADE
                found[row] = ModuleResult(module=row, verdict=verdict, under="" if first else broken[0])
    return tuple(found.values())
