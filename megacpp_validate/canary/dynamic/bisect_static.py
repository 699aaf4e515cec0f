"""The search by Python sources: its axis is the package index, its judge compares releases. It needs griffe."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from ...catalog.bridge import Catalog
from ..static.compare import compare_releases
from ..static.findings import Impact
from ..static.project import Source
from ..static.release import Release, ReleaseUnreadable, without_garbage_collection
from ..static.sources import Sources, SourceUnavailable, UnknownRelease, nearest
from ..static.sweep import read_bridge
from .search import TE, Answer, NotBuilt, Verdict


class StaticJudge:
    """Compares each release with the good end by their Python sources; needs no GPU and no install."""

    def __init__(self, good: str, module: str, source: Source, sources: Sources) -> None:
        self.good, self.module, self.source, self.sources = good, module, source, sources
        self._good: Release | None = None

    def identify(self, choices: Mapping[str, str]) -> str:
        """Both releases by the hash of their wheels."""
        hashes = (self._release(version).source.sha256 for version in (self.good, choices[TE]))
        return sha256("\n".join(hashes).encode()).hexdigest()

    def judge(self, choices: Mapping[str, str], run: int) -> Answer:  # noqa: ARG002 - sources say the same each time
        """Bad where a breaking finding touches the module, also one that the good end has already."""
        if self._good is None:
            self._good = self._release(self.good)
        try:
            with without_garbage_collection():
                found, standing, _ = compare_releases(self._good, self._release(choices[TE]), self.source)
        except ReleaseUnreadable as fault:
            raise NotBuilt(str(fault)) from fault
        red = [one for one in (*found, *standing) if one.impact is Impact.BREAKING and self.module in one.modules]
        if not red:
            return Answer(verdict=Verdict.GOOD, reason="no call of the module fails with its sources")
        name = ".".join(filter(None, (red[0].symbol, red[0].member)))
        parameter = f" ({red[0].parameter})" if red[0].parameter else ""
        more = f"{parameter}, and {len(red) - 1} more" if len(red) > 1 else parameter
        return Answer(verdict=Verdict.BAD, reason=f"`{name}`: {red[0].kind.value.replace('-', ' ')}{more}")

    def _release(self, version: str) -> Release:
        try:
            return self.sources.release(version)
        except (SourceUnavailable, ReleaseUnreadable) as fault:
            raise NotBuilt(str(fault)) from fault


def open_sources(catalog: Catalog, module: str, good: str, bad: str) -> tuple[list[str], StaticJudge]:
    """Every release of the index, and who judges them.

    Raises:
        UnknownRelease: GOOD or BAD is none of them.
    """
    sources = Sources()
    versions = sources.versions()
    for name in (good, bad):
        if name not in versions:
            raise UnknownRelease(
                f"the package index has no Transformer Engine {name}. Nearest: {', '.join(nearest(name, versions))}. "
                "Next step: choose one of them; `nox -s te_canary -- --list` shows all."
            )
    return versions, StaticJudge(good, module, read_bridge(catalog), sources)


def list_releases() -> list[str]:
    """Every release on the index; none where it does not answer."""
    try:
        return Sources().versions()
    except SourceUnavailable:
        return []
