"""A release judged by its Python sources: bad where a call of the module, as it is written, fails with them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from ...static.compare import compare_releases
from ...static.findings import Finding, Impact
from ...static.release import Release, ReleaseUnreadable, without_garbage_collection
from ...static.sources import Sources, SourceUnavailable
from ...static.surface import Surface
from ..bisect_result import TE, Answer, Verdict
from .judge import NotBuilt


class StaticJudge:
    """Compares each release with the good end; needs no GPU and no install.

    Args:
        good: release at the good end.
        module: that is asked about.
        surface: what the bridge consumes.
        sources: of the releases.
    """

    def __init__(self, good: str, module: str, surface: Surface, sources: Sources) -> None:
        self.good = good
        self.module = module
        self.surface = surface
        self.sources = sources
        self._good: Release | None = None

    def identify(self, choices: Mapping[str, str]) -> str:
        """Both releases by the hash of their wheels."""
        hashes = (self._release(version).source.sha256 for version in (self.good, choices[TE]))
        return sha256("\n".join(hashes).encode()).hexdigest()

    def judge(self, choices: Mapping[str, str], run: int) -> Answer:  # noqa: ARG002 - sources say the same each time
        """Bad where a breaking finding touches the module, also one that the good end has already."""
        version = choices[TE]
        if self._good is None:
            self._good = self._release(self.good)
        try:
            with without_garbage_collection():
                findings, standing = compare_releases(self._good, self._release(version), self.surface)
        except ReleaseUnreadable as fault:
            raise NotBuilt(str(fault)) from fault
        red = [
            finding
            for finding in (*findings, *standing)
            if finding.impact is Impact.BREAKING and self.module in finding.modules
        ]
        if not red:
            return Answer(verdict=Verdict.GOOD, reason="no call of the module fails with its sources")
        more = f", and {len(red) - 1} more" if len(red) > 1 else ""
        return Answer(verdict=Verdict.BAD, reason=f"{_say(red[0])}{more}")

    def _release(self, version: str) -> Release:
        try:
            return self.sources.release(version)
        except (SourceUnavailable, ReleaseUnreadable) as fault:
            raise NotBuilt(str(fault)) from fault


def _say(finding: Finding) -> str:
    name = ".".join(filter(None, (finding.symbol, finding.member)))
    parameter = f" ({finding.parameter})" if finding.parameter else ""
    return f"`{name}`: {finding.kind.value.replace('-', ' ')}{parameter}"
