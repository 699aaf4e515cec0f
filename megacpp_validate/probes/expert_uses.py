"""Uses of the expert bank one after another: what they leave behind, and which weights they take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .bench import Bench
from .emulation import EMULATED
from .kept_weights import check_kept_weights


def check_expert_uses(bench: Bench, new_layer: Callable[[Any], Any], routing: tuple[int, ...], times: int) -> None:
    """Forward and backward leave nothing behind, and take the weights of this step, in FP8 too.

    Args:
        new_layer: a bank of experts from its weights [E, N, K].
        routing: rows of each expert.
        times: on a GPU it is so many times as many, as in the cases that are held to numbers.
    """
    on_gpu = bench.device == "cuda"
    (inputs, outputs), counts = ((256, 384), tuple(n * times for n in routing)) if on_gpu else ((32, 48), routing)
    weights = bench.randn(len(counts), outputs, inputs, dtype=torch.bfloat16)
    rows = bench.randn(sum(counts), inputs, dtype=torch.bfloat16)
    gradient = bench.randn(sum(counts), outputs, dtype=torch.bfloat16)
    bench.layer_keeps_nothing("bf16", new_layer(weights), rows, counts)
    if not bench.wants_te:
        return

    def use(layer: Any, given: Any, first: bool | None) -> Any:
        return layer(given, counts, is_first_microbatch=first)

    fp8 = bench.bridge("fp8_scope")
    enter = partial(fp8.low_precision, target=bench.order.target.id, amax_reduction_group=fp8.SINGLE_OWNER)
    for recipe in bench.recipes:
        if recipe not in EMULATED:
            continue  # a failed check of the probe says that nothing is known of it
        scope, pair = partial(enter, recipe=recipe), (new_layer(weights), new_layer(weights))
        bench.layer_keeps_nothing(f"fp8.{recipe}", new_layer(weights), rows, counts, enter=scope)
        check_kept_weights(bench, f"fp8.{recipe}.bank", pair, rows, gradient, scope, use)
