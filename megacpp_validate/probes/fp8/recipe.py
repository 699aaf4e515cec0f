"""One FP8 recipe on a target: that it ran and no other, its numbers, its state, what its casts lose, what it refuses.

`Linear`, `LayerNormMLP` and `GroupedLinear` are held to fp64, forward and every gradient; what cast each operand is
read off the products themselves; delayed scaling's histories and scales, and the scales of current scaling, are
re-computed. On a target that lacks the recipe, its being refused is looked at, and nothing else.

What the low-precision path refuses, whatever it is given, says what happened, why, and what to do next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from ...evidence.receipt import Part
from .. import emulation as counted
from .. import references as reference
from ..bench import Bench, different
from ..emulation import EMULATED, LARGEST, Recipe, Update, emulated_mlp, operand_roundings
from ..expert_gemm import Bank, leaves_of, named
from ..fp8_linear import check_recipe
from ..observe import Enter
from ..trial import formula_pass, layer_trial, run_pass, try_case
from .quantizers import Operand, check_operands, watching_operands
from .scopes import check_resumed, check_scopes
from .state import check_casts, check_delayed_state, default_update, ulps

BF16: Final = torch.bfloat16
EPS: Final = 1e-5
# Rows of each expert, in multiples of 16, which every recipe takes; one is idle, as in training.
COUNTS: Final = (48, 0, 112, 96)
TIMES_ON_GPU: Final = 2
SQUARE: Final = 256  # two blocks of 128
# Two quotients, 448 / amax and 1 / scale, each of which a fast division may leave one unit off.
ULPS: Final = 2.0
# Words of Transformer Engine's own reasons where a device lacks a recipe (`pytorch/quantization.py`, 2.12 and 2.20).
REASONS: Final = ("compute capability", "architectures")


def probe(bench: Bench) -> None:
    """Look at the recipe that the cell is set to."""
    recipe = bench.setting("recipe", "delayed")
    if recipe not in bench.order.target.recipes:
        _check_lacking(bench, recipe)
        return
    if not bench.wants_te:
        bench.cannot_run(
            f"{recipe} runs in Transformer Engine only, which was not requested. Next step: request it, or leave this "
            "cell out."
        )
    refused = bench.bridge("fp8_scope").why_recipe_is_refused(recipe)
    bench.check(f"fp8.{recipe}.supported", not refused, refused or "Transformer Engine has it on this device")
    if not refused:
        _check_recipe(bench, recipe, bench.low_precision(recipe))


# --- a target that lacks it ---------------------------------------------------------------------------------------


def _check_lacking(bench: Bench, recipe: str) -> None:
    """Transformer Engine refuses it by itself, for this device; the bridge refuses it and names who has it."""
    errors, targets, name = bench.bridge("errors"), bench.bridge("recipes").TARGETS, f"fp8.{recipe}"
    having = [row.id for row in targets.values() if recipe in row.recipes]
    bench.refuses(f"{name}.bridge-refuses", errors.WrongTarget, bench.low_precision(recipe))
    said = bench.checks[-1].detail
    named_targets = [target for target in having if target in said]
    bench.check(f"{name}.bridge-names-targets", bool(having) and named_targets == having, said)
    if not bench.wants_te:
        bench.cannot_run(
            f"whether {recipe} is refused is for Transformer Engine to say, and it was not requested. Next step: "
            "request it, or leave this cell out."
        )
    scope = bench.bridge("fp8_scope")
    reason = scope.why_recipe_is_refused(recipe)
    surprise = f"surprise: Transformer Engine has {recipe} here, and the row of {bench.order.target.id} has not"
    raised = _own_scope_raises(scope, recipe)
    bench.check(f"{name}.te-refuses", bool(reason), reason or surprise)
    bench.check(f"{name}.te-says-why", any(words in reason for words in REASONS), reason or surprise)
    bench.check(f"{name}.te-scope-refuses", bool(reason) and reason in raised, raised or surprise)
    still = scope.te_state()
    bench.check(f"{name}.te-stays-off", not still["enabled"], f"after a reset: {still}")
    bench.unsupported = f"Transformer Engine: {reason} Targets with {recipe}: {', '.join(having)}."


def _own_scope_raises(scope: Any, recipe: str) -> str:
    """What Transformer Engine's own scope raises, which it leaves on (2.12 to 2.20): its state is reset."""
    try:
        with scope.te_scope(enabled=True, recipe=te_recipe(scope, recipe), amax_reduction_group=None):
            return ""
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"
    finally:
        scope.reset_te_state()


