"""TE linear replacement walker: a whitelist walk that puts `te.Linear` in the place of `nn.Linear`.

`plan_walk` says what would be swapped and why not; `swap_linears` does it, all of it or nothing. A swapped layer keeps
the very parameters of the old one, so values, gradients, ties, hooks on parameters, and an optimizer that already holds
them stay right, and no second copy of the weights is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from . import imports as te
from .backends import Choice, choose
from .errors import BridgeError
from .extra_state import take_over
from .features import PRODUCTION, Features
from .recipes import RecipeName
from .walk_plan import ALIGNMENT, Decision, NotATree, WalkPlan, plan_walk
from .walk_rules import EXCLUSIONS, PROJECTIONS, Exclusion

__all__ = [
    "ALIGNMENT", "EXCLUSIONS", "PROJECTIONS", "Decision", "Exclusion", "NotATree", "PlanMismatch", "Swap", "TeLinear",
    "WalkPlan", "plan_walk", "swap_linears",
]  # fmt: skip

NATIVE_PATH = "torch.nn.Linear, left as it is"
_OF_EVERY_LINEAR: Final = frozenset((*vars(nn.Module()), "in_features", "out_features"))


class PlanMismatch(BridgeError, ValueError):
    """A plan that does not hold for the tree that it is applied to."""


class TeLinear:
    """A `te.Linear` in the place of an `nn.Linear`: [..., in_features] -> [..., out_features].

    `inner` is what goes into a tree, so that names there stay `weight` and `bias`.

    Args:
        module: the `nn.Linear` to stand in for, weight [out_features, in_features]; shape, bias, dtype and device
            are taken from it, weights are not copied.
        name: where it stands in the tree; TE uses it in its messages.
    """

    def __init__(self, module: Any, *, name: str) -> None:
        self.inner = te.linear.require()(
            in_features=module.in_features,
            out_features=module.out_features,
            bias=module.bias is not None,
            params_dtype=module.weight.dtype,
            device=module.weight.device,
            name=name,
        )

    def __call__(self, rows: Any, *, is_first_microbatch: bool | None = None) -> Any:
        """Rows [..., in_features] -> [..., out_features]."""
        return self.inner(rows, is_first_microbatch=is_first_microbatch)

    def parameters(self) -> tuple[Any, Any]:
        """Weight [out_features, in_features] and bias [out_features]."""
        return self.inner.weight, self.inner.bias


@dataclass(frozen=True)
class Swap:
    """What a walk did.

    Attributes:
        plan: every decision with its reason.
        choices: name -> what was asked for and taken, of each layer that the whitelist let through.
    """

    plan: WalkPlan
    choices: Mapping[str, Choice]


def swap_linears(
    tree: Any,
    plan: WalkPlan | None = None,
    *,
    include: Sequence[str | type] = PROJECTIONS,
    features: Features = PRODUCTION,
    recipe: RecipeName | None = None,
) -> Swap:
    """Put Transformer Engine's linear layers into a tree, in place; everything or nothing.

    All new layers are built before the first one is put in, and an error puts back what was there. Parameters are
    handed over, not copied. Names in `state_dict` stay `weight` and `bias`; `extra_state` has the FP8 state
    that TE adds. Where TE may not be used the tree stays as it is, and `choices` say why. A swapped layer takes rows
    [..., in_features] with two axes at least. Under an FP8 recipe TE itself refuses inputs whose number of rows does
    not fit: pad them to a multiple of `ALIGNMENT[recipe]`.

    Args:
        tree: an `nn.Module`, changed in place.
        plan: of `plan_walk` for this tree; the other arguments are then those of the plan.
        include, features, recipe: as `plan_walk` takes them.

    Raises:
        PlanMismatch: the plan does not hold for this tree, or no longer.
        WeightMismatch: TE built a layer with other parameters than those it is to take over.
        NotATree, UnknownName: as `plan_walk`.
    """
    if plan is None:
        plan = plan_walk(tree, include=include, features=features, recipe=recipe)
    else:
        _hold_plan(tree, plan)
    linears = {name: tree.get_submodule(name) for name in plan.swapped}
    layers: dict[int, Any] = {}  # a layer that stands in two places is built once
    with torch.random.fork_rng(_cuda_devices(linears.values())):  # TE draws initial weights that nobody will see
        for name, linear in linears.items():
            if id(linear) not in layers:
                layers[id(linear)] = _build(linear, name)
    _put(tree, {name: layers[id(linear)] for name, linear in linears.items()})
    asked = [decision for decision in plan.decisions if decision.action == "swap" or decision.refusal is not None]
    return Swap(plan, {decision.name: _choose(decision) for decision in asked})


def _hold_plan(tree: Any, plan: WalkPlan) -> None:
    """Refuse a plan that this tree would not get now."""
    now = plan_walk(tree, include=plan.include, features=plan.features, recipe=plan.recipe)
    differing = sorted(set(now.decisions) ^ set(plan.decisions), key=lambda decision: decision.name)
    if differing:
        raise PlanMismatch(
            f"the plan does not hold for this tree: `{differing[0].name}` is now another case than planned "
            f"({len(differing)} decision(s) differ). Likely cause: the tree, or what may use TE, changed after the "
            "plan was made, or the plan was edited. Next step: plan again."
        )


def _choose(decision: Decision) -> Choice:
    return choose("linear_walker", (("te", lambda: decision.refusal), ("native", lambda: None)))


def _cuda_devices(linears: Any) -> list[int]:
    """Indices of the GPUs that some layers lie on."""
    return sorted({linear.weight.device.index for linear in linears if linear.weight.is_cuda})


def _build(linear: Any, name: str) -> Any:
    """A `te.Linear` that has the parameters of an `nn.Linear` and whatever else was set on it."""
    layer = take_over(TeLinear(linear, name=name).inner, linear, f"`{name}`")
    for key, value in vars(linear).items():
        if key not in _OF_EVERY_LINEAR and not hasattr(layer, key):
            setattr(layer, key, value)
    return layer


def _put(tree: Any, layers: Mapping[str, Any]) -> None:
    """Put layers in by qualified name; whatever goes wrong, all that was there comes back."""
    before: list[tuple[Any, str, Any]] = []
    try:
        for name, layer in layers.items():
            above, _, child = name.rpartition(".")
            holder = tree.get_submodule(above)
            before.append((holder, child, holder._modules[child]))
            holder.add_module(child, layer)
    except BaseException:
        for holder, child, old in reversed(before):
            holder._modules[child] = old
        raise
