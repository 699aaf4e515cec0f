"""One FP8 recipe on a target: that it ran and no other, its state, what its casts lose, what it refuses.

`Linear` is held to fp64, forward and both gradients; `LayerNormMLP` and `GroupedLinear` under the recipe are held to it
by the cells of layer_spec and expert_gemm. What cast each operand is read off the products themselves; delayed
scaling's histories and scales, and the scales of current scaling, are re-computed. On a target that lacks the recipe,
its being refused is looked at, and nothing else.

What the low-precision path refuses says what happened, why, and what to do next. Sizes, devices and state of
another recipe that it refuses are plain Python: tests/bridge holds that.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

import torch

from ..bench import Bench
from ..bounds import part
from ..emulation import EMULATED, LARGEST
from ..fp8_linear import check_recipe
from ..observe import Enter
from ..trial import run_pass
from .quantizers import Operand, check_operands, watching_operands
from .state import check_delayed_state, check_scopes, default_update, new_layers, ulps

BF16: Final = torch.bfloat16
WIDE: Final = (256, 512)  # in and out, in blocks of 128, which every recipe takes
# Two quotients, 448 / amax and 1 / scale, each of which a fast division may leave one unit off.
ULPS: Final = 2.0
# Words of Transformer Engine's own reasons where a device lacks a recipe (`pytorch/quantization.py`, 2.12 and 2.20).
REASONS: Final = ("compute capability", "architectures")


def probe(bench: Bench) -> None:
    """Look at the recipe that the cell is set to."""
    recipe: Any = bench.setting("recipe", "delayed")
    bench.require_te("recipes")
    if recipe not in bench.order.target.recipes:
        _check_lacking(bench, recipe)
        return
    refused = bench.bridge("fp8_scope").why_recipe_is_refused(recipe)
    bench.check(f"fp8.{recipe}.supported", not refused, refused or "Transformer Engine has it on this device")
    if not refused:
        _check_recipe(bench, recipe, bench.low_precision(recipe))


# --- a target that lacks it ---------------------------------------------------------------------------------------


def _check_lacking(bench: Bench, recipe: str) -> None:
    """Transformer Engine refuses the recipe by itself, for this device; the bridge refuses it too."""
    having = [row.id for row in bench.bridge("recipes").TARGETS.values() if recipe in row.recipes]
    name = f"fp8.{recipe}"
    bench.refuses(f"{name}.bridge-refuses", bench.bridge("errors").WrongTarget, bench.low_precision(recipe))
    reason = bench.bridge("fp8_scope").why_recipe_is_refused(recipe)
    surprise = f"surprise: Transformer Engine has {recipe} here, and the row of {bench.order.target.id} has not"
    bench.check(f"{name}.te-refuses", bool(reason), reason or surprise)
    bench.check(f"{name}.te-says-why", any(words in reason for words in REASONS), reason or surprise)
    bench.unsupported = f"Transformer Engine: {reason} Targets with {recipe}: {', '.join(having)}."


# --- a target that has it -----------------------------------------------------------------------------------------


def _check_recipe(bench: Bench, name: Any, enter: Enter) -> None:
    check_recipe(bench, name, enter)
    for one in new_layers(bench, *WIDE):
        if one.name == "linear" or (name in EMULATED and one.name in ("mlp", "experts")):
            seen = _step(one, enter, one.rows(bench, 1.0), one.gradient(bench, 1.0))
            check_operands(bench, f"fp8.{name}.{one.name}", name, seen, one.gemms)
    with bench.scope(f"fp8.{name}.refuses"):
        _check_not_finite(bench, enter)
    if name == "delayed":
        update = default_update(bench.device)
        check_delayed_state(bench, _new_linear(bench, 64, 96), enter, update=update, name="fp8.delayed.state")
        check_scopes(bench, enter, update=update, name="fp8.delayed.scopes")
    if name == "current":
        _check_current_scales(bench, enter)


def _new_linear(bench: Bench, width: int, out: int) -> Any:
    return bench.filled(bench.te_layer("linear", width, out))


def _step(layer: Any, enter: Enter, rows: Any, gradient: Any) -> list[Operand]:
    """One forward and backward pass of a layer, and what its products were given."""
    with watching_operands() as seen:
        run_pass(partial(layer, rows.detach().requires_grad_()), {}, gradient, enter)
    return seen


def _check_current_scales(bench: Bench, enter: Enter) -> None:
    """Each tensor's scale is the fp32 quotient of the format's largest value and its amax; 1 for nothing but zeros."""
    layer = _new_linear(bench, 64, 96)
    why = "1 / fp32(largest / amax) in fp32: two divisions, each a unit off at most"
    for phase, factor in (("normal", 1.0), ("large", 2.0**20), ("small", 2.0**-20), ("zero", 0.0)):
        rows, gradient = (bench.randn(32, width, dtype=BF16) * factor for width in (64, 96))
        seen = _step(layer, enter, rows, gradient)
        for tensor, values in (("input", rows), ("weight", layer.weight), ("gradient", gradient)):
            amax = float(values.detach().abs().amax())
            largest = LARGEST["e5m2" if tensor == "gradient" else "e4m3"]
            scale = torch.tensor(largest / amax if amax > 0.0 else 1.0, dtype=torch.float64).float()
            wanted = float((1.0 / scale.double()).float())
            found = [float(one.scale_inverse) for one in seen if one.tensor == tensor and one.scale_inverse is not None]
            off = max((ulps(one, wanted) for one in found), default=math.inf)
            said = f"amax {amax:.9g}; the inverse of the scale is {found}, wanted {wanted:.9g}"
            bench.check_parts(f"fp8.current.scale.{phase}.{tensor}", part("ulps", off, ULPS, why), detail=said)


# --- wrong input of a recipe that the target has ------------------------------------------------------------------

WIDTH: Final = 64
ROWS: Final = 32
STEP: Final = 7
NAN: Final = float("nan")
# Check -> where a value that is not finite lies, the value, and what the refusal must name.
NOT_FINITE: Final = {
    "nan.first-input": ("input", NAN, "the input of the layer 0"),
    "infinity.input": ("input", math.inf, "the input of the layer 0"),
    "nan.gradient": ("gradient", NAN, "gradient of the output of the layer 1"),
    "nan.weight": ("weight", NAN, "the weight of the layer 0"),
}


def _check_not_finite(bench: Bench, enter: Enter) -> None:
    """A NaN or an infinity in what a layer is given: the tensor, the layer and the step are named, whatever the recipe.

    And a step whose numbers are all finite, however large, is let through.
    """
    health = bench.bridge("layer_watch")
    model = torch.nn.Sequential(*(_new_linear(bench, WIDTH, WIDTH) for _ in range(2)))

    def step(where: str, value: float) -> None:
        hole = torch.zeros(ROWS, WIDTH, dtype=BF16, device=bench.device)
        hole[3, 5] = value
        added = {"input": 0.0, "gradient": 0.0, where: hole}
        with torch.no_grad():
            model[0].weight[2, 2] = value if where == "weight" else 0.0
        rows, gradient = (bench.randn(ROWS, WIDTH, dtype=BF16) + added[name] for name in ("input", "gradient"))
        run_pass(partial(model, rows.requires_grad_()), {}, gradient, enter)
        model.zero_grad(set_to_none=True)

    with health.Fp8Guard(model) as guard:
        for name, (where, value, layer) in NOT_FINITE.items():
            step(where, value)
            words = ("infinity" if value == math.inf else "NaN", layer, f"step {STEP}")
            bench.refuses(name, health.NotFinite, partial(guard.end_step, STEP), *words)
        step("input", 2.0**100)
        said = ""
        try:
            guard.end_step(STEP)
        except health.NotFinite as fault:
            said = str(fault)
        bench.check("finite.taken", not said, said or "what is right is let through")
