"""The dynamic tier from the command line: one result and exit code of many stacks; a killed run goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.evidence.store import read_store
from tests.canary.static.small_sources import write_release
from tests.command_line import Run, make_run, use_bare_host
from tests.environments.places import make_h200_host
from tests.environments.site_folders import make_te
from tests.running_processes import processes_of, within

OPEN, CLOSED, WRONG, NOTHING, MISSING, NO_ENVIRONMENT = 0, 1, 2, 3, 4, 5
ROOT = Path(__file__).resolve().parents[2]
EVIDENCE = ROOT / "docs" / "evidence" / "h200"


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the test's own, on a host with no GPU, no overlays, and nothing in its cache."""
    use_bare_host(monkeypatch)
    monkeypatch.setenv("MEGACPP_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command line in this process."""
    return make_run(capfd, monkeypatch)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A host with an H200, and a folder of overlays; its probes do what a test says."""

    def make(main: str, *releases: str) -> Path:
        place = make_h200_host(tmp_path, main, te="")
        monkeypatch.setenv("PATH", f"{place}:/usr/bin:/bin")
        monkeypatch.setenv("MEGACPP_PYTHON", str(place / "python3"))
        for release in releases:
            make_te(tmp_path / "overlays" / f"te-{release}", release)
        return tmp_path / "overlays"

    return make


GPU = ("canary", "--tiers", "gpu", "--no-times", "--format", "json")


def test_every_installed_release_is_run_and_the_one_that_breaks_is_named(run: Run, host: Callable[..., Path]) -> None:
    overlays = host(
        "bad = order['stack'] == 'te2.17.1' and order['probe'] in ('attention', 'native_block')\n"
        "write(**(dict(outcome='error', reason='cuDNN', failure=dict(type='RuntimeError', message='cudnn: bad graph'))"
        " if bad else {}))",
        "2.9.0", "2.17.1", "2.20.2",
    )  # fmt: skip
    said = run("canary", "--all-installed", "--overlays", overlays, "--format", "json", "--jobs", 3)
    assert said.code == CLOSED, said.err
    told = json.loads(said.out)
    assert (told["target"], told["tiers"]) == ("h200", ["gpu"])
    assert [stack["stack"] for stack in told["stacks"]] == ["te2.9.0", "te2.17.1", "te2.20.2"]
    assert [len(stack["ran"]) for stack in told["stacks"]] == [15, 9, 9]  # of the first, six modules are timed twice
    blamed = [[culprit["module"] for culprit in step["culprits"]] for step in told["steps"]]
    assert blamed == [["attention"], []]
    assert "33/33" in said.err
    assert "te2.9.0-h200-permute, again" in said.err

    again = run("canary", "--all-installed", "--overlays", overlays, "--no-times", "--format", "json")
    assert again.code == CLOSED
    told = json.loads(again.out)
    assert [(len(stack["ran"]), len(stack["reused"])) for stack in told["stacks"]] == [(0, 9), (0, 9), (0, 9)]


def test_a_release_that_is_not_here_costs_the_others_nothing(run: Run, host: Callable[..., Path]) -> None:
    overlays = host("write()", "2.9.0", "2.20.2")
    common = ("--overlays", overlays, "--probes", "imports")
    said = run(*GPU, "2.9.0", "2.14.1", "2.20.2", *common)
    assert said.code == MISSING
    told = json.loads(said.out)
    assert "no environment with Transformer Engine 2.14.1" in told["stacks"][1]["problem"]
    assert [len(stack["ran"]) for stack in told["stacks"]] == [1, 0, 1]
    grid = {stack: set(outcomes.values()) for stack, outcomes in told["grid"]["stacks"].items()}
    assert grid == {"te2.9.0": {"pass"}, "te2.14.1": {"not-run"}, "te2.20.2": {"pass"}}
    none = run(*GPU, "2.14.1", "2.15.0", *common)
    assert none.code == NO_ENVIRONMENT
    assert json.loads(none.out)["stacks"][0]["problem"]


def test_without_a_gpu_its_cells_are_not_run_and_the_other_tiers_are_told(run: Run, tmp_path: Path) -> None:
    code = "class Linear:\n    def __init__(self, in_features, out_features, bias=True, device='cuda'): ..."
    for name in ("one", "two"):
        write_release(tmp_path / name, code)
    said = run("canary", tmp_path / "one", tmp_path / "two", "--tiers", "static,gpu", "--format", "json")
    assert said.code == MISSING, said.err
    told = json.loads(said.out)
    assert len(told["static"]) == 1
    assert all("sm_90" in stack["problem"] and "none is present" in stack["problem"] for stack in told["stacks"])
    assert {one for outcomes in told["grid"]["stacks"].values() for one in outcomes.values()} == {"not-run"}
    assert list((tmp_path / "work").rglob("*.json")) == []


@pytest.mark.thorough
def test_two_canaries_and_a_parity_run_that_are_killed_lose_nothing(host: Callable[..., Path], tmp_path: Path) -> None:
    """With -9, all three at one of 20 random moments, and started again. No process is left, receipts are whole, and
    a receipt of a canary stays as it is."""
    overlays = host("subprocess.Popen(['sleep', '600']); time.sleep(0.2); write()", "2.17.1", "2.20.2")
    canary = ("canary", "2.17.1", "2.20.2", "--tiers", "gpu", "--no-times", "--overlays", overlays)
    commands = {"one": canary, "two": canary, "parity": ("parity", "--target", "cpu")}

    def start(store: Path) -> list[subprocess.Popen[bytes]]:
        words = [sys.executable, "-m", "megacpp_validate.cli"]
        env, quiet = {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.DEVNULL
        return [
            subprocess.Popen([*words, *map(str, own), "--receipts", store / name], env=env, stdout=quiet, stderr=quiet)
            for name, own in commands.items()
        ]

    def read(store: Path) -> dict[str, str]:
        files = read_store(store).files if store.exists() else ()
        assert all(one.head is not None for one in files), [one.problem for one in files]
        return {one.file: one.sha256 for one in files}

    started, store = time.monotonic(), tmp_path / "store-0"
    assert [tool.wait(timeout=300) for tool in start(tmp_path / "whole")] == [OPEN] * len(commands)
    takes_s, cells, rng = time.monotonic() - started, read(tmp_path / "whole").keys(), random.Random(0)
    for number in range(20):
        before, tools = read(store), start(store)
        time.sleep(moment := rng.uniform(0.0, takes_s))
        for tool in tools:
            tool.kill()
            tool.wait()
        assert within(10, lambda: not processes_of(tmp_path))
        after = read(store)
        assert before.keys() <= after.keys()
        sys.stdout.write(f"{number}: killed after {moment:.2f} s: {len(before)} receipts, then {len(after)}\n")
        assert all(after[file] == digest for file, digest in before.items() if not file.startswith("parity/"))
        if after.keys() == cells:
            store = tmp_path / f"store-{number + 1}"
    assert [tool.wait(timeout=300) for tool in start(store)] == [OPEN] * len(commands)
    assert read(store).keys() == cells


def test_the_gpu_tier_needs_nothing_that_reads_sources(host: Callable[..., Path]) -> None:
    """A GPU host has no griffe; and the static tier says so there."""
    overlays = host("write()", "2.9.0", "2.20.2")
    code = "import sys; sys.modules['griffe'] = None; from megacpp_validate.cli import main; main()"

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *map(str, arguments), "--overlays", str(overlays), "--probes", "imports"]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, env=env, check=False)

    done = call(*GPU, "2.9.0", "2.20.2")
    assert done.returncode == OPEN, done.stderr
    done = call("canary", "2.9.0", "2.20.2", "--tiers", "static,gpu")
    assert done.returncode == NO_ENVIRONMENT
    assert "griffe" in done.stderr
    assert "Traceback" not in done.stderr


FOLDERS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "lost": (lambda place: (place / "te2.20.2-h200-permute.json.xz").unlink(), MISSING, "permute"),
    "damaged": (
        lambda place: (place / "te2.20.2-h200-permute.json.xz").write_text("{"), MISSING,
        'h200-permute": "it cannot be read',
    ),
    "two-stacks": (
        lambda place: shutil.copy(EVIDENCE / "te2.12.0" / "te2.12.0-h200-permute.json.xz", place), WRONG, "te2.12.0",
    ),
    "empty": (lambda place: [file.unlink() for file in place.iterdir()], NOTHING, "no receipt"),
    "none": (shutil.rmtree, WRONG, "no such folder"),
}  # fmt: skip


@pytest.mark.parametrize(("harm", "code", "word"), FOLDERS.values(), ids=FOLDERS)
def test_folders_that_are_not_whole(
    harm: Callable[[Path], object], code: int, word: str, run: Run, tmp_path: Path
) -> None:
    after = Path(shutil.copytree(EVIDENCE / "te2.20.2", tmp_path / "after"))
    harm(after)
    said = run("compare-receipts", EVIDENCE / "te2.19.0", after, "--format", "json")
    assert said.code == code
    assert word in said.out + said.err
