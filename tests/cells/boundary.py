"""Which argument of Transformer Engine no cell ever varies: `python -m tests.cells boundary`.

Every cell on the double runs while each call of an accessor of the bridge is noted. TE could ignore an argument that is
seen with one value alone, and nobody would notice. Such an argument gets a second value in a probe's table, or a row in
`REASONS`.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum, EnumType
from typing import Any, Final

import torch

from megacpp_validate.selftest.faults import Call
from megacpp_validate.selftest.plant import around_calls, entries

Seen = dict[str, set[str]]
CONSTANT: Final = "the bridge passes this value, or TE's default; no caller of the bridge can set another"
ON_GPUS: Final = "cells of GPUs vary it; the double is of the CPU"
SHAPE: Final = "TE takes no other type or rank; the values differ"
# Accessor, or accessor and argument -> why one value is enough. An accessor's row holds for all of its arguments.
REASONS: Final[dict[str, str]] = {
    **dict.fromkeys(("make_graphed_callables", "mxfp8_block_scaling", "nvfp4_block_scaling"), ON_GPUS),
    **dict.fromkeys(("autocast amax_reduction_group", "device"), ON_GPUS),
    **dict.fromkeys(("float8_block_scaling", "float8_current_scaling", "fp8_format"), CONSTANT),
    **dict.fromkeys(("amax_compute_algo", "margin", "calibrating", "alone", "parameters_split", "bias"), CONSTANT),
    **dict.fromkeys(("normalization", "zero_centered_gamma", "attention_dropout", "attn_mask_type"), CONSTANT),
    **dict.fromkeys(("qkv_format", "map_type", "pad_offsets", "moe_unpermute probs", "params_dtype"), CONSTANT),
    **dict.fromkeys(("checkpoint", "routing_map", "sorted_index", "split_sizes", "row_id_map"), SHAPE),
    **dict.fromkeys(("moe_sort_chunks_by_index_with_probs", "fp8_unpadding.forward"), SHAPE),
    "align_size": "recipes of Hopper take multiples of 16; those of Blackwell, of 32, are cells of GPUs",
    "amax_history_len": "16 steps in production; the bounds of the FP8 cells are derived from it",
    "quantized_model_init": "its one use in the bridge is what `Dispatch` refuses",
    "transformer_layer": "`layer_spec` takes one shape of the whole layer; its parts are varied in their cells",
}


def kind_of(value: Any) -> str:
    """A value; of a tensor its rank, dtype, gradient and layout."""
    if isinstance(value, torch.Tensor):
        states = (("grad", value.requires_grad), ("strided", not value.is_contiguous()), ("empty", not value.numel()))
        return " ".join((f"{value.dim()}-d", str(value.dtype), *(name for name, holds in states if holds)))
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device | Enum):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(kind_of, value))}]"
    return type(value).__qualname__


def note_calls() -> Seen:
    """Wrap every accessor for the rest of this process's life; "accessor argument" -> kinds of values, as cells run."""
    seen: Seen = defaultdict(set)

    def note(name: str, call: Call) -> Any:
        for argument, value in call.arguments.items():
            if argument != "self":
                seen[f"{name} {argument}"].add(kind_of(value))
        return call.run()

    for name, entry in entries().items():
        target: Any = entry()
        if not callable(target) or isinstance(target, EnumType):
            continue
        made = isinstance(target, type)
        if made and hasattr(target, "forward"):
            target = around_calls(target, lambda call, name=name: note(f"{name}.forward", call))
        entry._found = (around_calls(target, lambda call, name=name: note(name, call), at_init=made), "")
    return seen


def never_varied(seen: Seen) -> dict[str, str]:
    """Arguments that were seen with one value alone and have no reason, with that value."""
    found = {}
    for name, (kind, *others) in sorted(seen.items()):
        accessor, _, argument = name.partition(" ")
        if not others and REASONS.keys().isdisjoint((name, accessor, accessor.removesuffix(".forward"), argument)):
            found[name] = kind
    return found
