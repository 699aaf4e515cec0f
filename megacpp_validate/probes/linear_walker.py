"""The linear walker: every decision on a tree that holds every kind of layer, and the numbers of a swapped one.

A small hybrid model with every kind of linear layer in it, and what is to be decided on each.
"""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from .bench import DTYPES, Bench, different
from .bounds import Roundings
from .emulation import Product, Recipe, operand_roundings
from .low_precision import check_kept_weights
from .observe import is_te
from .references import linear
from .trial import Trial, try_case

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


def hybrid_tree(device: str) -> Any:
    """A small hybrid model with every kind of linear layer in it."""

    def linear(outputs: int = WIDTH, *, bias: bool = True) -> Any:
        return nn.Linear(WIDTH, outputs, bias=bias, device=device)

    hooked = linear()
    hooked.register_forward_hook(lambda *_: None)
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


REFUSED: Final = frozenset({"te-unavailable", "switched-off", "flag-off", "device"})


def probe(bench: Bench) -> None:
    """Decisions, swap, ties, checkpoints; then numbers in every precision."""
    walker = bench.bridge()
    with bench.scope("plan"):
        _check_plan(bench, walker)
    with bench.scope("swap"):
        _check_swap(bench, walker)
    for name in DTYPES:
        for case in _cases(bench):
            _check_numbers(bench, walker, case, name, None)
    recipes = bench.judged_recipes("")
    for recipe in recipes:
        for case in _cases(bench, walker.ALIGNMENT[recipe]):
            _check_numbers(bench, walker, case, "bf16", recipe)
        _check_unpadded(bench, walker, recipe)
    for recipe in recipes:  # told the microbatch, a swapped layer takes the weights of this step, in FP8, and no others
        case = _cases(bench)[0]
        told, plain = (_swapped_layer(bench, walker, case, torch.bfloat16, recipe)[1] for _ in range(2))
        rows, gradient = _inputs(bench, case, torch.bfloat16)
        check_kept_weights(bench, recipe, (told, plain), rows, gradient, bench.low_precision(recipe))


# --- decisions and the swap -------------------------------------------------------------------------------------------


def _check_plan(bench: Bench, walker: Any) -> None:
    """Every decision, one by one; and that planning is a dry run."""
    tree = hybrid_tree(bench.device)
    before = dict(tree.named_modules())
    plan = walker.plan_walk(tree)
    bench.check("dry-run", dict(tree.named_modules()) == before, "the tree after planning")
    found = {decision.name: decision for decision in plan.decisions}
    bench.check("names", list(found) == list(EXPECTED), f"{len(found)} decisions: {', '.join(found)}")
    for name, code in EXPECTED.items():
        decision = found.get(name)
        if decision is None:
            bench.check(name, False, "there is no decision on it")
            continue
        wanted = {code} if code != LISTED or bench.wants_te else REFUSED
        acts = decision.action == ("swap" if code == LISTED and bench.wants_te else "keep")
        said = f"{decision.action}, {decision.code}: {decision.reason}"
        bench.check(name, acts and decision.code in wanted and bool(decision.reason), said)
    aligned = walker.plan_walk(tree, recipe="delayed")["narrow.fc1"]
    bench.check("alignment", (aligned.action, aligned.code) == ("keep", "fp8-alignment"), aligned.reason)


def _check_swap(bench: Bench, walker: Any) -> None:
    """The right layers are swapped and nothing else; parameters, ties, modes and checkpoints are those of before."""
    tree = hybrid_tree(bench.device)
    modules = dict(tree.named_modules(remove_duplicate=False))
    names = list(tree.state_dict())
    values = {name: one.detach().clone() for name, one in tree.named_parameters(remove_duplicate=False)}
    training = [name for name, module in modules.items() if module.training]
    swap = walker.swap_linears(tree)
    after = dict(tree.named_modules(remove_duplicate=False))
    listed = {name for name, code in EXPECTED.items() if code == LISTED}
    for name in EXPECTED:
        module, swapped = after.get(name), name in listed and bench.wants_te
        right = is_te(type(module)) if swapped else module is modules[name]
        bench.check(name, right, f"{type(module).__module__}.{type(module).__qualname__}")
    bench.check("choices", set(swap.choices) == listed, f"recorded for {', '.join(sorted(swap.choices))}")
    moved = different(values, dict(tree.named_parameters(remove_duplicate=False)))
    bench.check("weights", not moved, f"of {len(values)}, not bitwise the same: {', '.join(moved) or 'none'}")
    ties = {
        "embedding": tree.lm_head.weight is tree.embed.weight,
        "linears": tree.tied.fc1.weight is tree.tied.fc2.weight,
        "shared": after[SHARED[0]] is after[SHARED[1]],
    }
    for tie, holds in ties.items():
        bench.check(f"tie.{tie}", holds, "one object" if holds else "two objects")
    bench.check("frozen", not tree.last.down_proj.weight.requires_grad, "requires_grad of last.down_proj.weight")
    bench.check("training", [name for name, one in after.items() if one.training] == training, "modes of modules")
    bench.check("state-dict", list(tree.state_dict()) == names, ", ".join(sorted(set(tree.state_dict()) ^ set(names))))


# --- numbers ----------------------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    """One layer and its input: widths K -> N, the shape of the rows before K, and what is special."""

    name: str
    widths: tuple[int, int]
    rows: tuple[int, ...]
    bias: bool = True
    transposed: bool = False
    pad: int = 1


