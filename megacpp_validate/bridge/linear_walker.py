"""TE linear replacement walker: a whitelist walk that puts `te.Linear` in the place of `nn.Linear`.

`plan_walk` says what would be swapped and why not; `swap_linears` does it. A layer is swapped
where the whitelist names it, no pinned exclusion holds it back, it is a plain `nn.Linear` that Transformer Engine can
stand in for exactly, and the feature `linear` may take TE here. A swapped layer keeps the very parameters of the old
one, so values, gradients, ties, hooks on parameters, and an optimizer that already holds them stay right.

A whitelist cannot undo an exclusion.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import nn

from . import imports as te
from .backends import Choice, Refusal, choose
from .errors import UnknownName
from .extra_state import take_over
from .features import PRODUCTION, Features, why_not_te
from .recipes import ALIGNMENT, RECIPES, TE_DTYPES, RecipeName

NATIVE_PATH = "torch.nn.Linear, left as it is"

# --- rules ------------------------------------------------------------------------------------------------------------

PROJECTIONS: Final[tuple[str, ...]] = (
    # attention: separate, joined, and out
    "q_proj", "k_proj", "v_proj", "o_proj", "to_q", "to_k", "to_v", "to_out", "to_out.0", "wq", "wk", "wv", "wo",
    "qkv", "qkv_proj", "to_qkv", "Wqkv", "query_key_value", "linear_qkv", "linear_q", "linear_kv", "c_attn",
    "attention.query", "attention.key", "attention.value", "attention.out", "attn.query", "attn.key", "attn.value",
    "attn.out", "self.query", "self.key", "self.value", "out_proj", "linear_proj", "attention.dense", "attn.proj",
    "attn.c_proj",
    # Mamba's and the recurrent block's way out
    "out_projection",
    # MLP: gated, plain, and down
    "gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "fc1", "fc2", "linear_fc1", "linear_fc2",
    "wi", "wi_0", "wi_1", "mlp.wo", "c_fc", "mlp.c_proj", "dense_h_to_4h", "dense_4h_to_h", "mlp.up", "mlp.down",
    "mlp.gate_up", "lin1", "lin2", "linear1", "linear2",
)  # fmt: skip
"""Projections of attention and MLP in Llama, Mixtral, DeepSeek, Qwen, GPT, Falcon, BERT, T5, Megatron and others."""


@dataclass(frozen=True)
class Exclusion:
    """One kind of linear layer that stays what it is.

    Attributes:
        code: short and stable; what a plan says.
        reason: why it is not swapped.
        segments: regular expressions of a segment of the name, in any case: everything at or below it is kept.
        classes: of the class name of a module on the way: everything below it is kept.
        holders: of the class name of the module that holds the layer directly.
    """

    code: str
    reason: str
    segments: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()


EXCLUSIONS: Final[tuple[Exclusion, ...]] = (
    Exclusion(
        "mod-router",
        "a mixture-of-depths router picks tokens by small differences of its scores; FP8 would change the picks",
        segments=(r"(^|_)mod_(router|gate|scores?|weights?|proj)", r"(^|_)depth_(router|gate|scores?)"),
        classes=(r"(MoD|Depths?)_?(Router|Gate|Scor)",),
        holders=(r"MoD(?![a-z])|MixtureOfDepths",),
    ),
    Exclusion(
        "moe-router",
        "a mixture-of-experts router picks experts by small differences of its scores; FP8 would change the picks",
        segments=(
            r"router",
            r"^rout(e|es|ing)(_|$)",
            r"^((moe|experts?|shared_experts?|top_?k|noisy|switch)_)?gate$",
            r"^gat(e|ing)_(network|logits|scores?|weights?)$",
            r"^gating",
            r"^wg$",
        ),
        classes=(r"Router", r"(M[oO]E|Top[kK]|Top\d|Expert|Switch|Noisy)\w*Gat(e|ing)$"),
    ),
    Exclusion(
        "mhc-score",
        "the score projections of manifold-constrained hyper-connections mix residual streams; they are narrow, and "
        "their rounding would be fed to every later layer",
        segments=(r"(^|_)m?hc(_|$)", r"hyper_?connections?", r"^(phi|h)_(pre|post|res)$"),
        classes=(r"^[mM]?HC(?![a-z])|[mM]HC(?![a-z])|HyperConnection",),
    ),
    Exclusion(
        "ngram-hash",
        "projections of hashed n-grams read sparse table rows of very different size; one FP8 scale would lose the "
        "small ones",
        segments=(r"n_?gram", r"engram", r"hash_(emb|proj|table)"),
        classes=(r"N_?[gG]ram", r"Engram", r"Hash(ed)?_?(Emb|Proj|Table)"),
    ),
    Exclusion(
        "structure-embedding",
        "structure embeddings are added to the residual stream once and read everywhere; they stay in full precision",
        segments=(r"struct(ure|ural)?s?_?(emb|enc)",),
        classes=(r"Struct(ure|ural)?s?_?(Emb|Enc)",),
    ),
    Exclusion(
        "lora",
        "a LoRA adapter is low-rank, trained apart and merged into its layer; it must stay a plain layer",
        segments=(r"^(lora|dora|loha|lokr)(_|$)", r"_(lora|dora)$", r"(^|_)adapters?$"),
        # `LoraModel` of PEFT is the model that was adapted, and holds all of it.
        classes=(r"(L[oO]R[aA]|D[oO]R[aA]|Adapter)(?!\w*(Model|For[A-Z]))",),
        holders=(r"L[oO]R[aA]|D[oO]R[aA]|Adapter",),
    ),
)
# A child by this name is the linear layer that its holder stands for (PEFT, torch.compile, FSDP, checkpointing).
_WRAPPED_CHILDREN: Final = frozenset(
    {"base_layer", "original_module", "orig_linear", "wrapped", "wrapped_linear", "inner_linear", "_orig_mod",
     "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)  # fmt: skip


def segment_exclusions(segment: str) -> frozenset[Exclusion]:
    """The exclusions that a segment of a name brings on what is at or below it."""
    return frozenset(row for row in EXCLUSIONS if any(re.search(one, segment, re.IGNORECASE) for one in row.segments))


def class_exclusions(kind: str, column: Literal["classes", "holders"]) -> frozenset[Exclusion]:
    """Those that a module brings on everything below it (`classes`), or on its own children (`holders`)."""
    return frozenset(row for row in EXCLUSIONS if any(re.search(one, kind) for one in getattr(row, column)))


def is_wrapper(module: Any) -> bool:
    """Whether a module stands for a linear layer itself, by its class name or a linear layer's three attributes."""
    if re.search(r"Linear(Layer)?$", type(module).__name__):
        return True
    has_weight = "weight" in module._parameters or hasattr(type(module), "weight")
    return has_weight and all(isinstance(vars(module).get(name), int) for name in ("in_features", "out_features"))


