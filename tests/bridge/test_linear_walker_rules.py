"""What the linear walker may swap and never does: the pinned exclusions, the whitelist, and what wraps a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, parametrize  # noqa: E402

from megacpp_validate.bridge.linear_walker import EXCLUSIONS, plan_walk  # noqa: E402
from tests.bridge.linear_trees import codes, holder, tree_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")
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
    assert set(plan.swapped) | set(plan.kept) == {"a.fc1", "a.fc2", "b.fc1", "c"}


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
