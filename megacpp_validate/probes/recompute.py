"""Recomputation by the vendor's checkpoint: what it gives is what the same layers give without it, to the bit.

Transformer Engine promises that: under delayed scaling the second forward pass takes the scales of the first ("to
ensure both forward steps are numerically same", `pytorch/quantization.py`, 2.12 to 2.20). So layers with a checkpoint
are held to the very same layers without one, wherever these give the same bits twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..evidence.receipt import Check
from .bench import Bench
from .emulation import EMULATED, Product, Recipe, operand_roundings
from .low_precision import low_precision_ran
from .memory import Enter

WAYS: Final = {"reentrant": True, "not-reentrant": False}
STEPS: Final = (1.0, 3.0)  # another amax each step, so that scales of delayed scaling move between them
PRODUCTS: Final[tuple[tuple[str, Product], ...]] = (
    ("rows", "dgrad"), ("first.weight", "wgrad"), ("second.weight", "wgrad"),
)  # fmt: skip


@dataclass(frozen=True)
class _Sample:
    """Rows [R, K], weights [N, K] and [K, N] of two layers, gradient of the output [R, K]; bf16."""

    rows: Any
    weights: tuple[Any, Any]
    gradient: Any


@dataclass(frozen=True)
class _Seen:
    """What some steps gave.

    Attributes:
        outs: of each step.
        grads: of each step, by name.
        history: by layer and tensor, the amax values that delayed scaling remembers, in their order, and its scale.
    """

    outs: tuple[Any, ...]
    grads: tuple[dict[str, Any], ...]
    history: dict[str, tuple[tuple[float, ...], float]]


def check_recompute(bench: Bench, recipes: Mapping[Any, Enter]) -> None:
    """Both kinds of checkpoint, in bf16 and in every recipe.

    Args:
        bench: its checks so far tell which recipes the layer itself is right in: no others are judged here.
        recipes: the scope of each.
    """
    if bench.bridge().checkpoint() is None:  # the check of the accessor has said so
        return
    sample = _new_sample(bench)
    for name, enter in {"bf16": nullcontext, **{f"fp8.{recipe}": enter for recipe, enter in recipes.items()}}.items():
        about = (f"{name}.", "amax.") if name == "fp8.delayed" else (f"{name}.",)
        if wrong := next((c.name for c in bench.checks if not c.passed and c.name.startswith(about)), ""):
            bench.check(f"recompute.{name}.judged", True, f"not judged: without it {wrong} fails already")
            continue
        delayed = name == "fp8.delayed"
        plain, again = (_run(bench, sample, enter, delayed=delayed) for _ in range(2))
        without_grad = _first_out(bench, sample, enter)
        steady_out = _same(plain.outs, again.outs) and torch.equal(plain.outs[0], without_grad)
        steady = {key for key in plain.grads[0] if _same(_of(plain, key), _of(again, key))}
        for way, reentrant in WAYS.items():
            seen = _run(bench, sample, enter, reentrant=reentrant, delayed=delayed)
            with bench.scope(f"recompute.{name}.{way}"):
                _compare(bench, seen, plain, steady, steady_out=steady_out)
                if name != "bf16" and name.removeprefix("fp8.") in EMULATED:
                    bench.checks.append(_applied(sample, seen, name.removeprefix("fp8.")))  # type: ignore[arg-type]


def _compare(bench: Bench, seen: _Seen, plain: _Seen, steady: set[str], *, steady_out: bool) -> None:
    """To the bit, but for what differs without a checkpoint as well."""
    if steady_out:
        kept = _same(plain.outs, seen.outs)
        bench.check("forward", kept, f"{'the same' if kept else 'other'} bits, with a checkpoint and without one")
    names = [name for name in plain.grads[0] if name in steady]
    different = [name for name in names if not _same(_of(plain, name), _of(seen, name))]
    left_out = f"; not steady by itself: {', '.join(sorted(set(plain.grads[0]) - steady))}"
    said = f"other bits than without a checkpoint: {', '.join(different)}" if different else "the same bits"
    bench.check("grad", not different, said + (left_out if len(names) < len(plain.grads[0]) else ""))
    if plain.history:
        moved = [f"{name}: {seen.history[name]}, not {kept}" for name, kept in plain.history.items()
                 if seen.history[name] != kept]  # fmt: skip
        bench.check("history", not moved, "; ".join(moved) or "each amax is remembered once, and the scales are those")


def _applied(sample: _Sample, seen: _Seen, recipe: Recipe) -> Check:
    """That the second forward pass and its gradients ran in low precision: too accurate a gradient did not."""
    rows, weights = sample.rows.double() * STEPS[-1], [weight.double() for weight in sample.weights]
    gradient = sample.gradient.double() * STEPS[-1]
    back = gradient @ weights[1]
    between = rows @ weights[0].T
    wanted = {"rows": back @ weights[0], "first.weight": back.T @ rows, "second.weight": gradient.T @ between}
    lengths = {"dgrad": weights[0].shape[0], "wgrad": rows.shape[0]}
    parts = []
    for name, which in PRODUCTS:
        grad = seen.grads[-1][name]
        error = 0.0 if grad is None else float((grad.double() - wanted[name]).norm() / wanted[name].norm())
        last = operand_roundings(recipe, which, lengths[which])
        parts.append(low_precision_ran(error, last, f"gradient of {name}, of its last product alone"))
    return Check("grad.applied", all(part.passed for part in parts), tuple(parts))


# --- runs -------------------------------------------------------------------------------------------------


def _new_sample(bench: Bench) -> _Sample:
    """Multiples of 128, which every recipe takes; outputs of order 1."""
    rows, width, inner = (128, 128, 128) if bench.quick or bench.device == "cpu" else (256, 512, 384)
    made = {"dtype": torch.bfloat16}
    return _Sample(
        bench.randn(rows, width, **made),
        (bench.randn(inner, width, scale=width**-0.5, **made), bench.randn(width, inner, scale=inner**-0.5, **made)),
        bench.randn(rows, width, **made),
    )


def _new_layers(bench: Bench, sample: _Sample) -> tuple[Any, Any]:
    """Two layers, one after the other, with no state yet."""
    made = []
    for weight in sample.weights:
        layer = bench.bridge().linear.require()(
            weight.shape[1], weight.shape[0], bias=False, params_dtype=torch.bfloat16, device=bench.device
        )
        with torch.no_grad():
            layer.weight.copy_(weight)
        made.append(layer)
    return made[0], made[1]


def _run(bench: Bench, sample: _Sample, enter: Enter, *, reentrant: bool | None = None, delayed: bool = False) -> _Seen:
    """Some steps of fresh layers, with a checkpoint around both of them or (`reentrant` None) without one."""
    first, second = _new_layers(bench, sample)
    scope = bench.bridge("fp8_scope")

    def both(rows: Any) -> Any:
        return second(first(rows))

    outs, grads = [], []
    for factor in STEPS:
        for layer in (first, second):
            layer.zero_grad(set_to_none=True)
        leaf = (sample.rows * factor).requires_grad_()
        with enter():
            out = both(leaf) if reentrant is None else scope.te_recompute(both, leaf, use_reentrant=reentrant)
        out.backward(sample.gradient * factor)
        outs.append(out.detach())
        grads.append({"rows": leaf.grad, "first.weight": first.weight.grad, "second.weight": second.weight.grad})
    history = _history(scope, {"first": first, "second": second}) if delayed else {}
    return _Seen(tuple(outs), tuple(grads), history)


def _first_out(bench: Bench, sample: _Sample, enter: Enter) -> Any:
    """Output of the first step where no gradients are wanted, as a reentrant checkpoint computes it."""
    first, second = _new_layers(bench, sample)
    with torch.no_grad(), enter():
        return second(first(sample.rows * STEPS[0]))


def _history(scope: Any, layers: Mapping[str, Any]) -> dict[str, tuple[tuple[float, ...], float]]:
    """Amax values without the steps in which there was none, and scales.

    Transformer Engine lets histories move on once more at the end of a second forward pass, with nothing new in them:
    that drops no amax here, and leaves the scales as they are.
    """
    found = {}
    for name, layer in layers.items():
        for tensor, forward, column in (("input", True, 0), ("weight", True, 1), ("gradient", False, 0)):
            history, scale = scope.te_amax_state(layer, forward=forward)
            seen = tuple(value for value in history[:, column].tolist() if value)
            found[f"{name}.{tensor}"] = seen, float(scale[column])
    return found


def _of(seen: _Seen, name: str) -> tuple[Any, ...]:
    return tuple(step[name] for step in seen.grads)


def _same(some: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether tensors are there and bitwise the same."""
    pairs = zip(some, other, strict=True)
    return all(one is not None and two is not None and torch.equal(one, two) for one, two in pairs)
