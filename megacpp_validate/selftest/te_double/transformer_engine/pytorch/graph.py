"""`make_graphed_callables`: there are no graphs on a CPU, so what comes in goes out."""

from __future__ import annotations

from typing import Any

from .layer import only_defaults


def make_graphed_callables(
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: Any = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool | None = None,
    enabled: Any = None,
    calibrating: bool | None = None,
    recipe: Any = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool | None = None,
    _order: Any = None,
    _num_layers_per_chunk: Any = None,
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Any = None,
    post_warmup_hook: Any = None,
    capture_time_hooks: Any = None,
) -> Any:
    """The modules as they are."""
    done = ("num_warmup_iters", "allow_unused_input", "sample_kwargs", "fp8_enabled", "fp8_calibrating", "fp8_recipe",
            "fp8_group", "fp8_weight_caching", "enabled", "calibrating", "recipe", "amax_reduction_group",
            "cache_quantized_params")  # fmt: skip
    only_defaults(make_graphed_callables, locals(), done)
    return modules
