"""The script that brings up an engine: what it says and ends with where it is asked for something else."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Thread

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "containers/docker_engine"


@pytest.mark.parametrize(("by", "ended"), [("{home}/registry.yml", True), ("another/registry.yml", False)])
def test_down_ends_what_it_started_and_nobody_else(tmp_path: Path, by: str, ended: bool) -> None:
    """After a restart of the machine the number in the file may be anybody's."""
    words = ["sh", "-c", "sleep 30 & wait", by.format(home=tmp_path), "x"]
    with subprocess.Popen(words, start_new_session=True) as process:
        try:
            waiter = Thread(target=process.wait, daemon=True)
            waiter.start()  # or what is left of it keeps its number
            (tmp_path / "registry.pid").write_text(f"{process.pid}\n")
            (tmp_path / "dockerd.pid").write_text("999999999\n")  # nobody's
            home = {**os.environ, "MEGACPP_ENGINE_HOME": str(tmp_path)}
            done = subprocess.run([SCRIPT, "down"], env=home, capture_output=True, text=True, check=False, timeout=30)
            assert (done.returncode, "/proc/" in done.stderr) == (0, False), done
            assert not (tmp_path / "registry.pid").exists()
            waiter.join(5 if ended else 0)
            assert (process.returncode is not None) == ended
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
