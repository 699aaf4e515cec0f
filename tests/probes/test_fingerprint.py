"""What a process has loaded, read from the process itself."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacpp_validate.probes.doctor import identify, read_gpu
from megacpp_validate.probes.fingerprint import read_libraries, read_packages, read_version


def test_packages_are_those_that_are_loaded_and_from_where() -> None:
    packages = {package.name: package for package in read_packages()}
    assert packages["torch"].file == torch.__file__
    assert packages["numpy"].version == np.__version__
    assert "liger_kernel" not in packages


def test_a_second_copy_on_the_path_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = tmp_path / "site" / "numpy"
    second.mkdir(parents=True)
    (second / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    packages = {package.name: package for package in read_packages()}
    assert packages["numpy"].other_copies == (str(second / "__init__.py"),)
    assert packages["torch"].other_copies == ()


MAPS = """\
7f00 r-xp 00000000 00:01 11 /usr/local/cuda/lib64/libcudart.so.13.0.88
7f01 r--p 00000000 00:01 11 /usr/local/cuda/lib64/libcudart.so.13.0.88
7f02 r-xp 00000000 00:01 12 /opt/site with space/flash_attn_3/libcudart.so.12
7f03 r-xp 00000000 00:01 13 /opt/nvidia/cublas/lib/libcublasLt.so.13
7f04 r-xp 00000000 00:01 14 /opt/nvidia/cudnn/lib/libcudnn_graph.so.9
7f05 r-xp 00000000 00:01 14 /opt/nvidia/cudnn/lib/libcudnn.so.9
7f06 rw-p 00000000 00:00 0 [heap]
7f07 r-xp 00000000 00:01 15 /usr/lib/libmycudart.so.1
"""


def test_two_runtimes_are_two_files_of_one_library(tmp_path: Path) -> None:
    (tmp_path / "maps").write_text(MAPS)
    libraries = {library.name: library for library in read_libraries(tmp_path / "maps")}
    assert set(libraries) == {"libcudart", "libcublasLt", "libcudnn"}
    assert libraries["libcudart"].files == (
        "/opt/site with space/flash_attn_3/libcudart.so.12",
        "/usr/local/cuda/lib64/libcudart.so.13.0.88",
    )
    assert libraries["libcudart"].version == ""  # it is mapped in no process that could be asked


class Loaded:
    """A library of CUDA as ctypes has it: what it says of its version."""

    @staticmethod
    def cudaRuntimeGetVersion(number: Any) -> None:  # noqa: N802
        number._obj.value = 12080

    @staticmethod
    def cublasGetProperty(which: int, number: Any) -> None:  # noqa: N802
        number._obj.value = (13, 1, 0)[which]

    @staticmethod
    def cudnnGetVersion() -> int:  # noqa: N802
        return 91900


def test_a_library_that_is_loaded_is_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = "".join(
        f"7f00 r-xp 00000000 00:01 11 /opt/{name}.so.1\n"
        for name in ("libcudart", "libcublas", "libcudnn", "libnccl", "libnvrtc")
    )
    (tmp_path / "maps").write_text(maps)
    modes = []
    monkeypatch.setattr(ctypes, "CDLL", lambda file, mode: (modes.append(mode), Loaded)[1])
    versions = {library.name: library.version for library in read_libraries(tmp_path / "maps")}
    assert versions == {"libcudart": "12.8", "libcublas": "13.1.0", "libcudnn": "9.19.0", "libnccl": "", "libnvrtc": ""}
    assert {mode & os.RTLD_NOLOAD for mode in modes} == {os.RTLD_NOLOAD}


def test_identify_imports_no_torch_and_tells_what_is_there(tmp_path: Path) -> None:
    code = (
        "import sys, json; from megacpp_validate.probes.doctor import identify; facts = identify();"
        "print(json.dumps([facts, sorted(name for name in sys.modules if name.startswith(('torch', 'transformer')))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    facts, loaded = json.loads(done.stdout)
    assert loaded == []
    assert facts["torch"] == torch.__version__
    assert facts["python"] == sys.version.split()[0]


def test_te_is_seen_by_its_metadata_or_by_its_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacpp_validate.probes.doctor.read_version", read_version.__wrapped__)  # it is cached
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise SystemExit('never run')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert (identify()["te"], identify()["te_folder"]) == ("", str(tmp_path / "transformer_engine"))
    info = tmp_path / "transformer_engine-2.12.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.12.0\n")
    assert identify()["te"] == "2.12.0"


@pytest.mark.parametrize(
    ("said", "code", "name"),
    [
        ("NVIDIA H200, 9.0, 580.159.03, 143771", 0, "NVIDIA H200"),
        ("No devices were found", 6, ""),
        ("NVIDIA H200", 0, ""),
    ],
)
def test_the_gpu_is_what_nvidia_smi_says(
    said: str, code: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{said}'\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu, reason = read_gpu()
    assert (gpu or {}).get("name", "") == name
    assert name or said in reason
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_gpu() == (None, "CUDA_VISIBLE_DEVICES='' hides every GPU")
