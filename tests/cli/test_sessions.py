"""Verbs that run cells: exit codes by class of outcome, receipts of this run alone, no green without evidence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import matrix_folder
from megacpp_validate.catalog.policies import PRESETS
from megacpp_validate.environments.cell import own_folder
from megacpp_validate.errors import Exit
from megacpp_validate.evidence.store import read_receipts
from tests.command_line import Run
from tests.replay.loss import made_up, put
from tests.running_processes import hearing_signals, within

MODULES = {"imports", "attention", "linear_walker", "expert_gemm", "permute", "native_block", "layer_spec"}
Session = Callable[[str], Run]
Stack = Callable[[str], Path]

# --- parity ---


def test_without_the_gpu_nothing_runs_nothing_is_written_and_nothing_is_green(session: Session, tmp_path: Path) -> None:
    said = session("parity")("--target", "b200", "--format", "markdown")
    assert (said.code, said.err) == (Exit.EVIDENCE_MISSING, "")
    assert "| imports | ○ not run |" in said.out
    assert list(tmp_path.iterdir()) == []


def test_a_real_probe_on_this_machine(session: Session, tmp_path: Path) -> None:
    said = session("parity")("--target", "cpu", "--probes", "attention", "--seed", "5", "--format", "json")
    assert said.code == Exit.OPEN, said.out
    assert "pass         native-cpu-attention" in said.err
    receipt = read_receipts(tmp_path / ".megacpp" / "receipts").found["native-cpu-attention"]
    assert (receipt.seed, receipt.requested, said.told["receipts"][0]["seed"]) == (5, "native", 5)
    assert receipt.checks


def test_a_whole_session_of_one_stack(session: Session, stack: Stack, tmp_path: Path) -> None:
    """As release 2.17.1 does on an H200: two modules die, the rest hold."""
    stack("os.abort() if order['probe'] in ('attention', 'native_block') else write()")
    said = session("parity")("--target", "h200", "--receipts", "kept")
    assert said.code == Exit.CLOSED
    receipts = read_receipts(tmp_path / "kept").found
    assert {name.removeprefix("te2.17.1-h200-") for name in receipts} == MODULES
    red = {receipt.probe for receipt in receipts.values() if not receipt.outcome.is_good}
    assert red == {"attention", "native_block"}
    for words in ("Parity does not hold: 5 pass; error: attention, native_block.", "died of SIGABRT", "next"):
        assert words in said.out


def test_an_interrupt_ends_it_and_what_it_started(stack: Stack, tmp_path: Path) -> None:
    stack(f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    command = [sys.executable, "-m", "megacpp_validate.cli", "parity", "--target", "h200", "--probes", "imports"]
    with hearing_signals():
        process = subprocess.Popen(
            [*command, "--receipts", str(tmp_path / "receipts")], stderr=subprocess.PIPE, start_new_session=True
        )
    assert within(60, (tmp_path / "pid").exists)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, b"Traceback" in err, err.count(b"interrupted")) == (Exit.INTERRUPTED, False, 1)
    assert list((tmp_path / "receipts").glob("*.json")) == []  # an interrupt is no evidence against a module
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# --- FP8 ---


def test_a_session_that_leaves_good_curves_is_open(session: Session, stack: Stack, tmp_path: Path) -> None:
    for recipe, seed in product(("bf16", "delayed", "current"), range(3)):
        put(tmp_path, made_up(recipe, seed), "te2.17.1-h200-fp8_loss")
    left = [str(curve) for curve in tmp_path.glob("*.curve")]
    copy = f"[shutil.copy(curve, os.path.dirname(place)) for curve in {left}]"
    stack(f"import shutil\nif order['probe'] == 'fp8_loss': {copy}\nwrite()")
    said = session("fp8")("--format", "json")
    assert said.code == Exit.OPEN, said.out + said.err
    assert [row["recipe"] for row in said.told["loss"]] == ["current", "delayed"]


@pytest.mark.parametrize("form", ["table", "junit", "github"])
def test_lost_curves_and_refused_presets_are_open_in_no_form(
    form: str, session: Session, stack: Stack, tmp_path: Path
) -> None:
    stack("write()")
    said = session("fp8")("--probes", "loss", "--format", form)
    assert (said.code, "Left no curve" in said.out) == (Exit.EVIDENCE_MISSING, True)
    assert {"junit": "<skipped", "github": "::warning"}.get(form, "") in said.out
    matrix = Path(shutil.copytree(matrix_folder(), tmp_path / "matrix"))
    (matrix / PRESETS).write_text((matrix / PRESETS).read_text().replace("bf16_first = 1", "bf16_first = 0", 1))
    said = session("fp8")("--probes", "delayed", "--matrix", matrix, "--format", form)
    assert (said.code, "FP8 policy and its presets disagree" in said.flat) == (Exit.CLOSED, True)
    assert {"junit": "<failure"}.get(form, "") in said.out


# --- the smoke run ---

RECORD = """
steps = [dict(step=n, loss=3.4 - n / 10, perfect=2.0, grad_norm=1.0, seconds=0.5 if n else 9.0) for n in range(10)]
write(training=[dict(name='plan', model='scaled', pattern='AEMR', parameters=2_600_000_000, ranks=4,
    topology={'data': '4', 'expert_parallel': '4'}, precision='bf16', features={'preset': 'production'},
    forms={'moe': 'bridge'}, floor=2.0, without_context=3.47, steps=steps, whole_ns=20, phases_ns={'start-up': 5,
    'step': 15}, tokens=100, tokens_per_second=1234.5, flop_utilisation=0.321, peak_bytes={'step': 2**33})])
