"""torchao as an optional backend: Float8Linear under FSDP2 and torch.compile, in the one order that works.

    meta device -> convert -> fully_shard -> materialise -> compile -> train

A layer converted after sharding has a weight that FSDP gathers in bf16; a graph compiled before the conversion holds
the old layer; a model that is not on meta lies whole on each rank. Each of these trains, and is wrong, so the
conversion checks the model itself (https://docs.pytorch.org/ao/stable/workflows/training.html, and torchtitan's float8
guide).

The layers are those of the linear walker. Importing this module imports nothing of torchao and never raises. Its FP8
training is Python on `torch._scaled_mm`: a release whose compiled half does not fit this torch works all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import torch

from .backends import Refusal
from .errors import BridgeError, UnknownName, WrongOption, WrongTarget
from .linear_walker import PROJECTIONS, plan_walk
from .vendor import Vendor, explain_plainly

Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
FLOAT8_RECIPES: Final[tuple[Float8Recipe, ...]] = get_args(Float8Recipe)
# What each product of a linear layer runs in: torchao's float8/config.py, `from_recipe_name`.
IN_FP8: Final[dict[Float8Recipe, frozenset[str]]] = {
    "tensorwise": frozenset({"forward", "dgrad", "wgrad"}),
    "rowwise": frozenset({"forward", "dgrad", "wgrad"}),
    "rowwise_with_gw_hp": frozenset({"forward", "dgrad"}),
}
WIDTH: Final = 16  # both widths: `torch._scaled_mm` refuses other leading dimensions
LEAST_CAPABILITY: Final = (8, 9)  # the first with FP8 tensor cores
DTYPES: Final = (torch.bfloat16, torch.float32)  # of master weights; `fully_shard` casts the second

TORCHAO: Final = Vendor(
    "torchao",
    module="torchao.float8",
    switch="MEGACPP_DISABLE_TORCHAO",
    explain=explain_plainly("torchao", "pip install torchao==0.16.0"),
)


# Swaps `nn.Linear` for `Float8Linear` in a tree, where a filter of (module, name) says so.
convert_to_float8_training: Final = TORCHAO.attribute("convert_to_float8_training")
# What is cast, how it is scaled, and by which GEMM.
float8_linear_config: Final = TORCHAO.attribute("Float8LinearConfig")


@TORCHAO.required_entry
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
    from torchao.float8.float8_training_tensor import (  # type: ignore[import-not-found, unused-ignore]
        hp_tensor_and_scale_to_float8,
    )

    return hp_tensor_and_scale_to_float8


# --- which layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Float8Plan:
    """Which layers are converted.

    Attributes:
        names: of the layers.
        kept: name -> why it is kept, of every other linear layer.
        recipe: of all of them.
    """

    names: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    recipe: Float8Recipe


def why_not_float8(device: Any, *, emulate: bool = False) -> Refusal | None:
    """Why torchao's FP8 layers cannot run on a device; None where they can.

    Args:
        device: where the model will train; the model itself is on meta.
        emulate: products in fp32 of rounded operands, for a machine without FP8; never for training.
    """
    if not TORCHAO.is_available():
        return Refusal("torchao", "torchao-unavailable", TORCHAO.why_unavailable())
    if emulate:
        return None
    device = torch.device(device)
    if device.type != "cuda":
        return Refusal("torchao", "device", f"the model is to train on {device}, which has no FP8 tensor cores")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return Refusal("torchao", "arch", f"compute capability {capability}: FP8 tensor cores need {LEAST_CAPABILITY}")
    return None


def plan_float8(model: Any, recipe: str, *, include: Sequence[str | type] = PROJECTIONS) -> Float8Plan:
    """A dry run: which layers would be converted, and why not the others.

    Args:
        model: on meta or not; nothing is changed.
        recipe: one of `FLOAT8_RECIPES`.
        include: the whitelist, as `plan_walk` takes it.

    Raises:
        UnknownName: there is no such recipe.
        WrongOption: no layer is left; the text has every reason.
    """
    known = next((name for name in FLOAT8_RECIPES if name == recipe), None)
    if known is None:
        raise UnknownName(f"torchao has no recipe {recipe!r}. Next step: choose one of {', '.join(FLOAT8_RECIPES)}.")
    walked = plan_walk(model, include=include)
    # Whether Transformer Engine may be used does not matter here.
    asked = [one.name for one in walked.decisions if one.action == "swap" or one.refusal is not None]
    times = Counter(id(model.get_submodule(one).weight) for one in asked)
    refused = {one: _why_not_layer(model.get_submodule(one), times) for one in asked}
    names = tuple(one for one in asked if not refused[one])
    kept = tuple(
        (decision.name, refused.get(decision.name) or decision.reason)
        for decision in walked.decisions
        if decision.name not in names
    )
    if not names:
        reasons = "; ".join(f"`{one}`: {why}" for one, why in kept) or "there is no linear layer"
        raise WrongOption(
            f"no layer is left for Float8Linear. {reasons}. Next step: name layers with `include`, or stay in bf16."
        )
    return Float8Plan(names, kept, known)


def _why_not_layer(linear: Any, times: Counter[int]) -> str:
    """Why a layer cannot be converted; empty where it can."""
    if linear.in_features % WIDTH or linear.out_features % WIDTH:
        return f"{linear.in_features} -> {linear.out_features} features: torch._scaled_mm wants multiples of {WIDTH}"
    if linear.weight.dtype not in DTYPES:
        return f"its weight is {linear.weight.dtype}: Float8Linear trains bf16 or fp32 weights"
    if times[id(linear.weight)] > 1:
        return "it shares its weight with another layer, and each would cast and shard it alone"
    return ""


def float8_config(recipe: Float8Recipe, *, float8_all_gather: bool, emulate: bool) -> Any:
    """torchao's configuration of a recipe.

    Args:
        float8_all_gather: FSDP gathers weights in FP8.
        emulate: as `why_not_float8`.

    Raises:
        WrongOption: the recipe has one scale a row, and weights cannot be gathered with those.
        VendorEntryMissing: torchao cannot be used here.
    """
    if float8_all_gather and recipe != "tensorwise":
        raise WrongOption(
            f"an FP8 all-gather with the recipe {recipe}: a shard has no scale of a row that it holds a part of. Next "
            "step: gather in bf16, or take tensorwise."
        )
    config = float8_linear_config.require().from_recipe_name(recipe)
    return replace(config, enable_fsdp_float8_all_gather=float8_all_gather, emulate=emulate)


# --- the conversion ---------------------------------------------------------------------------------------------------


class WrongOrder(BridgeError, RuntimeError):
    """A model that is not as it must be before the conversion."""


def why_wrong_order(model: Any) -> str:
    """The first module or tensor that an earlier step of the order has touched; empty where none has."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel  # takes a second to import

    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            return f"`{name or 'the model'}` is compiled already"
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            return f"`{name or 'the model'}` is sharded by FSDP already"
        if isinstance(module, float8_linear.require()):
            return f"`{name or 'the model'}` is a Float8Linear already"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            return f"`{name}` is on {tensor.device}, not on meta"
    return ""


