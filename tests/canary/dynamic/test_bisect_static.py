"""The search on real releases, by their sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.bisect_static import StaticJudge
from megacpp_validate.canary.dynamic.search import Axis, BisectResult, Search, SearchEnd, Verdict
from megacpp_validate.canary.static.project import Source
from megacpp_validate.canary.static.sources import Sources, SourceUnavailable

# Down from 2.5.0, where the bridge's keywords are new: 2.2.0 does not know `name` of Linear (module/linear.py) nor
# `align_size` of Fp8Padding (module/fp8_padding.py); see tests/canary/test_real_releases.py.
RELEASES = ("2.5.0", "2.3.0", "2.2.0", "2.1.0")


def search(folder: Path, sources: Sources, bridge_source: Source, module: str, values: tuple[str, ...]) -> BisectResult:
    judge = StaticJudge(values[0], module, bridge_source, sources)
    axis = Axis(name="te", values=values)
    result = Search({"tool": "t", "tier": "static", "module": module}, (axis,), judge, folder).run()
    if any("could not be fetched" in point.reason for point in result.points):
        pytest.skip(f"not-run: {result.points[-1].reason}")
    return result


@pytest.mark.thorough
def test_the_first_release_that_breaks_a_module_is_found(
    tmp_path: Path, sources: Sources, bridge_source: Source
) -> None:
    result = search(tmp_path, sources, bridge_source, "linear_walker", RELEASES)
    assert result.end is SearchEnd.FOUND
    (turn,) = result.culprits[0].turns
    assert (turn.last_good, turn.first_bad) == ("2.3.0", ("2.2.0",))
    bad = next(point for point in result.points if point.choices == ("2.2.0",))
    assert "pytorch.Linear`: parameter removed (name)" in bad.reason
    assert result.environments <= 4


def test_a_placeholder_on_the_index_is_not_built_and_not_bad(
    tmp_path: Path, sources: Sources, bridge_source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sources.release

    def release(version: str) -> object:
        if version == "2.3.0":
            raise SourceUnavailable("transformer_engine-2.3.0.whl holds no package")
        return real(version)

    monkeypatch.setattr(sources, "release", release)
    result = search(tmp_path, sources, bridge_source, "permute", RELEASES)
    assert result.end is SearchEnd.NARROWED
    assert result.culprits[0].turns[0].first_bad == ("2.3.0", "2.2.0")
    assert {point.choices[0] for point in result.points if point.verdict is Verdict.CANNOT_BUILD} == {"2.3.0"}
