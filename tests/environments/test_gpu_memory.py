"""What the device has free, as nvidia-smi tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacpp_validate.environments.schedule import GpuMemory, read_gpu_memory

ANSWERS: dict[str, tuple[str, tuple[float | None, float | None]]] = {
    "an-h200": ("echo '143771, 143000'", (143771.0, 143000.0)),
    "shared-with-the-host": ("echo '[N/A], [N/A]'", (None, None)),
    "no-driver": ("echo 'NVIDIA-SMI has failed'; exit 9", (None, None)),
    "silent": ("exit 0", (None, None)),
}


@pytest.mark.parametrize(("script", "memory"), ANSWERS.values(), ids=ANSWERS)
def test_what_nvidia_smi_answers(script: str, memory: tuple[float | None, float | None], tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "asked"}\n{script}\n')
    smi.chmod(0o755)
    found = read_gpu_memory({"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "3,1"})
    assert found == GpuMemory(*memory)
    assert "--id=3" in (tmp_path / "asked").read_text()


def test_a_host_without_one(tmp_path: Path) -> None:
    assert read_gpu_memory({"PATH": str(tmp_path)}) == GpuMemory(None, None)
