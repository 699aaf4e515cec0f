"""The firewall tier holds on real damaged installs, and fails where a bridge does not stand."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megacpp_validate.canary.firewall import damage
from megacpp_validate.canary.firewall import run as firewall
from megacpp_validate.canary.firewall.damage import CannotBuild, Interpreter, read_interpreter
from megacpp_validate.canary.firewall.run import FirewallCase, FirewallResult, run_firewall
from megacpp_validate.canary.static.sources import Sources, SourceUnavailable
from megacpp_validate.catalog.bridge import Catalog
from megacpp_validate.evidence.receipt import Outcome
from tests.running_processes import hearing_signals

FAST = (
    "absent", "metapackage-alone", "core-library-deleted", "missing-library", "second-copy", "metadata-unreadable",
    "import-aborts", "import-hangs",
)  # fmt: skip
WITH_TORCH = ("core-without-extension", "undefined-symbol", "optional-symbol-gone")

Run = Callable[..., FirewallResult]


@pytest.fixture(scope="session")
def interpreter() -> Interpreter:
    return read_interpreter()


@pytest.fixture(scope="session")
def run(catalog: Catalog, sources: Sources, interpreter: Interpreter) -> Iterator[Run]:
    """The tier on some cases, with the real wheels; what this interpreter offers is looked at once."""

    def wheels(version: str, distribution: str) -> Path:
        try:
            return sources.wheel(version, distribution)
        except SourceUnavailable as fault:
            pytest.skip(f"not-run: {fault}")

    def go(*only: str, **options: object) -> FirewallResult:
        settings = {"wheels": wheels, "jobs": 2, **options}
        with pytest.MonkeyPatch.context() as user:  # no case inherits what the user has set
            for name, value in {"MEGACPP_DISABLE_TE": "1", "NVTE_FRAMEWORK": "none", "PYTHONSTARTUP": "x"}.items():
                user.setenv(name, value)
            return run_firewall(catalog, only=only, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(damage, "read_interpreter", lambda _: interpreter)
        yield go


@pytest.fixture(scope="session")
def tier(run: Run, interpreter: Interpreter) -> dict[str, FirewallCase]:
    """What the tier finds on this host; with torch where there is one."""
    cases = (*FAST, *(() if interpreter.problem else WITH_TORCH))
    return {case.case: case for case in run(*cases).cases}


@pytest.mark.parametrize("case", [*FAST, *WITH_TORCH])
def test_the_bridge_stands_on_a_damaged_install(
    tier: dict[str, FirewallCase], case: str, interpreter: Interpreter
) -> None:
    if interpreter.problem and case not in FAST:
        pytest.skip(f"not-run: {interpreter.problem}")
    found = tier[case]
    assert (found.problems, found.outcome) == ((), Outcome.PASS)
    assert found.available is (case == "optional-symbol-gone")


def test_the_undamaged_install_is_available(tier: dict[str, FirewallCase], interpreter: Interpreter) -> None:
    if interpreter.problem:
        pytest.skip(f"not-run: {interpreter.problem}")
    case = tier["undamaged-2.20.2"]  # nobody asked for it: the cases that lean on it did
    assert (case.outcome, case.available, case.reason) == (Outcome.PASS, True, "")
    assert case.compiled == "stand-in"


# --- faults planted in a copy of the bridge ---------------------------------------------------------------


def plant(tmp_path: Path, *edits: tuple[str, Callable[[str], str]]) -> Path:
    bridge = tmp_path / "bridge"
    for room in (firewall.BRIDGE, firewall.BRIDGE.with_name("native")):
        shutil.copytree(room, tmp_path / room.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, change in edits:
        before = (bridge / file).read_text()
        after = change(before)
        assert after != before
        (bridge / file).write_text(after)
    return bridge


def before(line: str, planted: str) -> Callable[[str], str]:
    return lambda text: text.replace(line, f"{planted}\n{line}", 1)


FUTURE = "from __future__ import annotations\n"


def edit(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


TRY_TE = "try:\n    import transformer_engine\nexcept Exception:\n    pass\n"
VERDICT = "return Verdict(False, self._explain(fault))"
# What is planted -> case, edits of the copy: file, edit, problem that must be reported.
Edit = tuple[str, Callable[[str], str], str]
PLANTED: dict[str, tuple[str, Edit]] = {
    "a module imports TE": (
        "absent", ("attention.py", before("class TeAttention", "import transformer_engine"),
                   r"bridge\.attention raised ModuleNotFoundError")),
    "a module imports TE in a try": (  # where the import succeeds
        "core-without-extension", ("permute.py", edit(FUTURE, f"{FUTURE}\n{TRY_TE}"),
                                   "importing the bridge imported transformer_engine")),
    "the question raises": (
        "absent", ("vendor.py", before("        return verdict.usable if", "        raise OSError('planted')"),
                   "asking the bridge raised OSError: planted")),
    "an exception class slips through": (
        "metapackage-alone", (
            "vendor.py", edit("except BaseException as fault:  # OS", "except ImportError as fault:  # OS"),
            "asking the bridge raised RuntimeError")),
    "the reason is empty": (
        "absent", ("vendor.py", edit(VERDICT, "return Verdict(False, '')"), "the reason does not say")),
    "the verdict is always good": (
        "absent", ("vendor.py", edit(VERDICT, VERDICT.replace("False", "True")),
                   r"is_te_available\(\) is True, not False")),
    "a native path is not named": (
        "absent", ("linear_walker.py", edit("NATIVE_PATH", "NATIVE"), "linear_walker names the native path ''")),
    "a module ends the process": (
        "absent", ("layer_spec.py", before("NATIVE_PATH", "import os\nos.abort()"),
                   r"gave no answer \(signal 6\)")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_in_the_bridge_fails_the_tier(run: Run, tmp_path: Path, name: str) -> None:
    case, (file, change, problem) = PLANTED[name]
    (found,) = run(case, bridge=plant(tmp_path, (file, change))).cases
    assert found.outcome is Outcome.FAIL
    assert re.search(problem, " | ".join(found.problems))


def test_a_bridge_that_hangs_fails_the_tier_in_time(run: Run, tmp_path: Path) -> None:
    bridge = plant(tmp_path, ("permute.py", before("NATIVE_PATH", "import time\ntime.sleep(3600)")))
    (case,) = run("absent", bridge=bridge, limit_s=4.0).cases
    assert case.outcome is Outcome.FAIL
    assert "killed after 4 s" in case.problems[0]


# --- what cannot be run is not run, and never green -------------------------------------------------------


def test_without_a_compiler_the_compiled_cases_are_not_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise CannotBuild("no C compiler")

    monkeypatch.setattr(damage, "build_stand_ins", refuse)
    result = run("missing-library", "import-hangs", "absent")
    outcomes = {case.case: case.outcome.value for case in result.cases}
    assert outcomes == {"missing-library": "not-run", "import-hangs": "not-run", "absent": "pass"}
    assert "no C compiler" in result.cases[1].problems[0]
    assert result.lacks


def test_without_torch_the_cases_that_want_it_are_not_run(
    run: Run, interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = replace(interpreter, torch="", problem="torch cannot be imported here")
    monkeypatch.setattr(damage, "read_interpreter", lambda _: without)
    result = run("undefined-symbol", "metapackage-alone")
    outcomes = {case.case: case.outcome.value for case in result.cases}
    assert outcomes == {
        "undamaged-2.20.2": "not-run",
        "metapackage-alone": "not-run",  # the bridge itself is made of torch
        "undefined-symbol": "not-run",
    }
    assert result.torch == "none"
    assert result.lacks


def test_an_interrupt_leaves_nothing_running(run: Run, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    note = f"import os, pathlib, time\npathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\ntime.sleep(3600)"
    bridge = plant(tmp_path, ("permute.py", before("NATIVE_PATH", note)))

    def interrupt() -> None:
        while not mark.exists() or not mark.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    started = time.monotonic()
    threading.Thread(target=interrupt, daemon=True).start()
    with hearing_signals(), pytest.raises(KeyboardInterrupt):
        run("absent", "metapackage-alone", bridge=bridge, limit_s=240.0)
    assert time.monotonic() - started < 120  # it did not wait for the limit
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
