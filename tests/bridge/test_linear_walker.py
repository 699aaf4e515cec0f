"""The linear walker: its rules, its plan, ties, and the walk itself, all or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from megacpp_validate.bridge import features
from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.errors import BridgeError, UnknownName, WeightMismatch
from megacpp_validate.bridge.features import read_features
from megacpp_validate.bridge.linear_walker import EXCLUSIONS, WalkPlan, plan_walk, swap_linears
from megacpp_validate.bridge.te_fp8 import te_quantized_weights
from megacpp_validate.probes.linear_walker import holder

pytestmark = pytest.mark.usefixtures("te_double")


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


EVERYTHING = (nn.Linear,)


EXCLUDED = {
    "moe-router": (
        "layers.0.mlp.router", "layers.0.moe.router.proj", "layers.0.router.mlp.0", "block_sparse_moe.gate",
        "mlp.gate", "mlp.shared_expert_gate", "moe.gate_network", "moe.wg", "moe.gating", "x:TopKRouter.proj",
        "x:MoEGate.proj", "x:TopKGate.w", "x:NoisyTopKGating.w", "x:MixtralTop2Router.q_proj", "layers.0.expert_router",
    ),
    "mod-router": (
        "blocks.1.mod_router", "mod_gate", "block.mod_router.proj", "depth_router", "x:MoDRouter.proj",
        "x:DepthRouter.proj", "x:MoDBlock.router", "x:MixtureOfDepths.scores",
    ),
    "mhc-score": (
        "blocks.0.mhc.score", "mhc_scores", "attn_mhc.proj", "hc.w", "hyper_connections.0.proj", "hyperconnection.w",
        "phi_pre", "h_res", "x:MHC.score", "x:MHCScores.proj", "x:HyperConnection.to_scores", "x:mHCLayer.mix.0",
    ),
    "ngram-hash": (
        "ngram.proj", "n_gram_hash", "ngram_hash_embedding.proj", "engram.q_proj", "hash_embeddings.0.proj",
        "x:NGramHash.proj", "x:NgramEmbedding.a.b", "x:Engram.proj", "x:HashEmbedding.up_proj",
    ),
    "structure-embedding": (
        "structure_embedding", "structure_embeddings.mlp.0", "structural_emb.proj", "struct_embed.up_proj",
        "x:StructureEmbedding.proj", "x:StructuralEncoder.a.0",
    ),
    "lora": (
        "q_proj.lora_A.default", "lora_down", "q_lora", "adapter.up_proj", "adapters.0.down", "x:LoRALinear.a",
        "x:LoraAdapter.fc1", "dora_A",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("code", "path"), [(code, path) for code, paths in EXCLUDED.items() for path in paths])
def test_each_pinned_exclusion_keeps_its_layers(code: str, path: str) -> None:
    name = ".".join(segment.partition(":")[0] for segment in path.split("."))
    found = plan_walk(tree_of(path), include=EVERYTHING)[name]
    assert (found.action, found.code) == ("keep", code)
    assert found.reason == next(row.reason for row in EXCLUSIONS if row.code == code)


LISTS = {
    "the end of a name": (("fc1",), {"a.fc1", "b.fc1"}),
    "two segments": (("a.fc1",), {"a.fc1"}),
    "a shell pattern": (("fc?",), {"a.fc1", "a.fc2", "b.fc1"}),
    "a pattern a segment": (("a.*",), {"a.fc1", "a.fc2"}),
    "a star is one segment": (("*",), {"a.fc1", "a.fc2", "b.fc1", "c"}),
    "longer than the name": (("x.y.c",), set()),
    "a class above": ((nn.Sequential,), {"b.fc1"}),
    "two entries": (("c", nn.Sequential), {"c", "b.fc1"}),
    "nothing": ((), set()),
    "a part of a segment": (("c1",), set()),
    "in another case": (("FC1",), set()),
}


@pytest.mark.parametrize(("include", "wanted"), LISTS.values(), ids=LISTS)
def test_the_whitelist_names_layers(include: Any, wanted: set[str]) -> None:
    sequence = nn.Sequential()
    sequence.add_module("fc1", nn.Linear(16, 16))
    tree = holder("Tree", a=holder("A", fc1=nn.Linear(16, 16), fc2=nn.Linear(16, 16)), b=sequence, c=nn.Linear(16, 16))
    plan = plan_walk(tree, include=include)
    assert set(plan.swapped) == wanted
    assert {decision.name for decision in plan.decisions} == {"a.fc1", "a.fc2", "b.fc1", "c"}


class Wrapping(nn.Module):
    """Looks like a linear layer and holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 16, 16
        self.body = nn.Linear(16, 16)

    @property
    def weight(self) -> Any:
        raise AssertionError("planning runs no property of a module")


