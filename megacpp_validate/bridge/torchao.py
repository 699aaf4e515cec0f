"""The torchao import bridge: the same firewall for a fourth vendor library.

As in `imports.py`, importing this module imports nothing of the library and never raises. Its FP8 training is Python on
`torch._scaled_mm`: a release whose compiled half does not fit this torch says so in the log, and serves all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

import torch

from .backends import Refusal
from .errors import UnknownName, WrongOption, WrongTarget
from .vendor import Vendor, explain_plainly
from .walk_plan import WalkPlan, plan_walk
from .walk_rules import PROJECTIONS

# --- torchao linear ---------------------------------------------------------------------------------------------------
# Which linear layers torchao's Float8Linear takes, in which recipe, and what it takes to run there.
#
# The layers are those of the linear walker: its whitelist, and its pinned exclusions. What they cannot run in FP8 is
# kept with its reason.


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


@dataclass(frozen=True)
class Float8Plan:
    """What is to be converted.

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
    device = torch.device(device)
    if emulate:
        return None
    if device.type != "cuda":
        return Refusal(
            "torchao",
            "device",
            f"the model is to train on {device}, which has no FP8 tensor cores. Next step: name a CUDA device, or pass "
            "emulate=True to see the rounding and none of the speed",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        found = ".".join(map(str, capability))
        return Refusal(
            "torchao", "arch", f"compute capability {found}: FP8 tensor cores come with {least}. Stay in bf16"
        )
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
        NotATree: as `plan_walk`.
    """
    name = read_float8_recipe(recipe)
    walked = plan_walk(model, include=include)
    asked = _asked(walked)
    times = Counter(id(model.get_submodule(one).weight) for one in asked)
    refused = {one: _why_not_layer(model.get_submodule(one), times) for one in asked}
    names = tuple(one for one in asked if not refused[one])
    kept = tuple(
        (decision.name, refused.get(decision.name) or decision.reason)
        for decision in walked.decisions
        if decision.name not in names
    )
    if not names:
        said = "; ".join(f"`{one}`: {why}" for one, why in kept) or "there is no linear layer"
        raise WrongOption(
            f"no layer is left for Float8Linear. {said}. Likely cause: a whitelist for another model, or widths that "
            f"are no multiples of {WIDTH}. Next step: name the layers with `include`, or stay in bf16."
        )
    return Float8Plan(names, kept, name)


def read_float8_recipe(recipe: str) -> Float8Recipe:
    """The recipe by this name.

    Raises:
        UnknownName: there is none; the text names those that there are.
    """
    for name in FLOAT8_RECIPES:
        if name == recipe:
            return name
    raise UnknownName(
        f"torchao has no recipe {recipe!r}. Likely cause: a recipe of Transformer Engine. Next step: choose one of "
        f"{', '.join(FLOAT8_RECIPES)}."
    )


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
            f"an FP8 all-gather was asked for with the recipe {recipe}. Likely cause: a configuration of `tensorwise`: "
            "a shard knows no scale of a row that it holds a part of. Next step: gather in bf16, or take tensorwise."
        )
    config = float8_linear_config.require().from_recipe_name(recipe)
    return replace(config, enable_fsdp_float8_all_gather=float8_all_gather, emulate=emulate)


def refuse(refusal: Refusal) -> None:
    """Raise a refusal.

    Raises:
        WrongTarget: always.
    """
    said = refusal.reason if "Next step" in refusal.reason else f"{refusal.reason}. Next step: leave the lane out here"
    raise WrongTarget(f"the torchao lane cannot run here: {said.rstrip('.')}.")


def _asked(walked: WalkPlan) -> list[str]:
    """What the whitelist lets through; whether Transformer Engine may be taken is no matter here."""
    return [one.name for one in walked.decisions if one.action == "swap" or one.refusal is not None]


def _why_not_layer(linear: Any, times: Counter[int]) -> str:
    """Why a layer cannot be converted; empty where it can."""
    if linear.in_features % WIDTH or linear.out_features % WIDTH:
        widths = f"{linear.in_features} -> {linear.out_features}"
        return f"{widths} features: torch._scaled_mm wants multiples of {WIDTH}"
    if linear.weight.dtype not in DTYPES:
        return f"its weight is {linear.weight.dtype}: Float8Linear trains bf16 or fp32 weights"
    if times[id(linear.weight)] > 1:
        return "it shares its weight with another layer, and each would cast and shard it alone"
    return ""


# --- torchao ----------------------------------------------------------------------------------------------------------


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
