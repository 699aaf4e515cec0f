"""Many stacks on one target: what is wrong with one of them costs no other anything, and is told in words."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.environments import stacks as room_of_stacks
from megacpp_validate.environments.environment import Environment, NoEnvironment
from megacpp_validate.environments.facts import Facts
from megacpp_validate.environments.fleet import Room
from megacpp_validate.environments.plan import UnknownTarget, choose_target
from megacpp_validate.environments.stacks import (
    RanStack,
    RunOptions,
    Stack,
    StackOptions,
    StackRequest,
    prepare_stacks,
    run_stacks,
)
from megacpp_validate.evidence.receipt import Outcome
from megacpp_validate.evidence.store import read_receipts
from megacpp_validate.process import Processes
from tests.environments.places import H200_HOST, LAPTOP, make_probes, target_of
from tests.running_processes import hearing_signals

ASKED = StackOptions(("imports", "permute"), 3, True, "tool 1", "c0", {})


@pytest.fixture
def run(catalog: Catalog, tmp_path: Path) -> Callable[..., dict[str, RanStack]]:
    def call(target: str, *stacks: Stack, asked: StackOptions = ASKED) -> dict[str, RanStack]:
        running = RunOptions(tmp_path / "receipts", Room(2), 30.0)
        found = run_stacks(catalog, target_of(catalog, target), stacks, asked, running, Processes())
        return {stack.run.stack: stack for stack in found}

    return call


def stack(folder: Path, name: str, facts: Facts = H200_HOST, main: str = "write(reason=json.dumps(order))") -> Stack:
    return Stack(name, make_probes(folder, main), facts)


def test_every_stack_has_its_cells_and_the_first_is_timed_twice(
    run: Callable[..., dict[str, RanStack]], tmp_path: Path
) -> None:
    found = run("h200", stack(tmp_path, "te2.12.0"), stack(tmp_path, "te2.20.2"))
    first, second = found["te2.12.0"], found["te2.20.2"]
    assert first.run.ran == (
        "te2.12.0-h200-imports", "te2.12.0-h200-permute", "again/te2.12.0-h200-imports", "again/te2.12.0-h200-permute",
    )  # fmt: skip
    assert second.run.ran == ("te2.20.2-h200-imports", "te2.20.2-h200-permute")
    assert (set(first.again), set(second.again)) == ({"imports", "permute"}, set())
    orders = {name: json.loads(receipt.reason) for name, receipt in first.receipts.items()}
    again = {name: json.loads(receipt.reason) for name, receipt in first.again.items()}
    other = json.loads(second.receipts["permute"].reason)
    assert {(o["times"], o["only_times"], o["seed"], o["requested"]) for o in orders.values()} == {
        (True, False, 3, "te")
    }
    assert {(o["times"], o["only_times"]) for o in again.values()} == {(True, True)}
    # One device, one turnstile, for all of them; and it is gone after the run.
    assert len({o["turnstile"] for o in (*orders.values(), *again.values(), other)}) == 1
    assert not Path(other["turnstile"]).parent.exists()
    assert set(read_receipts(tmp_path / "receipts" / "te2.12.0" / "again").found) == {
        "te2.12.0-h200-imports", "te2.12.0-h200-permute",
    }  # fmt: skip


def test_a_cpu_has_no_turnstile_and_what_is_not_to_be_timed_runs_once(
    run: Callable[..., dict[str, RanStack]], tmp_path: Path
) -> None:
    found = run("cpu", stack(tmp_path, "te0.0.1", LAPTOP), asked=replace(ASKED, times=False))
    order = json.loads(found["te0.0.1"].receipts["permute"].reason)
    assert (order["stack"], order["requested"], order["times"], order["turnstile"]) == ("te0.0.1", "native", False, "")
    assert found["te0.0.1"].again == {}


def test_a_stack_that_cannot_be_made_is_not_run_and_the_others_are(
    run: Callable[..., dict[str, RanStack]], tmp_path: Path
) -> None:
    found = run("h200", Stack("te2.14.1", problem="the wheel is damaged"), stack(tmp_path, "te2.20.2"))
    bad, good = found["te2.14.1"], found["te2.20.2"]
    assert (bad.run.problem, bad.run.ran, bad.run.folder) == ("the wheel is damaged", (), "")
    assert {(r.outcome, r.reason) for r in bad.receipts.values()} == {(Outcome.NOT_RUN, "the wheel is damaged")}
    assert all(receipt.outcome is Outcome.PASS for receipt in good.receipts.values())
    assert set(good.again) == {"imports", "permute"}  # the first that can be run gives the noise
    assert not (tmp_path / "receipts" / "te2.14.1").exists()


def fails(words: str) -> Callable[[], Environment]:
    def make() -> Environment:
        raise NoEnvironment(words)

    return make


def test_stacks_are_made_and_asked_what_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = make_probes(tmp_path, "")
    has = {
        "one": H200_HOST,
        "two": H200_HOST.model_copy(update={"te": "2.14.1+cu13"}),
        "bare": H200_HOST.model_copy(update={"torch": ""}),
    }

    class Named:
        because = shown = identity = "named"

        def __init__(self, name: str) -> None:
            self.name, self.call = name, environment.call

    monkeypatch.setattr(room_of_stacks, "read_facts", lambda made, processes: has[made.name])
    wanted = [
        StackRequest("te2.20.2", lambda: Named("one"), "2.20.2"),
        StackRequest("te2.14.1", lambda: Named("two"), "2.14.1"),
        StackRequest("te2.17.1", lambda: Named("one"), "2.17.1"),
        StackRequest("mine", lambda: Named("one")),
        StackRequest("te1", fails("uv says no"), "1"),
        StackRequest("bare", lambda: Named("bare")),
    ]
    found = {stack.name: stack for stack in prepare_stacks(wanted, Processes())}
    assert [name for name, made in found.items() if not made.problem] == ["te2.20.2", "te2.14.1", "mine"]
    assert found["te1"].problem == "uv says no"
    assert "stands for Transformer Engine 2.17.1, and named has Transformer Engine 2.20.2" in found["te2.17.1"].problem
    assert "has no torch" in found["bare"].problem
    assert all("Next step" in found[name].problem for name in ("te2.17.1", "bare"))


def test_the_target_is_that_of_the_gpu(catalog: Catalog) -> None:
    b200 = {"gpu": H200_HOST.gpu and H200_HOST.gpu.model_copy(update={"capability": "10.0"})}
    assert choose_target(catalog, [H200_HOST]).id == "h200"
    assert choose_target(catalog, [LAPTOP, H200_HOST.model_copy(update=b200)]).id == "b200"
    assert choose_target(catalog, [LAPTOP]).id == "h200"  # the reference; it says then that there is no GPU
    with pytest.raises(UnknownTarget, match=r"sm_90, aarch64.*Next step"):
        choose_target(catalog, [H200_HOST.model_copy(update={"machine": "aarch64"})])


def test_another_row_of_the_target_makes_old_receipts_no_answer(catalog: Catalog, tmp_path: Path) -> None:
    """The row says what a probe is judged by; a matrix of one's own changes it without another commit."""
    row = target_of(catalog, "h200")
    other = row.model_copy(update={"deep_gemm": not row.deep_gemm})
    asked, running = replace(ASKED, times=False), RunOptions(tmp_path / "receipts", Room(2), 30.0)
    one = stack(tmp_path, "te2.12.0", main="write()")
    ran = [
        len(run_stacks(catalog, target, [one], asked, running, Processes())[0].run.ran) for target in (row, row, other)
    ]
    assert ran == [2, 0, 2]


INTERRUPTED = """
import os, time
from megacpp_validate.process import Processes
from megacpp_validate.environments.stacks import StackRequest, prepare_stacks
def make():
    os.write(1, b"makes\\n")  # at once: two threads say it
    time.sleep(600)
prepare_stacks([StackRequest("a", make), StackRequest("b", make)], Processes())
"""


def test_an_interrupt_waits_for_no_environment_that_is_being_made(tmp_path: Path) -> None:
    """uv and docker take minutes, and one that builds the same is waited for even longer."""
    with hearing_signals(), subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as tool:  # fmt: skip
        assert tool.stdout is not None
        try:
            assert tool.stdout.readline() == b"makes\n"
            tool.send_signal(signal.SIGINT)
            assert tool.wait(timeout=30) != 0
        finally:
            tool.kill()
