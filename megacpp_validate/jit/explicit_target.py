"""Triton kernels compiled for a named architecture by whoever launches them, without a GPU and without launching.

The code that launches a kernel runs as it is, on tensors that have shapes and no memory: so types, constants, warps and
the alignment of every argument are those of the real launch, and with them Triton's key. The device that Triton asks is
one that knows its architecture and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from .order import Lacking

_ARCH: Final = re.compile(r"sm_(\d+)[af]?")
_WARP: Final = 32
FAR_ALIGNED: Final = (
    512  # bytes; torch's allocator gives nothing less (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)
)


class _Device:
    """What Triton asks of the active driver before a launch."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


class Pointer:
    """A tensor as Triton sees it: its dtype, and where it begins."""

    def __init__(self, tensor: Any) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        empty = not tensor.numel()  # torch gives those the address 0
        self._address = 0 if empty else FAR_ALIGNED + tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        """Where the allocator would have put it, as far as alignment goes."""
        return self._address


@contextmanager
def compiling_for(arch: str) -> Iterator[None]:
    """While this is open, launching a Triton kernel compiles it for `arch`, and does no more.

    Args:
        arch: such as "sm_90a".

    Raises:
        Lacking: there is no Triton.
        ValueError: no architecture.
    """
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise ValueError(f"{arch!r} is no architecture of CUDA. Next step: name one such as sm_90a.")
    try:
        import torch
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]
        from triton.runtime.driver import driver  # type: ignore[import-not-found, unused-ignore]
        from triton.runtime.jit import JITFunction  # type: ignore[import-not-found, unused-ignore]
    except ImportError as fault:
        raise Lacking(f"there is no Triton: {fault}") from fault
    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, **options: Any) -> Any:
        options.pop("warmup", None)
        given = [Pointer(one) if isinstance(one, torch.Tensor) else one for one in args]
        named = {name: Pointer(one) if isinstance(one, torch.Tensor) else one for name, one in options.items()}
        return plain(self, *given, grid=grid, warmup=True, **named)

    before = driver._active  # None before the first launch: asking for it by name would look for a GPU
    driver.set_active(_Device(GPUTarget("cuda", int(found[1]), _WARP)))
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = plain
        driver._active = before
