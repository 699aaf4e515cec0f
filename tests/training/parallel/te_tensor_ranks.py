"""A by Transformer Engine over two tensor ranks, with and without sequence parallelism, beside one rank: on GPUs.

    python -m tests.training.parallel.te_tensor_ranks FOLDER [RECIPE ...]

Starts two ranks, which leave what they measured in FOLDER; the exit status is 1 where a check failed. RECIPE is bf16,
delayed, current or block; all four without one. `torchrun` may start the ranks too.

Errors are relative Frobenius errors against the whole native layer in fp64, from the same weights, rows and cotangent.
The layer that is split rounds what one rank rounds, and three things more: each part of a sum before it is sent, the
sum of two parts, and each rank's part of a gradient. Those are roundings of its dtype, of the size of one that is there
already (the output's own), so its squared error is at most four times that of one rank: the bound is twice the error of
one rank. An error of 0.5 is never passed, whatever one rank has: half of a tensor zeroed has 0.7.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

from megacpp_validate.bridge.amax_owner import SINGLE_OWNER, AmaxGroupMissing
from megacpp_validate.bridge.features import PRESETS, PRODUCTION
from megacpp_validate.bridge.fp8_scope import low_precision, reset_te_state
from megacpp_validate.bridge.layer_watch import watch_layers
from megacpp_validate.native.rope import rope_tables
from megacpp_validate.training.first_weights import build_layer, first_weights
from megacpp_validate.training.layers import Build
from megacpp_validate.training.parallel.launch import launch
from megacpp_validate.training.parallel.plan import ParallelPlan, Spread
from megacpp_validate.training.parallel.ranks import join_ranks
from megacpp_validate.training.parallel.replicas import reduce_split_gradients, split_parameters
from megacpp_validate.training.parallel.tensor_weights import cut_state, plan_cuts
from megacpp_validate.training.parallel.verdict import Limits
from megacpp_validate.training.sizes import Size, read_size

MODULE: Final = "tests.training.parallel.te_tensor_ranks"
RECIPES: Final = ("bf16", "delayed", "current", "block")
BATCH: Final = 4
STEPS: Final = 3  # the first ones fill the amax history
WITHIN: Final = 2.0
AT_MOST: Final = 0.5
NORMS: Final = ("qkv.layer_norm_weight", "mlp.layer_norm_weight")  # in one order on all ranks


class SplitComparison:
    """One layer A, whole and split, on this rank.

    Args:
        size: of the layer; `length` is T.
        device: of this rank.
        target: whose recipes hold.
    """

    def __init__(self, size: Size, device: str, target: str) -> None:
        self.size, self.device, self.target = size, device, target
        self.rank = distributed.get_rank()
        self.build = Build(PRODUCTION, torch.bfloat16, device)
        self.weights = first_weights("A", size, self.build, seed=1, name="a")
        drawn = torch.Generator().manual_seed(2)
        shape = (BATCH, size.length, size.hidden)
        self.rows, self.cotangent = (torch.randn(shape, generator=drawn).to(device, torch.bfloat16) for _ in range(2))
        self.cuts = plan_cuts("A", size)
        exact = build_layer("A", size, Build(PRESETS["off"], torch.float64, device), seed=1, name="a")
        exact.load_native_state_dict({name: weight.double() for name, weight in self.weights.items()})
        self.exact = self._pass(exact, range(size.length), torch.float64)

    def judge(self, recipe: str, *, sequence_parallel: bool) -> tuple[dict[str, Any], list[str]]:
        """What was measured, and what is wrong."""
        plan = ParallelPlan(world=2, tensor_parallel=2, sequence_parallel=sequence_parallel)
        spread = Spread(plan, self.rank, tensor_group=distributed.group.WORLD)
        single = self._errors(self._train(recipe, self.build, SINGLE_OWNER), plan, whole=True)
        split = replace(self.build, spread=spread)
        seen = self._train(recipe, split, distributed.group.WORLD)
        off, unsummed = self._errors(seen, plan), self._errors(self._unsummed, plan)
        bounds = {name: min(AT_MOST, WITHIN * error) for name, error in single.items()}
        faults = [f"{name}: {error:.3g}, and one rank has {single[name]:.3g}" for name, error in off.items()
                  if not error <= bounds[name]]  # fmt: skip
        missed = [name for name in NORMS if _largest(unsummed[name], self.device) <= bounds[name]]
        if sequence_parallel and missed:
            faults.append(f"the planted fault is not seen: {', '.join(missed)} without the other ranks' part")
        faults += self._scale_faults(recipe, split) if sequence_parallel else []
        where = f"{recipe}, {'with' if sequence_parallel else 'without'} sequence parallelism, rank {self.rank}"
        told = {"split": off, "one": single, "not summed": unsummed, "marked": self._marked}
        return told, [f"{where}: {fault}" for fault in faults]

    def _train(self, recipe: str, build: Build, owner: Any) -> dict[str, Any]:
        reset_te_state()
        layer = build_layer("A", self.size, build, seed=1, name="a")
        watch_layers(layer)
        positions = build.spread.positions(self.size.length)
        for _ in range(STEPS):
            layer.zero_grad(set_to_none=True)
            seen = self._pass(layer, positions, torch.bfloat16, self._scope(recipe, owner))
        if (taken := layer.choices()["block"]).observed != "te":
            raise RuntimeError(f"the block took {taken}. Next step: run where Transformer Engine can be used.")
        self._marked = sorted(split_parameters(layer))
        if build.spread.tensor_group is not None:
            self._unsummed = seen
            reduce_split_gradients(split_parameters(layer), build.spread.tensor_group)
            seen = {**seen, **self._gradients(layer)}
        return seen

    def _scope(self, recipe: str, owner: Any) -> Any:
        if recipe == "bf16":
            return nullcontext()
        return low_precision(target=self.target, amax_reduction_group=owner, recipe=recipe)

    def _pass(self, layer: Any, positions: range, dtype: Any, scope: Any = None) -> dict[str, Any]:
        here = slice(positions.start, positions.stop)
        rows = self.rows[:, here].to(dtype).clone().requires_grad_()
        tables = rope_tables(self.size.length, self.size.head_dim, device=self.device,
                             dtype=torch.promote_types(dtype, torch.float32))  # fmt: skip
        with scope or nullcontext():
            out = layer(rows, tables).rows
        out.backward(self.cotangent[:, here].to(dtype))
        return {"out": out.detach(), "rows": rows.grad, **self._gradients(layer)}

    def _gradients(self, layer: Any) -> dict[str, Any]:
        """Of every weight by its native name: the layer says how its parameters make them."""
        kept = {name: one.detach().clone() for name, one in layer.named_parameters()}
        with torch.no_grad():
            for one in layer.parameters():
                one.copy_(one.grad)
            gradients = layer.native_state_dict()
            for name, one in layer.named_parameters():
                one.copy_(kept[name])
        return gradients

    def _errors(self, seen: Mapping[str, Any], plan: ParallelPlan, *, whole: bool = False) -> dict[str, float]:
        """Relative Frobenius error of this rank's part of each tensor; of a whole layer the same part is taken."""
        exact, mine = self._part(self.exact, plan), self._part(seen, plan) if whole else seen
        return {name: float((mine[name].double() - exact[name]).norm() / exact[name].norm()) for name in exact}

    def _part(self, seen: Mapping[str, Any], plan: ParallelPlan) -> dict[str, Any]:
        here = plan.positions(self.rank, self.size.length)
        rows = {name: seen[name][:, here.start : here.stop] for name in ("out", "rows")}
        return rows | cut_state({name: seen[name] for name in self.cuts}, self.cuts, self.rank, 2)

    def _scale_faults(self, recipe: str, build: Build) -> list[str]:
        """Delayed scales of this rank alone are to be refused, before anything is gathered."""
        if recipe != "delayed":
            return []
        try:
            self._train(recipe, build, SINGLE_OWNER)
        except AmaxGroupMissing:
            return []
        return ["delayed scaling with an amax of this rank alone was taken"]