def te_recipe(scope: Any, recipe: str, **of_delayed: Any) -> Any:
    """Transformer Engine's own object of a recipe."""
    made = {"mxfp8": "te_mxfp8", "nvfp4": "te_nvfp4", "block": "te_block_scaling", "current": "te_current_scaling"}
    return getattr(scope, made[recipe])() if recipe in made else scope.te_delayed_scaling(**of_delayed)


# --- a target that has it -----------------------------------------------------------------------------------------


def _check_recipe(bench: Bench, name: str, enter: Enter) -> None:
    check_recipe(bench, name, enter)
    rows, gradient = (bench.randn(SQUARE, width, dtype=BF16) for width in (SQUARE, 2 * SQUARE))
    seen = _step(_new_linear(bench, SQUARE, 2 * SQUARE), enter, rows, gradient)
    check_operands(bench, f"fp8.{name}.linear", name, seen, 1)
    with bench.scope(f"fp8.{name}.refuses"):
        _check_sizes_and_places(bench, name, enter)
        _check_not_finite(bench, enter)
        _check_state(bench, name)
    if name not in EMULATED:  # 4 bits, random transforms and stochastic rounding: what can be said is said above
        return
    recipe: Recipe = name
    check_mlp(bench, recipe, enter)
    check_experts(bench, recipe, enter)
    square, update = partial(_new_linear, bench, SQUARE, SQUARE), default_update(bench.device)
    if recipe == "delayed":
        update = _check_zero_step(bench, enter)
        check_delayed_state(bench, _new_linear(bench, 64, 96), enter, update=update, name="fp8.delayed.state")
    check_casts(bench, square, enter, recipe, update, f"fp8.{recipe}.shares")
    if recipe == "delayed":
        check_scopes(bench, enter, update=update, name="fp8.delayed.scopes")
        check_resumed(bench, enter, name="fp8.delayed.resumed")
    if recipe == "current":
        _check_current_scales(bench, enter)


def _new_linear(bench: Bench, width: int, out: int, *, bias: bool = True) -> Any:
    layer = bench.te_layer("linear", width, out, bias=bias)
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


def check_mlp(bench: Bench, recipe: Recipe, enter: Enter) -> None:
    """Norm and gated MLP as one layer; the checks are `fp8.RECIPE.mlp.*`."""
    path = f"fp8.{recipe}.mlp"  # multiples of 128, which every recipe takes
    count, hidden, ffn = (128, 128, 128) if bench.quick or bench.device == "cpu" else (512, 384, 512)
    options = {"eps": EPS, "normalization": "RMSNorm", "activation": "swiglu"}
    layer = bench.filled(bench.te_layer("layernorm_mlp", hidden, ffn, **options))
    rows = (bench.randn(count, hidden) + 0.5).bfloat16().requires_grad_()
    precision = replace(counted.precision_of("bf16", recipe=recipe), smallest=hidden * min(count, ffn))
    with enter() as opened:
        choice = opened.choice
    given = {
        "formula": partial(reference.mlp, activation="swiglu", eps=EPS),
        "roundings": partial(counted.mlp_roundings, precision=precision, length=ffn, gated=True),
        "native": partial(emulated_mlp, recipe=recipe, activation="swiglu", eps=EPS),
    }
    trial = layer_trial(path, layer, rows, choice, enter=enter, steps=2, **given)  # delayed scales: of the step before
    try_case(bench, trial)
    with watching_operands() as seen:
        run_pass(trial.call, trial.leaves, bench.randn(*rows.shape, dtype=BF16), enter)
    check_operands(bench, path, recipe, seen, 2)