class Subclass(nn.Linear):
    pass


def with_identity(layer: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


def plain() -> nn.Module:
    return nn.Linear(16, 16)


# What stands in the place of `q_proj`, and every name below it that is a layer: all of them are kept.
WRAPPERS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "subclass": (lambda: Subclass(16, 16), ()),
    "parametrization": (lambda: with_identity(plain()), ()),
    "weight norm": (lambda: parametrizations.weight_norm(plain()), ()),
    "looks like one": (Wrapping, (".body",)),
    "is called one": (lambda: holder("ScaledLinear", body=nn.Sequential(plain(), plain())), (".body.0", ".body.1")),
    "PEFT": (  # a class called Linear, the layer below `base_layer`, adapters beside it
        lambda: holder("Linear", base_layer=plain(), lora_A=nn.ModuleDict({"default": plain()})),
        (".base_layer", ".lora_A.default"),
    ),
    "lora factors beside it": (lambda: holder("Adapted", w=plain(), lora_A=nn.Linear(16, 2)), (".w", ".lora_A")),
    "a wrapped child": (lambda: holder("Anything", original_module=plain()), (".original_module",)),
}


@pytest.mark.parametrize(("make", "below"), WRAPPERS.values(), ids=WRAPPERS)
def test_what_wraps_a_linear_is_kept_and_said(make: Callable[[], nn.Module], below: tuple[str, ...]) -> None:
    found = codes(plan_walk(holder("Tree", q_proj=make()), include=EVERYTHING))
    wanted = {f"q_proj{name}": "lora" if "lora" in name else "wraps-linear" for name in ("", *below)}
    assert found == wanted


SWAPPED = (
    "layers.0.self_attn.q_proj", "layers.0.mlp.gate_proj", "layers.0.mlp.gate_up_proj", "layers.0.mlp.up_proj",
    "layers.0.mlp.down_proj", "h.0.attn.c_attn", "h.0.mlp.c_proj", "experts.3.w1", "blocks.0.attn.qkv",
    "blocks.0.attn.proj", "attn.to_out.0", "attention.out", "decoder.layers.0.self_attention.linear_qkv",
    "x:ModelBlock.q_proj", "x:GPTMODEL.fc1", "x:LinearAttention.q_proj", "x:SparseMoeBlock.w2", "modulation.fc1",
    "reconstruct.fc2", "x:Mlp.fc1", "schema.fc1", "mixer.out_projection",
)  # fmt: skip


NOT_LISTED = ("lm_head", "proj", "head", "layers.0.mlp.extra", "in_features", "attn.q_projection")


@pytest.mark.parametrize("path", [*SWAPPED, *NOT_LISTED])
def test_the_default_whitelist_names_projections(path: str) -> None:
    (found,) = plan_walk(tree_of(path)).decisions
    is_swapped = path in SWAPPED
    assert (found.action, found.code) == (("swap", "listed") if is_swapped else ("keep", "not-listed"))
    assert found.refusal is None


def changed(change: Any) -> nn.Module:
    layer = nn.Linear(16, 16)
    change(layer)
    return layer


def hook(*_: Any) -> None:
    """Does nothing."""


class Sharded(torch.Tensor):
    """A parameter of another class, as DTensor or a quantized weight is."""


