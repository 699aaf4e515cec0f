"""Real processes that end in every way there is: each cell has one receipt of this run, and it says what happened."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.environments.fleet import Expected, Session
from megacpp_validate.environments.interpreter import InterpreterEnvironment
from megacpp_validate.evidence.receipt import Outcome, Receipt
from megacpp_validate.evidence.store import read_receipt, read_receipts
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.process import Call, Processes
from tests.environments.places import make_probes
from tests.running_processes import is_running

CPU = Target("cpu", "")


def orders(*probes: str, seed: int = 0) -> list[Order]:
    return [Order(probe, "native", CPU, "native", seed=seed, tool="tool 1") for probe in probes]


def run(
    main: str, folder: Path, *probes: str, limit_s: float = 60.0, jobs: int = 2, seed: int = 0
) -> tuple[Receipt, ...]:
    environment = make_probes(folder, main)
    session = Session(environment, folder / "receipts", limit_s, jobs)
    return session.run(orders(*(probes or ("one",)), seed=seed), Processes())


def test_a_probe_that_writes_its_receipt_is_believed(tmp_path: Path) -> None:
    print_and_write = "print('warning of a vendor'); write()"
    (receipt,) = run(print_and_write, tmp_path)
    assert receipt.outcome is Outcome.PASS
    assert read_receipt(tmp_path / "receipts" / "native-cpu-one.json") == receipt
    assert (tmp_path / "receipts" / "native-cpu-one.log").read_text() == "warning of a vendor\n"


def test_what_a_probe_leaves_beside_its_receipt_is_kept_and_what_an_earlier_run_left_is_not(tmp_path: Path) -> None:
    receipts = tmp_path / "receipts"
    receipts.mkdir()
    (receipts / "native-cpu-one.old.curve").write_text("of an earlier run")
    (receipts / "native-cpu-one_more.curve").write_text("of another cell")
    leave = (
        "open(place[:-5] + '.seed0.curve', 'w').write('whole'); open(place + '.x', 'w').write('no');"
        "os.symlink('/etc/passwd', place[:-5] + '.link'); open('here', 'w').write('junk'); write()"
    )
    (receipt,) = run(leave, tmp_path)
    assert receipt.outcome is Outcome.PASS
    left = {file.name for file in receipts.iterdir()}
    assert {"native-cpu-one.seed0.curve", "native-cpu-one_more.curve", "native-cpu-one.json"} <= left
    assert not {"native-cpu-one.old.curve", "native-cpu-one.link", "here"} & left
    assert (receipts / "native-cpu-one.seed0.curve").read_text() == "whole"


def test_a_cell_that_is_known_to_take_long_is_given_longer(tmp_path: Path) -> None:
    environment = make_probes(tmp_path, "time.sleep(1.5); write()")
    session = Session(environment, tmp_path / "receipts", 1.0, 2)
    expected = {"long": Expected(seconds=100.0, limit_s=60.0)}
    short, long = session.run(orders("short", "long"), Processes(), expected=expected)
    assert (short.outcome, long.outcome) == (Outcome.TIMEOUT, Outcome.PASS)


LIMIT_S = 4.0  # of what hangs: it has to be there first, on a machine that has much else to do
DEATHS: dict[str, tuple[str, Outcome, list[str]]] = {
    "crash": (
        "def kernel(): os.kill(os.getpid(), signal.SIGSEGV)\nprint('launching', flush=True)\nkernel()",
        Outcome.ERROR,
        ["died of SIGSEGV", "in kernel", "launching"],
    ),
    "abort": ("print('CUDA error: misaligned address', flush=True); os.abort()", Outcome.ERROR, ["SIGABRT", "misal"]),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", Outcome.ERROR, ["died of SIGKILL", "nothing"]),
    "exit-status": ("print('bye'); os._exit(3)", Outcome.ERROR, ["exit status 3 before it wrote a receipt", "bye"]),
    "after-the-receipt": ("write(); os.abort()", Outcome.ERROR, ["died of SIGABRT"]),
    "no-receipt": ("print('well done')", Outcome.ERROR, ["no receipt that can be believed", "well done"]),
    "half-a-receipt": ("open(place, 'w').write('{\"cell\": ')", Outcome.ERROR, ["no receipt that can be believed"]),
    "another-cell": ("write(cell='native-cpu-two', probe='two')", Outcome.ERROR, ["its name does not say"]),
    "another-seed": ("write(seed=99)", Outcome.ERROR, ["answers another order"]),
    "another-environment": ("write(environment='f00')", Outcome.ERROR, ["answers another order"]),
    "another-backend": ("write(requested='te')", Outcome.ERROR, ["answers another order"]),
    "good-over-a-bad-check": ("write(checks=[dict(name='x', passed=False)])", Outcome.ERROR, ["failed check x"]),
    "good-over-nothing": ("write(checks=[])", Outcome.ERROR, ["no check at all"]),
    "an-outcome-of-its-own": ("write(outcome='fine')", Outcome.ERROR, ["outcome"]),
    "hang": (
        "def wait(): time.sleep(600)\nprint('step 1', flush=True)\nwait()",
        Outcome.TIMEOUT,
        ["killed after 4 s", "in wait", "step 1"],
    ),
    "deaf": ("signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGABRT]); time.sleep(600)", Outcome.TIMEOUT, ["4 s"]),
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


def test_an_interpreter_that_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    session = Session(InterpreterEnvironment((str(tmp_path / "nothing"),), {}), tmp_path / "receipts", 10.0, 1)
    (receipt,) = session.run(orders("one"), Processes())
    assert receipt.outcome is Outcome.ERROR
    assert "could not be started" in receipt.reason


def test_one_bad_cell_costs_no_other_and_the_order_is_that_of_the_orders(tmp_path: Path) -> None:
    main = "os.abort() if order['probe'] == 'two' else write()"
    receipts = run(main, tmp_path, "one", "two", "three")
    assert [(receipt.probe, receipt.outcome.value) for receipt in receipts] == [
        ("one", "pass"), ("two", "error"), ("three", "pass"),
    ]  # fmt: skip
    assert set(read_receipts(tmp_path / "receipts").found) == {f"native-cpu-{name}" for name in ("one", "two", "three")}


def test_an_earlier_receipt_is_never_taken_for_this_run(tmp_path: Path) -> None:
    run("write()", tmp_path, "one", "other")
    (receipt,) = run("print('nothing written')", tmp_path, "one")
    assert receipt.outcome is Outcome.ERROR
    assert read_receipt(tmp_path / "receipts" / "native-cpu-one.json").outcome is Outcome.ERROR
    assert read_receipt(tmp_path / "receipts" / "native-cpu-other.json").outcome is Outcome.PASS  # not asked, not lost


def test_cells_run_side_by_side_as_many_as_asked(tmp_path: Path) -> None:
    main = (
        "folder = os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0])))\n"
        "mark = os.path.join(folder, order['probe'])\nopen(mark, 'w').close()\n"
        "end = time.time() + 20\n"
        "while sum(name.startswith('side') for name in os.listdir(folder)) < 2 and time.time() < end:\n"
        "    time.sleep(0.01)\n"
        "write(outcome='pass' if time.time() < end else 'error')"
    )
    receipts = run(main, tmp_path, "side1", "side2", jobs=2)
    assert all(receipt.outcome is Outcome.PASS for receipt in receipts)


def test_progress_tells_each_cell_twice(tmp_path: Path) -> None:
    told: list[tuple[str, bool]] = []
    session = Session(make_probes(tmp_path, "write()"), tmp_path / "receipts", 60.0, 1)
    session.run(orders("one", "two"), Processes(), lambda cell, receipt: told.append((cell, receipt is not None)))
    assert told == [
        ("native-cpu-one", False), ("native-cpu-one", True), ("native-cpu-two", False), ("native-cpu-two", True),
    ]  # fmt: skip


def test_a_stop_kills_what_runs_and_starts_nothing_more(tmp_path: Path) -> None:
    """As an interrupt does: the session raises, and nothing is left running behind it."""
    processes = Processes()
    environment = make_probes(
        tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    session = Session(environment, tmp_path / "receipts", 600.0, 1)

    def stop() -> None:
        end = time.monotonic() + 30
        while not (tmp_path / "pid").exists() and time.monotonic() < end:
            time.sleep(0.02)
        processes.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(RuntimeError, match="everything was stopped"):
        session.run(orders("one", "two"), processes)
    stopper.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_session_that_is_killed_outright_takes_its_probes_with_it(tmp_path: Path) -> None:
    """The real entry of a probe process asks for that; nothing else would free the GPU."""
    code = (
        "import subprocess, sys, time\n"
        "child = 'import time; from megacpp_validate.probes.__main__ import _die_with_the_parent as die; die();'\n"
        "child += 'print(1, flush=True); time.sleep(600)'\n"
        "probe = subprocess.Popen([sys.executable, '-c', child], stdout=subprocess.PIPE, start_new_session=True)\n"
        "probe.stdout.readline(); print(probe.pid, flush=True); time.sleep(600)\n"
    )
    session = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    probe = int(session.stdout.readline())
    session.send_signal(signal.SIGKILL)
    session.wait()
    session.stdout.close()
    end = time.monotonic() + 20
    while is_running(probe) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(probe)


def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "receipts").write_text("")
    with pytest.raises(OSError, match="receipts"):
        run("write()", tmp_path)


def test_a_disk_that_is_full_is_no_evidence_on_a_module(tmp_path: Path) -> None:
    """What the probe saw could not be written; the reason says why it has to run again."""
    environment = make_probes(tmp_path, "raise OSError(28, os.strerror(28), place)")
    (receipt,) = Session(environment, tmp_path / "receipts", 30.0, 1).run(orders("one"), Processes())
    assert receipt.outcome is Outcome.NOT_RUN
    assert receipt.reason.startswith("No space left on device")


def test_an_engine_that_is_gone_is_no_evidence_on_a_module(tmp_path: Path) -> None:
    class Lost(InterpreterEnvironment):
        def call(self, module: str, *arguments: str, shares: tuple[Path, ...] = ()) -> Call:
            call = super().call(module, *arguments, shares=shares)
            return replace(call, words=("sh", "-c", "echo Cannot connect to the daemon; exit 125"), not_started=(125,))

    lost = Lost((sys.executable,), {"PATH": "/usr/bin:/bin"})
    (receipt,) = Session(lost, tmp_path / "receipts", 30.0, 1).run(orders("one"), Processes())
    assert receipt.outcome is Outcome.NOT_RUN
    assert "Cannot connect to the daemon" in receipt.reason
