"""What a training tree adds to TE layers on several ranks: gradient sums, shares of weights, FSDP2, MTP.

The caller owns the plan: these functions take process groups and a DeviceMesh, and make none. Nothing of FSDP2 is
imported before `shard_layers` runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import distributed

from .native_block import QKV, BlockShape

# --- gradients of which each rank of a tensor group has a part
#
# Under sequence parallelism a rank norms its own positions: the gradient of such a weight is a part of the whole on
# each rank of the tensor group, and is summed over it before the step (Korthikanti et al. 2022, arXiv:2205.05198,
# section 4.2.2; Megatron-LM's `_allreduce_layernorm_grads`). A rank that leaves one out trains a model of its own, and
# its loss hardly shows it.

# The mark that Megatron-LM and Transformer Engine put on such a parameter. TE marks the norms of its own layers
# (`sequence_parallel=True`); the caller marks what it computes on single positions itself: other norms, routers,
# embedding and head.
MARK: Final = "sequence_parallel"
_FUSED: Final = 1 << 20  # elements: larger gradients are summed in place, where a copy costs more than a launch


def mark_split(parameters: Iterable[Any]) -> None:
    """Mark parameters of which each rank of a tensor group has a part of the gradient."""
    for parameter in parameters:
        setattr(parameter, MARK, True)


def marked(model: Any, mark: str = MARK) -> set[str]:
    """Names of the parameters with a mark."""
    return {name for name, parameter in model.named_parameters() if getattr(parameter, mark, False)}


def sum_marked_gradients(model: Any, tp_group: Any) -> int:
    """Sum the gradients of all marked parameters over the tensor group: a collective call, once a step.

    It comes after the last backward pass and before clipping. A parameter without a gradient on this rank counts as
    zeros, so that all ranks sum the same tensors.

    Args:
        model: with the same marked parameters on all ranks; FSDP2 may have sharded them over another group.
        tp_group: the tensor group.

    Returns:
        How many gradients were summed.
    """
    parameters = [one for one in model.parameters() if getattr(one, MARK, False)]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sum_gradients([local_part(parameter.grad) for parameter in parameters], tp_group)
    return len(parameters)


def sum_gradients(gradients: Sequence[Any], group: Any) -> None:
    """Sum tensors in place over a group, the small ones of a dtype by one all-reduce: a collective call.

    Args:
        gradients: contiguous, of the same shapes and dtypes in the same order on all ranks.
        group: process group.
    """
    small = [one for one in gradients if one.numel() <= _FUSED]
    large = [one for one in gradients if one.numel() > _FUSED]
    waits = [distributed.all_reduce(one, group=group, async_op=True) for one in large]
    for dtype in dict.fromkeys(one.dtype for one in small):
        alike = [one.view(-1) for one in small if one.dtype == dtype]
        fused = torch.cat(alike)
        distributed.all_reduce(fused, group=group)
        torch._foreach_copy_(alike, fused.split([one.numel() for one in alike]))
    for wait in waits:
        wait.wait()


def local_part(tensor: Any) -> Any:
    """What lies here of a DTensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --- shares of fused weights
#
# A fused weight is a row of segments along one axis, such as queries, keys and values: of each a rank has whole heads
# or columns. A plain chunk of the weight would give the first ranks only queries and the last only values.

Cut = tuple[int, Sequence[int]]
"""How a weight is cut: the axis, and the sizes of its segments along that axis."""


def block_cuts(shape: BlockShape) -> dict[str, Cut]:
    """The weights of an A-block that ranks have shares of, under native names; both norms are whole on every rank.

    Args:
        shape: of the whole block, all ranks together.
    """
    up = (shape.ffn_hidden,) * (2 if shape.gated else 1)
    return {
        QKV: (0, shape.segments),
        "out.weight": (1, (shape.heads * shape.head_dim,)),
        "mlp.fc1_weight": (0, up),
        "mlp.fc2_weight": (1, (shape.ffn_hidden,)),
    }


def cut_state(state: Mapping[str, Any], cuts: Mapping[str, Cut], rank: int, ranks: int) -> dict[str, Any]:
    """One rank's share of the weights of a layer, such as `NativeBlock.load_native_state_dict` takes.

    Args:
        state: weights of the whole layer.
        cuts: name -> its cut, as of `block_cuts`; a weight without one is whole on every rank.
        rank, ranks: of the tensor group.
    """
    return {
        name: cut_segments(weight, *cuts[name], rank=rank, ranks=ranks) if name in cuts else weight
        for name, weight in state.items()
    }


def cut_segments(weight: Any, axis: int, segments: Sequence[int], *, rank: int, ranks: int) -> Any:
    """One rank's share of a fused weight: the same part of each segment, joined in their order.

    `BlockShape.shard` and the layer that takes the share refuse segments that do not divide among the ranks.
    """
    parts = weight.split(list(segments), dim=axis)
    return torch.cat([part.chunk(ranks, dim=axis)[rank] for part in parts], dim=axis)


# --- FSDP2


def shard_layers(
    model: Any,
    layers: Iterable[Any],
    mesh: Any,
    *,
    whole: Collection[Any] = (),
    used_twice: Collection[Any] = (),
    methods: Iterable[str] = (),
    summed: bool = False,
) -> None:
    """Shard a model over a mesh by FSDP2, in place: each layer as one group, then what the layers leave of the model.

    - A layer is a whole block, such as `NativeBlock`, never one of the TE classes in it: TE casts a weight when its
      layer runs, so that all weights of the block are gathered by then, in one all-gather.
    - Parameters stay in their own dtype; gradients of low-precision ones are reduced in fp32. FP8 comes after the
      gather, in TE's own casts. Inputs are not cast: a norm in fp32 gets what its caller gives.
    - Scales and amax histories of TE are neither parameters nor buffers: FSDP2 leaves them on every rank. All ranks of
      the mesh hold shards of the same weights, so the scope takes the group of the mesh as `amax_reduction_group`.

    Args:
        model: after its weights are loaded and marked; its optimizer is made afterwards.
        layers: of the model, in the order in which they run.
        mesh: DeviceMesh of one dimension.
        whole: parameters that stay whole on every rank: experts, which expert parallelism has distributed, and
            parameters of another dtype than the rest of their layer.
        used_twice: layers that run again in the same forward pass, as the last layer of the trunk does in the head
            that predicts one token further (MTP). They are not resharded behind a forward pass: a second all-gather
            would fetch what was just let go.
        methods: of the model, that are called in the place of `forward`.
        summed: whether gradients are summed over the mesh, as losses that are shares of one loss need it; else FSDP2
            averages them.
    """
    from torch.distributed import fsdp

    ignored = set(whole)
    low = any(one.dtype.itemsize < 4 for one in model.parameters() if one not in ignored)
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False)
    made: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": ignored}
    for layer in layers:
        fsdp.fully_shard(layer, reshard_after_forward=layer not in used_twice, **made)
    fsdp.fully_shard(model, reshard_after_forward=False, **made)
    for module in model.modules() if summed else ():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    for name in methods:
        fsdp.register_fsdp_forward_method(model, name)
