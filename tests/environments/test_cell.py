"""Real processes that end in every way there is: each cell has one receipt of this run, and it says what happened."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.diagnosis.diagnose import find_retry_fault
from megacpp_validate.environments.cell import Cell, is_done, own_folder
from megacpp_validate.environments.fleet import Room, run_here
from megacpp_validate.environments.interpreter import InterpreterEnvironment
from megacpp_validate.errors import InfrastructureFailed, WrongArguments
from megacpp_validate.evidence.receipt import Check, Failure, Outcome, Receipt, Timing
from megacpp_validate.evidence.store import read_receipt
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.process import Processes
from tests.environments.places import make_probes

CPU = Target("cpu", "")


def orders(*probes: str) -> list[Order]:
    return [Order(probe, "native", CPU, "native", tool="tool 1") for probe in probes]


def run(main: str, folder: Path, *probes: str, limit_s: float = 60.0) -> tuple[Receipt, ...]:
    return run_in(make_probes(folder, main), folder, *(probes or ("one",)), limit_s=limit_s)


def run_in(
    environment: InterpreterEnvironment, folder: Path, *probes: str, limit_s: float, **more: Any
) -> tuple[Receipt, ...]:
    cells = [Cell(environment, order, folder / "receipts", limit_s) for order in orders(*probes)]
    return tuple(ran.receipt for ran in run_here(cells, Room(2), more.get("processes") or Processes()))


def test_what_a_probe_writes_is_kept_and_what_an_earlier_run_left_is_not(tmp_path: Path) -> None:
    receipts = tmp_path / "receipts"
    receipts.mkdir()
    (receipts / "native-cpu-one.old.curve").write_text("of an earlier run")
    (receipts / "native-cpu-one_more.curve").write_text("of another cell")
    leave = (
        "print('warning of a vendor')\n"
        "open(place[:-5] + '.seed0.curve', 'w').write('whole'); open(place + '.x', 'w').write('no');"
        "os.symlink('/etc/passwd', place[:-5] + '.link'); open('here', 'w').write('junk'); write()"
    )
    (receipt,) = run(leave, tmp_path)
    assert receipt.outcome is Outcome.PASS
    assert read_receipt(receipts / "native-cpu-one.json") == receipt
    assert (receipts / "native-cpu-one.log").read_text() == "warning of a vendor\n"
    left = {file.name for file in receipts.iterdir()}
    assert {"native-cpu-one.seed0.curve", "native-cpu-one_more.curve"} <= left
    assert not {"native-cpu-one.old.curve", "native-cpu-one.link", "here"} & left


LIMIT_S = 4.0  # of what hangs: it has to be there first, on a machine that has much else to do
DEATHS: dict[str, tuple[str, Outcome, list[str]]] = {
    "crash": (
        "def kernel(): os.kill(os.getpid(), signal.SIGSEGV)\nprint('launching', flush=True)\nkernel()",
        Outcome.ERROR,
        ["died of SIGSEGV", "in kernel", "launching"],
    ),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", Outcome.ERROR, ["died of SIGKILL", "nothing"]),
    "killed-in-a-container": ("os._exit(137)", Outcome.ERROR, ["died of SIGKILL"]),
    "exit-status": ("print('bye'); os._exit(3)", Outcome.ERROR, ["exit status 3 before it wrote a receipt", "bye"]),
    "after-the-receipt": ("write(); os.abort()", Outcome.ERROR, ["died of SIGABRT"]),
    "no-receipt": ("print('well done')", Outcome.ERROR, ["no receipt that can be used", "well done"]),
    "half-a-receipt": ("open(place, 'w').write('{\"cell\": ')", Outcome.ERROR, ["no receipt that can be used"]),
    "another-seed": ("write(seed=99)", Outcome.ERROR, ["answers another order"]),
    "another-environment": ("write(environment='f00')", Outcome.ERROR, ["answers another order"]),
    "hang": (
        "def wait(): time.sleep(600)\nprint('step 1', flush=True)\nwait()",
        Outcome.TIMEOUT,
        ["killed after 4 s", "in wait", "step 1"],
    ),
    "full-disk": ("raise OSError(28, os.strerror(28), place)", Outcome.NOT_RUN, ["No space left on device"]),
}


@pytest.mark.parametrize(("main", "outcome", "words"), DEATHS.values(), ids=DEATHS)
def test_a_process_that_dies_leaves_a_receipt_that_says_how(
    main: str, outcome: Outcome, words: list[str], tmp_path: Path
) -> None:
    (receipt,) = run(main, tmp_path, limit_s=LIMIT_S if outcome is Outcome.TIMEOUT else 60.0)
    assert receipt.outcome is outcome
    for word in words:
        assert word in receipt.reason
    assert receipt.failure is not None
    assert receipt.started
    assert read_receipt(tmp_path / "receipts" / "native-cpu-one.json") == receipt


def test_a_stop_kills_what_runs_and_starts_nothing_more(tmp_path: Path) -> None:
    """As an interrupt does: the session raises, and nothing is left running behind it."""
    processes, pid = Processes(), tmp_path / "pid"
    main = f"open({str(pid)!r}, 'a').write(str(os.getpid()) + ' '); time.sleep(600)"

    def stop() -> None:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.02)
        processes.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(RuntimeError, match="everything was stopped"):
        run_in(make_probes(tmp_path, main), tmp_path, "one", limit_s=600.0, processes=processes)
    stopper.join()
    (started,) = pid.read_text().split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started), 0)


def test_an_interpreter_that_does_not_start_is_no_evidence(tmp_path: Path) -> None:
    (receipt,) = run_in(InterpreterEnvironment((str(tmp_path / "no"),), {}), tmp_path, "one", limit_s=30.0)
    assert receipt.outcome is Outcome.NOT_RUN
    assert find_retry_fault(receipt).startswith("not-started: the process could not be started")


# --- what an earlier run left is taken again only if it answers the order ---

ORDER = Order("permute", "te1", Target("cpu", ""), "native", seed=3, tool="tool 1", commit="c0", environment="e0")
DONE = Receipt(
    cell=ORDER.cell, stack="te1", target="cpu", probe="permute", outcome=Outcome.PASS, reason="", requested="native",
    checks=(Check("one", True),), seed=3, tool="tool 1", commit="c0", environment="e0",
)  # fmt: skip
TIMED = Timing("permute.forward", "perf_counter", (1.0, 1.0), 1.0, 0.0, 5)

STALE: dict[str, tuple[Order, Receipt]] = {
    "another-seed": (replace(ORDER, seed=4), DONE),
    "another-request": (replace(ORDER, requested="te"), DONE),
    "another-tool": (replace(ORDER, tool="tool 2"), DONE),
    "another-commit": (replace(ORDER, commit="c0-dirty"), DONE),
    "another-environment": (replace(ORDER, environment="e1"), DONE),
    "another-cell": (replace(ORDER, stack="te2"), DONE),
    "of-no-known-environment": (replace(ORDER, environment=""), replace(DONE, environment="")),
    "not-run": (ORDER, replace(DONE, outcome=Outcome.NOT_RUN)),
    "killed-by-somebody-else": (ORDER, replace(DONE, outcome=Outcome.ERROR, failure=Failure("SIGKILL", "nothing"))),
    "the-disk-was-full": (
        ORDER,
        replace(DONE, outcome=Outcome.ERROR, reason="OSError: [Errno 28] No space left on device: '/tmp/x'"),
    ),
    "too-slow-beside-others": (ORDER, replace(DONE, outcome=Outcome.TIMEOUT)),
    "not-timed": (replace(ORDER, times=True), DONE),
}


ANSWERS: dict[str, tuple[Order, Receipt]] = {
    "good": (ORDER, DONE),
    "bad": (ORDER, replace(DONE, outcome=Outcome.ERROR)),
    "timed": (replace(ORDER, times=True), replace(DONE, timings=(TIMED,))),
    "timed-and-nobody-asked": (ORDER, replace(DONE, timings=(TIMED,))),
    "crashed": (ORDER, replace(DONE, outcome=Outcome.ERROR, failure=Failure("SIGSEGV", "nothing"))),
    "too-slow-alone": (replace(ORDER, times=True), replace(DONE, outcome=Outcome.TIMEOUT, retries=("timeout: ",))),
    "nothing-to-time": (
        replace(ORDER, probe="composed", times=True),
        replace(DONE, probe="composed", cell="te1-cpu-composed"),
    ),
}


@pytest.mark.parametrize(
    ("order", "receipt", "done"),
    [*((*row, False) for row in STALE.values()), *((*row, True) for row in ANSWERS.values())],
    ids=[*STALE, *ANSWERS],
)
def test_which_receipts_are_answers(order: Order, receipt: Receipt, done: bool) -> None:
    assert is_done(order, receipt) is done


def test_a_second_run_is_refused_while_the_first_one_holds_the_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with own_folder(tmp_path), pytest.raises(InfrastructureFailed, match="another run"), own_folder(tmp_path):
            pass
    (tmp_path / "file").touch()
    with pytest.raises(WrongArguments, match="give --root a folder"), own_folder(tmp_path / "file", "--root"):
        pass
