"""The search for the first bad release from the command line: on sources, and on a host with a GPU and overlays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.bisect import order_releases, read_axes
from megacpp_validate.errors import Exit, WrongArguments
from tests.canary.static.small_index import UNREACHABLE, use_index
from tests.command_line import Run
from tests.environments.places import make_h200_host
from tests.environments.site_folders import make_te


@pytest.fixture
def run(session: Callable[[str], Run], index: None) -> Run:
    """The verb, with an index of six releases."""
    return session("te-bisect")


def test_the_first_bad_release_is_named_and_closes(run: Run) -> None:
    said = run("2.8.0", "2.13.0", "--module", "linear_walker")
    assert said.code == Exit.CLOSED
    assert "breaks first with Transformer Engine 2.11.0; the last good point is Transformer Engine 2.10.0" in said.flat
    assert "nox -s te_canary -- 2.10.0 2.11.0" in said.flat
    assert said.err.count("\n") <= 5
    found = run("2.8.0", "2.13.0", "--module", "linear_walker", "--format", "json").told
    assert (found["last_good"], found["first_bad"]) == ({"te": "2.10.0"}, [{"te": "2.11.0"}])


# --- on a host with a GPU ---------------------------------------------------------------------------------------

PROBE = """
from importlib.metadata import version
from pathlib import Path
cudnn = next((file.read_text() for file in (Path(entry, 'cudnn') for entry in sys.path) if file.is_file()), '9.14.0')
Path(__file__).with_name('ran').open('a').write(version('transformer-engine') + ' ' + cudnn + '\\n')
bad = cudnn >= '9.18.0' and order['probe'] == 'attention'
write(outcome='error' if bad else 'pass', reason='cuDNN raises' if bad else '',
    checks=[dict(name='one', passed=not bad)], libraries=[dict(name='libcudnn', version=cudnn)])
"""


def test_not_transformer_engine_but_cudnn(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = make_h200_host(tmp_path, PROBE, te="")
    monkeypatch.setenv("PATH", f"{host}:/usr/bin:/bin")
    use_index(monkeypatch, UNREACHABLE)
    for release in ("2.12.0", "2.15.0", "2.17.1"):
        make_te(tmp_path / "overlays" / f"te-{release}", release)
    versions = ("9.15.0", "9.16.0", "9.17.0", "9.18.0", "9.19.0")
    for version in versions:
        (tmp_path / version).mkdir()
        (tmp_path / version / "cudnn").write_text(version)
    axis = f"cudnn={','.join(f'{version}:{tmp_path}/{version}' for version in versions)}"
    place = ("--overlays", tmp_path / "overlays", "--python", host / "python3")
    said = run("2.12.0", "2.17.1", "--module", "attention", *place, "--axis", axis)
    assert said.code == Exit.CLOSED, said
    assert (
        "attention breaks first with cuDNN 9.18.0; the last good point is Transformer Engine 2.17.1 with cuDNN 9.17.0"
        in said.flat
    )
    ran = (tmp_path / "fake" / "megacpp_validate" / "probes" / "ran").read_text().splitlines()
    assert len(set(ran)) <= 2 + 3


# --- axes -------------------------------------------------------------------------------------------------------

NO_AXES = "|cudnn|cudnn=|cudnn=9.1:|cudnn=9.1,9.2|te=1:,2:|cuDNN=9.1:,9.2:|a=1:,2:/no"


@pytest.mark.parametrize("text", NO_AXES.split("|"))
def test_what_is_no_axis_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(WrongArguments, match="Next step: write NAME=VERSION:DIR"):
        read_axes([text])


@pytest.mark.parametrize(
    ("good", "bad", "values"),
    [
        ("2.8", "2.10.0", ("2.8", "2.9.0", "2.10.0")),
        ("2.10.0", "2.8.0", ("2.10.0", "2.9.0", "2.8.0")),
        ("2.9.0", "2.9.0", ("2.9.0",)),
    ],
)
def test_releases_are_ordered_from_the_good_end_to_the_bad_one(good: str, bad: str, values: tuple[str, ...]) -> None:
    assert order_releases(["2.8.0", "2.9.0", "2.10.0"], good, bad) == values
