"""Small module trees for the tests of the linear walker."""

from __future__ import annotations

from typing import Any

from torch import nn

from megacpp_validate.bridge.linear_walker import WalkPlan


def holder(name: str, **children: Any) -> nn.Module:
    """A module of a class by this name."""
    made = type(name, (nn.Module,), {})()
    for child, module in children.items():
        made.add_module(child, module)
    return made


def tree_of(path: str, leaf: Any = None) -> nn.Module:
    """A tree in which `path` is a linear layer; a segment `name:Class` gives the module above the next one a class."""
    inner = leaf if leaf is not None else nn.Linear(16, 16)
    for segment in reversed(path.split(".")):
        name, _, kind = segment.partition(":")
        if kind:  # the class belongs to the module by this name, which is `inner`
            inner.__class__ = type(kind, (type(inner),), {})
        inner = holder("Holder", **{name: inner})
    return inner


def codes(plan: WalkPlan) -> dict[str, str]:
    return {decision.name: decision.code for decision in plan.decisions}