def convert_linears(
    model: Any,
    recipe: str,
    *,
    device: Any,
    include: Sequence[str | type] = PROJECTIONS,
    float8_all_gather: bool = False,
    emulate: bool = False,
) -> Float8Plan:
    """`convert_to_float8_training` on the layers of the plan; the other steps of the order are torch's own.

    Args:
        model: all of it on the meta device, not sharded, not compiled.
        recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp".
        device: where it will train.
        include: the whitelist of layers, as `plan_walk` takes it.
        float8_all_gather: FSDP gathers weights in FP8; then `after_step` must follow the materialisation and each step
            of the optimizer.
        emulate: as `why_not_float8`.

    Raises:
        WrongOrder: the model was materialised, converted, sharded or compiled before.
        WrongTarget: torchao or FP8 is not here.
        UnknownName, WrongOption: as `plan_float8` and `float8_config`.
    """
    refusal = why_not_float8(device, emulate=emulate)
    if refusal is not None:
        raise WrongTarget(f"torchao cannot be used here: {refusal.reason.rstrip('.')}. Next step: stay in bf16.")
    if wrong := why_wrong_order(model):
        raise WrongOrder(
            f"the model cannot be converted: {wrong}. The order is meta device -> convert -> fully_shard -> "
            "materialise -> compile -> train. Next step: build the model anew on the meta device, and convert it first."
        )
    plan = plan_float8(model, recipe, include=include)
    config = float8_config(plan.recipe, float8_all_gather=float8_all_gather, emulate=emulate)
    convert_to_float8_training.require()(model, module_filter_fn=lambda _, name: name in plan.names, config=config)
    return plan


def after_step(model: Any) -> None:
    """Scales of the next FP8 all-gather of all weights of a model, by one all-reduce; after each optimizer's step."""
    precompute_scales.require()(model)
