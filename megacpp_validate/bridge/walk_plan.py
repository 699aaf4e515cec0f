"""The plan of the linear walk: every linear layer of a module tree, whether it is swapped, and why.

Planning changes nothing. A layer is swapped only where the whitelist names it, no pinned exclusion holds it back, it is
a plain `nn.Linear` that Transformer Engine can stand in for exactly, and the feature `linear` may take TE here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from .backends import Refusal
from .errors import BridgeError, UnknownName
from .features import PRODUCTION, Features, why_not_te
from .recipes import RECIPES, RecipeName
from .walk_rules import PROJECTIONS, Place, find_exclusion, find_wrapper, matches

# What an FP8 GEMM wants both widths of a weight to be a multiple of: `assert_dim_for_fp8_exec` in TE's utils.py, and
# the block of MXFP8 (`MXFP8_BLOCK_SCALING_SIZE`).
ALIGNMENT: Final[Mapping[RecipeName, int]] = {"delayed": 16, "current": 16, "block": 16, "mxfp8": 32, "nvfp4": 16}
TE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

WRAPS: Final = "stands for a linear layer and reaches into the one inside, whose weight it changes, merges or replaces"

TREE: Final = Place((), ())
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
        decisions: one a name; a module that stands in two places has two, and they agree.
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
    owners = _read_owners(tree)
    found: dict[str, Decision] = {}
    linears: list[tuple[Place, Any]] = []
    for module, places in _read_places(tree):
        if not isinstance(module, nn.Linear):
            continue
        linears += [(place, module) for place in places]
        judged = _judge(module, places, owners, whitelist, recipe)
        if judged is None:
            refusal = why_not_te(features, "linear", module.weight.device)
            judged = (refusal.code, refusal.reason) if refusal else ("listed", "the whitelist names it")
        else:
            refusal = None
        action: Literal["swap", "keep"] = "swap" if judged[0] == "listed" else "keep"
        for place in places:
            found[place.name] = Decision(place.name, action, *judged, refusal)
            if (depth := find_wrapper(place)) is not None:
                wrapper = ".".join(place.segments[:depth])
                found.setdefault(wrapper, Decision(wrapper, "keep", "wraps-linear", WRAPS))
    order = {place.name: position for position, (place, _) in enumerate(_walk(tree))}
    decisions = tuple(sorted(found.values(), key=lambda decision: order[decision.name]))
    idle = tuple(entry for entry in whitelist if not any(matches(place, module, entry) for place, module in linears))
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


def _walk(tree: Any, place: Place = TREE) -> Iterator[tuple[Place, Any]]:
    """Every module under every name it has, the tree first; `named_modules` gives each only once."""
    yield place, tree
    for name, child in tree._modules.items():
        if child is not None and not any(child is above for above in place.chain):
            yield from _walk(child, Place((*place.segments, name), (*place.chain, tree)))


def _read_places(tree: Any) -> list[tuple[Any, list[Place]]]:
    """Every module with every place it stands in."""
    found: dict[int, tuple[Any, list[Place]]] = {}
    for place, module in _walk(tree):
        found.setdefault(id(module), (module, []))[1].append(place)
    return list(found.values())


def _read_owners(tree: Any) -> dict[Any, str]:
    """What a tensor is known by -> the name of one that is no plain `nn.Linear`'s."""
    found: dict[Any, str] = {}
    for name, module in tree.named_modules():
        if type(module) is not nn.Linear:
            for part, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    found |= dict.fromkeys(_keys(tensor), f"{name}.{part}".removeprefix("."))
    return found


def _keys(tensor: Any) -> set[Any]:
    """What a tensor is known by: itself, and where its values lie."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.is_meta or not tensor.numel():
        return {id(tensor)}
    return {id(tensor), (tensor.device, tensor.data_ptr())}


def _judge(
    module: Any,
    places: Sequence[Place],
    owners: Mapping[Any, str],
    include: Sequence[str | type],
    recipe: RecipeName | None,
) -> tuple[str, str] | None:
    """Code and reason of the first thing that keeps a linear layer; None where nothing does."""
    return (
        _by_place(module, places)
        or _by_tie(module, owners)
        or _by_list(module, places, include)
        or _by_state(module)
        or _by_numbers(module, recipe)
    )


def _by_place(module: Any, places: Sequence[Place]) -> tuple[str, str] | None:
    """The pinned exclusions, by name and by what is around it; one place that is excluded excludes it everywhere."""
    for place in places:
        if (row := find_exclusion(place)) is not None:
            return row.code, row.reason
    if type(module) is not nn.Linear:
        return (
            "wraps-linear",
            f"a {type(module).__name__} is more than a plain linear layer; TE would drop what it adds",
        )
    if any(find_wrapper(place) is not None for place in places):
        return "wraps-linear", f"the module around {WRAPS}"
    if not all(place.segments for place in places):
        return "root", "it is the tree itself, which nothing holds that could hold another layer instead"
    return None


def _by_tie(module: Any, owners: Mapping[Any, str]) -> tuple[str, str] | None:
    weight = module._parameters.get("weight")
    owner = next((owners[key] for key in _keys(weight) if key in owners), None) if weight is not None else None
    if owner is None:
        return None
    return "tied-embedding", (
        f"its weight is also {owner}, which is no linear layer's; a head tied with its embedding keeps its precision"
    )


def _by_list(module: Any, places: Sequence[Place], include: Sequence[str | type]) -> tuple[str, str] | None:
    """The whitelist; a layer that stands in several places must be named in each."""
    missing = [place.name for place in places if not any(matches(place, module, entry) for entry in include)]
    if not missing:
        return None
    shared = f", where this layer also stands, as {missing[0]}" if len(missing) < len(places) else ""
    return "not-listed", f"the whitelist does not name it{shared}"


def _by_state(module: Any) -> tuple[str, str] | None:
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


def _by_numbers(module: Any, recipe: RecipeName | None) -> tuple[str, str] | None:
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