def wraps_child(holder: Any, name: str) -> bool:
    """Whether a module stands for the linear layer that it holds by this name: a wrapper, or low-rank factors on it."""
    return name in _WRAPPED_CHILDREN or any(
        part.startswith("lora_") for part in (*holder._modules, *holder._parameters)
    )


# --- the walk ---------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """One name of a module; a module that stands in two places has two.

    Attributes:
        above: the place of the module that holds it; None for the tree itself.
        inherited: exclusions that hold for everything at or below this name.
        excluded: exclusions that hold here.
        inside: name of the module above that is a wrapper for everything below it; None where there is none.
        wrapper: the same, or the name of the holder where that wraps this child alone.
    """

    name: str
    module: Any
    above: Place | None = None
    inherited: frozenset[Exclusion] = frozenset()
    excluded: frozenset[Exclusion] = frozenset()
    inside: str | None = None
    wrapper: str | None = None

    def child(self, name: str, module: Any) -> Place:
        """The place of a module that this one holds under a name."""
        kind = type(self.module).__name__
        inherited = self.inherited | segment_exclusions(name) | class_exclusions(kind, "classes")
        inside = self.name if self.inside is None and is_wrapper(self.module) else self.inside
        wrapper = self.name if inside is None and wraps_child(self.module, name) else inside
        excluded = inherited | class_exclusions(kind, "holders")
        return Place(f"{self.name}.{name}".lstrip("."), module, self, inherited, excluded, inside, wrapper)

    def is_named(self, entry: str | type) -> bool:
        """Whether an entry of the whitelist names it: the end of the name, or a class at or above it."""
        if isinstance(entry, str):
            wanted, segments = entry.split("."), self.name.split(".")
            return len(wanted) <= len(segments) and all(map(fnmatchcase, segments[-len(wanted) :], wanted))
        place: Place | None = self
        while place is not None and not isinstance(place.module, entry):
            place = place.above
        return place is not None


def read_places(tree: Any) -> Iterator[Place]:
    """Every module by each of its names, in the order of the tree; no recursion, because trees may be deep."""
    stack = [Place("", tree)]
    while stack:
        place = stack.pop()
        yield place
        children = [(name, module) for name, module in place.module._modules.items() if module is not None]
        stack += [place.child(name, module) for name, module in reversed(children)]


# --- ties: layers that share the memory of their weights --------------------------------------------------------------


def read_ties(places: Sequence[Place]) -> tuple[dict[int, str], list[tuple[int, ...]]]:
    """The ties of a tree: tensors that begin at the same address, or are the same object without memory.

    Returns:
        Id of a linear layer -> name of a tensor of another kind of module that shares its weight; and groups of ids of
        plain `nn.Linear` layers that share their weights with each other.
    """
    sharing: dict[object, list[tuple[Any, str]]] = {}
    modules = {id(place.module): place for place in reversed(places)}
    for place in modules.values():
        for part, tensor in {**place.module._parameters, **place.module._buffers}.items():
            # The bias of a linear layer is never rounded, so it ties nothing.
            if tensor is not None and (part != "bias" or type(place.module) is not nn.Linear):
                name = f"{place.name}.{part}".lstrip(".")
                sharing.setdefault(_memory_of(tensor), []).append((place.module, name))
    owners: dict[int, str] = {}
    groups: list[tuple[int, ...]] = []
    for tensors in sharing.values():
        linears = tuple(dict.fromkeys(id(module) for module, _ in tensors if type(module) is nn.Linear))
        others = [name for module, name in tensors if type(module) is not nn.Linear]
        if others:
            owners |= dict.fromkeys(linears, others[0])
        if len(linears) > 1:
            groups.append(linears)
    return owners, groups


def _memory_of(tensor: Any) -> object:
    """The device and address of a tensor; its id where it has no memory of its own (meta, sharded, freed, empty)."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    start = tensor.data_ptr() if plain else 0
    return (tensor.device, start) if start else id(tensor)


