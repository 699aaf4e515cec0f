"""Files of the CUDA driver's cache do not say whose they are: a process works on a copy, and answers for its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megacpp_validate.jit import driver_cache, monitor

# A process that starts as a probe does. "compiles" stands for the driver: it writes where the variable says.
_PROCESS = """
import os, sys, time
from pathlib import Path
from megacpp_validate.jit import driver_cache, monitor
from megacpp_validate.jit.monitor import start_compiling
name, wait = sys.argv[1], Path(sys.argv[2])
start_compiling()
print(Path.cwd())
moment = monitor.mark()
own = Path(os.environ["CUDA_CACHE_PATH"]) / name
own.mkdir(parents=True)
(own / "kernel").write_bytes(b"\\x7fELF.text.%b\\0.nv.info" % name.encode())
(own / "what_came_before").write_bytes(b"llvm.used%bllvm.metadata" % name.encode())
print("ready", flush=True)
while not wait.exists():
    time.sleep(0.01)
print([(one.library, one.kernel, one.shape) for one in monitor.compiles_since(moment)])
print(sorted(path.name for path in own.parent.iterdir() if not path.name.startswith(".")))
if name != "killed":
    driver_cache.give_back()
print("given", flush=True)
while name == "killed":
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root, a temporary folder and a folder for copies of this test alone."""
    monkeypatch.delenv(driver_cache.SOURCE, raising=False)
    for name in ("root/cpu/cuda", "tmp", "work"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("MEGACPP_JIT_ROOT", str(tmp_path / "root"))
    monkeypatch.setenv("MEGACPP_JIT_ARCH", "cpu")
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path / "root/cpu/cuda"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(driver_cache.tempfile, "tempdir", None)
    monkeypatch.setattr(driver_cache, "_copies", [])
    monkeypatch.setattr(driver_cache, "_shared", [])
    yield tmp_path
    driver_cache.give_back()


def start(tmp_path: Path, name: str, folder: str = "/") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROCESS, name, str(tmp_path / "go")], stdout=subprocess.PIPE, text=True,
        cwd=tmp_path / "work", env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )  # fmt: skip
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(2)] == [folder, "ready"]
    return process


def copies(tmp_path: Path) -> Sequence[Path]:
    return sorted(path for path in (tmp_path / "tmp").glob("megacpp-cuda-*") if path.is_dir())


def test_two_processes_at_once_are_each_blamed_for_what_is_theirs(tmp_path: Path) -> None:
    (tmp_path / "root/cpu/cuda/before").mkdir()
    (tmp_path / "root/cpu/cuda/before/kernel").write_bytes(b"old")
    # It may be of a process that only asked for the device, and name none of the kernels that lie there.
    (tmp_path / "root/cpu/cuda/index").write_bytes(b"not copied")
    processes = {name: start(tmp_path, name) for name in ("first", "second")}
    (tmp_path / "go").touch()
    for name, process in processes.items():
        said = process.communicate(timeout=60)[0].splitlines()
        assert said == [
            f"[('cuda', '{name}', '{name}/kernel'), ('cuda', '{name}', '{name}/what_came_before')]",
            f"['before', '{name}']",
            "given",
        ]
    assert sorted(path.name for path in (tmp_path / "root/cpu/cuda").iterdir()) == [
        "before", "first", "index", "second",
    ]  # fmt: skip
    assert not copies(tmp_path)


def test_the_copy_of_a_killed_process_goes_with_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    killed = start(tmp_path, "killed")
    assert killed.stdout is not None
    while killed.stdout.readline().strip() != "given":
        time.sleep(0.01)
    driver_cache.work_on_copy()  # of a process that lives, the copy stays
    assert len(copies(tmp_path)) == 2
    driver_cache.give_back()
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    driver_cache.work_on_copy()
    assert len(copies(tmp_path)) == 1


@pytest.mark.parametrize(
    ("cuda", "disabled", "seen"), [("13.0", "", True), ("12.9", "0", True), ("12.8", "", False), ("13.0", "1", False)]
)
def test_nvrtc_is_unwatched_where_it_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, cuda: str, disabled: str, seen: bool
) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("CUDA_CACHE_DISABLE", disabled)
    monkeypatch.setitem(sys.modules, "transformer_engine", sys)
    assert ("transformer_engine" not in monitor.unwatched()) is seen
