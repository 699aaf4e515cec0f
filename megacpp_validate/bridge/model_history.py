"""What was done to a model, seen on the model: compiled, sharded, given memory. Whoever did it.

torch's sharding is imported when it is asked about: it takes a second, which everybody who
imports the bridge would wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def why_compiled(model: Any) -> str:
    """Which module torch.compile took, as a wrapper or in place; empty where it took none."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return f"`{name or 'the model'}` is compiled already"
    return ""


def why_sharded(model: Any) -> str:
    """Which module FSDP took; empty where it took none."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            return f"`{name or 'the model'}` is sharded by FSDP already"
    return ""


def why_parallel(model: Any) -> str:
    """Which parameter is a DTensor, by FSDP or a tensor-parallel plan; empty where none is."""
    from torch.distributed.tensor import DTensor

    found = next((name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)), None)
    return f"`{found}` is a DTensor already" if found is not None else ""


def sharded_modules(model: Any) -> frozenset[str]:
    """Names of the modules that FSDP2 manages."""
    from torch.distributed.fsdp import FSDPModule

    return frozenset(name for name, module in model.named_modules() if isinstance(module, FSDPModule))


def unsharded(model: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Those of these layers whose weight no FSDP2 module around them shards."""
    from torch.distributed.tensor import DTensor

    around = sharded_modules(model)
    return tuple(
        name
        for name in names
        if not isinstance(model.get_submodule(name).weight, DTensor)
        or not any(f"{name}.".startswith(f"{one}." if one else "") for one in around)
    )


def why_not_meta(model: Any) -> str:
    """Which parameter or buffer has memory; empty where all are on meta."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            return f"`{name}` is on {tensor.device}, not on meta"
    return ""
