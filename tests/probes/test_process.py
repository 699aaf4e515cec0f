"""Whatever a probe or the vendor library does, there is one receipt, and its outcome says what happened."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.evidence.receipt import JitCompile, Outcome
from megacpp_validate.evidence.store import read_receipt
from megacpp_validate.jit.monitor import saw
from megacpp_validate.probes import process
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.bounds import Roundings
from megacpp_validate.probes.order import Order, Target
from megacpp_validate.probes.process import describe, run_probe

CPU = Target("cpu", "")
H200 = Target("h200", "sm_90", ("delayed",), "delayed", ("te",), deep_gemm=True)
ORDER = Order("fake", "native", CPU, "native", "for a test", seed=7, tool="tool 1", commit="abc", lock_hash="def")
FP32 = Roundings((("fp32", 1),), 1)

Plant = Callable[[Callable[[Bench], None]], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Make a function the probe `fake`, whose bridge module is there."""
    monkeypatch.setitem(sys.modules, f"{process.BRIDGE}.fake", types.ModuleType("fake"))

    def put(probe: Callable[[Bench], None]) -> None:
        module = types.ModuleType("fake")
        vars(module)["probe"] = probe
        monkeypatch.setitem(sys.modules, f"{process.PROBES}.fake", module)

    return put


def good(bench: Bench) -> None:
    bench.check("one", True, "seen")
    bench.check("two", True)


def test_a_probe_whose_checks_hold_passes_and_the_receipt_says_where_it_ran(plant: Plant) -> None:
    plant(good)
    receipt = run_probe(ORDER)
    assert (receipt.outcome, receipt.reason, receipt.failure) == (Outcome.PASS, "", None)
    assert [check.name for check in receipt.checks] == ["one", "two"]
    assert receipt.cell == "native-cpu-fake"
    assert (receipt.requested, receipt.requested_because, receipt.seed) == ("native", "for a test", 7)
    assert (receipt.tool, receipt.commit, receipt.lock_hash) == ("tool 1", "abc", "def")
    assert receipt.machine.torch == torch.__version__
    assert {package.name: package.version for package in receipt.packages}["torch"] == torch.__version__
    assert set(receipt.seconds) == {"probe", "total"}
    assert receipt.peak_memory_mib > 10
    assert receipt.started.endswith("+00:00")


def test_a_failed_check_fails_the_cell_and_is_named(plant: Plant) -> None:
    def probe(bench: Bench) -> None:
        bench.check("fine", True)
        bench.compare("bf16.forward", torch.ones(4), torch.zeros(4).double() + 2, roundings=FP32)

    plant(probe)
    receipt = run_probe(ORDER)
    assert receipt.outcome is Outcome.FAIL
    assert receipt.reason == "1 of 2 checks failed: bf16.forward"


def test_what_the_target_lacks_is_good_where_every_check_of_it_holds(plant: Plant) -> None:
    def probe(bench: Bench) -> None:
        bench.check("refusal", bench.setting("fine") == "yes")
        bench.unsupported = "sm_90 has no such format"

    plant(probe)
    receipt = run_probe(replace(ORDER, settings={"fine": "yes"}))
    assert (receipt.outcome, receipt.reason) == (Outcome.EXPECTED_UNSUPPORTED, "sm_90 has no such format")
    assert run_probe(replace(ORDER, settings={"fine": "no"})).outcome is Outcome.FAIL
    plant(lambda bench: setattr(bench, "unsupported", "nothing was looked at"))
    assert run_probe(ORDER).outcome is Outcome.ERROR


def test_what_a_probe_lacks_here_is_not_run_and_hides_no_failed_check(plant: Plant) -> None:
    def probe(bench: Bench) -> None:
        bench.check("before", bench.setting("fine", "yes") == "yes")
        bench.cannot_run("there is one GPU. Next step: run it where there are two.")

    plant(probe)
    receipt = run_probe(ORDER)
    assert (receipt.outcome, receipt.reason[:16]) == (Outcome.NOT_RUN, "there is one GPU")
    assert run_probe(replace(ORDER, settings={"fine": "no"})).outcome is Outcome.FAIL


