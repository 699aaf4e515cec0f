"""Small caches as the libraries lay them out, with real files; nothing of them was compiled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megacpp_validate.catalog.prewarm import PrewarmTask
from megacpp_validate.jitcache.cache import seal
from megacpp_validate.jitcache.layout import (
    CompilerOf,
    JitCompile,
    Manifest,
    StackSeen,
    TaskDone,
    describe_files,
    write_manifest,
)

STACK = StackSeen(
    machine="x86_64",
    versions={
        "python": "3.12.3", "torch": "2.11.0+cu130", "triton": "3.6.0", "cutlass": "4.8.1", "flash-attn-4": "4.0.0b36",
        "deep-gemm": "0.1.3", "gpu": "NVIDIA H200", "driver": "580.95.05", "cuda": "13.0",
    },
    compiler=CompilerOf(path="/usr/local/cuda/bin/nvcc", version="13.0.88"),
    include_paths=("/opt/stack/deep_gemm/include", "/usr/local/cuda/include"),
)  # fmt: skip
KERNEL = JitCompile(library="fa4", kernel="fwd", shape="bf16 d128", seconds=2.5)
TASK = PrewarmTask(id="fa4_d128", library="fa4", code="fa4", targets=["h200"], gpu=False, settings={"head_dim": "128"})
DONE = TaskDone(id=TASK.id, code=TASK.code, settings=TASK.settings, seconds=5.0, compiled=(KERNEL,))
GROUP = "triton/KEY1/__grp__add_norm_kernel.json"
CUBIN = "triton/KEY1/add_norm_kernel.cubin"
OBJECT = "fa4/FINGERPRINT/fwd/b282f513.o"


def fill(folder: Path) -> Path:
    """Files of ROOT/ARCH as Triton, FlashAttention 4, TorchInductor and DeepGEMM leave them, locks and remains too."""
    put(folder / CUBIN, b"\x7fELF cubin" * 50)
    put(folder / GROUP, json.dumps({"child_paths": {"add_norm_kernel.cubin": str(folder / CUBIN)}}).encode())
    put(folder / OBJECT, b"\x7fELF object" * 80)
    put(folder / "fa4/FINGERPRINT/fwd/b282f513.lock", b"")
    put(folder / "fa4/FINGERPRINT/fwd/.b282f513.4711.tmp.o", b"half")
    put(folder / "inductor/fxgraph/oq/foq/e7n4", b"a graph")
    put(folder / "inductor/locks/c6b.lock", b"")
    put(folder / "inductor/2b/.17.42.tmp", b"half")
    put(folder / "triton/KEY2/tmp.pid_9_uuid/kernel.ttir", b"half")
    put(folder / "triton/tmp.0b4f8a52-uuid/kernel.cubin", b"of a graph, where another process was first")
    put(folder / "cuda/index", b"the driver's")
    put(folder / "cuda/4/2/.f2aec281.17.tmp", b"half given back")
    put(folder / "deep_gemm/cache/kernel.fp8_gemm.abc/kernel.cubin", b"sm_90a" * 40)
    put(folder / "deep_gemm/tmp/17/kernel.cu", b"half")
    put(folder / "locks/KEY/OWNER", b"")
    return folder


def put(place: Path, content: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)


def make_manifest(folder: Path, missing: tuple[str, ...] = ()) -> Manifest:
    """The manifest of what lies in ROOT/ARCH."""
    return Manifest(
        architecture=folder.name, target="h200", folder=str(folder), mode="nvcc", stack=STACK, tasks=(DONE,),
        missing=missing, files=describe_files(folder), made="2026-11-22T17:00:00+00:00", tool="test",
    )  # fmt: skip


def make_sealed(root: Path, arch: str = "sm_90a") -> tuple[Path, str]:
    """A sealed ROOT/ARCH and the hash of its manifest."""
    folder = fill(root / arch)
    write_manifest(folder, make_manifest(folder, missing=("probe_expert_gemm",)))
    return folder, seal(folder)


def flip_a_bit(place: Path) -> None:
    """What a bad disk does: one bit of one byte, the size and the times as they were."""
    before = place.stat()
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 1
    place.chmod(0o644)
    place.write_bytes(content)
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))
    place.chmod(before.st_mode)


@contextmanager
def small_disk(size: str = "64k", option: str = "exec") -> Iterator[Path]:
    """A file system of its own, that is soon full."""
    import subprocess

    folder = Path(tempfile.mkdtemp(prefix="megacpp-small-"))
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},{option}", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        folder.rmdir()
        pytest.skip("not-run: no small file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()
