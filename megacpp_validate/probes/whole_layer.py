"""The attention layer of the spec as one: what the bridge builds for kind A, in training mode, against fp64.

It stands on the attention of the vendor, which has a cell of its own: where that one is red, this is red after it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch

from .attention import HEADS
from .bench import DTYPES, Bench
from .bounds import low_precision_ran, relative_error
from .emulation import EMULATED, operand_roundings
from .native_block import Sample, block_trial, check_layers_ran, new_sample, parted
from .trial import Case, Tried, try_case

GROUPS: Final = 2
DEFAULT_EPS: Final = 1e-5  # the bridge leaves it at the default that both paths have
LAYERS: Final = ("TransformerLayer", "LayerNormLinear", "DotProductAttention", "Linear", "LayerNormMLP")
# Name in the native block -> in Transformer Engine's layer.
NAMES: Final = {
    "qkv.layer_norm_weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "qkv.weight": "self_attention.layernorm_qkv.weight",
    "out.weight": "self_attention.proj.weight",
    "mlp.layer_norm_weight": "layernorm_mlp.layer_norm_weight",
    "mlp.fc1_weight": "layernorm_mlp.fc1_weight",
    "mlp.fc2_weight": "layernorm_mlp.fc2_weight",
}


PLAIN: Final = Case("gqa4")
SMALL_ROWS: Final = Case("gqa4.small", extra=5, small=True)


def check_whole_layer(bench: Bench, spec: Any) -> None:
    """Forward and every gradient, in every precision."""
    new = partial(new_sample, bench, turned=False, eps=DEFAULT_EPS)
    for name in DTYPES:
        cases = (PLAIN, SMALL_ROWS) if not bench.quick else (SMALL_ROWS if name == "fp32" else PLAIN,)
        for case in cases:
            sample, path = new(case, DTYPES[name]), f"{name}.whole.{case.name}"
            # In training mode: what drops anything out gives other values each time. Backward passes may sum in any
            # order.
            tried = _try(bench, spec, sample, path, steps=2, repeated=True)
            if tried is not None and bench.wants_te:
                check_layers_ran(bench, path, tried.seen["forward"], LAYERS)
    recipes = [recipe for recipe in bench.recipes if recipe in EMULATED] if bench.wants_te else []
    for recipe in recipes[:1] if bench.quick else recipes:  # the probe tells of any other
        # With larger branches, what each adds to the other's errors would widen FP8 bounds beyond use.
        sample, path = new(PLAIN, torch.bfloat16, branches=0.5), f"{recipe}.whole.{PLAIN.name}"
        tried = _try(bench, spec, sample, path, recipe=recipe)
        if tried is not None:
            _check_low_precision(bench, f"{path}.grad.applied", tried, recipe, sample)


def _try(bench: Bench, spec: Any, sample: Sample, path: str, **more: Any) -> Tried | None:
    """One case; None where the layer has other parameters: a check has failed, and there is nothing to compare."""
    layer, choice = _new_layer(bench, spec, sample, path)
    if layer is None:
        return None
    leaves = {"rows": sample.rows, **dict(layer.named_parameters())}
    call, named = partial(layer, sample.rows), partial(_named, sample)
    trial = block_trial(path, sample, call, leaves, lambda: choice, named=named, shown=_shown, **more)
    return try_case(bench, trial)


def _check_low_precision(bench: Bench, name: str, tried: Tried, recipe: Any, sample: Sample) -> None:
    """That each of the four products did: a gradient that is too accurate was made of operands as they were."""
    last, parts = operand_roundings(recipe, "wgrad", len(sample.rows.flatten(0, 1))), []
    for weight in ("qkv.weight", "out.weight", "mlp.fc1_weight", "mlp.fc2_weight"):
        own = [part for part in tried.wanted if part.removeprefix("grad.").startswith(weight)]
        found = [tried.seen[part] for part in own]
        error = 0.0
        if all(grad is not None for grad in found):
            error = relative_error(torch.cat(found), torch.cat([tried.wanted[part] for part in own]))
        parts.append(low_precision_ran(error, last, f"{NAMES[weight]}, of its last product alone"))
    bench.check_parts(name, *parts)


def _new_layer(bench: Bench, spec: Any, sample: Sample, path: str) -> tuple[Any, Any]:
    """The layer as the bridge builds it, with the weights of a sample, and what was chosen.

    It is None where it has other parameters: a check has failed, and there is nothing to compare.
    """
    hidden, ffn = sample.weights["mlp.fc2_weight"].shape
    made = {"dtype": sample.rows.dtype, "device": bench.device}
    choice = spec.kind_spec("A", device=bench.device).choice
    if bench.wants_te:
        sizes = {"hidden": hidden, "ffn_hidden": ffn, "num_heads": HEADS, "num_gqa_groups": GROUPS}
        layer, names = spec.te_attention_layer(**sizes, layer_number=1, **made), NAMES
    else:
        layer = spec.native_layer_spec()["A"](hidden, ffn, HEADS, hidden // HEADS, GROUPS, **made)
        names = {name: name for name in NAMES}
    own, order = dict(layer.named_parameters()), _interleaved(sample)
    wanted = {names[name]: (tuple(value.shape), value.dtype) for name, value in sample.weights.items()}
    found = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in own.items()}
    bench.check(f"{path}.parameters", found == wanted, str(found))
    if found != wanted:
        return None, choice
    with torch.no_grad():
        for name, weight in sample.weights.items():
            own[names[name]].copy_(weight[order] if bench.wants_te and name == "qkv.weight" else weight)
    return layer.train(), choice


def _interleaved(sample: Sample) -> Any:
    """For each row of the layer's QKV weight its row in the native one.

    The layer's rows lie by group: the queries of a group, its key, its value (Megatron-LM's order, which Transformer
    Engine takes where `qkv_weight_interleaved` is left on); the native ones are all queries, all keys, all values.
    """
    width, share = sample.case.width, HEADS // GROUPS
    heads: list[int] = []
    for group in range(GROUPS):
        heads += [*range(group * share, (group + 1) * share), HEADS + group, HEADS + GROUPS + group]
    first = torch.tensor(heads, device=sample.rows.device)[:, None] * width
    return (first + torch.arange(width, device=sample.rows.device)).flatten()


# --- names ------------------------------------------------------------------------------------------------


def _named(sample: Sample, seen: dict[str, Any]) -> dict[str, Any]:
    """A pass by native names."""
    if f"grad.{NAMES['qkv.weight']}" not in seen:
        return parted(seen, sample)
    found = {"forward": seen["forward"], "grad.rows": seen["grad.rows"]}
    found |= {f"grad.{name}": seen[f"grad.{own}"] for name, own in NAMES.items()}
    if (joint := found["grad.qkv.weight"]) is not None:
        found["grad.qkv.weight"] = torch.empty_like(joint)
        found["grad.qkv.weight"][_interleaved(sample)] = joint
    return parted(found, sample)


def _shown(name: str) -> str:
    """As Transformer Engine's layer has it: a part of it is none of what stands under "mlp" in this cell."""
    own = name.removeprefix("grad.")
    head, part = ("qkv.weight", own.removeprefix("qkv.weight")) if own.startswith("qkv.weight.") else (own, "")
    return f"grad.{NAMES[head]}{part}" if head in NAMES else name
