"""The search for the first bad release from the command line: on sources, and on a host with a GPU and overlays."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.canary.dynamic.bisect import order_releases, read_axes
from megacpp_validate.canary.static.sources import CACHE_VARIABLE
from megacpp_validate.errors import WrongArguments
from tests.canary.static.small_index import PACKAGE, UNREACHABLE, use_index, write_index
from tests.command_line import Run, make_run

FOUND, WRONG, MISSING, NO_ENVIRONMENT, INFRASTRUCTURE = 1, 2, 4, 5, 6
LINEAR = """
class Linear:
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device='cuda', eps=1e-5, name=None): ...
"""
BROKEN = LINEAR.replace("in_features", "width", 1)
RELEASES = {
    f"2.{minor}.0": PACKAGE | {"transformer_engine/pytorch/__init__.py": BROKEN if minor >= 11 else LINEAR}
    for minor in range(8, 14)
}


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command line in this process, in a folder of the test's own, without an index."""
    for name in ("MEGACPP_PYTHON", "MEGACPP_DISABLE_TE", "MEGACPP_OVERLAYS", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    use_index(monkeypatch, UNREACHABLE)
    monkeypatch.chdir(tmp_path)
    return make_run(capfd, monkeypatch, "te-bisect")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index of a few releases, and a cache that the tests of this file share."""
    folder = tmp_path_factory.mktemp("shop")
    write_index(folder, RELEASES)
    return folder


@pytest.fixture
def index(run: Run, shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(shop / "cache"))
    use_index(monkeypatch, (shop / "simple").as_uri())


# --- by sources -------------------------------------------------------------------------------------------------


def test_the_first_bad_release_is_named_and_closes_in_every_form(run: Run, index: None) -> None:
    said = run("2.8.0", "2.13.0", "--module", "linear_walker")
    assert said.code == FOUND
    flat = " ".join(said.out.split())
    assert "linear_walker breaks first with Transformer Engine 2.11.0; 2.10.0 is the last good one" in flat
    assert "nox -s te_canary -- 2.10.0 2.11.0" in flat
    assert said.err.count("\n") <= 5
    again = run("2.8.0", "2.13.0", "--module", "linear_walker", "--format", "markdown")
    assert "| 2.11.0 | ✗ bad |" in again.out
    (turn,) = json.loads(run("2.8.0", "2.13.0", "--module", "linear_walker", "--format", "json").out)["culprits"]
    assert (turn["last_good"], turn["first_bad"]) == ("2.10.0", ["2.11.0"])


WRONG_ARGUMENTS: dict[str, tuple[list[str], list[str]]] = {
    "no-module": (["2.8.0", "2.13.0", "--module", "linear"], ["'linear'", "linear_walker"]),
    "no-release": (["2.8.0", "2.13.9", "--module", "permute"], ["2.13.9", "Nearest: 2.12.0, 2.13.0"]),
    "one-release": (["2.8.0", "2.8.0", "--module", "permute"], ["nothing to search"]),
    "axis-sources": (
        ["2.8.0", "2.9.0", "--module", "permute", "--tier", "static", "--axis", "a=1:,2:"],
        ["--axis", "--tier gpu"],
    ),
    "no-target": (["2.8.0", "2.9.0", "--module", "permute", "--tier", "gpu"], ["no target", "h200"]),
    "no-such-target": (["2.8.0", "2.9.0", "--module", "permute", "--target", "h100"], ["'h100'"]),
    "no-axis": (["2.8.0", "2.9.0", "--module", "permute", "--target", "h200", "--axis", "cudnn=9.1"], ["NAME=VALUE"]),
    "answers": (
        ["2.8.0", "2.13.0", "--module", "permute", "--target", "cpu", "--receipts", "a-file"],
        ["a-file", "--receipts"],
    ),
}


@pytest.mark.parametrize(("arguments", "words"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_wrong_arguments_are_told_in_words(
    run: Run, index: None, arguments: list[str], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a-file").write_text("")
    said = run(*arguments)
    assert said.code == WRONG, said
    for word in words:
        assert word in said.err
    assert "Traceback" not in said.err


# --- on a host with a GPU ---------------------------------------------------------------------------------------

PROBE = """
import hashlib, json, sys
from importlib.metadata import distributions
from pathlib import Path
order = json.load(sys.stdin)
cell = '{stack}-{id}-{probe}'.format(**order, **order['target'])
path = [Path(entry) for entry in sys.path]
te = next(d.version for d in distributions() if d.metadata['Name'] == 'transformer-engine')
cudnn = next(((entry / 'cudnn').read_text() for entry in path if (entry / 'cudnn').is_file()), '9.14.0')
at = tuple(int(part) for part in te.split('.')), cudnn
outcome, reason, more = 'pass', '', {}
exec(Path(__file__).with_name('said').read_text())
receipt = dict(cell=cell, stack=order['stack'], target=order['target']['id'], probe=order['probe'], outcome=outcome,
    reason=reason, requested=order['requested'], seed=order['seed'], environment=order['environment'],
    tool=order['tool'], commit=order['commit'], checks=[dict(name='one', passed=outcome == 'pass')],
    libraries=[dict(name='libcudnn', version=cudnn)], **more)
with open(Path(__file__).with_name('ran'), 'a') as log:
    log.write(order['probe'] + ' ' + te + ' ' + cudnn + '\\n')
text = json.dumps({**receipt, 'seal': ''}, indent=2) + '\\n'
open(sys.argv[1], 'w').write(text[:-4] + hashlib.sha256(text.encode()).hexdigest() + text[-4:])
"""
SMI = "#!/bin/sh\necho 'NVIDIA H200, 9.0, 580.159.03, 143771'\n"
ALL = ("2.12.0", "2.13.0", "2.14.1", "2.15.0", "2.16.0", "2.16.1", "2.17.0", "2.17.1")


@pytest.fixture
def host(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A host with an H200 and some releases in overlays, whose probes do what a test says; arguments that name it."""
    probes = tmp_path / "fake" / "megacpp_validate" / "probes"
    probes.mkdir(parents=True)
    for package in (probes, probes.parent):
        (package / "__init__.py").write_text("")
    (probes / "__main__.py").write_text(PROBE)
    binaries = tmp_path / "host"
    binaries.mkdir()
    (binaries / "nvidia-smi").write_text(SMI)
    (binaries / "python3").write_text(
        f'#!/bin/sh\nfake="{tmp_path / "fake"}"\n'
        'case "$*" in *"-m megacpp_validate.probes "*) export PYTHONPATH="$fake:$PYTHONPATH";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    for name in ("nvidia-smi", "python3"):
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")

    def make(said: str, releases: tuple[str, ...] = ALL) -> list[str]:
        (probes / "said").write_text(said)
        for release in releases:
            package = tmp_path / "overlays" / f"te-{release}" / "transformer_engine"
            package.mkdir(parents=True)
            (package / "__init__.py").write_text("")
            info = package.parent / f"transformer_engine-{release}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer-engine\nVersion: {release}\n")
        place = ["--overlays", str(tmp_path / "overlays"), "--python", str(binaries / "python3")]
        return ["--module", "attention", "--target", "h200", *place]

    return make


def ran(tmp_path: Path) -> list[str]:
    return (tmp_path / "fake" / "megacpp_validate" / "probes" / "ran").read_text().split("\n")[:-1]


def cudnn_folders(tmp_path: Path, *versions: str) -> str:
    for version in versions:
        (tmp_path / f"cudnn-{version}").mkdir()
        (tmp_path / f"cudnn-{version}" / "cudnn").write_text(version)
        (tmp_path / f"cudnn-{version}" / "x.pth").write_text("")
    return ",".join(f"{version}:{tmp_path}/cudnn-{version}" for version in versions)


def test_not_transformer_engine_but_cudnn(run: Run, host: Callable[..., list[str]], tmp_path: Path) -> None:
    fault = "if at[1] >= '9.18.0' and order['probe'] == 'attention': outcome, reason = 'error', 'cuDNN raises'"
    axis = f"cudnn={cudnn_folders(tmp_path, '9.15.0', '9.16.0', '9.17.0', '9.18.0', '9.19.0')}"
    said = run("2.12.0", "2.17.1", *host(fault, ("2.12.0", "2.15.0", "2.17.1")), "--axis", axis)
    assert said.code == FOUND, said
    flat = " ".join(said.out.split())
    assert (
        "The cause is cuDNN. attention breaks first with cuDNN 9.18.0, together with Transformer Engine 2.17.1; "
        "9.17.0 is the last good one" in flat
    )
    assert len({line.partition(" ")[2] for line in ran(tmp_path)}) <= 2 + 3


# --- axes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cudnn",
        "cudnn=",
        "cudnn=9.1:",
        "cudnn=9.1,9.2",
        "cudnn=9.1:,9.1:",
        "te=1:,2:",
        "cuDNN=9.1:,9.2:",
        "a=1:,2:/no",
    ],
)
def test_what_is_no_axis_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(WrongArguments, match="Next step: write NAME=VALUE:DIR"):
        read_axes([text])


@pytest.mark.parametrize(
    ("good", "bad", "values"),
    [
        ("2.8.0", "2.10.0", ("2.8.0", "2.9.0", "2.10.0")),
        ("2.10.0", "2.8.0", ("2.10.0", "2.9.0", "2.8.0")),
        ("2.8", "2.10.0", ("2.8", "2.9.0", "2.10.0")),
        ("2.9.0", "2.9.0", ("2.9.0",)),
    ],
)
def test_releases_are_ordered_from_the_good_end_to_the_bad_one(good: str, bad: str, values: tuple[str, ...]) -> None:
    assert order_releases(["2.8.0", "2.9.0", "2.10.0"], good, bad).values == values


# --- environments -----------------------------------------------------------------------------------------------