def check_experts(bench: Bench, recipe: Recipe, enter: Enter) -> None:
    """A bank of experts, one of them idle; the checks are `fp8.RECIPE.experts.*`."""
    on_gpu, path = bench.device == "cuda" and not bench.quick, f"fp8.{recipe}.experts"
    width, out = (256, 384) if on_gpu else (128, 128)
    counts = tuple(count * (TIMES_ON_GPU if on_gpu else 1) for count in COUNTS)
    rows = bench.randn(sum(counts), width, dtype=BF16, grad=True)
    weights = torch.stack([bench.randn(out, width, dtype=BF16, scale=width**-0.5) for _ in counts])
    bank = Bank(rows, weights, counts, bench.randn(sum(counts), out, dtype=BF16))
    layer = bench.te_layer("grouped_linear", len(counts), width, out)
    with torch.no_grad():
        for into, given in zip(layer.parameters(), weights, strict=True):
            into.copy_(given)
    for _ in range(2):  # delayed scales come from the step before
        with watching_operands() as operands:
            call = partial(layer, bank.rows, list(counts))
            seen = named(run_pass(call, leaves_of(layer, bank), bank.gradient, enter))
    with enter() as opened:
        bench.ran_on(path, opened.choice, seen["forward"])
    native = formula_pass(bank.emulated(recipe), bank.operands, bank.gradient)
    roundings = bank.roundings(partial(operand_roundings, recipe))
    for tensor, exact in bank.exact().items():  # the gradient of an idle expert's weight is zeros
        name = f"{path}.{tensor.replace('grad.rows', 'dgrad').replace('grad.weight', 'wgrad')}"
        bench.compare(name, seen[tensor], exact, roundings=roundings(tensor), native=native[tensor])
        if seen[tensor] is not None and bool(exact.any()):
            bench.ran_low(f"{name}.applied", seen[tensor], exact, roundings(tensor))
    check_operands(bench, path, recipe, operands, len(counts))


def _check_zero_step(bench: Bench, enter: Enter) -> Update:
    """What a step of nothing but zeros does to a history, told apart from all else; what was seen holds from there on.

    The kernel that releases ship leaves the history as it is where the amax of a call is zero; the update in Python
    takes a zero in like any other amax (both seen on an H200 with 2.12.0 and 2.20.2, 2026-11-21).
    """
    read, layer = bench.bridge("fp8_scope").te_amax_state, _new_linear(bench, 64, 96)
    histories = []
    for factor in (1.0, 0.0):
        rows, gradient = (bench.randn(32, width, dtype=BF16) * factor for width in (64, 96))
        _step(layer, enter, rows, gradient)
        histories.append([read(layer, forward=way)[0][:, 0].tolist() for way in (True, False)])
    before, after = histories
    ways: dict[Update, list[list[float]]] = {
        "fused": before,
        "python": [[*history[1:], history[0]] for history in before],
    }
    wanted = default_update(bench.device)
    found = next((update for update, history in ways.items() if history == after), None)
    said = f"a step of zeros makes {before} to {after}, as the update {found or 'of neither'} does; expected: {wanted}"
    bench.check("fp8.delayed.zero-step", found == wanted, said)
    return found or wanted


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
            part = Part("ulps", off, ULPS, off <= ULPS, why)
            bench.check_parts(f"fp8.current.scale.{phase}.{tensor}", part, detail=said)


# --- wrong input of a recipe that the target has ------------------------------------------------------------------

WIDTH: Final = 64
ROWS: Final = 32
STEP: Final = 7
NAN: Final = float("nan")


