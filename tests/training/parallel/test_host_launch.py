"""Two hosts as two launchers on this machine: ranks are numbered, judged and ended over both, and faults are named."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacpp_validate.training.parallel.gather import read_end
from megacpp_validate.training.parallel.host_launch import main
from megacpp_validate.training.parallel.rank_process import reserve_port

sys.path.insert(0, str(Path(__file__).parent))
from tests.running_processes import processes_of
from tests.training.parallel.test_launch import wait_for

pytestmark = pytest.mark.thorough

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
Launcher = subprocess.Popen[str]


def free_port() -> int:
    with reserve_port() as one:
        return int(one.getsockname()[1])


def start(folder: Path, port: int, host: int, what: str, *options: str, ranks: int = 1, hosts: int = 2) -> Launcher:
    words = [sys.executable, "-m", "megacpp_validate.training.parallel.host_launch", "--launcher", "torchrun"]
    words += ["--hosts", str(hosts), "--ranks-per-host", str(ranks), "--folder", str(folder)]
    words += ["--rendezvous", f"127.0.0.1:{port}", "--host-rank", str(host), *options, "launched_rank", what]
    given = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    given["PYTHONPATH"] = os.pathsep.join([str(HERE), str(ROOT)])
    return subprocess.Popen(words, env=given, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def finish(*launchers: Launcher) -> tuple[list[int], list[str]]:
    said = [launcher.communicate(timeout=60)[1] for launcher in launchers]
    return [launcher.returncode for launcher in launchers], said


def run(folder: Path, what: str, *options: str, ranks: int = 1) -> tuple[list[int], list[str]]:
    port = free_port()
    return finish(*[start(folder, port, host, what, *options, ranks=ranks) for host in (0, 1)])


def test_two_hosts_reduce_together_and_receipts_are_gathered(tmp_path: Path) -> None:
    codes, said = run(tmp_path, "gloo-fine", ranks=2)
    assert codes == [0, 0], said
    end = read_end(tmp_path)
    assert end is not None
    assert [rank["receipt"] for rank in end["ranks"]] == [
        {"rank": rank, "total": [6.0] * 3, "world": 4, "local": rank % 2} for rank in range(4)
    ]
    assert [f"rank-{rank}.log" for rank in range(4)] == [Path(rank["log"]).name for rank in end["ranks"]]
    assert all("total [6.0, 6.0, 6.0]" in Path(rank["log"]).read_text() for rank in end["ranks"])
    assert processes_of(tmp_path) == []


def test_a_rank_killed_on_host_1_is_named_by_host_0(tmp_path: Path) -> None:
    codes, said = run(tmp_path, "gloo-killed")
    assert codes == [1, 1]
    assert "At fault: rank 1." in said[0]
    assert "rank 1 ended by SIGKILL; last collective: all_reduce float32[3] #1 of ranks 0, 1 (left)" in said[0]
    assert processes_of(tmp_path) == []


def test_a_rank_that_hangs_on_host_1_is_named_with_its_stack(tmp_path: Path) -> None:
    codes, said = run(tmp_path, "alone-hangs", "--silent-s", "1.5")
    assert codes == [1, 1]
    assert "no rank gave a sign of life for 1.5 s" in said[0]
    assert "At fault: rank 1." in said[0]
    assert "launched_rank.py" in said[0]
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize("host", [0, 1])
def test_a_launcher_that_is_killed_takes_the_run_with_it(tmp_path: Path, host: int) -> None:
    port = free_port()
    launchers = [start(tmp_path, port, number, "alone-waits") for number in (0, 1)]
    wait_for(lambda: all((tmp_path / f"rank-{rank}.collectives").exists() for rank in (0, 1)))
    launchers[host].kill()
    codes, said = finish(*launchers)
    assert codes[host] == -signal.SIGKILL
    other = said[1 - host]
    assert codes[1 - host] == (1 if host else 6), other
    assert ("host 1 was lost: its launcher is gone" if host else "host 0 was lost") in other
    assert "At fault: rank 1." in other or host == 0
    wait_for(lambda: processes_of(tmp_path) == [])


def test_a_launcher_that_is_asked_to_end_ends_all(tmp_path: Path) -> None:
    port = free_port()
    launchers = [start(tmp_path, port, number, "alone-slow") for number in (0, 1)]
    wait_for(lambda: all((tmp_path / f"rank-{rank}.collectives").exists() for rank in (0, 1)))
    launchers[1].terminate()
    codes, said = finish(*launchers)
    assert codes == [1, 1]
    assert "the launcher was asked to end (SIGTERM or SIGINT)" in said[0]
    assert processes_of(tmp_path) == []


def test_a_host_that_never_joins_is_named_before_a_rank_starts(tmp_path: Path) -> None:
    begun = time.monotonic()
    port = free_port()
    options = ("--joining-s", "1.5")
    codes, said = finish(*[start(tmp_path, port, host, "gloo-fine", *options, hosts=3) for host in (0, 1)])
    assert codes == [6, 6]
    assert all("host 2 did not join within 1.5 s" in one for one in said), said
    assert time.monotonic() - begun < 15
    assert not list(tmp_path.glob("rank-*"))


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    port = free_port()
    codes, said = finish(
        *[start(tmp_path / f"disk-{host}", port, host, "gloo-fine", "--joining-s", "4") for host in (0, 1)]
    )
    assert codes == [6, 6]
    assert all("host 1 does not see what host 0 writes in" in one for one in said), said
    assert all("not shared between them" in one for one in said)
    assert not list(tmp_path.rglob("rank-*"))


def test_a_host_with_other_numbers_is_refused(tmp_path: Path) -> None:
    port = free_port()
    codes, said = finish(*[start(tmp_path, port, host, "gloo-fine", ranks=host + 1) for host in (0, 1)])
    assert codes == [6, 6]
    assert all("came as host 1 of 2 with 2 rank(s) each" in one for one in said), said


def test_a_port_in_use_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["--launcher", "torchrun", "--hosts", "2", "--ranks-per-host", "1", "--folder", str(tmp_path)]
        assert main([*words, "--host-rank", "0", "--rendezvous", f"127.0.0.1:{port}", "nothing"]) == 6
    assert f"port {port} of 127.0.0.1 cannot be had" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--launcher torchrun --hosts 2 --ranks-per-host 2 --world 8",
            "the plan's world is 8.*make 4: ranks are missing",
        ),
        ("--launcher torchrun --hosts 2 --ranks-per-host 2 --world 2", "ranks would be idle"),
        ("--launcher local --hosts 2 --ranks-per-host 2", "--launcher local runs on this host"),
        ("--launcher torchrun --hosts 2 --ranks-per-host 2", "2 hosts need a --rendezvous"),
        ("--launcher torchrun --ranks-per-host 2 --rendezvous nowhere", "pass HOST:PORT"),
        ("--launcher torchrun --ranks-per-host 0", "is no run"),
        ("--launcher torchrun --hosts 2 --ranks-per-host 1 --rendezvous a:1 --host-rank 2", "--host-rank is 2"),
        ("--launcher slurm --in-job --hosts 2 --ranks-per-host 1", "SLURM_NNODES.* is not set"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: str, said: str
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert main([*options.split(), "--folder", str(tmp_path), "nothing"]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_one_host_goes_the_local_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(ROOT)]))
    words = ["--launcher", "local", "--ranks-per-host", "2", "--folder", str(tmp_path), "launched_rank", "alone-fine"]
    assert main(words) == 0
    end = read_end(tmp_path)
    assert end is not None
    assert [rank["receipt"] for rank in end["ranks"]] == [{"rank": 0}, {"rank": 1}]
