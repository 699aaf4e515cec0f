"""What the low-precision path refuses, whatever it is given: each says what happened, why, and what to do next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from ..bench import Bench

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
        _check_not_finite(bench, recipe, partial(enter, recipe=recipe))
        _check_state(bench, recipe, enter)


def _check_scopes(bench: Bench, recipe: str, enter: Callable[..., Any]) -> None:
    """FP8 asked on another machine than the one that is there, or on the CPU; and inside of itself."""
    errors, targets = bench.bridge("errors"), bench.bridge("recipes").TARGETS
    elsewhere = "cpu" if bench.device == "cuda" else "h200"
    bench.refuses(f"target.{elsewhere}", errors.WrongTarget, partial(enter, target=elsewhere, recipe=recipe))
    have = targets[bench.order.target.id].recipes
    for other in (name for name in bench.bridge("recipes").RECIPES if name not in have):
        bench.refuses(f"recipe.{other}", errors.WrongTarget, partial(enter, recipe=other))
        _says(bench, *(row.id for row in targets.values() if other in row.recipes))
    with enter(recipe=recipe) as opened:
        bench.refuses("second-entry", errors.ScopeEnteredTwice, lambda: enter(recipe=recipe).__enter__())
        _says(bench, opened.entered_at)


def _check_history(bench: Bench) -> None:
    make, errors = bench.bridge("te_fp8").te_delayed_scaling, bench.bridge("errors")
    for length in (0, -1):
        bench.refuses(f"history.{length}", errors.WrongOption, partial(make, amax_history_len=length))
        _says(bench, str(length))


def _says(bench: Bench, *words: str) -> None:
    """The refusal that was seen last names these; that is a check of its own."""
    last = bench.checks[-1]
    missing = [word for word in words if word not in last.detail]
    bench.check(f"{last.name}.says", not missing, f"without {', '.join(missing)}: {last.detail}" if missing else "")


def _takes(bench: Bench, name: str, call: Callable[[], Any], said: str) -> None:
    """The call must raise nothing."""
    try:
        call()
    except Exception as fault:
        bench.check(name, False, f"{type(fault).__name__}: {fault}")
    else:
        bench.check(name, True, said)


class _Pair(torch.nn.Module):
    """Two layers of Transformer Engine one after the other: [..., WIDTH] -> [..., WIDTH]."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        make = bench.bridge("imports").linear.require()
        given: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": bench.device}
        self.first, self.second = make(WIDTH, WIDTH, **given), make(WIDTH, WIDTH, **given)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(bench.randn(WIDTH, WIDTH, scale=WIDTH**-0.5))

    def forward(self, rows: Any, damage: Any = None) -> Any:
        """`damage` is added between the two."""
        between = self.first(rows)
        return self.second(between if damage is None else between + damage)


def _rows(bench: Bench, count: int = ROWS) -> Any:
    return bench.randn(count, WIDTH, dtype=torch.bfloat16, grad=True)


def _check_sizes_and_places(bench: Bench, recipe: str, enter: Callable[[], Any]) -> None:
    """Rows that the recipe cannot take, and rows on the CPU; outside of the scope the same layer takes them."""
    health, errors = bench.bridge("amax_health"), bench.bridge("errors")
    model = _Pair(bench)
    with health.Fp8Guard(model):
        model(_rows(bench, 5))

        def low(rows: Any) -> Any:
            with enter():
                return model(rows)

        for count in (5, 24):  # Transformer Engine takes 24 forward, and raises in the backward pass
            bench.refuses(f"rows.{count}", errors.NotDivisible, partial(low, _rows(bench, count)))
            _says(bench, "first", f"{count} rows", f"rows in multiples of {32 if recipe == 'mxfp8' else 16}")
        if bench.device == "cuda":
            bench.refuses("rows-on-the-cpu", errors.WrongTarget, lambda: low(_rows(bench).cpu()))
            _says(bench, "first", "cpu")
        _takes(bench, "rows.taken", partial(low, _rows(bench)), "what the recipe can take is let through")


def _check_not_finite(bench: Bench, recipe: str, enter: Callable[[], Any]) -> None:
    """A NaN or an infinity in what a layer is given: the tensor, the layer and the step are named, whatever the recipe.

    And a step whose numbers are all finite, however large, is let through.
    """
    del recipe
    health = bench.bridge("amax_health")
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
            bench.refuses(name, health.NotFinite, partial(guard.end_step, STEP))
            _says(bench, *words, f"step {STEP}")
        with torch.no_grad():
            model.first.weight[2, 2] = float("nan")
        step()
        bench.refuses("nan.weight", health.NotFinite, partial(guard.end_step, STEP))
        _says(bench, "NaN", "the weight of the layer first", f"step {STEP}")
        with torch.no_grad():
            model.first.weight[2, 2] = 0.0
        step(damage=hole(2.0**100))
        _takes(bench, "finite.taken", partial(guard.end_step, STEP), "a step of finite numbers is let through")


def _check_state(bench: Bench, recipe: str, enter: Callable[..., Any]) -> None:
    """State of another recipe, both ways; nothing is loaded where it is refused, and its own is taken."""
    loading = bench.bridge("recipe_state")
    have = [name for name in bench.order.target.recipes if not bench.bridge("fp8_scope").why_recipe_is_refused(name)]
    if "delayed" not in have:
        return
    other = next((name for name in have if name != recipe), None) if recipe == "delayed" else "delayed"
    if other is None:
        return
    states = {name: _trained(bench, partial(enter, recipe=name)).state_dict() for name in (recipe, other)}
    model = _Pair(bench)
    before = [weight.detach().clone() for weight in model.parameters()]
    bench.refuses(
        f"state.{other}",
        loading.WrongState,
        lambda: loading.load_fp8_state_dict(model, states[other], recipe=recipe),
    )
    _says(bench, "first", "nothing was loaded")
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
