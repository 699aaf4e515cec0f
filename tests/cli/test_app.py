"""The application: its verbs, its version, and what each class of error ends with."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from megacpp_validate import TOOL
from megacpp_validate.catalog.file import MatrixInvalid
from megacpp_validate.cli import app as app_module
from megacpp_validate.cli.app import EXIT_CODES, app
from megacpp_validate.errors import (
    EvidenceMissing,
    Exit,
    InfrastructureFailed,
    NoEnvironment,
    NothingSelected,
    WrongArguments,
)
from tests.command_line import Run

HERE = [sys.executable, "-m", "megacpp_validate.cli"]


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (WrongArguments("a"), Exit.WRONG_ARGUMENTS, "megacpp-validate: a\n"),
        (MatrixInvalid(["a"]), Exit.WRONG_ARGUMENTS, "1 fault(s) in TOML"),
        (NothingSelected("b"), Exit.NOTHING_SELECTED, "b"),
        (EvidenceMissing("c"), Exit.EVIDENCE_MISSING, "c"),
        (NoEnvironment("d"), Exit.NO_ENVIRONMENT, "d"),
        (InfrastructureFailed("e\x1b[31m\u202e"), Exit.INFRASTRUCTURE, "megacpp-validate: e[31m\n"),
        (KeyboardInterrupt(), Exit.INTERRUPTED, "interrupted; what has a receipt is kept"),
        (SystemExit(130), Exit.INTERRUPTED, "interrupted; what has a receipt is kept"),  # as typer ends on an interrupt
        (BrokenProcessPool("a process was terminated"), Exit.INFRASTRUCTURE, "ran out of memory"),
        (OSError(errno.ENOSPC, "No space left on device", "/some/file"), Exit.INFRASTRUCTURE, "the disk is full"),
    ],
)
def test_each_class_of_error_has_its_exit_code(
    fault: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(**_: object) -> None:
        raise fault

    monkeypatch.setattr(app_module, "app", run)
    with pytest.raises(SystemExit) as ended:
        app_module.main()
    said = capsys.readouterr().err
    assert ended.value.code == code
    assert says in said
    assert "Traceback" not in said


def test_a_fault_of_the_tool_is_no_breakage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app_module, "app", lambda **_: {}["nothing"])
    with pytest.raises(SystemExit) as ended:
        app_module.main()
    said = capsys.readouterr().err
    assert ended.value.code == Exit.INFRASTRUCTURE
    assert "Traceback" in said
    assert "Next step" in said


# Command line, exit code, and part of what is written, on a host without a GPU.
CALLS = (
    ("parity --target h100", 2, "'h100'"),
    ("parity --target h200 --probes ,", 3, "nothing is selected"),
    ("parity --target cpu --python python9", 5, "python9"),
    ("parity --target cpu --limit 0", 2, "--limit"),
    ("fp8 --target h100", 2, "there is no target 'h100'"),
    ("fp8 --probes delaid", 2, "there is no cell of FP8 'fp8_delaid'"),
    ("fp8 --target h200", 4, "not run"),
    ("moe-smoke --target gb10", 2, "no cell for gb10"),
    ("moe-smoke --target cpu --cells scaled_bf16_4", 2, "of the smoke run on cpu"),
    ("smoke-faults --faults nun", 2, "there is no fault 'nun'"),
    ("smoke-faults --faults wrong-amax-group", 4, "2 devices of h200 or b200"),
    ("smoke-faults --faults ,", 3, "nothing is selected"),
    ("selftest attention-zeroes", 2, "there is no mutant 'attention-zeroes'"),
    ("fp8-policy", 0, "production"),
    ("fp8-policy --preset mamba-scan", 0, "mamba-scan rolled back"),
    ("fp8-faults --faults nothing --target cpu", 2, "no fault"),
    ("blame-score --target h1000", 2, "no target"),
    ("fp8-policy --preset nightly", 2, "there is no preset 'nightly'"),
    ("fp8-policy --preset ,", 3, "nothing is selected"),
    ("matrix --targets cpu --stacks te2.17.1", 3, "no cell is selected"),
    ("matrix --targets tpu", 2, "there is no target 'tpu'"),
    ("matrix --targets cpu --stacks te9", 2, "there is no stack 'te9'"),
    ("matrix --targets cpu --probes atention", 2, "there is no probe 'atention'"),
    ("matrix --targets cpu --cells native-cpu-no", 2, "there is no cell 'native-cpu-no'"),
    ("matrix --targets cpu --environment one", 2, "is not an environment"),
    ("matrix --targets cpu --cluster nowhere.toml", 2, "does not exist"),
    ("matrix --targets cpu --plan --launcher slurm", 0, "native-cpu-imports"),
    ("matrix --targets cpu --environment x=python:/nowhere/python", 5, "not run: x-cpu-imports"),
    ("loss-gate nowhere", 2, "nowhere"),
    ("prewarm --target cpu --root /proc/none", 2, "cannot be written"),
    ("prewarm --target h200 --tasks probe_permute --at-build", 2, "there is no task of h200"),
    ("jit-verify --target cpu --root /nowhere", 4, "has no sealed cache"),
    ("jit-cache check --root /nowhere", 4, "0 caches with a manifest"),
    ("jit-cache check --root /nowhere --arch ../x", 2, "not an architecture"),
    ("jit-cache import /nowhere.tar", 2, "cannot be unpacked"),
    ("jit-cache import", 2, "no archive"),
    ("fits 9.9.9", 4, "the matrix has no release 9.9.9"),
    ("lock --check", 0, "✓ Compared with the matrix: all match."),
    ("lock x100", 2, "no image for 'x100'"),
    ("canary 2.9.0 2.9.0", 2, "2.9.0 is given twice"),
    ("canary 2.9.0 2.9.7", 2, "Nearest: 2.8.0, 2.9.0, 2.10.0, 2.11.0"),
    ("canary 2.9.0 latest", 2, "'latest' is not a release"),
    ("canary 2.8.0 2.9.0 --tiers static,gpus", 2, "'gpus'"),
    ("canary 2.8.0 2.9.0 --probes nosuch", 2, "there is no probe 'nosuch'"),
    ("canary 2.8.0 2.9.0 --env nowhere.txt", 2, "pip freeze"),
    ("canary 2.8.0 2.9.0 --env cublass=13.1", 2, "write cublas"),
    ("canary --tiers gpu --env cublas=13.1", 2, "--env"),
    ("canary --list --fail-on risk", 2, "--fail-on"),
    ("canary 0.1.3 0.2.5 --library deepgemm", 2, "no library 'deepgemm'"),
    ("canary 0.1.3 0.2.5 --library deep-gemm --env torch=2.11", 2, "--library"),
    ("canary --all 2.8.0 2.9.0 2.10.0", 2, "between two releases at most"),
    ("canary --all --tiers gpu", 2, "--all"),
    ("canary --all --env cublas=13.1", 2, "--env"),
    ("canary --all 2.9.7 2.11.0", 2, "Nearest: 2.8.0, 2.9.0"),
    ("canary --tiers gpu 2.9.0 2.20.2 --target h100", 2, "'h100'"),
    ("canary --tiers gpu 2.9.0 2.20.2 --probes atention", 2, "'atention'"),
    ("canary --tiers gpu --environment te1=conda:x", 2, "overlay:"),
    ("canary --tiers gpu --target cpu --environment a=python:x --environment a=python:y", 2, "a is given twice"),
    ("canary --tiers gpu 2.9.0 te2.9.0", 2, "twice"),
    ("canary --tiers gpu --target cpu --environment a=python:x", 3, "a alone"),
    ("canary 2.9.0 2.20.2 --tiers ,", 3, "No tier"),
    ("canary --all-installed --target cpu", 3, "No release"),
    ("te-bisect 2.8.0 2.13.0 --module linear", 2, "linear_walker"),
    ("te-bisect 2.8.0 2.13.9 --module permute", 2, "Nearest: 2.12.0, 2.13.0"),
    ("te-bisect 2.8.0 2.8.0 --module permute", 2, "nothing to search"),
    ("te-bisect 2.8.0 2.9.0 --module permute --tier static --axis a=1:,2:", 2, "--tier gpu"),
    ("te-bisect 2.8.0 2.9.0 --module permute --target h100", 2, "'h100'"),
    ("te-bisect 2.8.0 2.9.0 --module permute --target h200 --axis cudnn=9.1", 2, "NAME=VERSION"),
    ("te-bisect 2.8.0 2.13.0 --module permute --target cpu --receipts /dev/null", 2, "--receipts"),
)


@pytest.mark.parametrize(("words", "code", "part"), CALLS, ids=[words for words, *_ in CALLS])
def test_a_command_line_ends_with_the_code_of_its_class(
    words: str, code: int, part: str, tmp_path: Path, session: Callable[[str], Run], index: None
) -> None:
    verb, *arguments = words.split()
    done = session(verb)(*arguments)
    shown = " ".join((done.out + done.err).split())
    assert (done.code, part in shown, "Traceback" in shown) == (code, True, False), shown
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and "matrix" not in words]


def test_the_version_and_the_name_in_usage_lines() -> None:
    done = subprocess.run([*HERE, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{TOOL}\n"
    done = subprocess.run([*HERE, "no-such-verb"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (Exit.WRONG_ARGUMENTS, "")
    assert "Usage: megacpp-validate [OPTIONS]" in done.stderr


def test_a_verb_loads_no_room_that_it_does_not_call() -> None:
    code = (
        "import sys; sys.argv = ['x', 'schema', '--help']\n"
        "from megacpp_validate.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*sorted(name for name in sys.modules if name.startswith(('rich', 'megacpp_validate.'))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage: megacpp-validate schema" in done.stdout
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {name.split(".")[1] for name in loaded} == {"cli", "errors", "text"}


def test_every_verb_takes_every_format_and_says_what_its_exit_codes_mean(session: Callable[[str], Run]) -> None:
    assert len(app.registered_commands) > 30
    for command in app.registered_commands:
        said = session(command.name or "")("--help")
        assert said.code == 0
        assert EXIT_CODES in said.flat, command.name
        assert "--output " in said.out, command.name


def test_a_terminal_of_another_encoding_shows_the_verdict_too(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    terminal = io.TextIOWrapper(buffer, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(app_module, "app", lambda **_: terminal.write("2.17.1 \u2192 2.20.2\n"))
    app_module.main()
    terminal.flush()
    assert buffer.getvalue() == b"2.17.1 \\u2192 2.20.2\n"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_reader_that_is_gone_changes_no_exit_code(closed: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [*HERE, "schema", "receipt"] if closed == "stdout" else [*HERE, "moe-smoke", "--target", "nope"]
    with os.fdopen(writer, "wb") as gone:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, closed: gone}
        ended = subprocess.run(words, check=False, cwd=tmp_path, **streams)  # type: ignore[call-overload]
    assert ended.returncode == (Exit.OPEN if closed == "stdout" else Exit.WRONG_ARGUMENTS)
