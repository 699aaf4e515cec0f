"""What the linear walker may swap, and what it never does: data, each row with its reason.

Names are matched a segment at a time: `layers.3.mlp.gate_proj` has four of them. The exclusions are pinned: a
whitelist cannot undo them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

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
"""Names of the projections of attention and MLP in the models that are common: Llama, Mixtral, DeepSeek, Qwen, GPT-2,
GPT-NeoX, Falcon, BERT, T5, Megatron, timm, diffusers and torch's own."""


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
    return frozenset(
        row for row in EXCLUSIONS if any(re.search(pattern, segment, re.IGNORECASE) for pattern in row.segments)
    )


def class_exclusions(kind: str) -> frozenset[Exclusion]:
    """The exclusions that a module of a class by this name brings on everything below it."""
    return frozenset(row for row in EXCLUSIONS if any(re.search(pattern, kind) for pattern in row.classes))


def holder_exclusions(kind: str) -> frozenset[Exclusion]:
    """The exclusions that it brings on the layers that it holds itself."""
    return frozenset(row for row in EXCLUSIONS if any(re.search(pattern, kind) for pattern in row.holders))


def is_wrapper(module: Any) -> bool:
    """Whether a module stands for a linear layer itself, so that what is below it is a part of one."""
    return bool(re.search(r"Linear(Layer)?$", type(module).__name__)) or _looks_like_linear(module)


def wraps_child(holder: Any, name: str) -> bool:
    """Whether a module stands for the linear layer that it holds by this name."""
    return name in _WRAPPED_CHILDREN or _has_adapter(holder)


def _looks_like_linear(module: Any) -> bool:
    """Whether it has a linear layer's three names. Its class is asked, so that no property runs."""
    has_weight = "weight" in module._parameters or hasattr(type(module), "weight")
    return has_weight and all(isinstance(vars(module).get(name), int) for name in ("in_features", "out_features"))


def _has_adapter(module: Any) -> bool:
    """Whether low-rank factors hang on it beside what they adapt."""
    return any(name.startswith("lora_") for name in (*module._modules, *module._parameters))
