"""The torchao import bridge: the same firewall for a fourth vendor library.

As in `imports.py`, importing this module imports nothing of the library and never raises. Its FP8 training is Python on
`torch._scaled_mm`: a release whose compiled half does not fit this torch says so in the log, and serves all the same.
"""

from __future__ import annotations

from typing import Any, Final

from .vendor import Vendor, explain_plainly

NATIVE_PATH: Final = "torch.nn.Linear, left in bf16"

TORCHAO: Final = Vendor(
    "torchao",
    module="torchao.float8",
    switch="MEGACPP_DISABLE_TORCHAO",
    trial="MEGACPP_TORCHAO_TRIAL_SECONDS",
    explain=explain_plainly("torchao", "pip install torchao==0.16.0"),
)

is_torchao_available = TORCHAO.is_available
why_torchao_is_unavailable = TORCHAO.why_unavailable


@TORCHAO.entry(required=True)
def convert_to_float8_training() -> Any:
    """Swaps `nn.Linear` for `Float8Linear` in a tree, where a filter of (module, name) says so."""
    from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found, unused-ignore]

    return convert_to_float8_training


@TORCHAO.entry(required=True)
def float8_linear_config() -> Any:
    """What is cast, how it is scaled, and by which GEMM: `Float8LinearConfig`."""
    from torchao.float8 import Float8LinearConfig  # type: ignore[import-not-found, unused-ignore]

    return Float8LinearConfig


@TORCHAO.entry(required=True)
def float8_linear() -> Any:
    """The layer that `convert_to_float8_training` puts in."""
    from torchao.float8.float8_linear import Float8Linear  # type: ignore[import-not-found, unused-ignore]

    return Float8Linear


@TORCHAO.entry
def precompute_scales() -> Any:
    """One all-reduce for the scales of all sharded FP8 weights of a model; to be called after the optimizer's step."""
    from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
        precompute_float8_dynamic_scale_for_fsdp,
    )

    return precompute_float8_dynamic_scale_for_fsdp


@TORCHAO.entry
def cast_to_float8() -> Any:
    """A tensor and a scale to multiply it with -> torchao's quantized tensor of training."""
    try:
        from torchao.float8.float8_training_tensor import (  # type: ignore[import-not-found, unused-ignore]
            hp_tensor_and_scale_to_float8,
        )
    except ImportError:  # before 0.13
        from torchao.float8.float8_tensor import (  # type: ignore[import-not-found, unused-ignore]
            hp_tensor_and_scale_to_float8,
        )

    return hp_tensor_and_scale_to_float8
