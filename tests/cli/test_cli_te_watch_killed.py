"""The watch killed outright half way, started again, and started twice at once: each release once all the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacpp_validate.canary.static.sources import CACHE_VARIABLE
from megacpp_validate.catalog.bridge import matrix_folder
from tests.canary.static.small_index import PACKAGE, use_index, write_index

LINEAR = "class Linear:\n    def __init__(self, {}, out_features, bias=True, params_dtype=None, device=None): ...\n"
GOOD = PACKAGE | {"transformer_engine/pytorch/__init__.py": LINEAR.format("in_features")}
BROKEN = PACKAGE | {"transformer_engine/pytorch/__init__.py": LINEAR.format("width")}
LIMIT_S = 120.0


def test_killed_half_way_and_started_twice_no_release_is_judged_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    use_index(monkeypatch, write_index(tmp_path / "index", {"2.9.0": GOOD, "2.10.0": BROKEN, "2.11.0": BROKEN}))
    matrix, state = Path(shutil.copytree(matrix_folder(), tmp_path / "matrix")), tmp_path / "state"
    (matrix / "stacks.toml").write_text('pinned = "pin"\n[[stack]]\nid = "pin"\nte = "2.9.0"\n')
    text = (matrix / "pipelines.toml").read_text()
    (matrix / "pipelines.toml").write_text(text.replace('tiers = ["static", "firewall"]', 'tiers = ["static"]'))
    code = "from megacpp_validate.cli import main, te_watch_verbs; main()"
    command = [sys.executable, "-c", code, "te-watch", "--matrix", str(matrix), "--state", str(state)]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            command, start_new_session=True, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    first = start()
    answer = state / "results" / "2.10.0.json"
    deadline = time.monotonic() + LIMIT_S
    while not answer.is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    first.communicate()
    made = answer.stat().st_mtime_ns
    assert not (state / "results" / "2.11.0.json").exists()

    pair = [start(), start()]
    words = [process.communicate(timeout=LIMIT_S)[1] for process in pair]
    assert sorted(process.returncode for process in pair) == [1, 6], words
    assert "another run of the watch holds" in "".join(words)
    assert answer.stat().st_mtime_ns == made  # what the killed run had found is not made again
    assert sorted(path.name for path in (state / "issues").iterdir()) == ["2.10.0.md", "2.11.0.md"]
    rows = {row["version"]: row["standing"] for row in json.loads((state / "state.json").read_text())["releases"]}
    assert rows == {"2.9.0": "known", "2.10.0": "judged", "2.11.0": "judged"}
    assert [path.name for path in state.rglob(".*")] == [".lock"]  # nothing half-written lies about
