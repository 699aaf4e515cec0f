"""Float8Linear of torchao under FSDP2 on two ranks trains as it does whole: gloo on a CPU, NCCL on two GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_validate.bridge import torchao
from megacpp_validate.bridge.parallel_hooks import local_part
from tests.bridge.torchao_ready import on_meta, shard
from tests.training.parallel.gloo_ranks import on_ranks

WORLD = 2
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="not-run: there are fewer than two GPUs")


def trained_on_a_rank(device: str, gather: bool) -> float:
    """The largest relative difference of the losses of two steps and the weights behind them, sharded against whole."""
    rank = distributed.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(device)

    def train(*, sharded: bool) -> list[Any]:
        model, losses, gathers = on_meta(), list[Any](), gather and sharded
        torchao.convert_linears(model, "tensorwise", device=device, emulate=device == "cpu", float8_all_gather=gathers)
        if sharded:
            shard(model, torch.distributed.device_mesh.init_device_mesh(device, (WORLD,)))
        model.to_empty(device=device)
        torch.manual_seed(2)
        with torch.no_grad():
            for weight in model.parameters():
                whole = torch.randn(weight.shape) / 8
                local_part(weight).copy_(whole.chunk(WORLD)[rank] if sharded else whole)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(2):
            if gathers:
                torchao.after_step(model)
                weight = model[0].fc1.weight
                scale = weight._local_tensor._precomputed_scale
                assert float(scale) == pytest.approx(448.0 / float(weight.detach().full_tensor().abs().max()))
            losses.append(model(rows).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *(weight.full_tensor() if sharded else weight for weight in model.parameters())]

    pairs = zip(train(sharded=False), train(sharded=True), strict=True)
    return max(float((one - other).detach().norm() / one.detach().norm()) for one, other in pairs)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def test_sharded_layers_train_in_fp8_as_whole_ones(device: str, gather: bool) -> None:
    """Ranks read the same rows, so that the mean of their gradients is the gradient of one."""
    assert on_ranks(WORLD, trained_on_a_rank, device, gather) == pytest.approx([0.0] * WORLD, abs=1e-6)
