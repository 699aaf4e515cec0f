"""Which modules of a source tree an unmet requirement breaks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ...environments.fits import Fit, FitVerdict
from .findings import ModuleResult, ModuleVerdict
from .surface import Surface

# Rows of needs.toml name modules of the bridge. A module of another tree is one of them by the names that it uses.
_NAMES: Final = {
    "attention": "attention|attn|transformerlayer",
    "native_block": "layernorm|transformerlayer|multiheadattention",
    "layer_spec": "layernorm|linear|transformerlayer",
    "linear_walker": "linear|layernormmlp|transformerlayer",
    "expert_gemm": "grouped",
    "permute": "permute|sort_chunks",
}


def place_requirements(fits: Iterable[Fit], surface: Surface) -> Iterator[Fit]:
    """Requirements with the modules of the tree that they break; what breaks none of them is a warning."""
    for fit in fits:
        rows = tuple(row for row in surface.module_order if _stands_on(row, fit, surface))
        unused = fit.verdict is FitVerdict.REFUSED and not rows
        verdict = FitVerdict.WARNED if unused else fit.verdict
        yield fit.model_copy(update={"breaks": rows, "verdict": verdict})


def _stands_on(row: str, fit: Fit, surface: Surface) -> bool:
    if not fit.breaks or "imports" in fit.breaks or row in fit.breaks:
        return True
    if row in _NAMES:  # of the bridge, and not named by the row of the matrix
        return False
    names = "|".join(_NAMES[one] for one in fit.breaks if one in _NAMES)
    used = (f"{use.accessor} {' '.join(use.path)}" for use in surface.uses if use.module == row)
    return bool(names) and any(re.search(names, one, re.IGNORECASE) for one in used)


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
