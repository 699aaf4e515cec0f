"""The plan of the linear walk: every linear layer of a module tree, whether it is swapped, and why.

Planning changes nothing. A layer is swapped only where the whitelist names it, no pinned exclusion holds it back, it is
a plain `nn.Linear` that Transformer Engine can stand in for exactly, and the feature `linear` may take TE here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

from .backends import Refusal
from .errors import BridgeError, UnknownName
from .features import PRODUCTION, Features, why_not_te
from .recipes import RECIPES, RecipeName
from .walk_rules import (
    EXCLUSIONS,
    PROJECTIONS,
    Exclusion,
    class_exclusions,
    holder_exclusions,
    is_wrapper,
    segment_exclusions,
    wraps_child,
)

# --- walk graph -------------------------------------------------------------------------------------------------------
# A module tree as a graph: each module once, whatever number of names it has, and what holds for any way to it.
#
# A block that stands in two places, in a block that stands in two, has names without end; modules and the edges
# between them stay few. What keeps a layer is asked of the graph, over every way; names are read out of it, not all
# of them.


# Names that the children of one module are given through it; a model that runs one block 64 times is named in full.
MOST_NAMES: Final = 64


@dataclass(eq=False)
class Node:
    """One module.

    Attributes:
        module: it.
        above: who holds it, and under which name.
        below: what it holds: name and module.
        excluded: the pinned exclusions that hold back a layer here, on any way.
        inherited: those of them that hold for what is below it, too.
        wrapped: whether on any way something above stands for a linear layer itself.
        below_wrapper: the same, where it holds for what is below it, too.
    """

    module: Any
    above: list[tuple[Node, str]] = field(default_factory=list)
    below: list[tuple[str, Node]] = field(default_factory=list)
    excluded: frozenset[Exclusion] = frozenset()
    inherited: frozenset[Exclusion] = frozenset()
    wrapped: bool = False
    below_wrapper: bool = False


class Place(NamedTuple):
    """One name of a module.

    Attributes:
        name: qualified, as in `named_modules`.
        node: the module.
        wrapper: name of the module on this way that stands for a linear layer itself; None where none does.
    """

    name: str
    node: Node
    wrapper: str | None


def read_graph(tree: Any) -> list[Node]:
    """Every module of a tree, holders before what they hold; a way back to a holder is left out.

    No recursion: a tree may be deeper than Python's stack.
    """
    known = {id(tree): Node(tree)}
    done: list[Node] = []
    open_ids = {id(tree)}
    stack = [(known[id(tree)], iter(tree._modules.items()))]
    while stack:
        node, children = stack[-1]
        for name, child in children:
            if child is None or id(child) in open_ids:
                continue
            is_new = id(child) not in known
            below = known.setdefault(id(child), Node(child))
            below.above.append((node, name))
            node.below.append((name, below))
            if is_new:
                open_ids.add(id(child))
                stack.append((below, iter(child._modules.items())))
                break
        else:
            stack.pop()
            open_ids.discard(id(node.module))
            done.append(node)
    done.reverse()
    for node in done:
        _inherit(node)
    return done


def _inherit(node: Node) -> None:
    """What holds back layers at this node, from those above it, which have theirs."""
    for holder, name in node.above:
        kind = type(holder.module).__name__
        node.inherited |= holder.inherited | segment_exclusions(name) | class_exclusions(kind)
        node.excluded |= holder_exclusions(kind)
        node.below_wrapper |= holder.below_wrapper or is_wrapper(holder.module)
        node.wrapped |= node.below_wrapper or wraps_child(holder.module, name)
    node.excluded |= node.inherited


def read_places(root: Node) -> Iterator[Place]:
    """Every module by name, in the order of the tree, the tree first.

    A module with more than `MOST_NAMES` names is gone into that many times: what is below it gets no more names, and
    at least one for each place in each holder.
    """
    times: Counter[int] = Counter()
    stack: list[tuple[Place, str | None]] = [(Place("", root, None), None)]  # and the wrapper of all that is below
    while stack:
        place, wrapper = stack.pop()
        yield place
        name, node = place.name, place.node
        times[id(node)] += 1
        if times[id(node)] > MOST_NAMES:
            continue
        if wrapper is None and is_wrapper(node.module):
            wrapper = name
        for child, below in reversed(node.below):
            own = name if wrapper is None and wraps_child(node.module, child) else wrapper
            stack.append((Place(f"{name}.{child}" if name else child, below, own), wrapper))


# --- walk plan --------------------------------------------------------------------------------------------------------


# --- walk whitelist ---------------------------------------------------------------------------------------------------
# Which layers of a tree a whitelist names: asked over every way to a layer, without going each of them.


Entry = str | type


class Whitelist:
    """A whitelist and the tree that it is held to.

    A pattern of n segments is held to the last n of a name, each as a shell pattern: `fc?`, `attention.*`. A class
    names every layer below a module of it, or of it.

    Args:
        entries: patterns and classes.
        nodes: of the tree, holders before what they hold.
    """

    def __init__(self, entries: Sequence[Entry], nodes: Sequence[Node]) -> None:
        self.entries: Final = tuple(entries)
        self._patterns: Final = [entry.split(".") for entry in self.entries if isinstance(entry, str)]
        self._classes: Final = tuple(entry for entry in self.entries if isinstance(entry, type))
        self._longest: Final = max(map(len, self._patterns), default=0)
        self._free = self._read_free(nodes)

    def find_unnamed(self, node: Node) -> str | None:
        """A name of this layer that no entry covers; None where each is covered."""
        if isinstance(node.module, self._classes):
            return None
        ways: list[tuple[Node, tuple[str, ...]]] = [(node, ())]
        while ways:
            top, tail = ways.pop()
            if any(len(tail) == len(pattern) and all(map(fnmatchcase, tail, pattern)) for pattern in self._patterns):
                continue
            if not top.above:
                return ".".join(tail)
            if len(tail) < self._longest:
                ways += [(holder, (name, *tail)) for holder, name in reversed(top.above) if not self._is_named(holder)]
            elif id(top) in self._free:
                return ".".join((*self._way_to(top), *tail))
        return None

    def names_somewhere(self, node: Node) -> bool:
        """Whether any entry covers any name of this layer."""
        return any(self.covers(entry, node) for entry in self.entries)

    def covers(self, entry: Entry, node: Node) -> bool:
        """Whether one entry covers any name of this layer."""
        ways: list[tuple[Node, int]] = [(node, 0)]
        seen = set()
        segments = entry.split(".") if isinstance(entry, str) else []
        while ways:
            at, depth = ways.pop()
            if isinstance(entry, type):
                if isinstance(at.module, entry):
                    return True
                ways += [(holder, 0) for holder, _ in at.above if id(holder) not in seen]
                seen |= {id(holder) for holder, _ in at.above}
            elif depth == len(segments):
                return True
            else:
                wanted = segments[-1 - depth]
                ways += [(holder, depth + 1) for holder, name in at.above if fnmatchcase(name, wanted)]
        return False

    def _is_named(self, holder: Node) -> bool:
        return isinstance(holder.module, self._classes)

    def _read_free(self, nodes: Sequence[Node]) -> set[int]:
        """The modules to which a way leads past no class of the whitelist, by id."""
        free: set[int] = set()
        for node in nodes:
            if not node.above or any(id(holder) in free and not self._is_named(holder) for holder, _ in node.above):
                free.add(id(node))
        return free

    def _way_to(self, node: Node) -> list[str]:
        """The segments of one such way."""
        segments: list[str] = []
        while node.above:
            node, name = next(
                (holder, name) for holder, name in node.above if id(holder) in self._free and not self._is_named(holder)
            )
            segments.append(name)
        return segments[::-1]


# --- walk plan --------------------------------------------------------------------------------------------------------


# --- walk ties --------------------------------------------------------------------------------------------------------
# Which linear layers share the memory of their weights, with each other or with what is no linear layer.


@dataclass(frozen=True)
class Ties:
    """Weights that lie in the same memory, in part or in whole.

    Attributes:
        owners: id of a node -> name of a tensor that it shares, of no plain `nn.Linear`.
        groups: the plain `nn.Linear` layers that share their weights with each other, two or more each.
    """

    owners: Mapping[int, str]
    groups: tuple[tuple[Node, ...], ...]


class _Span(NamedTuple):
    """Where a tensor of a node lies: bytes `start` to `stop` of a space, or itself alone."""

    space: tuple[str, int]
    start: int
    stop: int
    node: Node
    part: str


def read_ties(nodes: Sequence[Node], names: Mapping[int, str]) -> Ties:
    """Every tie of a tree; layers beside each other in one flat buffer are not tied.

    Args:
        nodes: of the tree.
        names: id of a node -> its first name.
    """
    owners: dict[int, str] = {}
    groups: list[tuple[Node, ...]] = []
    for spans in _overlapping([span for node in nodes for span in _spans(node)]):
        linears = {id(span.node): span.node for span in spans if type(span.node.module) is nn.Linear}
        others = [span for span in spans if type(span.node.module) is not nn.Linear]
        if others:
            owner = f"{names[id(others[0].node)]}.{others[0].part}".removeprefix(".")
            owners |= dict.fromkeys(linears, owner)
        if len(linears) > 1:
            groups.append(tuple(linears.values()))
    return Ties(owners, tuple(groups))


def _overlapping(spans: list[_Span]) -> list[list[_Span]]:
    """Spans put together where they overlap, also by way of a third."""
    found: list[list[_Span]] = []
    ordered = sorted(spans, key=lambda span: (span.space, span.start))
    for _, here in groupby(ordered, key=lambda span: span.space):
        end = -1
        for span in here:
            if span.start < end:
                found[-1].append(span)
            else:
                found.append([span])
                end = -1
            end = max(end, span.stop)
    return found


def _spans(node: Node) -> list[_Span]:
    """Where the tensors of a module lie; of a plain linear layer the bias is left out, because it is never rounded."""
    parts = {**node.module._parameters, **node.module._buffers}
    if type(node.module) is nn.Linear:
        parts.pop("bias", None)
    return [_Span(*_memory(tensor), node, part) for part, tensor in parts.items() if tensor is not None]


def _memory(tensor: Any) -> tuple[tuple[str, int], int, int]:
    """The space in which a tensor lies, and its first and last byte there; reads no values, waits for nothing."""
    alone = ("object", id(tensor)), 0, 1
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return alone
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()
    if tensor.is_meta:
        start = tensor.storage_offset() * tensor.element_size()
        return ("meta", tensor.untyped_storage()._cdata), start, start + length
    start = tensor.data_ptr()
    return ((str(tensor.device), 0), start, start + length) if start else alone  # 0: its memory was given back


# --- walk plan --------------------------------------------------------------------------------------------------------


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
            names (`MOST_NAMES`) some have none: it is judged by all of its places and swapped in all.
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
