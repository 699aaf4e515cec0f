"""The hybrid model over two tensor ranks, beside the same model on one: what ranks of `test_tensor_model` run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import distributed

from megacpp_validate.training.model import HybridModel
from megacpp_validate.training.parallel.plan import ParallelPlan
from megacpp_validate.training.parallel.replicas import check_replicas, reduce_split_gradients, split_parameters
from megacpp_validate.training.parallel.sharding import make_groups
from megacpp_validate.training.parallel.tensor_weights import share_parameters
from megacpp_validate.training.sizes import read_size
from tests.training.parallel.tensor_layer_run import PLAIN, SLACK

SIZE = read_size("tiny", num_heads=4, num_gqa_groups=2, recurrent_heads=2, length=8, chunk=4, batch=2)
TOKENS = torch.randint(SIZE.vocabulary, (2, 9), generator=torch.Generator().manual_seed(11))


def run_model(build: Any) -> tuple[Any, dict[str, float]]:
    """The model behind a backward pass, and the losses that this rank added."""
    model = HybridModel(SIZE, build, seed=4)
    losses = model.losses(TOKENS)
    losses.total.backward()
    return model, {name: float(getattr(losses, name).detach()) for name in ("language", "aux", "z", "total")}


def model_on_a_rank() -> dict[str, Any]:
    whole, wanted = run_model(PLAIN)
    single, rough = run_model(replace(PLAIN, dtype=torch.float32))
    rounding = {name: abs(rough[name] - wanted[name]) + 2.0**-24 * abs(wanted[name]) for name in wanted}
    return {mode: one_mode(mode, whole, single, wanted, rounding) for mode in (True, False)}


def one_mode(mode: bool, whole: Any, single: Any, wanted: dict[str, float], rounding: dict[str, float]) -> Any:
    groups = make_groups(ParallelPlan(world=2, tensor_parallel=2, sequence_parallel=mode), "cpu")
    group = groups.spread.tensor_group
    model, added = run_model(replace(PLAIN, spread=groups.spread))
    losses = torch.tensor(list(added.values()), dtype=torch.float64)
    if mode:
        distributed.all_reduce(losses)
    unsummed = off_gradients(model, whole, single)
    reduce_split_gradients(split_parameters(model), group)
    shares = {name for name, _ in share_parameters(model)}
    alike = [(name, one.grad) for name, one in model.named_parameters() if name not in shares]
    return {
        "alike": check_replicas(alike, what="gradient", group=group) == len(alike),
        "losses": {
            name: abs(seen - wanted[name]) / (SLACK * rounding[name])
            for name, seen in zip(added, losses.tolist(), strict=True)
        },
        "off": off_gradients(model, whole, single),
        "not summed": unsummed,
        "marked": sorted(split_parameters(model)),
    }


def off_gradients(model: Any, whole: Any, single: Any) -> dict[str, float]:
    """Of parameters that every rank has whole, under the same name as on one rank: how far off, over the bound."""
    shares, ours = {name for name, _ in share_parameters(model)}, dict(model.named_parameters())
    told = {}
    for name, one in whole.named_parameters():
        if name not in ours or name in shares or one.grad is None:
            continue
        rough = dict(single.named_parameters())[name].grad
        e = max(float((rough.double() - one.grad).abs().max()), 2.0**-24 * float(one.grad.abs().max()))
        slack = SLACK if one.dtype == torch.float64 else SLACK * 2.0**29  # routers are in fp32 in every model
        told[name] = float((ours[name].grad - one.grad).abs().max()) / (slack * e)
    return told
