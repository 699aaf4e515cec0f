"""torchao as tests take it: there, imported without its warnings turning into errors, and a world of one rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # 0.16 warns of its own imports
    pytest.importorskip("torchao.float8", reason="not-run: there is no torchao", exc_type=ImportError)

from torch import distributed, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402

ROWS = 48


class Block(nn.Module):
    """Two layers of the whitelist and a router, on a residual stream."""

    def __init__(self, width: int = 64, hidden: int = 96, dtype: Any = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.fc2 = nn.Linear(hidden, width, dtype=dtype)
        self.router = nn.Linear(width, 16, dtype=dtype)

    def forward(self, rows: Any) -> Any:
        return rows + self.fc2(nn.functional.silu(self.fc1(rows))) * self.router(rows).softmax(-1)[:, :1]


def on_meta(**options: Any) -> Any:
    with torch.device("meta"):
        return nn.Sequential(Block(**options), Block(**options))


def fill(model: Any) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)


@contextmanager
def one_rank(folder: Path) -> Iterator[Any]:
    store = distributed.FileStore(str(folder / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def shard_with(mesh: Any) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def shard(model: Any) -> None:
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    return shard