class _Pair(torch.nn.Module):
    """Two layers of Transformer Engine one after the other: [..., WIDTH] -> [..., WIDTH]."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.first, self.second = (_new_linear(bench, WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, rows: Any, damage: Any = None) -> Any:
        """`damage` is added between the two."""
        between = self.first(rows)
        return self.second(between if damage is None else between + damage)


def _takes(bench: Bench, name: str, call: Callable[[], Any], said: str = "what is right is let through") -> None:
    """The call must raise nothing."""
    passed = True
    try:
        call()
    except Exception as fault:
        said, passed = f"{type(fault).__name__}: {fault}", False
    bench.check(name, passed, said)


def _rows(bench: Bench, count: int = ROWS) -> Any:
    return bench.randn(count, WIDTH, dtype=BF16, grad=True)


def _check_sizes_and_places(bench: Bench, recipe: str, enter: Enter) -> None:
    """Rows that the recipe cannot take, and rows on the CPU; outside of the scope the same layer takes them."""
    health, errors = bench.bridge("layer_watch"), bench.bridge("errors")
    model = _Pair(bench)

    def low(rows: Any) -> Any:
        with enter():
            return model(rows)

    with health.Fp8Guard(model):
        model(_rows(bench, 5))
        for count in (5, 24):  # Transformer Engine takes 24 forward, and raises in the backward pass
            words = ("first", f"{count} rows", f"rows in multiples of {32 if recipe == 'mxfp8' else 16}")
            bench.refuses(f"rows.{count}", errors.NotDivisible, partial(low, _rows(bench, count)), *words)
        if bench.device == "cuda":
            bench.refuses("rows-on-the-cpu", errors.WrongTarget, lambda: low(_rows(bench).cpu()), "first", "cpu")
        _takes(bench, "rows.taken", partial(low, _rows(bench)))


def _check_not_finite(bench: Bench, enter: Enter) -> None:
    """A NaN or an infinity in what a layer is given: the tensor, the layer and the step are named, whatever the recipe.

    And a step whose numbers are all finite, however large, is let through.
    """
    health, model = bench.bridge("layer_watch"), _Pair(bench)

    def hole(value: float) -> Any:
        made = torch.zeros(ROWS, WIDTH, dtype=BF16, device=bench.device)
        made[3, 5] = value
        return made

    def step(damage: Any = None, between: Any = None, gradient: Any = None) -> None:
        rows = _rows(bench).detach() + (0.0 if damage is None else damage)
        with enter():
            out = model(rows.requires_grad_(), between)
        given = bench.randn(ROWS, WIDTH, dtype=BF16)
        out.backward(given if gradient is None else given + gradient)
        model.zero_grad(set_to_none=True)

    def weigh(value: float) -> None:
        with torch.no_grad():
            model.first.weight[2, 2] = value

    with health.Fp8Guard(model) as guard:
        cases: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
            "nan.first-input": ({"damage": hole(NAN)}, ("NaN", "the input of the layer first")),
            "nan.second-input": ({"between": hole(NAN)}, ("NaN", "the input of the layer second")),
            "infinity.input": ({"damage": hole(math.inf)}, ("infinity", "the input of the layer first")),
            "nan.gradient": ({"gradient": hole(NAN)}, ("NaN", "gradient of the output of the layer second")),
            "nan.weight": ({}, ("NaN", "the weight of the layer first")),
        }
        for name, (damages, words) in cases.items():
            weigh(NAN if name == "nan.weight" else 0.0)
            step(**damages)
            bench.refuses(name, health.NotFinite, partial(guard.end_step, STEP), *words, f"step {STEP}")
        weigh(0.0)
        step(damage=hole(2.0**100))
        _takes(bench, "finite.taken", partial(guard.end_step, STEP))


def _check_state(bench: Bench, recipe: str) -> None:
    """State of another recipe, both ways; nothing is loaded where it is refused, and its own is taken."""
    loading = bench.bridge("extra_state")
    have = [name for name in bench.order.target.recipes if not bench.bridge("fp8_scope").why_recipe_is_refused(name)]
    other = next((name for name in have if name != recipe), None) if recipe == "delayed" else "delayed"
    if "delayed" not in have or other is None:
        return
    states = {name: _trained(bench, bench.low_precision(name)).state_dict() for name in (recipe, other)}
    model = _Pair(bench)

    def is_now(wanted: dict[str, Any]) -> bool:
        return not different(
            dict(model.named_parameters()), {name: wanted[name] for name, _ in model.named_parameters()}
        )

    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    load = partial(loading.load_fp8_state_dict, model, states[other], recipe=recipe)
    bench.refuses(f"state.{other}", loading.WrongState, load, "first", "nothing was loaded")
    bench.check(f"state.{other}.nothing-loaded", is_now(before), "the weights are as they were")
    _takes(bench, f"state.{recipe}.taken", partial(loading.check_fp8_state, model, states[recipe], recipe=recipe))
    said = "all of it was loaded"
    try:
        loading.load_fp8_state_dict(model, states[recipe], recipe=recipe)
        whole = is_now(states[recipe])
    except loading.WrongState as fault:  # a release that does not unpickle says so before anything is loaded
        said, whole = str(fault), is_now(before) and "Next step" in str(fault)
    bench.check(f"state.{recipe}.whole", whole, said)


def _trained(bench: Bench, enter: Enter) -> Any:
    model = _Pair(bench)
    with enter():
        out = model(_rows(bench))
    out.backward(bench.randn(ROWS, WIDTH, dtype=BF16))
    return model