def test_a_cell_of_another_code_reaches_its_bridge_modules_and_accuses_the_one_that_is_broken(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(lambda bench: bench.check("reached", bench.bridge().__name__ == "fake"))
    order = replace(ORDER, probe="fp8_fake", code="fake", stands_on=("fake", "imports"))
    assert run_probe(order).outcome is Outcome.PASS
    monkeypatch.setitem(sys.modules, f"{process.BRIDGE}.broken", None)
    receipt = run_probe(replace(order, stands_on=("fake", "broken")))
    assert receipt.outcome is Outcome.IMPORT_ERROR
    assert receipt.reason.startswith("megacpp_validate.bridge.broken cannot be imported")


class Odd(BaseException):
    """What a vendor library makes up."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


RAISED: dict[str, tuple[BaseException, str]] = {
    "error": (RuntimeError("cuDNN\nerror"), "RuntimeError: cuDNN error"),
    "exit": (SystemExit(0), "SystemExit: 0"),
    "assertion": (AssertionError(), "AssertionError:"),
    "own-class": (Odd(), f"{__name__}.Odd: its text cannot be made"),
    "half-a-character": (ValueError("\udcff"), "ValueError: \udcff"),
}


@pytest.mark.parametrize(("fault", "reason"), RAISED.values(), ids=RAISED)
def test_what_a_probe_raises_is_an_error_and_keeps_the_checks_before_it(
    fault: BaseException, reason: str, plant: Plant, tmp_path: Path
) -> None:
    def probe(bench: Bench) -> None:
        bench.check("before", True)
        raise fault

    plant(probe)
    receipt = run_probe(ORDER)
    assert (receipt.outcome, receipt.reason) == (Outcome.ERROR, reason)
    assert [check.name for check in receipt.checks] == ["before"]
    assert receipt.failure is not None
    assert "in probe" in receipt.failure.frame
    assert "test_process.py" in receipt.failure.traceback


def test_the_innermost_vendor_frame_is_told_from_its_package_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that passes through torch and the vendor, and ends in a function of ours, is the vendor's."""
    folder = tmp_path / "torch" / "site"  # a folder of that name on the way says nothing
    (folder / "deep_gemm").mkdir(parents=True)
    (folder / "deep_gemm" / "__init__.py").write_text("def call(function):\n    return function()\n")
    monkeypatch.syspath_prepend(str(folder))
    deep_gemm: Any = importlib.import_module("deep_gemm")
    del sys.modules["deep_gemm"]

    def fail() -> None:
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError) as raised:
        deep_gemm.call(fail)
    assert describe(raised.value).frame == "deep_gemm/__init__.py:2 in call"


