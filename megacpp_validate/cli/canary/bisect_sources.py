"""The search on the static tier: its axis is the index, its judge reads sources."""

from __future__ import annotations

from ...canary.dynamic.bisect_result import Axis
from ...canary.dynamic.search.static_judge import StaticJudge
from ...canary.static.derive import BridgeUnreadable
from ...canary.static.sources import Sources, SourceUnavailable, UnknownRelease, nearest
from ...canary.static.sweep import read_surface
from ...catalog.bridge import Catalog
from ..app import Exit, foreseen
from .bisect_axes import order_releases


@foreseen({
    BridgeUnreadable: Exit.WRONG_ARGUMENTS,
    UnknownRelease: Exit.WRONG_ARGUMENTS,
    SourceUnavailable: Exit.NO_ENVIRONMENT,
})  # fmt: skip
def open_sources(catalog: Catalog, module: str, good: str, bad: str) -> tuple[Axis, StaticJudge]:
    """Every release of the index between two, and who judges them."""
    sources = Sources()
    versions = sources.versions()
    for name in (good, bad):
        if name not in versions:
            raise UnknownRelease(
                f"there is no Transformer Engine {name} on the index. Nearest: {', '.join(nearest(name, versions))}. "
                "Next step: choose one of them; `nox -s te_canary -- --list` shows all."
            )
    return order_releases(versions, good, bad), StaticJudge(good, module, read_surface(catalog), sources)


def list_releases() -> list[str]:
    """Every release on the index; none where it does not answer."""
    try:
        return Sources().versions()
    except SourceUnavailable:
        return []
