"""One FP8 recipe on a target: that it ran and no other, its numbers, its state, what its casts lose, what it refuses.

`Linear`, `LayerNormMLP` and `GroupedLinear` are held to fp64, forward and every gradient; what cast each operand is
read off the products themselves; delayed scaling's histories and scales, and the scales of current scaling, are
re-computed. On a target that lacks the recipe, its being refused is looked at, and nothing else.

`LayerNormMLP` and `GroupedLinear` under a recipe: forward and every gradient, and what each product was given.

What the low-precision path refuses, whatever it is given: each says what happened, why, and what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from ...evidence.receipt import Check, Part
from ..bench import Bench
from ..emulation import EMULATED, FORMATS, LARGEST, Recipe, emulated_grouped, emulated_mlp, operand_roundings
from ..expert_bank import Bank, leaves_of, named
from ..fp8_linear import check_recipe
from ..low_precision import low_precision_ran
from ..memory import Enter
from ..references import layers as reference
from ..references import roundings as counted
from ..references.delayed_scaling import Update
from ..trial import Tensors, formula_pass, layer_trial, run_pass, try_case
from .quantizers import Operand, check_operands, watching_operands
from .scopes import check_resumed, check_scopes
from .state import check_delayed_state, check_shares, check_shares_of_a_cast, default_update, ulps

EPS: Final = 1e-5
# Rows of each expert, in multiples of 16, which every recipe takes; one is idle, as in training.
COUNTS: Final = (48, 0, 112, 96)
TIMES_ON_GPU: Final = 2


def check_mlp(bench: Bench, recipe: Recipe, enter: Enter) -> None:
    """Norm and gated MLP as one layer; the checks are `fp8.RECIPE.mlp.*`."""
    path = f"fp8.{recipe}.mlp"  # multiples of 128, which every recipe takes
    count, hidden, ffn = (128, 128, 128) if bench.quick or bench.device == "cpu" else (512, 384, 512)
    layer = bench.bridge("imports").layernorm_mlp.require()(
        hidden_size=hidden, ffn_hidden_size=ffn, eps=EPS, bias=False, normalization="RMSNorm",
        activation="swiglu", params_dtype=torch.bfloat16, device=bench.device,
    )  # fmt: skip
    with torch.no_grad():
        for value in layer.parameters():
            mean, deviation = (1.0, 0.2) if value.dim() == 1 else (0.0, value.shape[-1] ** -0.5)
            value.copy_(mean + bench.randn(*value.shape, scale=deviation))
    rows = (bench.randn(count, hidden) + 0.5).bfloat16().requires_grad_()
    precision = replace(counted.precision_of("bf16", recipe=recipe), smallest=hidden * min(count, ffn))
    with enter() as opened:
        choice = opened.choice
    trial = layer_trial(
        path,
        layer,
        rows,
        choice,
        formula=partial(reference.mlp, activation="swiglu", eps=EPS),
        roundings=partial(counted.mlp_roundings, precision=precision, length=ffn, gated=True),
        native=partial(emulated_mlp, recipe=recipe, activation="swiglu", eps=EPS),
        enter=enter,
        steps=2,  # delayed scales come from the step before
    )
    try_case(bench, trial)
    with watching_operands() as seen:
        run_pass(trial.call, trial.leaves, bench.randn(*rows.shape, dtype=torch.bfloat16), enter)
    check_operands(bench, path, recipe, seen, dict.fromkeys(FORMATS, 2))


def check_experts(bench: Bench, recipe: Recipe, enter: Enter) -> None:
    """A bank of experts, one of them idle; the checks are `fp8.RECIPE.experts.*`."""
    on_gpu, path = bench.device == "cuda" and not bench.quick, f"fp8.{recipe}.experts"
    width, out = (256, 384) if on_gpu else (128, 128)
    counts = tuple(count * (TIMES_ON_GPU if on_gpu else 1) for count in COUNTS)
    rows = bench.randn(sum(counts), width, dtype=torch.bfloat16, grad=True)
    weights = torch.stack([bench.randn(out, width, dtype=torch.bfloat16, scale=width**-0.5) for _ in counts])
    bank = Bank(rows, weights, counts, bench.randn(sum(counts), out, dtype=torch.bfloat16))
    layer = bench.bridge("imports").grouped_linear.require()(
        len(counts), width, out, bias=False, params_dtype=torch.bfloat16, device=bench.device
    )
    with torch.no_grad():
        for into, given in zip(layer.parameters(), weights, strict=True):
            into.copy_(given)
    for _ in range(2):  # delayed scales come from the step before
        with watching_operands() as operands:
            call = partial(layer, bank.rows, list(counts))
            seen = named(run_pass(call, leaves_of(layer, bank), bank.gradient, enter))
    with enter() as opened:
        bench.ran_on(path, opened.choice, seen["forward"])
    _compare(bench, path, recipe, bank, seen)
    check_operands(bench, path, recipe, operands, dict.fromkeys(FORMATS, len(counts)))


def _compare(bench: Bench, path: str, recipe: Recipe, bank: Bank, seen: Tensors) -> None:
    """Output, gradient of the rows, and of each expert's weight; that of an idle one is zeros."""

    def emulated(given: Tensors) -> Any:
        weights = [given[f"weight{expert}"] for expert in range(len(bank.counts))]
        return emulated_grouped(given["rows"], weights, bank.counts, recipe)

    native, roundings = (
        formula_pass(emulated, bank.operands, bank.gradient),
        bank.roundings(partial(operand_roundings, recipe)),
    )
    for tensor, exact in bank.exact().items():
        name = tensor.replace("grad.rows", "dgrad").replace("grad.weight", "wgrad")
        found, rounded = seen[tensor], roundings(tensor)
        bench.compare(f"{path}.{name}", found, exact, roundings=rounded, native=native[tensor])
        if found is not None and bool(exact.any()):
            part = low_precision_ran(float((found.detach().double() - exact).norm() / exact.norm()), rounded)
            bench.checks.append(Check(f"{path}.{name}.applied", part.passed, (part,)))


