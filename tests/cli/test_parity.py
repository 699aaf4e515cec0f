"""The verbs of parity: exit codes by class of outcome, receipts of this run alone, no green without evidence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacpp_validate.evidence.store import read_receipts
from tests.command_line import Run, make_run
from tests.environments.places import make_h200_host
from tests.running_processes import hearing_signals

OPEN, CLOSED, WRONG, NOTHING, MISSING, NO_ENVIRONMENT, INFRASTRUCTURE, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130
MODULES = {"imports", "attention", "linear_walker", "expert_gemm", "permute", "native_block", "layer_spec"}


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command line in this process, on a host with no GPU, in a folder of the test's own."""
    for name in ("MEGACPP_PYTHON", "MEGACPP_DISABLE_TE", "CUDA_VISIBLE_DEVICES", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return make_run(capfd, monkeypatch)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """An interpreter on a host with an H200 and Transformer Engine 2.17.1, whose probes do what a test says."""

    def make(main: str) -> Path:
        host = make_h200_host(tmp_path, main)
        monkeypatch.setenv("PATH", f"{host}:/usr/bin:/bin")
        return host / "python3"

    return make


def test_without_the_gpu_nothing_runs_nothing_is_written_and_nothing_is_green(run: Run, tmp_path: Path) -> None:
    said = run("parity", "--target", "b200", "--format", "markdown")
    assert (said.code, said.err) == (MISSING, "")
    assert "| imports | ○ not run |" in said.out
    assert list(tmp_path.iterdir()) == []


def test_a_real_probe_on_this_machine(run: Run, tmp_path: Path) -> None:
    said = run("parity", "--target", "cpu", "--probes", "attention", "--seed", "5", "--format", "json")
    assert said.code == OPEN, said.out
    assert "pass         native-cpu-attention" in said.err
    (told,) = json.loads(said.out)["receipts"]
    receipts = read_receipts(tmp_path / ".megacpp" / "receipts")
    assert receipts.unreadable == ()
    receipt = receipts.found["native-cpu-attention"]
    assert (receipt.seed, receipt.requested, told["seed"]) == (5, "native", 5)
    assert receipt.checks


def test_a_whole_session_of_one_stack(run: Run, stack: Callable[[str], Path], tmp_path: Path) -> None:
    """As release 2.17.1 does on an H200: two modules die, the rest hold."""
    python = stack("os.abort() if order['probe'] in ('attention', 'native_block') else write()")
    said = run("parity", "--target", "h200", "--python", python, "--receipts", "kept")
    assert said.code == CLOSED
    receipts = read_receipts(tmp_path / "kept").found
    assert {name.removeprefix("te2.17.1-h200-") for name in receipts} == MODULES
    red = {receipt.probe for receipt in receipts.values() if not receipt.outcome.is_good}
    assert red == {"attention", "native_block"}
    assert "Parity does not hold: 5 pass; error: attention, native_block." in said.out
    for words in ("died of SIGABRT", "next", "Transformer Engine 2.17.1"):
        assert words in said.out


def test_te_turned_off_asks_for_the_native_paths_and_says_so(
    run: Run, stack: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = stack("write()")
    monkeypatch.setenv("MEGACPP_DISABLE_TE", "1")
    monkeypatch.setenv("MEGACPP_PYTHON", str(python))
    said = run("parity", "--target", "h200", "--probes", "permute,attention", "--probes", "imports")
    assert said.code == OPEN
    assert "MEGACPP_DISABLE_TE=1 turns Transformer Engine off" in said.out
    assert set(read_receipts(tmp_path / ".megacpp" / "receipts").found) == {
        f"native-h200-{name}" for name in ("imports", "attention", "permute")
    }


def test_an_interrupt_ends_it_and_what_it_started(stack: Callable[[str], Path], tmp_path: Path) -> None:
    python = stack(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    command = [sys.executable, "-m", "megacpp_validate.cli", "parity", "--target", "h200", "--python", str(python)]
    with hearing_signals():
        process = subprocess.Popen(
            [*command, "--probes", "imports", "--receipts", str(tmp_path / "receipts")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert "Traceback" not in err
    assert list((tmp_path / "receipts").glob("*.json")) == []  # an interrupt is no evidence against a module
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
