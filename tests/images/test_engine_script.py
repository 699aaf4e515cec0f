"""The script that brings up an engine: what it says and ends with where it is asked for something else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "containers/docker_engine"


@pytest.mark.parametrize(("words", "code", "said"), [
    ([], 2, "no verb"), (["start"], 2, "no verb start"), (["status", "now"], 2, "takes no arguments, and got now"),
    (["--help"], 0, "MEGACPP_ENGINE_PORT"), (["-h"], 0, "containers/docker_engine down"),
])  # fmt: skip
def test_a_wrong_word_starts_nothing(words: list[str], code: int, said: str) -> None:
    done = subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done
