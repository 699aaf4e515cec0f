"""Four real processes compile with the real Inductor for the CPU, from one empty cache: each graph once over all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megacpp_validate.jitcache.layout import cache_variables

pytestmark = pytest.mark.thorough

RANKS = 4


def start(root: Path, **more: str) -> subprocess.Popen[str]:
    order = {
        "task": "gated",
        "code": "inductor_cpu",
        "library": "inductor",
        "arch": "cpu",
        "settings": {"program": "gated", "rows": "64", "width": "32"},
        "root": str(root),
    }
    given = {
        **os.environ,
        **cache_variables(root, "cpu", nvrtc=False),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **more,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "megacpp_validate.jit"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(json.dumps(order))
    process.stdin.close()
    process.stdin = None
    return process


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    assert found["failure"] == "", err
    return found


def test_each_graph_is_compiled_once_over_all_ranks_also_where_the_one_that_compiles_is_killed(tmp_path: Path) -> None:
    locks = tmp_path / "cpu" / "locks"
    ranks = [start(tmp_path) for _ in range(RANKS)]
    victim = wait_for_holder(ranks, locks)
    os.killpg(victim.pid, signal.SIGKILL)  # the compilers that it started, too
    victim.communicate()
    answers = [answer(rank) for rank in ranks if rank is not victim]
    compiled = [one["kernel"] for told in answers for one in told["compiled"] if not one["cached"]]
    assert sorted(compiled) == ["graph 0 backward", "graph 0 forward"]
    assert sum(one["cached"] for told in answers for one in told["compiled"]) == 2 * (RANKS - 1) - 2
    assert [told["notes"] for told in answers] == [[]] * (RANKS - 1)


def test_ranks_without_a_guard_compile_the_same_graphs_again(tmp_path: Path) -> None:
    answers = [answer(rank) for rank in [start(tmp_path, MEGACPP_JIT_GUARD="0") for _ in range(2)]]
    assert sum(not one["cached"] for told in answers for one in told["compiled"]) > 2


def wait_for_holder(ranks: list[subprocess.Popen[str]], locks: Path) -> subprocess.Popen[str]:
    """The process that holds the first lock: proc(5) lists the locks of each open file."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for rank in ranks:
            for file in Path(f"/proc/{rank.pid}/fd").iterdir():
                with suppress(OSError):
                    if (
                        file.readlink().parent == locks
                        and "FLOCK" in Path(f"/proc/{rank.pid}/fdinfo/{file.name}").read_text()
                    ):
                        return rank
        time.sleep(0.02)
    pytest.fail("no process compiled anything")