def _largest(error: float, device: str) -> float:
    """Over both ranks: of two parts of a sum one is off by half of it or more."""
    both = torch.tensor(error, device=device)
    distributed.all_reduce(both, distributed.ReduceOp.MAX)
    return float(both)


def compare_all(size: Size, device: str, target: str, recipes: Sequence[str]) -> dict[str, Any]:
    """Every recipe in both modes, on this rank; "faults" is empty where all is well."""
    comparison = SplitComparison(size, device, target)
    told: dict[str, Any] = {"faults": []}
    for recipe in recipes:
        for sequence_parallel in (True, False):
            measured, faults = comparison.judge(recipe, sequence_parallel=sequence_parallel)
            told[f"{recipe} {'sp' if sequence_parallel else 'tp'}"] = measured
            told["faults"] += faults
    return told


def main() -> None:
    """Start the ranks; or be one."""
    folder, recipes = Path(sys.argv[1]), tuple(sys.argv[2:]) or RECIPES
    if "RANK" not in os.environ:
        end = launch(MODULE, sys.argv[1:], ranks=2, folder=folder, limits=Limits(whole=540, silent=240))
        receipts = [rank.receipt or {"faults": [f"rank {rank.rank} left nothing"]} for rank in end.ranks]
        faults = [fault for receipt in receipts for fault in receipt["faults"]]
        sys.exit("\n".join([end.words, *faults]) if faults or end.ending != "done" else 0)
    with join_ranks("nccl") as rank:
        size = read_size("small", length=256)
        rank.write_receipt(compare_all(size, rank.device, "h200", recipes))


if __name__ == "__main__":
    main()
