"""What a training tree adds on several ranks: one sum for all norms, shares of whole heads, FSDP2 around TE blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed

from megacpp_validate.bridge import parallel_hooks as hooks
from megacpp_validate.bridge.native_block import BlockShape
from megacpp_validate.native.norms import RMSNorm
from tests.training.parallel.gloo_ranks import on_ranks

RANKS = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.thorough)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_share_has_whole_heads_of_each_segment(ranks: int) -> None:
    shape = BlockShape(hidden=4, ffn_hidden=12, heads=8, groups=4, head_dim=2, gated=True)
    state = {name: torch.arange(torch.Size(size).numel()).view(size) for name, size in shape.native_shapes().items()}
    cuts = hooks.block_cuts(shape)
    shares = [hooks.cut_state(state, cuts, rank, ranks) for rank in range(ranks)]
    assert {name: tuple(share.shape) for name, share in shares[1].items()} == shape.shard(ranks).native_shapes()
    for name, (axis, segments) in cuts.items():
        parts = [share[name].split([size // ranks for size in segments], dim=axis) for share in shares]
        assert torch.equal(
            torch.cat([part for of_all in zip(*parts, strict=True) for part in of_all], axis), state[name]
        )


WIDTHS = {"one": 8, "two": 8, "idle": 8, "large": 32, "apart": 8}


def sums_on_a_rank() -> tuple[list[float], list[int]]:
    """Gradients of 1 on the first rank, 2 on the second; one norm has none on the first, and one is not marked."""
    rank, calls, real = distributed.get_rank(), list[int](), distributed.all_reduce
    hooks._FUSED = 16  # type: ignore[misc] # in a process of its own
    model = torch.nn.ModuleDict({name: RMSNorm(width) for name, width in WIDTHS.items()})
    hooks.mark_split(parameter for name, parameter in model.named_parameters() if not name.startswith("apart"))
    for name, norm in model.items():
        norm.weight.grad = None if name == "idle" and rank == 0 else torch.full((WIDTHS[name],), rank + 1.0)
    distributed.all_reduce = lambda tensor, **given: (calls.append(tensor.numel()), real(tensor, **given))[1]
    assert hooks.sum_marked_gradients(model, None) == 4
    return [float(norm.weight.grad.mean()) for norm in model.values()], calls


@RANKS
def test_all_small_gradients_are_summed_at_once(world: int) -> None:
    total = world * (world + 1) / 2
    for rank, seen in enumerate(on_ranks(world, sums_on_a_rank)):
        assert seen == ([total, total, total - 1, total, rank + 1], [32, 3 * 8])


def wrapped_on_a_rank(recipe: str) -> tuple[bool, list[int], list[int]]:
    """Two TE blocks, the last used twice as by an MTP head: sharded in FP8, and whole beside it."""
    from torch.distributed.device_mesh import init_device_mesh

    from megacpp_validate.bridge.fp8_scope import low_precision
    from megacpp_validate.selftest.plant import use_te_double
    from megacpp_validate.training.parallel.ranks import CollectiveRecord, watch_collectives
    from tests.bridge.small_blocks import make, rows, state

    class Operations(CollectiveRecord):
        def inside(self, operation: str, *given: Any) -> Any:
            self.seen.append(operation)
            return super().inside(operation, *given)

    use_te_double()
    watch_collectives(record := Operations())
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))

    def train(*, shared: bool | None) -> tuple[list[Any], list[int]]:
        """Losses, gradients and scales of two steps; and the all-gathers of each forward pass."""
        model = torch.nn.Sequential(make(), make())
        for block in model:
            block.load_native_state_dict(state())
        if shared is not None:
            hooks.shard_layers(model, list(model), mesh, used_twice=[model[1]] if shared else [])
            assert all(hooks.local_part(one).numel() * mesh.size() == one.numel() for one in model.parameters())
        found, gathers = [], []
        for _ in range(2):
            record.seen = []
            with low_precision(target="cpu", amax_reduction_group=mesh.get_group(), recipe=recipe):
                stream = model(rows(length=16))
                loss = (stream + model[1](stream)).square().mean()
            gathers.append(sum(one.startswith("all_gather") for one in record.seen))
            loss.backward()
            assert model[1].choice.observed == "te"
            found.append(loss.detach())
            for one in model.parameters():
                found.append(one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad.clone())
                one.data.sub_(0.1 * one.grad)
                one.grad = None
        scales = [layer.fp8_meta.get("scaling_fwd") for layer in model.modules() if hasattr(layer, "fp8_meta")]
        return [*found, *(one.scale for one in scales if one is not None)], gathers

    (whole, _), (once, kept), (twice, left) = (train(shared=shared) for shared in (None, True, False))
    off = [
        float((one - other).norm() / one.norm())
        for again in (once, twice)
        for one, other in zip(whole, again, strict=True)
    ]
    return max(off) < 1e-3, kept, left  # sums in another order, and no value in another step of FP8


@RANKS
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fsdp2_around_te_blocks_trains_in_fp8_as_without(recipe: str, world: int) -> None:
    """Ranks read the same rows, so that the mean of their gradients is the gradient of one; the second time the MTP
    head's layer is not gathered again."""
    assert on_ranks(world, wrapped_on_a_rank, recipe) == [(True, [2, 2], [3, 3])] * world
