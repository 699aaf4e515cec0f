"""What a container can see of the machine below it: the NVIDIA driver, and the GPUs that were handed to it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_VERSION: Final = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
_NAME_BYTES: Final = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
_VERSION_BYTES: Final = 80  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE


@dataclass(frozen=True)
class Gpu:
    """A GPU; its capability as "sm_90"."""

    name: str
    arch: str


@dataclass(frozen=True)
class Machine:
    """What is there.

    Attributes:
        driver: version of the kernel's NVIDIA driver, seen from inside a container too; empty where none is loaded.
        devices: whether device files of GPUs were handed to this container.
        library: whether the driver's management library was.
        gpus: what that library lists.
    """

    driver: str
    devices: bool
    library: bool
    gpus: tuple[Gpu, ...]


NOTHING: Final = Machine("", devices=False, library=False, gpus=())


def read_machine(root: Path = Path("/"), library: str = "libnvidia-ml.so.1") -> Machine:
    """Look; never raises, because what is not there is the answer."""
    devices = any((root / "dev").glob("nvidia[0-9]*"))
    nvml = None
    with suppress(OSError):
        nvml = ctypes.CDLL(library)
    driver = ""
    gpus: tuple[Gpu, ...] = ()
    with suppress(OSError):
        found = _VERSION.search((root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace"))
        driver = found[1] if found else ""
    if nvml is not None:
        with suppress(AttributeError):  # a library that is none of NVIDIA's
            driver, gpus = _ask(nvml, driver)
    return Machine(driver, devices, nvml is not None, gpus)


def _ask(nvml: ctypes.CDLL, driver: str) -> tuple[str, tuple[Gpu, ...]]:
    if nvml.nvmlInit_v2() != 0:
        return driver, ()
    try:
        text = ctypes.create_string_buffer(_VERSION_BYTES)
        if nvml.nvmlSystemGetDriverVersion(text, _VERSION_BYTES) == 0:
            driver = text.value.decode(errors="replace")
        return driver, tuple(_list_gpus(nvml))
    finally:
        nvml.nvmlShutdown()


def _list_gpus(nvml: ctypes.CDLL) -> Iterator[Gpu]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return
    for index in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(_NAME_BYTES)
        major, minor = ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
            continue
        nvml.nvmlDeviceGetName(handle, name, _NAME_BYTES)
        if nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)) == 0:
            yield Gpu(name.value.decode(errors="replace"), f"sm_{major.value}{minor.value}")
