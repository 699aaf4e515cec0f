"""What a call leaves behind: bytes that still live on the device when its output and gradients are gone.

A layer that keeps a tensor of every call for good is right in every number, and ends a training run out of memory
hours later. What is made once (workspaces of cuBLAS, weights in FP8, amax histories, masks and lengths by shape, what
Triton tunes) is made in the first calls, or shows in one call and in no other: only what rises with every call counts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any, Final

import torch

from ..evidence.receipt import Check, Part

Enter = Callable[[], AbstractContextManager[Any]]
"""Makes a scope anew for each step."""

# Set to anything at all, CUDACachingAllocator of c10 calls cudaMalloc and counts nothing, so nothing could rise.
UNCOUNTED: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"
WARM_UP: Final = 2  # delayed scaling has its histories and scales then, and each direction its workspaces
CALLS: Final = 3
BLOCK: Final = 512  # bytes of the smallest block that torch's CUDA allocator counts (kMinBlockSize)
SCALARS: Final = 8  # blocks a call: scales and the like, no activation, no weight, no history


def drop_gradients(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Go back from every output that has a graph, with ones, to every input that is in it; nothing is kept of it."""
    behind = [output for output in outputs if output is not None and output.requires_grad]
    if behind:  # a fault that cuts the graph shows elsewhere
        torch.autograd.grad(behind, inputs, [torch.ones_like(output) for output in behind], allow_unused=True)


def use_of(
    layer: Callable[..., Any], inputs: Sequence[Any], enter: Enter, options: dict[str, Any]
) -> Callable[[], None]:
    """A use of a layer: a copy of each tensor goes forward through it in the scope, and gradients come back outside."""

    def use() -> None:
        given = [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in inputs]
        rows = [one.requires_grad_() for one in given if isinstance(one, torch.Tensor) and one.is_floating_point()]
        with enter():
            out = layer(*given, **options)
        made = [one for one in (out if isinstance(out, tuple | list) else (out,)) if isinstance(one, torch.Tensor)]
        trained = layer.parameters() if isinstance(layer, torch.nn.Module) else ()
        drop_gradients(made, [*rows, *(parameter for parameter in trained if parameter.requires_grad)])

    return use


def check_memory(name: str, device: str, call: Callable[[], Any]) -> Check:
    """Whether calls leave the bytes on the device as they were; see `Bench.keeps_nothing`."""
    if device == "cuda" and UNCOUNTED in os.environ:
        said = f"nothing is known: torch counts no bytes of its own under {UNCOUNTED}. Next step: unset it"
        return Check(f"{name}.memory", False, (), said)
    kept, bound = bytes_kept(device, call), float(BLOCK * SCALARS if device == "cuda" else 0)
    why = (
        f"the smallest rise of {CALLS} calls after {WARM_UP} of warm-up: what is made once rises in one of them at most"
    )
    if device == "cuda":
        why += f"; {SCALARS} of the allocator's smallest blocks, {BLOCK} bytes each, are less than any tensor of a call"
    part = Part("bytes-kept-a-call", kept, bound, kept <= bound, why)
    said = f"every call of forward and backward keeps {kept:.0f} bytes on the device for good: memory grows with steps"
    return Check(f"{name}.memory", part.passed, (part,), "" if part.passed else said)


def bytes_kept(device: str, call: Callable[[], Any]) -> float:
    """Bytes a call by which what lives on the device rises in every one of some; 0 where there is one without.

    Args:
        device: "cuda", or "cpu", where only tensors that Python knows of can be seen.
        call: forward and backward of new inputs; what it gives is dropped.
    """
    with _only_what_is_new():
        for _ in range(WARM_UP):
            call()
        held = [_living_bytes(device)]
        for _ in range(CALLS):
            call()
            held.append(_living_bytes(device))
    return max(0.0, min(after - before for before, after in pairwise(held)))


@contextmanager
def _only_what_is_new() -> Iterator[None]:
    """The collector looks at nothing that was there before: it would take it longer than all the calls."""
    was_frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def _living_bytes(device: str) -> int:
    """Bytes of living tensors: of all on a GPU, of those made since the freeze on a CPU."""
    gc.collect()
    if device == "cuda":
        return int(torch.cuda.memory_allocated())
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.layout is torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