# --- the plan ---------------------------------------------------------------------------------------------------------

WRAPS: Final = "stands for a linear layer and reaches into the one inside, whose weight it changes, merges or replaces"
Verdict = tuple[str, str]  # code and reason
_PARTS: Final = frozenset({"weight", "bias"})
_HOOKS: Final = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """What is done with one module, under one of its names; the name of the tree itself is empty.

    Attributes:
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
    """

    decisions: tuple[Decision, ...]

    @property
    def swapped(self) -> tuple[str, ...]:
        """Names of the layers to swap."""
        return tuple(decision.name for decision in self.decisions if decision.action == "swap")

    def __getitem__(self, name: str) -> Decision:
        """The decision on one name; KeyError where the plan has no such name."""
        return {decision.name: decision for decision in self.decisions}[name]


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
        UnknownName: the whitelist holds what is neither pattern nor class, or there is no such recipe.
    """
    if isinstance(include, str) or not all(isinstance(one, str | type) and one for one in include):
        raise UnknownName(
            f"the whitelist is {include!r}; each entry is the end of a name as a shell pattern, or a class. Next step: "
            'pass a sequence such as ("attention.*", "fc?", TransformerBlock).'
        )
    if recipe is not None and recipe not in RECIPES:
        raise UnknownName(f"there is no recipe {recipe!r}. Next step: choose from {', '.join(RECIPES)}.")
    places = list(read_places(tree))
    judged = _judge_all(places, tuple(include), recipe)
    found: dict[str, Decision] = {}
    for place in places:
        if id(place.module) in judged:
            found[place.name] = _decide(place, judged[id(place.module)], features)
            if place.wrapper is not None:
                found.setdefault(place.wrapper, Decision(place.wrapper, "keep", "wraps-linear", WRAPS))
    decisions = tuple(found[place.name] for place in places if place.name in found)
    return WalkPlan(decisions)


def _decide(place: Place, judged: Verdict | None, features: Features) -> Decision:
    """The decision on one name of a layer that has been judged."""
    if judged is not None:
        return Decision(place.name, "keep", *judged)
    refusal = why_not_te(features, "linear", place.module.weight.device)
    if refusal is not None:
        return Decision(place.name, "keep", refusal.code, refusal.reason, refusal)
    return Decision(place.name, "swap", "listed", "the whitelist names it")


def _judge_all(
    places: Sequence[Place], include: Sequence[str | type], recipe: RecipeName | None
) -> dict[int, Verdict | None]:
    """Id of each linear layer -> what keeps it; what shares a weight with a layer that is kept is kept too."""
    linears: dict[int, list[Place]] = {}
    for place in places:
        if isinstance(place.module, nn.Linear):
            linears.setdefault(id(place.module), []).append(place)
    owners, groups = read_ties(places)
    judged = {key: _judge(own, owners, include, recipe) for key, own in linears.items()}
    for group in groups:
        kept = [linears[key][0].name for key in group if judged[key]]
        for key in group if kept else ():
            judged[key] = judged[key] or ("tied-kept", f"its weight is also that of `{kept[0]}`, which is kept")
    return judged


def _judge(
    places: Sequence[Place], owners: Mapping[int, str], include: Sequence[str | type], recipe: RecipeName | None
) -> Verdict | None:
    """Code and reason of the first thing that keeps a linear layer, its ties aside; None where nothing does."""
    module = places[0].module
    return (
        _by_place(places)
        or _by_tie(module, owners)
        or _by_list(places, include)
        or _by_state(module)
        or _by_numbers(module, recipe)
    )


def _by_place(places: Sequence[Place]) -> Verdict | None:
    """The pinned exclusions and what is around it; one place that is excluded excludes it everywhere."""
    kind = type(places[0].module)
    row = next((row for row in EXCLUSIONS if any(row in place.excluded for place in places)), None)
    if row is not None:
        return row.code, row.reason
    if kind is not nn.Linear:
        return "wraps-linear", f"a {kind.__name__} adds to a plain linear layer; TE would drop what it adds"
    if any(place.wrapper is not None for place in places):
        return "wraps-linear", f"the module around {WRAPS}"
    if places[0].above is None:
        return "root", "it is the tree itself, which nothing holds that could hold another layer instead"
    return None


def _by_tie(module: Any, owners: Mapping[int, str]) -> Verdict | None:
    owner = owners.get(id(module))
    if owner is None:
        return None
    return "tied-embedding", f"its weight is also {owner}; a head tied with its embedding is kept"


def _by_list(places: Sequence[Place], include: Sequence[str | type]) -> Verdict | None:
    """The whitelist; a layer that stands in several places must be named in each."""
    missing = [place.name for place in places if not any(map(place.is_named, include))]
    if not missing:
        return None
    shared = f", where this layer also stands, as {missing[0]}" if len(missing) < len(places) else ""
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
        widths = f"{module.in_features} -> {module.out_features} features"
        return "fp8-alignment", f"{widths}; the {recipe} recipe wants multiples of {align}"
    return None


# --- the swap ---------------------------------------------------------------------------------------------------------
_OF_EVERY_LINEAR: Final = frozenset((*vars(nn.Module()), "in_features", "out_features"))


def te_linear(module: Any, *, name: str) -> Any:
    """A `te.Linear` of the sizes of an `nn.Linear`: [..., in_features] -> [..., out_features].

    Args:
        module: the `nn.Linear` to stand in for, weight [out_features, in_features]; its weights are not copied.
        name: where it stands in the tree; TE uses it in its messages.
    """
    return te.linear.require()(
        in_features=module.in_features,
        out_features=module.out_features,
        bias=module.bias is not None,
        params_dtype=module.weight.dtype,
        device=module.weight.device,
        name=name,
    )


@dataclass(frozen=True)
class Swap:
    """What a walk did.

    Attributes:
        choices: name -> what was asked for and taken, of each layer that the whitelist let through.
    """

    plan: WalkPlan
    choices: Mapping[str, Choice]


def swap_linears(
    tree: Any,
    *,
    include: Sequence[str | type] = PROJECTIONS,
    features: Features = PRODUCTION,
    recipe: RecipeName | None = None,
) -> Swap:
    """Put Transformer Engine's linear layers into a tree, in place, once all of them are built.

    Parameters are handed over, not copied, under the same names. Where TE may not be used the tree stays as it is, and
    `choices` say why. A swapped layer takes rows [..., in_features] with two axes at least; under an FP8 recipe pad
    them to a multiple of `ALIGNMENT[recipe]`.

    Args:
        tree: an `nn.Module`, changed in place.
        include, features, recipe: as `plan_walk` takes them.

    Raises:
        WeightMismatch: TE built a layer with other parameters than those it is to take over.
        UnknownName: as `plan_walk`.
    """
    plan = plan_walk(tree, include=include, features=features, recipe=recipe)
    linears = {name: tree.get_submodule(name) for name in plan.swapped}
    layers: dict[int, Any] = {}  # a layer that stands in two places is built once
    with torch.random.fork_rng(cuda_devices(linears.values())):  # TE draws initial weights that nobody will see
        for name, linear in linears.items():
            if id(linear) not in layers:
                layers[id(linear)] = _build(linear, name)
    for name, linear in linears.items():
        above, _, child = name.rpartition(".")
        tree.get_submodule(above).add_module(child, layers[id(linear)])
    asked = [decision for decision in plan.decisions if decision.action == "swap" or decision.refusal is not None]
    candidates = {one.name: (("te", lambda one=one: one.refusal), ("native", lambda: None)) for one in asked}
    return Swap(plan, {name: choose("linear_walker", backends) for name, backends in candidates.items()})


def cuda_devices(linears: Any) -> list[int]:
    """Indices of the GPUs that some layers lie on."""
    return sorted({linear.weight.device.index for linear in linears if linear.weight.is_cuda})


def _build(linear: Any, name: str) -> Any:
    """A `te.Linear` that has the parameters of an `nn.Linear` and whatever else was set on it."""
    layer = take_over(te_linear(linear, name=name), linear, f"`{name}`")
    for key, value in vars(linear).items():
        if key not in _OF_EVERY_LINEAR and not hasattr(layer, key):
            setattr(layer, key, value)
    return layer
