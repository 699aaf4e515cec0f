"""One FP8 recipe on a target: that it ran and no other, its numbers, its state, what its casts lose, what it refuses.

`Linear`, `LayerNormMLP` and `GroupedLinear` are held to fp64, forward and every gradient; what cast each operand is
read off the products themselves; delayed scaling's histories and scales, and the scales of current scaling, are
re-computed. On a target that lacks the recipe, its being refused is looked at, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from ...evidence.receipt import Check, Part
from ..bench import Bench
from ..emulation import EMULATED, FORMATS, LARGEST, Recipe
from ..fp8_linear import check_recipe
from ..low_precision import Enter
from ..references.delayed_scaling import Update
from .quantizers import Operand, check_operands, watching_operands
from .recipe_layers import check_experts, check_mlp
from .refusals import check_refusals
from .resumed import check_resumed
from .scopes import check_scopes
from .shares import check_shares, check_shares_of_a_cast
from .state import check_delayed_state, default_update, ulps

HISTORY: Final = 16
WIDTH: Final = 256  # two blocks of 128
# Two quotients, 448 / amax and 1 / scale, each of which a fast division may leave one unit off.
ULPS: Final = 2.0
# Words of Transformer Engine's own reasons where a device lacks a recipe (`pytorch/quantization.py`, 2.12 and 2.20).
REASONS: Final = ("compute capability", "architectures")


def probe(bench: Bench) -> None:
    """Look at the recipe that the cell is set to."""
    recipe = bench.setting("recipe", "delayed")
    enter = _scope_of(bench)
    if recipe not in bench.order.target.recipes:
        _check_lacking(bench, recipe, enter)
        return
    if not bench.wants_te:
        bench.cannot_run(
            f"{recipe} runs in Transformer Engine only, which was not requested. Next step: request it, or leave this "
            "cell out."
        )
    refused = bench.bridge("fp8_scope").why_recipe_is_refused(recipe)
    bench.check(f"fp8.{recipe}.supported", not refused, refused or "Transformer Engine has it on this device")
    if not refused:
        _check_recipe(bench, recipe, partial(enter, recipe=recipe))


def _scope_of(bench: Bench) -> Callable[..., Any]:
    scope = bench.bridge("fp8_scope")
    return partial(scope.low_precision, target=bench.order.target.id, amax_reduction_group=scope.SINGLE_OWNER)


# --- a target that lacks it ---------------------------------------------------------------------------------------


def _check_lacking(bench: Bench, recipe: str, enter: Callable[..., Any]) -> None:
    """Transformer Engine refuses it by itself, for this device; the bridge refuses it and names who has it."""
    errors, targets = bench.bridge("errors"), bench.bridge("recipes").TARGETS
    having = [row.id for row in targets.values() if recipe in row.recipes]
    bench.refuses(f"fp8.{recipe}.bridge-refuses", errors.WrongTarget, partial(enter, recipe=recipe))
    said = bench.checks[-1].detail
    named = [target for target in having if target in said]
    bench.check(f"fp8.{recipe}.bridge-names-targets", bool(having) and named == having, said)
    if not bench.wants_te:
        bench.cannot_run(
            f"whether {recipe} is refused is for Transformer Engine to say, and it was not requested. Next step: "
            "request it, or leave this cell out."
        )
    scope = bench.bridge("fp8_scope")
    reason = scope.why_recipe_is_refused(recipe)
    surprise = f"surprise: Transformer Engine has {recipe} here, and the row of {bench.order.target.id} has not"
    bench.check(f"fp8.{recipe}.te-refuses", bool(reason), reason or surprise)
    bench.check(f"fp8.{recipe}.te-says-why", any(words in reason for words in REASONS), reason or surprise)
    raised = _own_scope_raises(scope, recipe)
    bench.check(f"fp8.{recipe}.te-scope-refuses", bool(reason) and reason in raised, raised or surprise)
    still = scope.te_state()
    bench.check(f"fp8.{recipe}.te-stays-off", not still["enabled"], f"after a reset: {still}")
    return bench.is_unsupported(f"Transformer Engine: {reason} Targets with {recipe}: {', '.join(having)}.")


def _own_scope_raises(scope: Any, recipe: str) -> str:
    """What Transformer Engine's own scope raises, which it leaves on (2.12 to 2.20): its state is reset."""
    made = {"mxfp8": scope.te_mxfp8, "nvfp4": scope.te_nvfp4, "block": scope.te_block_scaling}
    make = made.get(recipe, scope.te_current_scaling if recipe == "current" else scope.te_delayed_scaling)
    try:
        with scope.te_scope(enabled=True, recipe=make(), amax_reduction_group=None):
            return ""
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"
    finally:
        scope.reset_te_state()


# --- a target that has it -----------------------------------------------------------------------------------------


