"""The tree that the torchao lane is held to, and a world of one rank to shard it in."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.distributed import FileStore, destroy_process_group, init_process_group, is_initialized
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

LAYERS: Final = {"fc1": (512, 384), "fc2": (256, 640)}


class Tree(nn.Module):
    """Two layers of the whitelist and a router beside each other, so that each has its own gradients."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        for name, (inner, outer) in LAYERS.items():
            self.add_module(name, nn.Linear(inner, outer, bias=False, dtype=dtype))
        self.router = nn.Linear(512, 16, bias=False, dtype=dtype)

    def forward(self, first: Any, second: Any) -> tuple[Any, Any, Any]:
        """Rows [R, 512] and [R, 256] -> [R, 384], [R, 640] and the router's [R, 16]."""
        return self.fc1(first), self.fc2(second), self.router(first)


def on_meta(build: Callable[[], Any] = Tree) -> Any:
    """A model without memory."""
    with torch.device("meta"):
        return build()


def sharding(mesh: Any) -> Callable[[Any], object]:
    """FSDP2's rule: the whole model as one unit, gathered in bf16, gradients reduced in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return partial(fully_shard, mesh=mesh, mp_policy=policy)


@contextmanager
def one_rank(device: str) -> Iterator[Any]:
    """A mesh of this rank alone: FSDP2 as it is, with nobody to share with."""
    mine = not is_initialized()
    if device == "cuda":
        torch.cuda.set_device(torch.cuda.current_device())  # else the mesh guesses, and warns that it does
    with tempfile.TemporaryDirectory() as folder:
        if mine:
            store = FileStore(str(Path(folder, "store")), 1)
            init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=0, world_size=1)
        try:
            yield init_device_mesh(device, (1,))
        finally:
            if mine:
                destroy_process_group()


def fill(model: Any) -> None:
    """Some values."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
