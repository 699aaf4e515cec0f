"""FSDP2 on the hybrid model: dense parameters are sharded over the data group, block by block.

Experts are not sharded: expert parallelism distributes them already, replicated over expert_data. Gradients are summed,
never averaged, since losses are shares. A block that is used again at once (the last one, by the head that predicts one
token further) keeps its parameters whole after the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from ..expert_layer import EXPERT
from ..model import HybridModel
from ..optimizer import GradientSums
from .checks import MARK, marked
from .plan import MESH_NAMES, ParallelPlan, Spread
from .tensor_layers import SHARE_MARK


@dataclass(frozen=True, eq=False)
class Sharded:
    """A model that was distributed.

    Attributes:
        sums: gradients that the optimizer sums over ranks.
        alike: kind, names of parameters, and the group whose ranks hold bitwise the same of them.
        experts: names of the parameters of experts.
        in_parts: names of those that the tensor group holds in parts.
    """

    sums: GradientSums
    alike: tuple[tuple[str, frozenset[str], Any], ...]
    experts: frozenset[str]
    in_parts: frozenset[str]


def shard_model(model: HybridModel) -> Sharded:
    """Distribute a model in place, as its `build.spread` says."""
    spread, named = model.build.spread, dict(model.named_parameters())
    plan, tensor, tokens, same = spread.plan, spread.tensor_group, spread.token_group, spread.same_experts
    experts = frozenset(name for name in named if EXPERT.match(name))
    # FSDP2 wants one dtype a block; the routers are in fp32, and small: every rank holds them whole.
    routers = frozenset(name for name, one in named.items() if name not in experts and one.dtype != model.build.dtype)
    split = frozenset(marked(model, MARK)) - experts - routers
    in_parts = frozenset(marked(model, SHARE_MARK))
    if spread.data_mesh is not None:
        _shard(model, spread.data_mesh, {named[name] for name in experts | routers})
    sums = ((experts, same), (routers, tokens), (split, tensor))
    alike = (
        ("expert", experts, same),
        ("router", routers, tokens),
        ("parameter of a tensor group", frozenset(named) - in_parts - experts - routers, tensor),
    )
    whole_on = {**dict.fromkeys(experts, plan.mesh_shape[0]), **dict.fromkeys(routers, plan.data)}
    copies = {name: whole_on.get(name, 1) * (1 if name in in_parts else plan.tensor_parallel) for name in named}
    return Sharded(
        GradientSums(tuple((names, group) for names, group in sums if names and group is not None), copies),
        tuple(one for one in alike if one[1] and one[2] is not None),
        experts,
        in_parts,
    )


def _shard(model: HybridModel, mesh: Any, whole: set[Any]) -> None:
    from torch.distributed import fsdp  # a second, which one rank does without

    low = model.build.dtype in (torch.bfloat16, torch.float16)
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False)
    made: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": whole}
    last = len(model.layers) - 1
    for place, layer in enumerate(model.layers):
        fsdp.fully_shard(layer, reshard_after_forward=not (model.size.mtp and place == last), **made)
    fsdp.fully_shard(model, reshard_after_forward=False, **made)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    fsdp.register_fsdp_forward_method(model, "losses")


# --- mesh


def make_spread(plan: ParallelPlan, device: str, *, audit: bool = False) -> Spread:
    """Make all groups of a plan: a collective call of the whole world.

    Args:
        plan: one that `refuse_plan` takes.
        device: "cpu" or "cuda".
        audit: as `Spread` has it.
    """
    if plan.world == 1:
        return Spread(plan=plan, audit=audit)
    from torch.distributed.device_mesh import init_device_mesh

    rank = distributed.get_rank()
    mesh = init_device_mesh(device, plan.mesh_shape, mesh_dim_names=MESH_NAMES)
    same_experts = None
    for expert in range(plan.expert_parallel if plan.world > plan.expert_parallel else 0):  # every rank makes all
        members = [one for one in range(plan.world) if plan.place(one).expert == expert]
        group = distributed.new_group(members)
        same_experts = group if rank in members else same_experts
    return Spread(
        plan=plan,
        rank=rank,
        expert_group=mesh.get_group("expert") if plan.expert_parallel > 1 else None,
        tensor_group=mesh.get_group("tensor") if plan.tensor_parallel > 1 else None,
        token_group=distributed.group.WORLD,
        same_experts=same_experts,
        data_mesh=mesh["expert_data", "expert"]._flatten("data") if plan.data > 1 else None,
        audit=audit,
    )