WIDTH: Final = 64
ROWS: Final = 32
STEP: Final = 7


def check_refusals(bench: Bench, recipe: str, enter: Callable[..., Any]) -> None:
    """Bad input of a recipe that the target has; the checks are `fp8.RECIPE.refuses.*`.

    Args:
        bench: of the probe.
        recipe: which one.
        enter: makes a scope of the target; takes `recipe`, and another `target`.
    """
    with bench.scope(f"fp8.{recipe}.refuses"):
        _check_scopes(bench, recipe, enter)
        _check_history(bench)
        _check_sizes_and_places(bench, recipe, partial(enter, recipe=recipe))
        _check_not_finite(bench, partial(enter, recipe=recipe))
        _check_state(bench, recipe, enter)


def _check_scopes(bench: Bench, recipe: str, enter: Callable[..., Any]) -> None:
    """FP8 asked on another machine than the one that is there, or on the CPU; and inside of itself."""
    errors, targets = bench.bridge("errors"), bench.bridge("recipes").TARGETS
    elsewhere = "cpu" if bench.device == "cuda" else "h200"
    bench.refuses(f"target.{elsewhere}", errors.WrongTarget, partial(enter, target=elsewhere, recipe=recipe))
    have = targets[bench.order.target.id].recipes
    for other in (name for name in bench.bridge("recipes").RECIPES if name not in have):
        having = (row.id for row in targets.values() if other in row.recipes)
        _refuses(bench, f"recipe.{other}", errors.WrongTarget, partial(enter, recipe=other), *having)
    with enter(recipe=recipe) as opened:
        again = enter(recipe=recipe)
        _refuses(bench, "second-entry", errors.ScopeEnteredTwice, again.__enter__, opened.entered_at)


def _check_history(bench: Bench) -> None:
    make, errors = bench.bridge("te_fp8").te_delayed_scaling, bench.bridge("errors")
    for length in (0, -1):
        call = partial(make, amax_history_len=length)
        _refuses(bench, f"history.{length}", errors.WrongOption, call, str(length))


def _refuses(bench: Bench, name: str, error: type[BaseException], call: Callable[[], Any], *words: str) -> None:
    """The call must raise this error; that its text has these words is a check of its own."""
    bench.refuses(name, error, call)
    if words:
        said = bench.checks[-1].detail
        missing = [word for word in words if word not in said]
        bench.check(f"{name}.says", not missing, f"without {', '.join(missing)}: {said}" if missing else "")


def _takes(bench: Bench, name: str, call: Callable[[], Any], said: str) -> None:
    """The call must raise nothing."""
    try:
        call()
    except Exception as fault:
        said, passed = f"{type(fault).__name__}: {fault}", False
    else:
        passed = True
    bench.check(name, passed, said)