STATES = {
    "forward hook": (lambda layer: layer.register_forward_hook(hook), "hooks"),
    "forward pre-hook": (lambda layer: layer.register_forward_pre_hook(hook), "hooks"),
    "backward hook": (lambda layer: layer.register_full_backward_hook(hook), "hooks"),
    "backward pre-hook": (lambda layer: layer.register_full_backward_pre_hook(hook), "hooks"),
    "state_dict hook": (lambda layer: layer.register_state_dict_post_hook(hook), "hooks"),
    "load hook": (lambda layer: layer.register_load_state_dict_pre_hook(hook), "hooks"),
    "pruned": (lambda layer: prune.identity(layer, "weight"), "hooks"),
    "forward replaced": (lambda layer: setattr(layer, "forward", print), "own-forward"),
    "buffer": (lambda layer: layer.register_buffer("scale", torch.ones(1)), "altered"),
    "parameter": (lambda layer: layer.register_parameter("extra", nn.Parameter(torch.ones(1))), "altered"),
    "child": (lambda layer: layer.add_module("dropout", nn.Dropout()), "altered"),
    "weight is None": (lambda layer: layer.register_parameter("weight", None), "altered"),
    "weight of a class": (
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(16, 16).as_subclass(Sharded))),
        "parameter-type",
    ),
    "transposed": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(16, 16).t())), "layout"),
    "another shape": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(8, 16))), "layout"),
    "fp64": (lambda layer: layer.double(), "dtype"),
    "mixed": (lambda layer: setattr(layer, "bias", nn.Parameter(torch.randn(16, dtype=torch.bfloat16))), "dtype"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "code"), STATES.values(), ids=STATES)
def test_what_te_would_lose_is_kept(change: Any, code: str) -> None:
    tree = holder("Tree", fc1=changed(change), fc2=nn.Linear(16, 16))
    plan = plan_walk(tree)
    assert codes(plan) == {"fc1": code, "fc2": "listed"}


REFUSED = {
    "flag": (features.read_features(linear=False), {}, "flag-off"),
    "preset": (features.read_features("off"), {}, "flag-off"),
    "environment": (features.PRODUCTION, {"MEGACPP_DISABLE_TE_LINEAR": "1"}, "switched-off"),
    "preset's environment": (features.PRODUCTION, {"MEGACPP_DISABLE_TE_PRODUCTION": "1"}, "switched-off"),
    "all of it": (features.PRODUCTION, {"MEGACPP_DISABLE_TE": "1"}, "te-unavailable"),
}