def _check_recipe(bench: Bench, name: str, enter: Enter) -> None:
    check_recipe(bench, name, enter)
    _check_linear_operands(bench, name, enter)
    check_refusals(bench, name, _scope_of(bench))
    if name not in EMULATED:  # 4 bits, random transforms and stochastic rounding: what can be said is said above
        return
    recipe: Recipe = name
    check_mlp(bench, recipe, enter)
    check_experts(bench, recipe, enter)
    square = partial(_new_linear, bench, WIDTH, WIDTH)
    if recipe == "delayed":
        update = _check_zero_step(bench, enter)
        check_delayed_state(
            bench, _new_linear(bench, 64, 96), enter, length=HISTORY, update=update, name="fp8.delayed.state"
        )
        check_shares(bench, square, enter, update=update, name="fp8.delayed.shares")
        check_scopes(bench, enter, update=update, name="fp8.delayed.scopes", length=HISTORY)
        check_resumed(bench, enter, name="fp8.delayed.resumed")
        return
    check_shares_of_a_cast(bench, square, enter, recipe, name=f"fp8.{recipe}.shares")
    if recipe == "current":
        _check_current_scales(bench, enter)


def _new_linear(bench: Bench, width: int, out: int) -> Any:
    layer = bench.bridge("imports").linear.require()(
        width, out, bias=True, params_dtype=torch.bfloat16, device=bench.device
    )
    with torch.no_grad():
        layer.weight.copy_(bench.randn(out, width, scale=width**-0.5))
    return layer


def _step(layer: Any, enter: Enter, rows: Any, gradient: Any) -> list[Operand]:
    """One forward and backward pass, and what its products were given."""
    layer.zero_grad(set_to_none=True)
    with watching_operands() as seen:
        with enter():
            out = layer(rows.detach().requires_grad_())
        out.backward(gradient)
    return seen


def _check_linear_operands(bench: Bench, recipe: str, enter: Enter) -> None:
    layer = _new_linear(bench, WIDTH, 2 * WIDTH)
    rows, gradient = (bench.randn(WIDTH, width, dtype=torch.bfloat16) for width in (WIDTH, 2 * WIDTH))
    seen = _step(layer, enter, rows, gradient)
    check_operands(bench, f"fp8.{recipe}.linear", recipe, seen, dict.fromkeys(FORMATS, 1))


def _check_zero_step(bench: Bench, enter: Enter) -> Update:
    """What a step of nothing but zeros does to a history, told apart from all else; what was seen holds from there on.

    The kernel that releases ship leaves the history as it is where the amax of a call is zero; the update in Python
    takes a zero in like any other amax (both seen on an H200 with 2.12.0 and 2.20.2, 2026-11-21).
    """
    read, layer = bench.bridge("fp8_scope").te_amax_state, _new_linear(bench, 64, 96)
    histories = []
    for factor in (1.0, 0.0):
        rows, gradient = (bench.randn(32, width, dtype=torch.bfloat16) * factor for width in (64, 96))
        _step(layer, enter, rows, gradient)
        histories.append([read(layer, forward=way)[0][:, 0].tolist() for way in (True, False)])
    before, after = histories
    ways: dict[Update, list[list[float]]] = {
        "fused": before,
        "python": [[*history[1:], history[0]] for history in before],
    }
    wanted = default_update(bench.device)
    found = next((update for update, history in ways.items() if history == after), None)
    words = {
        "fused": "a step of zeros leaves the history as it is",
        "python": "a step of zeros goes into the history",
        None: f"a step of zeros makes {before} to {after}",
    }
    bench.check("fp8.delayed.zero-step", found == wanted, f"{words[found]}; expected: {words[wanted]}")
    return found or wanted


def _check_current_scales(bench: Bench, enter: Enter) -> None:
    """Each tensor's scale is the fp32 quotient of the format's largest value and its amax; 1 for nothing but zeros."""
    layer = _new_linear(bench, 64, 96)
    for phase, factor in (("normal", 1.0), ("large", 2.0**20), ("small", 2.0**-20), ("zero", 0.0)):
        rows, gradient = (bench.randn(32, width, dtype=torch.bfloat16) * factor for width in (64, 96))
        seen = _step(layer, enter, rows, gradient)
        for tensor, values in (("input", rows), ("weight", layer.weight), ("gradient", gradient)):
            amax = float(values.detach().abs().amax())
            found = [one.scale_inverse for one in seen if one.tensor == tensor and one.scale_inverse is not None]
            bench.checks.append(_hold_scale(f"fp8.current.scale.{phase}.{tensor}", amax, tensor, found))


def _hold_scale(name: str, amax: float, tensor: str, found: list[Any]) -> Check:
    largest = LARGEST["e5m2" if tensor == "gradient" else "e4m3"]
    scale = torch.tensor(largest / amax if amax > 0.0 else 1.0, dtype=torch.float64).float()
    wanted = float((1.0 / scale.double()).float())
    off = max((ulps(float(one), wanted) for one in found), default=math.inf)
    part = Part(
        "ulps", off, ULPS, off <= ULPS, "1 / fp32(largest / amax) in fp32: two divisions, each a unit off at most"
    )
    said = f"amax {amax:.9g}; the inverse of the scale is {[float(one) for one in found]}, wanted {wanted:.9g}"
    return Check(name, part.passed, (part,), said)