def _cases(bench: Bench, pad: int = 1) -> list[_Case]:
    """Shapes for one precision; rows are padded to a multiple of `pad`."""
    large = bench.device == "cuda" and not bench.quick
    widths, batch = ((384, 512), (4, 64)) if large else ((64, 96), (4, 16))
    cases = [
        _Case("bias", widths, batch),
        _Case("no_bias", widths, batch, bias=False),
        _Case("transposed", widths, batch, transposed=True),
        _Case("one_token", widths, (1,), pad=pad),
        _Case("odd_rows", widths, (3, 37) if large else (3, 7), pad=pad),
    ]
    return cases if not bench.quick else cases[:1] + cases[2:3] + cases[4:]


def _swapped_layer(bench: Bench, walker: Any, case: _Case, dtype: Any, recipe: Recipe | None) -> tuple[Any, Any, Any]:
    """A plain layer, what the walker makes of it, and its choice. Weights give outputs of size 1."""
    wide, narrow = case.widths
    plain = nn.Linear(wide, narrow, bias=case.bias, dtype=dtype, device=bench.device)
    with torch.no_grad():
        plain.weight.copy_(bench.randn(narrow, wide, scale=wide**-0.5))
        if case.bias:
            plain.bias.copy_(bench.randn(narrow))
    tree = nn.ModuleDict({"fc1": copy.deepcopy(plain)})
    swap = walker.swap_linears(tree, recipe=recipe)
    return plain, tree["fc1"], swap.choices["fc1"]


def _inputs(bench: Bench, case: _Case, dtype: Any) -> tuple[Any, Any]:
    """Rows [..., K] and the gradient of the output [..., N]."""
    wide, narrow = case.widths
    if case.transposed:
        rows = bench.randn(*case.rows[::-1], wide, dtype=dtype).transpose(0, 1).requires_grad_(True)
    else:
        rows = bench.randn(*case.rows, wide, dtype=dtype, grad=True)
    return rows, bench.randn(*case.rows, narrow, dtype=dtype)


def _padded(layer: Any, case: _Case, rows: Any) -> Any:
    """The output [..., N] of a layer that is given rows in a multiple of `pad`."""
    if case.pad == 1:
        return layer(rows)
    flat = rows.reshape(-1, rows.shape[-1])
    out = layer(functional.pad(flat, (0, 0, 0, -len(flat) % case.pad)))[: len(flat)]
    return out.reshape(*rows.shape[:-1], -1)


def _check_numbers(bench: Bench, walker: Any, case: _Case, precision: str, recipe: Recipe | None) -> None:
    """Forward and every gradient of one layer against fp64, and against native PyTorch in the same precision."""
    plain, layer, choice = _swapped_layer(bench, walker, case, DTYPES[precision], recipe)
    rows, gradient = _inputs(bench, case, DTYPES[precision])
    trial = Trial(
        path=f"{recipe or precision}.{case.name}",
        call=lambda: _padded(layer, case, rows),
        leaves={"input": rows, **dict(layer.named_parameters())},
        choice=lambda: choice,
        formula=linear,
        roundings=partial(_roundings, bench, case, precision, recipe),
        native=lambda given: functional.linear(given["input"], given["weight"], given.get("bias")),
        operands={"input": rows, **dict(plain.named_parameters())},
        gradient=gradient,
        recipe=recipe,
    )
    try_case(bench, trial)
    if precision == "bf16" and case.name == "bias":
        bench.layer_keeps_nothing(trial.path, layer, rows, enter=bench.low_precision(recipe) if recipe else nullcontext)


def _roundings(bench: Bench, case: _Case, precision: str, recipe: Recipe | None, tensor: str) -> Roundings:
    """What is rounded on the way to a tensor; the bias and its gradient are never rounded to FP8."""
    (wide, narrow), count = case.widths, math.prod(case.rows)
    tf32 = precision == "fp32" and bench.wants_te and bench.device == "cuda"
    if tensor == "grad.bias":
        if tf32:
            why = "summed beside a TF32 product, whose operands it may share"
            return Roundings((("tf32", 1), ("fp32", 1)), count, why=why)
        return Roundings(((precision, 1),), count, why="a sum of the gradient as it came, rounded once")
    products: dict[str, tuple[Product, int]] = {
        "forward": ("forward", wide),
        "grad.input": ("dgrad", narrow),
        "grad.weight": ("wgrad", count),
    }
    product, length = products[tensor]
    if recipe:
        found = operand_roundings(recipe, product, length, precision)
    elif tf32:
        why = "TE multiplies fp32 as TF32 (CUBLAS_COMPUTE_32F_FAST_TF32): both operands, then the result"
        found = Roundings((("tf32", 2), ("fp32", 1)), length, why=why)
    else:
        found = Roundings(((precision, 1),), length, why="exact products, summed in fp32, rounded once")
    # Output, gradient of the input and gradient of the weight are each a product of two of these.
    return replace(found, independent=min(count * narrow, count * wide, wide * narrow))


# --- FP8 --------------------------------------------------------------------------------------------------------------


def _check_unpadded(bench: Bench, walker: Any, recipe: Recipe) -> None:
    """Seven rows without padding: refused before anything is computed, or right; never silently wrong."""
    case = _Case("unpadded", (64, 96), (7,))
    plain, layer, _ = _swapped_layer(bench, walker, case, torch.bfloat16, recipe)
    rows, _ = _inputs(bench, case, torch.bfloat16)
    try:
        with bench.low_precision(recipe)():
            out = layer(rows)
    except (AssertionError, ValueError, RuntimeError) as refusal:
        bench.check(f"{recipe}.unpadded", True, f"refused: {type(refusal).__name__}: {refusal}")
        return
    operands = {"input": rows, **dict(plain.named_parameters())}
    wanted = linear({name: one.double() for name, one in operands.items()})
    bench.compare(f"{recipe}.unpadded", out, wanted, roundings=operand_roundings(recipe, "forward", 64))