"""
OUTCOMES = {
    "good": (RECORD, Exit.OPEN, "32.1%"),
    "no-gpus": ("write(outcome='not-run', reason='takes 4 GPUs', checks=[])", Exit.EVIDENCE_MISSING, "takes 4 GPUs"),
    "red": (
        "write(outcome='fail', reason='one', checks=[dict(name='plan.learns', passed=False)])", Exit.CLOSED,
        "plan.learns",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("main", "code", "words"), OUTCOMES.values(), ids=OUTCOMES)
def test_a_smoke_cell(main: str, code: int, words: str, session: Session, stack: Stack) -> None:
    stack(main)
    said = session("moe-smoke")("--target", "h200", "--cells", "scaled_bf16_4")
    assert (said.code, words in said.out) == (code, True), said.out + said.err


# --- many cells ---


def test_cells_run_here_and_a_second_run_at_once_is_refused(session: Session, stack: Stack, tmp_path: Path) -> None:
    matrix, host = session("matrix"), stack("write()")
    receipts = tmp_path / "receipts"
    words = ("--targets", "cpu", "--probes", "imports", "--python", host / "python3", "--receipts", receipts)
    with own_folder(receipts):
        done = matrix(*words)
        assert (done.code, "another run writes to" in done.err) == (Exit.INFRASTRUCTURE, True)
    done = matrix(*words, "--launcher", "slurm")
    assert (done.code, "--launcher local" in done.err) == (Exit.INFRASTRUCTURE, True)
    done = matrix(*words, "--format", "json")
    assert done.code == Exit.OPEN, done.err
    (cell,) = done.told["cells"]
    assert (cell["cell"], cell["outcome"], cell["retries"]) == ("native-cpu-imports", "pass", [])
    (again,) = json.loads(matrix(*words, "--format", "json").out)["cells"]
    assert again["kept"] is True


def test_a_cell_on_a_gpu(session: Session, stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = stack("write(outcome='error', reason=os.environ['CUDA_VISIBLE_DEVICES'])")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8")
    place = f"mine=python:{host / 'python3'}"
    done = session("matrix")("--targets", "h200", "--probes", "imports", "--environment", place, "--format", "json")
    assert done.code == Exit.CLOSED, done.err
    (cell,) = done.told["cells"]
    assert (cell["outcome"], cell["reason"]) == ("error", "8")
    (receipt,) = read_receipts(tmp_path / ".megacpp" / "matrix").found.values()
    assert receipt.outcome.value == "error"