class _Pair(torch.nn.Module):
    """Two layers of Transformer Engine one after the other: [..., WIDTH] -> [..., WIDTH]."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.first, self.second = (_new_linear(bench, WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, rows: Any, damage: Any = None) -> Any:
        """`damage` is added between the two."""
        between = self.first(rows)
        return self.second(between if damage is None else between + damage)


def _rows(bench: Bench, count: int = ROWS) -> Any:
    return bench.randn(count, WIDTH, dtype=torch.bfloat16, grad=True)


def _check_sizes_and_places(bench: Bench, recipe: str, enter: Callable[[], Any]) -> None:
    """Rows that the recipe cannot take, and rows on the CPU; outside of the scope the same layer takes them."""
    health, errors = bench.bridge("layer_watch"), bench.bridge("errors")
    model = _Pair(bench)
    with health.Fp8Guard(model):
        model(_rows(bench, 5))

        def low(rows: Any) -> Any:
            with enter():
                return model(rows)

        for count in (5, 24):  # Transformer Engine takes 24 forward, and raises in the backward pass
            words = ("first", f"{count} rows", f"rows in multiples of {32 if recipe == 'mxfp8' else 16}")
            _refuses(bench, f"rows.{count}", errors.NotDivisible, partial(low, _rows(bench, count)), *words)
        if bench.device == "cuda":
            _refuses(bench, "rows-on-the-cpu", errors.WrongTarget, lambda: low(_rows(bench).cpu()), "first", "cpu")
        _takes(bench, "rows.taken", partial(low, _rows(bench)), "what the recipe can take is let through")


def _check_not_finite(bench: Bench, enter: Callable[[], Any]) -> None:
    """A NaN or an infinity in what a layer is given: the tensor, the layer and the step are named, whatever the recipe.

    And a step whose numbers are all finite, however large, is let through.
    """
    health = bench.bridge("layer_watch")
    model = _Pair(bench)

    def hole(value: float) -> Any:
        made = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device=bench.device)
        made[3, 5] = value
        return made

    def step(damage: Any = None, between: Any = None, gradient: Any = None) -> None:
        rows = _rows(bench).detach() + (0.0 if damage is None else damage)
        with enter():
            out = model(rows.requires_grad_(), between)
        given = bench.randn(ROWS, WIDTH, dtype=torch.bfloat16)
        out.backward(given if gradient is None else given + gradient)
        model.zero_grad(set_to_none=True)

    with health.Fp8Guard(model) as guard:
        cases: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
            "nan.first-input": ({"damage": hole(float("nan"))}, ("NaN", "the input of the layer first")),
            "nan.second-input": ({"between": hole(float("nan"))}, ("NaN", "the input of the layer second")),
            "infinity.input": ({"damage": hole(float("inf"))}, ("infinity", "the input of the layer first")),
            "nan.gradient": ({"gradient": hole(float("nan"))}, ("NaN", "gradient of the output of the layer second")),
        }
        for name, (damages, words) in cases.items():
            step(**damages)
            _refuses(bench, name, health.NotFinite, partial(guard.end_step, STEP), *words, f"step {STEP}")
        with torch.no_grad():
            model.first.weight[2, 2] = float("nan")
        step()
        words = ("NaN", "the weight of the layer first", f"step {STEP}")
        _refuses(bench, "nan.weight", health.NotFinite, partial(guard.end_step, STEP), *words)
        with torch.no_grad():
            model.first.weight[2, 2] = 0.0
        step(damage=hole(2.0**100))
        _takes(bench, "finite.taken", partial(guard.end_step, STEP), "a step of finite numbers is let through")


def _check_state(bench: Bench, recipe: str, enter: Callable[..., Any]) -> None:
    """State of another recipe, both ways; nothing is loaded where it is refused, and its own is taken."""
    loading = bench.bridge("extra_state")
    have = [name for name in bench.order.target.recipes if not bench.bridge("fp8_scope").why_recipe_is_refused(name)]
    if "delayed" not in have:
        return
    other = next((name for name in have if name != recipe), None) if recipe == "delayed" else "delayed"
    if other is None:
        return
    states = {name: _trained(bench, partial(enter, recipe=name)).state_dict() for name in (recipe, other)}
    model = _Pair(bench)
    before = [weight.detach().clone() for weight in model.parameters()]
    load = partial(loading.load_fp8_state_dict, model, states[other], recipe=recipe)
    _refuses(bench, f"state.{other}", loading.WrongState, load, "first", "nothing was loaded")
    same = all(torch.equal(weight, old) for weight, old in zip(model.parameters(), before, strict=True))
    bench.check(f"state.{other}.nothing-loaded", same, "the weights are as they were")
    _takes(
        bench,
        f"state.{recipe}.taken",
        lambda: loading.check_fp8_state(model, states[recipe], recipe=recipe),
        "its own state is let through",
    )
    said = "all of it was loaded"
    try:
        loading.load_fp8_state_dict(model, states[recipe], recipe=recipe)
        wanted = [states[recipe][f"{layer}.weight"] for layer in ("first", "second")]
    except loading.WrongState as fault:  # a release that does not unpickle says so before anything is loaded
        said, wanted = str(fault), before
    whole = all(torch.equal(weight, value) for weight, value in zip(model.parameters(), wanted, strict=True))
    bench.check(f"state.{recipe}.whole", whole and (wanted is not before or "Next step" in said), said)


def _trained(bench: Bench, enter: Callable[[], Any]) -> Any:
    model = _Pair(bench)
    with enter():
        out = model(_rows(bench))
    out.backward(bench.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    return model


HISTORY: Final = 16
SQUARE: Final = 256  # two blocks of 128
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
    square = partial(_new_linear, bench, SQUARE, SQUARE)
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


def _new_linear(bench: Bench, width: int, out: int, *, bias: bool = True) -> Any:
    layer = bench.bridge("imports").linear.require()(
        width, out, bias=bias, params_dtype=torch.bfloat16, device=bench.device
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
    layer = _new_linear(bench, SQUARE, 2 * SQUARE)
    rows, gradient = (bench.randn(SQUARE, width, dtype=torch.bfloat16) for width in (SQUARE, 2 * SQUARE))
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
