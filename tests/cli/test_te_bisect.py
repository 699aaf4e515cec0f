"""The search for the first bad release from the command line: on sources, and on a host with a GPU and overlays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.bisect import order_releases, read_axes
from megacpp_validate.canary.static.sources import CACHE_VARIABLE
from megacpp_validate.errors import Exit, WrongArguments
from tests.canary.static.small_index import PACKAGE, UNREACHABLE, use_index, write_index
from tests.command_line import Run
from tests.environments.places import make_probes
from tests.environments.site_folders import make_te

LINEAR = """
class Linear:
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device='cuda', eps=1e-5, name=None): ...
"""
BROKEN = LINEAR.replace("in_features", "width", 1)
RELEASES = {
    f"2.{minor}.0": PACKAGE | {"transformer_engine/pytorch/__init__.py": BROKEN if minor >= 11 else LINEAR}
    for minor in range(8, 14)
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """An index of six releases, and a cache that the tests of this file share."""
    folder = tmp_path_factory.mktemp("shop")
    return write_index(folder / "index", RELEASES), str(folder / "cache")


@pytest.fixture
def run(session: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch, shop: tuple[str, str]) -> Run:
    """The verb, with that index."""
    use_index(monkeypatch, shop[0])
    monkeypatch.setenv(CACHE_VARIABLE, shop[1])
    return session("te-bisect")


def test_the_first_bad_release_is_named_and_closes(run: Run) -> None:
    said = run("2.8.0", "2.13.0", "--module", "linear_walker")
    assert said.code == Exit.CLOSED
    assert "linear_walker breaks first with Transformer Engine 2.11.0; 2.10.0 is the last good one" in said.flat
    assert "nox -s te_canary -- 2.10.0 2.11.0" in said.flat
    assert said.err.count("\n") <= 5
    (turn,) = run("2.8.0", "2.13.0", "--module", "linear_walker", "--format", "json").told["culprits"]
    assert (turn["last_good"], turn["first_bad"]) == ("2.10.0", ["2.11.0"])


WRONG_ARGUMENTS = (
    ("2.8.0 2.13.0 --module linear", ("'linear'", "linear_walker")),
    ("2.8.0 2.13.9 --module permute", ("2.13.9", "Nearest: 2.12.0, 2.13.0")),
    ("2.8.0 2.8.0 --module permute", ("nothing to search",)),
    ("2.8.0 2.9.0 --module permute --tier static --axis a=1:,2:", ("--axis", "--tier gpu")),
    ("2.8.0 2.9.0 --module permute --tier gpu", ("no target", "h200")),
    ("2.8.0 2.9.0 --module permute --target h100", ("'h100'",)),
    ("2.8.0 2.9.0 --module permute --target h200 --axis cudnn=9.1", ("NAME=VALUE",)),
    ("2.8.0 2.13.0 --module permute --target cpu --receipts a-file", ("a-file", "--receipts")),
)


@pytest.mark.parametrize(("arguments", "words"), WRONG_ARGUMENTS, ids=[words for words, _ in WRONG_ARGUMENTS])
def test_wrong_arguments_are_told_in_words(arguments: str, words: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    said = run(*arguments.split())
    assert said.code == Exit.WRONG_ARGUMENTS, said
    assert [word for word in (*words, "megacpp-validate") if word not in said.err] == []


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
    make_probes(tmp_path, PROBE)
    host = tmp_path / "host"
    host.mkdir()
    (host / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 580.159.03, 143771'\n")
    (host / "python3").write_text(
        '#!/bin/sh\ncase "$*" in *"-m megacpp_validate.probes "*) '
        f'export PYTHONPATH="{tmp_path}/fake:$PYTHONPATH";; esac\nexec {sys.executable} "$@"\n'
    )
    for name in ("nvidia-smi", "python3"):
        (host / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{host}:/usr/bin:/bin")
    use_index(monkeypatch, UNREACHABLE)
    for release in ("2.12.0", "2.15.0", "2.17.1"):
        make_te(tmp_path / "overlays" / f"te-{release}", release)
    versions = ("9.15.0", "9.16.0", "9.17.0", "9.18.0", "9.19.0")
    for version in versions:
        (tmp_path / version).mkdir()
        (tmp_path / version / "cudnn").write_text(version)
    axis = f"cudnn={','.join(f'{version}:{tmp_path}/{version}' for version in versions)}"
    place = ("--overlays", tmp_path / "overlays", "--python", host / "python3", "--target", "h200")
    said = run("2.12.0", "2.17.1", "--module", "attention", *place, "--axis", axis)
    assert said.code == Exit.CLOSED, said
    assert (
        "The cause is cuDNN. attention breaks first with cuDNN 9.18.0, together with Transformer Engine 2.17.1; "
        "9.17.0 is the last good one" in said.flat
    )
    ran = (tmp_path / "fake" / "megacpp_validate" / "probes" / "ran").read_text().splitlines()
    assert len(set(ran)) <= 2 + 3


# --- axes -------------------------------------------------------------------------------------------------------

NO_AXES = "|cudnn|cudnn=|cudnn=9.1:|cudnn=9.1,9.2|cudnn=9.1:,9.1:|te=1:,2:|cuDNN=9.1:,9.2:|a=1:,2:/no"


@pytest.mark.parametrize("text", NO_AXES.split("|"))
def test_what_is_no_axis_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(WrongArguments, match="Next step: write NAME=VALUE:DIR"):
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
    assert order_releases(["2.8.0", "2.9.0", "2.10.0"], good, bad).values == values
