"""Delayed scaling's state in a checkpoint: what a layer saves is what a fresh one goes on with, to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from ..bench import Bench
from ..low_precision import Enter

FACTORS: Final = (1.0, 4.0, 0.5)  # of the tensors of each step: histories with rows that can be told apart
ROWS: Final = 32
# Since 2.17 the state of delayed scaling, which is a pickle, is read back only with this; the probe wrote it itself.
UNPICKLING: Final = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
DIRECTIONS: Final = {"forward": True, "backward": False}


def check_saved_state(bench: Bench, make: Callable[[], Any], enter: Enter, *, name: str) -> None:
    """Train a layer, load what it saves into a fresh one, and go on with both.

    The checks are `NAME.DIRECTION.history`, `NAME.DIRECTION.scale`, and `NAME.next-step`.

    Args:
        bench: of the probe.
        make: a linear layer that has never run, [R, K] -> [R, N].
        enter: makes the scope of the recipe: delayed scaling.
        name: of the checks.
    """
    layer, fresh = make(), make()
    for factor in FACTORS:
        _step(layer, enter, *_sample(bench, layer, factor))
    saved = {key: value.clone() if hasattr(value, "clone") else value for key, value in layer.state_dict().items()}
    with unpickling_allowed(os.environ):
        fresh.load_state_dict(saved)
    kept = _read(bench, layer)
    loaded = _read(bench, fresh) if "scaling_fwd" in fresh.fp8_meta else {}
    for what, wanted in kept.items():
        seen = loaded.get(what)
        right = seen is not None and torch.equal(seen, wanted)
        said = "as saved" if right else f"saved {_shown(wanted)}, loaded {_shown(seen)}"
        bench.check(f"{name}.{what}", right, said)
    sample = _sample(bench, layer, FACTORS[-1])
    # The end of a scope brings every layer up to date that there is: so the fresh one steps first.
    again = _step(fresh, enter, *sample)
    bench.same_bits(f"{name}.next-step", again, _step(layer, enter, *sample))


@contextmanager
def unpickling_allowed(variables: Any) -> Iterator[None]:
    """Transformer Engine reads its pickled state back; what was set before is put back."""
    before = variables.get(UNPICKLING)
    variables[UNPICKLING] = "1"
    try:
        yield
    finally:
        if before is None:
            del variables[UNPICKLING]
        else:
            variables[UNPICKLING] = before


def _read(bench: Bench, layer: Any) -> Mapping[str, Any]:
    """Histories [H, N] and scales [N], copied, by direction and name."""
    found: dict[str, Any] = {}
    for direction, forward in DIRECTIONS.items():
        history, scale = bench.bridge("fp8_scope").te_amax_state(layer, forward=forward)
        found |= {f"{direction}.history": history.detach().clone(), f"{direction}.scale": scale.detach().clone()}
    return found


def _sample(bench: Bench, layer: Any, factor: float) -> tuple[Any, Any]:
    """Rows and the gradient of their output."""
    out, width = layer.weight.shape
    rows, gradient = (bench.randn(ROWS, size, dtype=torch.bfloat16) for size in (width, out))
    return rows * factor, gradient * factor


def _step(layer: Any, enter: Enter, rows: Any, gradient: Any) -> tuple[Any, ...]:
    """Output and gradients of one step; the weights stay."""
    layer.zero_grad(set_to_none=True)
    leaf = rows.detach().clone().requires_grad_()
    with enter():
        out = layer(leaf)
    out.backward(gradient)
    return out.detach(), leaf.grad, layer.weight.grad


def _shown(tensor: Any) -> str:
    return "nothing" if tensor is None else f"{[f'{value:g}' for value in tensor.flatten().tolist() if value][:6]}"
