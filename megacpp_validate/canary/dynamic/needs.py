"""The row of the matrix that tells what a failure wants: which version of which library or package.

A missing symbol tells its row whichever the release is; else a row speaks of the release that broke, of the component
that is at fault and of the module that lost it, and of nothing that what is loaded has already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from packaging.version import InvalidVersion, Version

from ...catalog.needs import Need, Needs
from ...evidence.receipt import Receipt
from ...evidence.values import Cause
from .causes import Diagnosis
from .components import COMPONENTS, component_named
from .red import Red
from .versions import cuda_major, release_of

_PINNED: Final = ("library", "distribution")  # kinds of need that a version answers


def find_need(red: Red, diagnosis: Diagnosis, needs: Needs | None) -> Need | None:
    """The row that a failure is about; None where no row is, or nothing is known to be missing.

    Args:
        red: what failed.
        diagnosis: of it, or of what it shares with other modules.
        needs: the matrix; None where there is none.
    """
    if needs is None:
        return None
    rows = [need for need in needs.need if need.version and is_unmet(need, red.receipt)]
    if diagnosis.missing and (named := next((row for row in rows if _names(row, diagnosis.missing)), None)):
        return named
    mine = [row for row in rows if row.kind in _PINNED and red.module in row.breaks and _holds(row, red)]
    if diagnosis.component:
        return next((row for row in mine if row.of in _names_of(diagnosis.component)), None)
    # A crash that names nothing: the one library that is known to be too old is the first thing to mend.
    crashed = diagnosis.cause is Cause.BINARY and not diagnosis.missing
    return mine[0] if crashed and len(mine) == 1 and mine[0].kind == "library" else None


def is_unmet(need: Need, receipt: Receipt) -> bool:
    """Whether a version as loaded lies outside of the range; of what was not seen loaded nothing is known."""
    return any(not need.allows(version) for version in _versions(need.of, receipt))


def package_of(need: Need, needs: Needs, receipt: Receipt) -> str:
    """The distribution that brings what is needed, for the CUDA of a receipt."""
    library = next((row for row in needs.library if row.id == need.of), None)
    if library is None:
        return need.of
    of_cuda = (name for name in library.distributions if name.endswith(f"-cu{cuda_major(receipt)}"))
    return next(of_cuda, library.distributions[0])


def answering(need: Need, receipt: Receipt) -> str:
    """The versions of it as loaded, with commas."""
    return ", ".join(map(str, _versions(need.of, receipt)))


def _versions(name: str, receipt: Receipt) -> Iterator[Version]:
    """Versions of a library, or of the packages that a distribution is imported as."""
    names = {name, *(loaded for row in COMPONENTS if row.package == name for loaded in row.loaded)}
    said = [library.version for library in receipt.libraries if library.name in names]
    said += [package.version for package in receipt.packages if package.name in names]
    for text in dict.fromkeys(one.strip() for version in said for one in version.split(",")):
        try:
            yield Version(text)
        except InvalidVersion:
            continue


def _names_of(component: str) -> tuple[str, ...]:
    """Libraries and distribution of a component, as rows name them."""
    row = component_named(component)
    return (*row.loaded, row.package) if row is not None else (component,)


def _names(need: Need, symbol: str) -> bool:
    return symbol == need.symbol or symbol in need.says.split()


def _holds(need: Need, red: Red) -> bool:
    """Whether the release that broke has this need; one that was not met before either, and did no harm, is not it."""
    if red.before is not None and red.was_good and is_unmet(need, red.before) and _has(need, red.before):
        return False
    return _has(need, red.receipt)


def _has(need: Need, receipt: Receipt) -> bool:
    try:
        return need.holds_for(Version(release_of({receipt.probe: receipt})))
    except InvalidVersion:
        return False


__all__ = ["answering", "find_need", "is_unmet", "package_of"]
