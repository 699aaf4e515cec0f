"""The plan of the linear walk: every linear layer of a module tree, whether it is swapped, and why.

Planning changes nothing. A layer is swapped only where the whitelist names it, no pinned exclusion holds it back, it is
a plain `nn.Linear` that Transformer Engine can stand in for exactly, and the feature `linear` may take TE here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from .backends import Refusal
from .errors import BridgeError, UnknownName
from .features import PRODUCTION, Features, why_not_te
from .recipes import RECIPES, RecipeName
from .walk_graph import Node, Place, read_graph, read_places
from .walk_rules import EXCLUSIONS, PROJECTIONS
from .walk_ties import Ties, read_ties
from .walk_whitelist import Whitelist

# What an FP8 GEMM wants both widths of a weight to be a multiple of: `assert_dim_for_fp8_exec` in TE's utils.py, and
# the block of MXFP8 (`MXFP8_BLOCK_SCALING_SIZE`).
ALIGNMENT: Final[Mapping[RecipeName, int]] = {"delayed": 16, "current": 16, "block": 16, "mxfp8": 32, "nvfp4": 16}
TE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

WRAPS: Final = "stands for a linear layer and reaches into the one inside, whose weight it changes, merges or replaces"

Verdict = tuple[str, str]  # code and reason
_PARTS: Final = frozenset({"weight", "bias"})
_HOOKS: Final = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class NotATree(BridgeError, TypeError):
    """What is to be walked is no `nn.Module`."""


@dataclass(frozen=True)
class Decision:
    """What becomes of one module, under one of its names.

    Attributes:
        name: qualified name; empty for the tree itself.
        action: "swap" or "keep".
        code: short and stable: "listed", "not-listed", the code of an exclusion, ...
        reason: the same for a person.
        refusal: why Transformer Engine may not be taken, of a layer that would be swapped otherwise.
    """

    name: str
    action: Literal["swap", "keep"]
    code: str
    reason: str
    refusal: Refusal | None = None


@dataclass(frozen=True)
class WalkPlan:
    """Every `nn.Linear` of a tree and every module that wraps one, in the order of the tree.

    Attributes:
        decisions: one a name; a module that stands in two places has two, and they agree. Of a module with very many
            names (`walk_graph.MOST_NAMES`) some have none: it is judged by all of its places and swapped in all.
        include, features, recipe: what the plan was made with.
        idle: entries of the whitelist that name no linear layer of the tree.
    """

    decisions: tuple[Decision, ...]
    include: tuple[str | type, ...]
    features: Features
    recipe: RecipeName | None
    idle: tuple[str | type, ...]

    @property
    def swapped(self) -> tuple[str, ...]:
        """Names of the layers to swap."""
        return tuple(decision.name for decision in self.decisions if decision.action == "swap")

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of what stays as it is."""
        return tuple(decision.name for decision in self.decisions if decision.action == "keep")

    def __getitem__(self, name: str) -> Decision:
        """The decision on one name; KeyError where the plan has no such name."""
        for decision in self.decisions:
            if decision.name == name:
                return decision
        raise KeyError(name)


def plan_walk(
    tree: Any,
    *,
    include: Sequence[str | type] = PROJECTIONS,
    features: Features = PRODUCTION,
    recipe: RecipeName | None = None,
) -> WalkPlan:
    """A dry run: what `swap_linears` would do, and why. Nothing is changed.

    Args:
        tree: an `nn.Module`.
        include: the whitelist. A pattern of n segments names a layer whose last n segments match, each as a shell
            pattern ("fc?", "attention.*"); a class names every linear layer below a module of it.
        features: what may take Transformer Engine; `linear` is the flag at hand.
        recipe: the low precision that the layers are to run in, if any: then both widths must fit its GEMM.

    Raises:
        NotATree: `tree` is no `nn.Module`.
        UnknownName: the whitelist holds what is neither pattern nor class, or there is no such recipe.
    """
    if not isinstance(tree, nn.Module):
        raise NotATree(
            f"a {type(tree).__name__} cannot be walked: it is no torch.nn.Module. Next step: pass the model itself."
        )
    whitelist = _read_include(include)
    if recipe is not None and recipe not in RECIPES:
        raise UnknownName(f"there is no recipe {recipe!r}. Next step: choose from {', '.join(RECIPES)}.")
    nodes = read_graph(tree)
    places = list(read_places(nodes[0]))
    listed = Whitelist(whitelist, nodes)
    judged = _judge_all(places, read_ties(nodes, _first_names(places)), listed, recipe)
    found: dict[str, Decision] = {}
    for place in places:
        if id(place.node) in judged:
            found[place.name] = _decide(place, judged[id(place.node)], features)
            if place.wrapper is not None:
                found.setdefault(place.wrapper, Decision(place.wrapper, "keep", "wraps-linear", WRAPS))
    decisions = tuple(found[place.name] for place in places if place.name in found)
    linears = [node for node in nodes if id(node) in judged]
    idle = tuple(entry for entry in whitelist if not any(listed.covers(entry, node) for node in linears))
    return WalkPlan(decisions, whitelist, features, recipe, idle)


def _read_include(include: Sequence[str | type]) -> tuple[str | type, ...]:
    """The whitelist as a tuple."""
    if isinstance(include, str) or not all(
        isinstance(entry, type) or (isinstance(entry, str) and entry) for entry in include
    ):
        raise UnknownName(
            f"the whitelist is {include!r}. Each entry of it is the end of a name as a shell pattern, or a class. "
            'Next step: pass a sequence such as ("attention.*", "fc?", TransformerBlock).'
        )
    return tuple(include)


