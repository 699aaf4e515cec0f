"""The sessions: what nox does around a verb that is interrupted, or for which nothing can be installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.running_processes import hearing_signals

ROOT = Path(__file__).parents[1]
NOX = ROOT / ".venv" / "bin" / "python"  # made by ./nox

# A verb that cleans up for longer than the quarter of a second that `subprocess.run` leaves one.
VERB = """
import pathlib, sys, time
try:
    print("runs", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    pathlib.Path(sys.argv[1]).write_text("cleaned")
    sys.exit(130)
"""
DOOR = """
import subprocess, sys, noxfile
sys.exit(noxfile._wait(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])))
"""


@pytest.mark.skipif(not NOX.exists(), reason="not-run: there is no nox here, which ./nox makes")
def test_a_verb_that_is_interrupted_ends_what_it_started(tmp_path: Path) -> None:
    command = [str(NOX), "-c", DOOR, VERB, str(tmp_path / "said")]
    with hearing_signals(), subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as nox:
        assert nox.stdout is not None
        nox.stdout.readline()
        os.killpg(nox.pid, signal.SIGINT)
        assert nox.wait(30) == 130
    assert (tmp_path / "said").read_text() == "cleaned"


@pytest.mark.thorough
def test_without_an_index_there_is_no_environment_and_nothing_is_closed(tmp_path: Path) -> None:
    (tmp_path / "nox").write_bytes((ROOT / "nox").read_bytes())
    (tmp_path / "nox").chmod(0o755)
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    began = time.monotonic()
    done = subprocess.run(
        [str(tmp_path / "nox"), "-l"], env={**os.environ, **nowhere, "PYTHON": sys.executable}, capture_output=True,
        text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 5, (done.stderr, time.monotonic() - began)
    assert all(words in done.stderr for words in ("Likely cause", "Next step", "no network"))


NOX_STUB = """#!/bin/sh
printf '%s|' "$@"
"""


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("-s te_canary 2.17.1 2.20.2", "-s|te_canary|--|2.17.1|2.20.2|"),
        ("-s te_canary -- 2.17.1 x y", "-s|te_canary|--|2.17.1|x|y|"),
        ("-s lint tests", "-s|lint|tests|"),
        ("-s images cpu --plan", "-s|images|--|cpu|--plan|"),
        ("-R -s tests -- -k x", "-R|-s|tests|--|-k|x|"),
        ("-s te_canry 2.17.1", "-s|te_canry|--|2.17.1|"),
        ("-l", "-l|"),
        ("", "|"),
    ],
)
def test_arguments_of_a_verb_need_no_separator(tmp_path: Path, given: str, passed: str) -> None:
    shutil.copy(ROOT / "nox", tmp_path)
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    want = re.search(r'want="(.*)"', (ROOT / "nox").read_text())
    assert want
    home = tmp_path / ".venv" / "bin"
    home.mkdir(parents=True)
    (home / "python").symlink_to(sys.executable)
    (home / "nox").write_text(NOX_STUB)
    (home / "nox").chmod(0o755)
    (tmp_path / ".venv" / "nox.installed").write_text(f"{want[1]} {tmp_path}\n")
    done = subprocess.run([str(tmp_path / "nox"), *given.split()], capture_output=True, text=True, check=True)
    assert done.stdout.removeprefix(f"-f|{tmp_path}/noxfile.py|").strip("|") == passed.strip("|")


def test_an_interpreter_that_is_missing_is_named(tmp_path: Path) -> None:
    shutil.copy(ROOT / "nox", tmp_path)
    done = subprocess.run(
        [str(tmp_path / "nox"), "-l"], env={**os.environ, "PYTHON": "/nonexistent"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 5
    assert "there is no interpreter /nonexistent" in done.stderr
