"""A small run on several ranks for the tests of checkpoints: sharded parameters, shared-out experts, AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from megacpp_validate.training.parallel.checkpoint import load_checkpoint, save_checkpoint

WIDTH, INNER, OUT, EXPERTS, BATCH = 6, 10, 3, 4, 8
IDENTITY = {"name": "tiny", "pattern": "AE", "hidden": WIDTH, "betas": (0.9, 0.95)}


class Run:
    """A small model, sharded by FSDP2, and a bank of experts that are shared out; AdamW for both; fp64."""

    def __init__(self, *, seed: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor, Shard

        torch.manual_seed(seed)
        self.world, self.rank = distributed.get_world_size(), distributed.get_rank()
        mesh = init_device_mesh("cpu", (self.world,))
        self.model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, OUT)).double()
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        bank = torch.randn(EXPERTS, WIDTH, WIDTH, dtype=torch.float64)
        self.experts = nn.Parameter(bank.chunk(self.world)[self.rank].clone())
        named = {**dict(self.model.named_parameters()), "experts": self.experts}
        self.adam = torch.optim.AdamW(named.values(), lr=1e-2)
        self.step, self.state = 0, {}
        for name, parameter in named.items():
            moments = {part: torch.zeros_like(parameter) for part in ("exp_avg", "exp_avg_sq")}
            self.adam.state[parameter] = {"step": torch.zeros(()), **moments}
            for part, value in {"": parameter.detach(), **self.adam.state[parameter]}.items():
                whole = DTensor.from_local(value, mesh, [Shard(0)]) if name == "experts" and value.dim() else value
                self.state[f"{name}.{part}".rstrip(".")] = whole

    def train(self, until: int) -> list[float]:
        """The loss of each step, over the batch of all ranks."""
        losses = []
        while self.step < until:
            rows, wanted = read_batch(self.step)
            mine = slice(self.rank * BATCH // self.world, (self.rank + 1) * BATCH // self.world)
            per_rank = EXPERTS // self.world
            gate = torch.arange(self.rank * per_rank, (self.rank + 1) * per_rank) + self.step + 1.0
            # FSDP averages over ranks: the sum over a rank's part, times the ranks, is the mean over all.
            loss = (self.model(rows[mine]) - wanted[mine]).square().sum() * self.world / wanted.numel()
            own = (self.experts.sum((1, 2)) - gate).square().sum()
            (loss + own).backward()
            self.adam.step()
            self.adam.zero_grad()
            total = torch.stack([loss.detach() / self.world, own.detach()])
            distributed.all_reduce(total)
            losses.append(float(total.sum()))
            self.step += 1
        return losses

    def save(self, folder: str, **more: Any) -> Path:
        plain = {"step": self.step}
        return save_checkpoint(Path(folder), self.state, step=self.step, identity=IDENTITY, plain=plain, **more)

    def load(self, folder: str, identity: dict[str, Any] = IDENTITY) -> Any:
        resumed = load_checkpoint(Path(folder), self.state, identity=identity)
        self.step = resumed.plain["step"]
        return resumed

    def whole(self) -> dict[str, Any]:
        """Every tensor with all its parts."""
        parts = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in self.state.items()}
        return {name: value.detach().clone() for name, value in parts.items()}


def read_batch(step: int) -> tuple[Any, Any]:
    drawn = torch.Generator().manual_seed(step)
    rows = torch.randn(BATCH, WIDTH, generator=drawn, dtype=torch.float64)
    return rows, torch.randn(BATCH, OUT, generator=drawn, dtype=torch.float64)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
