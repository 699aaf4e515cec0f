"""The whole model on two real ranks has the losses and gradients of one, whatever they share out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_validate.bridge.features import PRESETS
from megacpp_validate.native.router import load_balancing_loss
from megacpp_validate.training import expert_layer
from megacpp_validate.training.language import Language
from megacpp_validate.training.layers import Build
from megacpp_validate.training.model import HybridModel
from megacpp_validate.training.parallel.plan import ALONE, ParallelPlan, Spread
from megacpp_validate.training.parallel.replicas import split_parameters
from megacpp_validate.training.parallel.token_counts import check_conservation
from megacpp_validate.training.sizes import Forms, Size, read_size
from tests.training.parallel.gloo_ranks import on_ranks

pytestmark = pytest.mark.thorough

LOSSES = ("language", "aux", "z", "mtp", "total")
ACCUMULATE = 2
BRIDGE = Forms()
PLANS = {
    "experts": ParallelPlan(2, 2, 2, accumulate=ACCUMULATE),
    "jagged": ParallelPlan(2, 2, 2, accumulate=ACCUMULATE),  # the same, by the other way to the experts
    "sequences": ParallelPlan(2, 2, accumulate=ACCUMULATE),
    "positions": ParallelPlan(2, tensor_parallel=2, sequence_parallel=True, accumulate=ACCUMULATE),
    "heads": ParallelPlan(2, tensor_parallel=2, accumulate=ACCUMULATE),
}


def size_of(kind: str) -> Size:
    """The routers' losses weigh, so that a share that is left out shows; experts in the MTP head too."""
    return read_size(
        "tiny",
        pattern="AMERA" if kind in ("positions", "heads") else "AMERE",
        num_gqa_groups=2,
        batch=4,
        mtp=True,
        shared_experts=1,
        aux_coefficient=0.5,
        z_coefficient=0.1,
    )


def run_plan(
    size: Size, spread: Spread, dtype: Any = torch.float64, forms: Forms = BRIDGE
) -> tuple[HybridModel, dict[str, Any]]:
    """A step's passes on this rank: its shares of the losses, and its gradients, the router's too in that dtype."""
    model = HybridModel(size, Build(PRESETS["off"], dtype, spread=spread, forms=forms), seed=0).to(dtype)
    batch = Language(size.grammar, seed=4).batch(0, size.batch, size.length + 1)
    return model, run_passes(model, batch)


def run_passes(model: HybridModel, batch: Any) -> dict[str, Any]:
    spread, total = model.build.spread, torch.zeros(len(LOSSES), dtype=torch.float64)
    model.zero_grad()
    for part in range(ACCUMULATE):
        mine = spread.plan.sequences(spread.rank, len(batch), part=part)
        losses = model.losses(batch[mine.start : mine.stop])
        losses.total.backward()
        total += torch.stack([getattr(losses, name).detach().double() for name in LOSSES])
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return {"losses": total, **gradients}


def everything_on_a_rank() -> dict[str, dict[str, Any]]:
    """What each plan gives, summed over the ranks where they hold the same; and with faults planted."""
    rank, world = distributed.get_rank(), distributed.group.WORLD
    seen = {}
    for kind, plan in PLANS.items():
        groups = {"token_group": world if kind != "heads" else None, "data_group": world if plan.data > 1 else None}
        groups |= {"expert_group": world} if plan.expert_parallel > 1 else {"tensor_group": world}
        spread = Spread(plan, rank, audit=True, **groups)
        size = size_of(kind)
        model, found = run_plan(size, spread, forms=Forms(moe="jagged" if kind == "jagged" else "bridge"))
        seen[kind] = _sum_over_ranks(found, plan)
        marked = {name for name in split_parameters(model) if is_local(name, plan)}
        assert marked == {name for name in seen[kind] if kind == "positions" and is_local(name, plan)} - {"losses"}
        if plan.expert_parallel > 1:
            seen[f"conserved, {kind}"] = _look_at_counts(model, spread)
        if kind != "experts":
            continue
        batch = Language(size.grammar, seed=4).batch(0, size.batch, size.length + 1)
        expert_layer.share_of_balance_loss = _left_out_on_one
        seen["share left out"] = _sum_over_ranks(run_passes(model, batch), plan)
        expert_layer.share_of_balance_loss = REAL_SHARE
        if rank:
            state = model.layers[2].native_state_dict()
            state["up.weight"], state["down.weight"] = state["up.weight"].flip(0), state["down.weight"].flip(0)
            model.layers[2].load_native_state_dict(state)
        seen["experts swapped"] = _sum_over_ranks(run_passes(model, batch), plan)
    return seen


REAL_SHARE = expert_layer.share_of_balance_loss


