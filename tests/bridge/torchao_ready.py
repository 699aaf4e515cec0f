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
from torch.distributed.fsdp import fully_shard  # noqa: E402


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


@contextmanager
def one_rank(folder: Path) -> Iterator[Any]:
    store = distributed.FileStore(str(folder / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def shard(model: Any, mesh: Any) -> None:
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
