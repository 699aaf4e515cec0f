"""A small hybrid model with every kind of linear layer in it, and what is to be decided on each."""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torch.nn.utils import parametrizations

WIDTH: Final = 32
LISTED: Final = "listed"

# Name in the tree -> code of its decision, in the order of the tree. Each excluded layer has a sibling after it that is
# to be swapped: a walk that leaves a branch at the first exclusion loses those.
EXPECTED: Final[dict[str, str]] = {
    "structure_embedding.proj": "structure-embedding",
    "ngram_hash.q_proj": "ngram-hash",
    "blocks.0.mod_router": "mod-router",
    "blocks.0.mhc.score": "mhc-score",
    "blocks.0.attn.q_proj": LISTED,
    "blocks.0.attn.k_proj": "hooks",
    "blocks.0.attn.v_proj": "wraps-linear",
    "blocks.0.attn.v_proj.base_layer": "wraps-linear",
    "blocks.0.attn.v_proj.lora_A.default": "lora",
    "blocks.0.attn.v_proj.lora_B.default": "lora",
    "blocks.0.attn.o_proj": LISTED,
    "blocks.1.moe.router": "moe-router",
    "blocks.1.moe.experts.0.w1": LISTED,
    "blocks.1.moe.experts.0.w2": LISTED,
    "blocks.1.moe.gate": "moe-router",
    "blocks.1.moe.experts_again.w1": LISTED,
    "blocks.1.normed.fc1": "wraps-linear",
    "blocks.1.normed.fc2": LISTED,
    "tied.fc1": LISTED,
    "tied.fc2": LISTED,
    "narrow.fc1": LISTED,
    "extra_head": "not-listed",
    "lm_head": "tied-embedding",
    "last.down_proj": LISTED,
}
SHARED: Final = "blocks.1.moe.experts.0.w1", "blocks.1.moe.experts_again.w1"


def holder(kind: str, **children: Any) -> Any:
    """A module whose class has this name."""
    made = type(kind, (nn.Module,), {})()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def _adapted(device: str) -> Any:
    """A linear layer with LoRA adapters, as PEFT lays it out."""
    down, up = (nn.ModuleDict({"default": nn.Linear(*shape, device=device)}) for shape in ((WIDTH, 4), (4, WIDTH)))
    return holder("Linear", base_layer=nn.Linear(WIDTH, WIDTH, device=device), lora_A=down, lora_B=up)


def no_hook(*_: Any) -> None:
    """A hook that does nothing."""


def hybrid_tree(device: str) -> Any:
    """A small hybrid model with every kind of linear layer in it."""

    def linear(outputs: int = WIDTH, *, bias: bool = True) -> Any:
        return nn.Linear(WIDTH, outputs, bias=bias, device=device)

    hooked = linear()
    hooked.register_forward_hook(no_hook)
    attention = holder("Attention", q_proj=linear(), k_proj=hooked, v_proj=_adapted(device), o_proj=linear())
    block = holder("Block", mod_router=linear(1), mhc=holder("MHC", score=linear(4)), attn=attention)
    shared = linear()
    experts = nn.ModuleList([nn.ModuleDict({"w1": shared, "w2": linear()})])
    again = nn.ModuleDict({"w1": shared})
    moe = holder("MoE", router=linear(4), experts=experts, gate=linear(4), experts_again=again)
    normed = holder("Mlp", fc1=parametrizations.weight_norm(linear()), fc2=linear())
    tied = holder("Mlp", fc1=linear(), fc2=linear())
    tied.fc2.weight = tied.fc1.weight
    tree = holder(
        "Model",
        embed=nn.Embedding(48, WIDTH, device=device),
        structure_embedding=holder("Structure", proj=linear()),
        ngram_hash=holder("Hash", q_proj=linear()),
        blocks=nn.ModuleList([block, holder("Block", moe=moe, normed=normed)]),
        tied=tied,
        narrow=holder("Mlp", fc1=linear(24)),
        extra_head=linear(48),
        lm_head=linear(48, bias=False),
        last=holder("Mlp", down_proj=linear(bias=False)),
    )
    tree.lm_head.weight = tree.embed.weight
    tree.last.down_proj.weight.requires_grad_(False)
    tree.blocks[0].eval()
    return tree