def _left_out_on_one(probs: Any, routing_map: Any, group: Any = None) -> Any:
    """The last rank counts its own tokens only, and takes its share of that."""
    shared = REAL_SHARE(probs, routing_map, group)
    return load_balancing_loss(probs, routing_map) / 2 if distributed.get_rank() == 1 else shared


def _sum_over_ranks(found: dict[str, Any], plan: ParallelPlan) -> dict[str, Any]:
    """What all ranks hold and see other tokens of; shares of split layers are theirs, and looked at elsewhere."""
    splits_tokens = plan.tensor_parallel == 1 or plan.sequence_parallel
    for name, value in found.items():
        if splits_tokens and is_local(name, plan) and not (_is_expert(name) and plan.expert_parallel > 1):
            distributed.all_reduce(value)
    return found


def is_local(name: str, plan: ParallelPlan) -> bool:
    """Whether it belongs to what works on single positions: all but layers that split heads."""
    return plan.tensor_parallel == 1 or not name.startswith("layers.") or name.startswith("layers.2.")


def _is_expert(name: str) -> bool:
    return ".up." in name or ".down." in name


def _look_at_counts(model: HybridModel, spread: Spread) -> list[tuple[int, ...]]:
    layers = [layer for letter, layer in zip(model.size.letters, model.layers, strict=True) if letter == "E"]
    return [check_conservation(layer.last.counts, layer.last.routing_map, spread.expert_group) for layer in layers]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(2, everything_on_a_rank)


def gathered(ranks: list[dict[str, Any]], kind: str, *, experts: bool) -> dict[str, Any]:
    """What a plan found, experts side by side where they are shared out."""
    first, second = ranks[0][kind], ranks[1][kind]
    return {
        name: torch.cat([value, second[name]]) if experts and _is_expert(name) else value
        for name, value in first.items()
        if is_local(name, PLANS.get(kind, PLANS["experts"]))
    }


def far(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Relative, of the tensor that is off the most."""
    assert found.keys() == wanted.keys()
    return max(float((found[name].double() - value).norm() / value.norm()) for name, value in wanted.items())


def one_rank(kind: str, dtype: Any = torch.float64) -> dict[str, Any]:
    _, found = run_plan(size_of(kind), Spread(ParallelPlan(accumulate=ACCUMULATE)), dtype)
    return {name: value for name, value in found.items() if is_local(name, PLANS[kind])}


def bound(kind: str) -> float:
    """How far another order of the same sums may be off in fp64, relative, by the model's own condition.

    To first order the error of any tensor is a sum over its roundings, each at most u and carried on by the same
    derivatives in every precision. The run in fp32 has one draw of that sum: its roundings, in units of u, are as large
    as those in fp64. Two runs in fp64 differ by two draws; 16 is for the largest tensor of each being another one.
    """
    return 2 * 16 * far(one_rank(kind, torch.float32), one_rank(kind)) * 2.0**-53 / 2.0**-24


@pytest.mark.parametrize("kind", PLANS)
def test_losses_and_gradients_are_those_of_one_rank(ranks: list[dict[str, Any]], kind: str) -> None:
    most = bound(kind)
    assert most < 1e-10
    assert far(gathered(ranks, kind, experts=PLANS[kind].expert_parallel > 1), one_rank(kind)) <= most
    for name in ("losses", "embedding.weight", "norm.weight"):
        assert torch.equal(ranks[0][kind][name], ranks[1][kind][name]), name


@pytest.mark.parametrize("fault", ["share left out", "experts swapped"])
def test_a_planted_fault_is_seen_in_that_comparison(ranks: list[dict[str, Any]], fault: str) -> None:
    assert far(gathered(ranks, fault, experts=True), one_rank("experts")) > 1e6 * bound("experts")


@pytest.mark.parametrize("kind", ["experts", "jagged"])
def test_tokens_are_conserved_in_the_last_pass_of_every_layer(ranks: list[dict[str, Any]], kind: str) -> None:
    size = size_of(kind)
    counts = ranks[0][f"conserved, {kind}"]
    assert counts == ranks[1][f"conserved, {kind}"]
    assert [sum(layer) for layer in counts] == [2 * size.length * size.top_k] * 2


def test_a_rank_alone_in_one_pass_has_whole_losses() -> None:
    size = size_of("experts")
    batch = Language(size.grammar, seed=4).batch(0, size.batch, size.length + 1)
    model = HybridModel(size, Build(PRESETS["off"], torch.float64, spread=ALONE), seed=0)
    losses = model.losses(batch)
    seen = model.trunk(batch[:, :-1])
    language = torch.nn.functional.cross_entropy(model.head(seen.rows).flatten(0, 1), batch[:, 1:].flatten())
    assert torch.equal(losses.language, language)
    assert torch.equal(losses.total, language + seen.aux_loss + seen.z_loss + losses.mtp)