@pytest.mark.parametrize(("asked", "environment", "code"), REFUSED.values(), ids=REFUSED)
def test_where_te_may_not_be_used_the_layers_are_kept(
    asked: Any, environment: dict[str, str], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    te.TE._verdict = None  # the fixture puts back what was there before
    plan = plan_walk(holder("Tree", fc1=nn.Linear(16, 16), other=nn.Linear(16, 16)), features=asked)
    assert codes(plan) == {"fc1": code, "other": "not-listed"}
    assert plan["fc1"].refusal is not None
    assert plan["fc1"].refusal.reason == plan["fc1"].reason


WIDTHS = {"mxfp8": ((48, 64), "mxfp8", "fp8-alignment"), "bf16": ((7, 3), None, "listed")}


@pytest.mark.parametrize(("shape", "recipe", "code"), WIDTHS.values(), ids=WIDTHS)
def test_widths_fit_the_recipe(shape: Any, recipe: Any, code: str) -> None:
    assert codes(plan_walk(holder("Tree", fc1=nn.Linear(*shape)), recipe=recipe)) == {"fc1": code}


def test_the_tree_itself_cannot_be_swapped() -> None:
    assert codes(plan_walk(nn.Linear(16, 16), include=(nn.Linear,))) == {"": "root"}


BAD = {
    "a string for a list": (lambda: plan_walk(tree_of("fc1"), include="fc1"), UnknownName),
    "an empty pattern": (lambda: plan_walk(tree_of("fc1"), include=("",)), UnknownName),
    "no pattern": (lambda: plan_walk(tree_of("fc1"), include=(3,)), UnknownName),
    "no recipe": (lambda: plan_walk(tree_of("fc1"), recipe="fp8"), UnknownName),
}


@pytest.mark.parametrize(("call", "error"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_a_next_step(call: Any, error: type[BridgeError]) -> None:
    with pytest.raises(error, match="Next step"):
        call()


def linear(weight: Any = None) -> nn.Linear:
    """A layer of its own, or on a given weight."""
    if weight is None:
        return nn.Linear(16, 16, bias=False)
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    made.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight)
    return made


def embedding_and(change: Any) -> nn.Module:
    embedding = nn.Embedding(32, 16)
    return holder("Tree", embed=embedding, fc1=linear(change(embedding.weight)))


def custom_embedding() -> nn.Module:
    embedding = holder("Embed")
    embedding.weight = nn.Parameter(torch.randn(32, 16))
    return holder("Tree", embed=embedding, fc1=linear(embedding.weight))


def with_router() -> nn.Module:
    router = linear()
    return holder("Tree", fc1=linear(router.weight.detach()), moe=holder("MoE", router=router))


def with_twin(name: str, *, hooked: bool = False) -> nn.Module:
    first = linear()
    tree = holder("Tree", fc1=first, **{name: linear(first.weight)})
    if hooked:
        tree.get_submodule(name).register_forward_hook(lambda *_: None)
    return tree


KEPT = {
    "an embedding": (lambda: embedding_and(lambda weight: weight), "tied-embedding"),
    "its memory": (lambda: embedding_and(lambda weight: weight.detach()), "tied-embedding"),
    "its first rows": (lambda: embedding_and(lambda weight: weight.detach()[:16]), "tied-embedding"),
    "a custom embedding": (custom_embedding, "tied-embedding"),
    "a router": (with_router, "tied-kept"),
    "an unlisted head": (lambda: with_twin("lm_head"), "tied-kept"),
    "a hooked twin": (lambda: with_twin("fc2", hooked=True), "tied-kept"),
}


@pytest.mark.parametrize(("make", "code"), KEPT.values(), ids=KEPT)
def test_what_shares_a_weight_with_what_is_kept_is_kept(make: Any, code: str) -> None:
    tree = make()
    plan = plan_walk(tree)
    assert codes(plan)["fc1"] == code
    assert code != "tied-embedding" or "embed.weight" in plan["fc1"].reason
    assert swap_linears(tree).plan.swapped == ()


def test_what_is_no_tie_keeps_nothing() -> None:
    """A bias that is shared, memory that was given back, and one flat buffer."""
    tree = holder("Tree", fc1=nn.Linear(16, 16), head=nn.Linear(16, 16))
    tree.head.bias = tree.fc1.bias
    assert plan_walk(tree).swapped == ("fc1",)
    tree = holder("Tree", fc1=linear(), head=linear())
    for layer in (tree.fc1, tree.head):  # as a sharded model is between two steps: sizes stay, memory is none
        layer.weight.untyped_storage().resize_(0)
    assert plan_walk(tree).swapped == ("fc1",)
    embedding, *flat = torch.randn(3 * 256).view(3, 16, 16)
    tree = holder("Tree", embed=nn.Embedding(16, 16, _weight=embedding), fc1=linear(flat[0]), fc2=linear(flat[1]))
    assert plan_walk(tree).swapped == ("fc1", "fc2")


def test_a_module_in_two_places_is_named_twice_and_judged_once() -> None:
    shared = linear()
    tree = holder("Tree", a=nn.Sequential(shared), q_proj=shared)
    plan = plan_walk(tree)
    assert codes(plan) == {"a.0": "not-listed", "q_proj": "not-listed"}
    assert "as a.0" in plan["q_proj"].reason
    assert plan_walk(tree, include=(nn.Sequential,)).swapped == ()
    assert plan_walk(tree, include=(nn.Sequential, "q_proj")).swapped == ("a.0", "q_proj")
    tree.add_module("router", holder("R", q_proj=shared))
    assert set(codes(plan_walk(tree)).values()) == {"moe-router"}


@pytest.fixture
def model() -> nn.Module:
    return holder("Tree", router=nn.Linear(16, 4), fc1=nn.Linear(16, 16), mlp=holder("Mlp", fc2=nn.Linear(16, 16)))


def test_weights_in_the_recipes_format_are_refused(model: nn.Module) -> None:
    before = dict(model.named_modules())
    with te_quantized_weights(enabled=True, recipe=None), pytest.raises(WeightMismatch, match="Next step"):
        swap_linears(model)
    assert dict(model.named_modules()) == before


def test_random_numbers_are_where_they_were(model: nn.Module) -> None:
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    swap_linears(model)
    assert torch.equal(torch.rand(3), wanted)


def test_without_te_the_tree_stays_and_says_why(model: nn.Module) -> None:
    before = dict(model.named_modules())
    swap = swap_linears(model, features=read_features(linear=False))
    assert dict(model.named_modules()) == before
    assert set(swap.choices) == {"fc1", "mlp.fc2"}
    for choice in swap.choices.values():
        assert (choice.requested, choice.observed, choice.refusals[0].code) == ("te", "native", "flag-off")