def _first_names(places: Sequence[Place]) -> dict[int, str]:
    """Id of a node -> the first of its names."""
    return {id(place.node): place.name for place in reversed(places)}


def _decide(place: Place, judged: Verdict | None, features: Features) -> Decision:
    """The decision on one name of a layer that has been judged."""
    if judged is not None:
        return Decision(place.name, "keep", *judged)
    refusal = why_not_te(features, "linear", place.node.module.weight.device)
    if refusal is not None:
        return Decision(place.name, "keep", refusal.code, refusal.reason, refusal)
    return Decision(place.name, "swap", "listed", "the whitelist names it")


def _judge_all(
    places: Sequence[Place], ties: Ties, listed: Whitelist, recipe: RecipeName | None
) -> dict[int, Verdict | None]:
    """Id of each linear layer's node -> what keeps it; what shares a weight with a layer that is kept is kept too."""
    nodes = {id(place.node): place.node for place in places if isinstance(place.node.module, nn.Linear)}
    judged = {key: _judge(node, ties.owners, listed, recipe) for key, node in nodes.items()}
    names = _first_names(places)
    for group in ties.groups:
        kept = [node for node in group if judged[id(node)] is not None]
        for node in group:
            if kept and judged[id(node)] is None:
                judged[id(node)] = _by_kept_tie(names[id(kept[0])], judged[id(kept[0])])
    return judged


def _judge(node: Node, owners: Mapping[int, str], listed: Whitelist, recipe: RecipeName | None) -> Verdict | None:
    """Code and reason of the first thing that keeps a linear layer, its ties aside; None where nothing does."""
    return (
        _by_place(node)
        or _by_tie(node, owners)
        or _by_list(node, listed)
        or _by_state(node.module)
        or _by_numbers(node.module, recipe)
    )


def _by_place(node: Node) -> Verdict | None:
    """The pinned exclusions, by name and by what is around it; one place that is excluded excludes it everywhere."""
    row = next((row for row in EXCLUSIONS if row in node.excluded), None)
    if row is not None:
        return row.code, row.reason
    if type(node.module) is not nn.Linear:
        return (
            "wraps-linear",
            f"a {type(node.module).__name__} is more than a plain linear layer; TE would drop what it adds",
        )
    if node.wrapped:
        return "wraps-linear", f"the module around {WRAPS}"
    if not node.above:
        return "root", "it is the tree itself, which nothing holds that could hold another layer instead"
    return None


def _by_tie(node: Node, owners: Mapping[int, str]) -> Verdict | None:
    owner = owners.get(id(node))
    if owner is None:
        return None
    return "tied-embedding", (
        f"its weight is also {owner}, or a part of it, which is no plain linear layer's; a head tied with its "
        "embedding keeps its precision"
    )


def _by_kept_tie(name: str, judged: Verdict | None) -> Verdict:
    code = judged[0] if judged is not None else "kept"
    return "tied-kept", f"its weight is also, in part or in whole, that of `{name}`, which stays as it is ({code})"


def _by_list(node: Node, listed: Whitelist) -> Verdict | None:
    """The whitelist; a layer that stands in several places must be named in each."""
    missing = listed.find_unnamed(node)
    if missing is None:
        return None
    shared = f", where this layer also stands, as {missing}" if listed.names_somewhere(node) else ""
    return "not-listed", f"the whitelist does not name it{shared}"


def _by_state(module: Any) -> Verdict | None:
    """What Transformer Engine's layer would not have."""
    hooks = [name.strip("_") for name in _HOOKS if getattr(module, name, None)]
    if hooks:
        return "hooks", f"it has {', '.join(hooks)}, which a new layer would not have"
    if "forward" in vars(module):
        return "own-forward", "its forward was replaced on the object, which a new layer would not have"
    own = {*module._parameters, *module._buffers, *module._modules} - _PARTS
    if own or set(module._parameters) != _PARTS or module.weight is None:
        shown = ", ".join(sorted(own)) or "no weight of its own"
        return "altered", f"it has {shown} beside or in place of weight and bias"
    for part in (module.weight, module.bias):
        if part is not None and type(part) is not nn.Parameter:
            return "parameter-type", f"a parameter of it is a {type(part).__name__}: sharded, quantized or not made yet"
    if not module.weight.is_contiguous() or tuple(module.weight.shape) != (module.out_features, module.in_features):
        return "layout", "its weight is no contiguous [out_features, in_features], which TE's kernels take for granted"
    return None


def _by_numbers(module: Any, recipe: RecipeName | None) -> Verdict | None:
    """Dtype and widths."""
    dtypes = {str(part.dtype).removeprefix("torch.") for part in module.parameters()}
    if module.weight.dtype not in TE_DTYPES or len(dtypes) > 1:
        return "dtype", f"its parameters are {', '.join(sorted(dtypes))}; TE takes one of fp32, bf16, fp16 for both"
    if not module.weight.numel():
        return "empty", "its weight is empty"
    align = ALIGNMENT[recipe] if recipe is not None else 1
    if module.in_features % align or module.out_features % align:
        return "fp8-alignment", (
            f"{module.in_features} -> {module.out_features} features; the {recipe} recipe wants multiples of {align}"
        )
    return None