def test_the_bridge_module_that_cannot_be_imported_accuses_its_own_cell(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(good)
    monkeypatch.delitem(sys.modules, f"{process.BRIDGE}.fake")
    receipt = run_probe(ORDER)
    assert receipt.outcome is Outcome.IMPORT_ERROR
    assert "megacpp_validate.bridge.fake cannot be imported: ModuleNotFoundError" in receipt.reason
    assert receipt.blocked_by == ""


UNDEFINED = (
    "Transformer Engine cannot be used: OSError: /tmp/te/libtransformer_engine.so: undefined symbol: "
    "cublasLtGroupedMatrixLayoutInit_internal (at /opt/site/transformer_engine/common/__init__.py:310). Likely cause: "
    "cuBLAS is older. Next step: upgrade nvidia-cublas. Found: transformer-engine 2.14.1; sources in /opt/site."
)


@pytest.mark.parametrize("probe", ["imports", "fake"])
def test_te_that_cannot_be_used_is_one_import_error_and_blocks_the_rest(
    probe: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(good)
    monkeypatch.setattr(te, "is_te_available", lambda: False)
    monkeypatch.setattr(te, "why_te_is_unavailable", lambda: UNDEFINED)
    monkeypatch.setattr(sys, "path", [*sys.path, "/opt/site"])
    receipt = run_probe(replace(ORDER, probe=probe, requested="te", stack="te2.14.1"))
    assert "cublasLtGroupedMatrixLayoutInit_internal" in receipt.reason
    assert receipt.checks == ()
    if probe == "imports":
        assert receipt.outcome is Outcome.IMPORT_ERROR
        assert receipt.failure is not None
        assert receipt.failure.type == "OSError"
        assert receipt.failure.message.endswith("undefined symbol: cublasLtGroupedMatrixLayoutInit_internal")
        assert receipt.failure.frame == "transformer_engine/common/__init__.py:310"
    else:
        assert receipt.outcome is Outcome.BLOCKED
        assert receipt.blocked_by == "te2.14.1-cpu-imports"


@pytest.mark.skipif(torch.cuda.is_available(), reason="not-run: there is a GPU here")
def test_another_machine_than_the_target_is_not_run(plant: Plant) -> None:
    plant(good)
    receipt = run_probe(replace(ORDER, target=H200))
    assert receipt.outcome is Outcome.NOT_RUN
    assert "sm_90" in receipt.reason
    assert receipt.checks == ()


@pytest.mark.parametrize("breaks_in", [0, 2, 3])
def test_what_breaks_on_second_use_fails_and_late_compiles_are_counted(breaks_in: int) -> None:
    """Run 1 is the probe itself; a GPU session then uses the module twice more."""
    runs: list[bool] = []

    def probe(bench: Bench) -> None:
        runs.append(bench.quick)
        saw("deep_gemm", f"kernel-{len(runs)}", "bf16[8,8]", 2.0, cached=False)
        bench.check("first", True)
        if len(runs) == breaks_in:
            raise RuntimeError("stale state")

    bench = Bench(ORDER)
    run = process._Run(ORDER, bench=bench)
    probe(bench)
    process._use_again(probe, bench, run, torch)
    assert runs[:2] == [False, True]
    assert bench.checks[-1].name == "second-use"
    if breaks_in:
        assert run.outcome is Outcome.FAIL
        assert "stale state" in bench.checks[-1].detail
    else:
        assert run.outcome is Outcome.PASS
        assert process._jit(run).after == {"deep_gemm": 1}  # of the last run alone


def test_a_receipt_names_what_was_compiled_and_where_it_is_kept(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGACPP_JIT_ARCH", "sm_90a")
    monkeypatch.setenv("MEGACPP_JIT_MODE", "nvrtc")
    saw("triton", "before", "of another probe", 1.0, cached=False)

    def probe(bench: Bench) -> None:
        saw("triton", "gate", "up:*bf16 width=512", 0.5, cached=False)
        saw("triton", "gate", "up:*bf16 width=512", 0.0, cached=True)
        row = {"library": "inductor", "kernel": "graph 0", "shape": "bf16[8]", "seconds": 2.0, "when": "after"}
        bench.rank_jit.take({"rank": 3, "jit": {"compiled": [row], "hits": {"triton": 4}}})
        bench.rank_jit.take({"rank": 4, "jit": {"compiled": [], "hits": {}}})
        bench.rank_jit.take({"rank": 5})
        bench.check("fine", True)

    plant(probe)
    jit = run_probe(ORDER).jit
    assert jit.compiled == (
        JitCompile("triton", "gate", "up:*bf16 width=512", 0.5, "warm-up"),
        JitCompile("inductor", "graph 0", "bf16[8]", 2.0, "after", rank=3),
    )
    assert jit.warm_up == {"triton": 1}
    assert jit.hits["triton"] >= 4 + 1
    assert (jit.root, jit.arch, jit.mode) == ("", "sm_90a", "nvrtc")


def start(order: str, receipt: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "megacpp_validate.probes", str(receipt)]
    return subprocess.run(command, input=order, capture_output=True, text=True, timeout=120, check=False)


def test_the_process_reads_an_order_and_writes_a_receipt(tmp_path: Path) -> None:
    place = tmp_path / "new" / "native-cpu-fake.json"
    done = start(json.dumps(asdict(ORDER)), place)
    assert done.returncode == 0, done.stderr
    receipt = read_receipt(place)
    assert receipt.outcome is Outcome.IMPORT_ERROR  # there is no such bridge module in another process
    assert receipt.seed == 7
    assert [path.name for path in place.parent.iterdir()] == [place.name]


@pytest.mark.parametrize("order", ["", "{}", "[]", '{"probe": "fake", "target": {"id": "cpu", "colour": "red"}}'])
def test_an_order_that_cannot_be_read_leaves_no_receipt(order: str, tmp_path: Path) -> None:
    done = start(order, tmp_path / "receipt.json")
    assert done.returncode == 1
    assert "Next step" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
