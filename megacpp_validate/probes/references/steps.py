"""One forward and backward pass of a layer at hand, as `layers.Step` holds the reference's, and both side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.func import functional_call

from ..bench import Bench
from ..bounds import Roundings
from .layers import Function, Parameters, Step, reference_step


def layer_step(
    layer: Any, rows: Any, gradient: Any, scope: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Step:
    """Output and every gradient of a layer; only its forward pass runs in the scope.

    Args:
        layer: a module that takes rows.
        rows: its input, a leaf that wants a gradient.
        gradient: of its output.
        scope: made anew for each step.
    """
    parameters = dict(layer.named_parameters())
    for leaf in (rows, *parameters.values()):
        leaf.grad = None
    with scope():
        out = layer(rows)
    out.backward(gradient)
    return Step(out, {"input": rows.grad, **{name: value.grad for name, value in parameters.items()}})


def function_step(function: Function, rows: Any, parameters: Parameters, gradient: Any) -> Step:
    """The same of a function, on copies of the operands in their own dtype."""
    x = rows.detach().clone().requires_grad_(True)
    given = {name: value.detach().clone().requires_grad_(True) for name, value in parameters.items()}
    out = function(x, given)
    out.backward(gradient)
    return Step(out, {"input": x.grad, **{name: value.grad for name, value in given.items()}})


def function_of(module: Any) -> Function:
    """A module as a function of its input and parameters; its own are not read."""
    return lambda rows, parameters: functional_call(module, dict(parameters), (rows,))


@contextmanager
def tf32_products() -> Iterator[None]:
    """torch multiplies fp32 matrices on a GPU as TF32, as Transformer Engine does."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@contextmanager
def plain_convolutions() -> Iterator[None]:
    """cuDNN convolves fp32 as fp32, not as TF32, which is torch's default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


_HELD_TO_MEMORY: Final = (".norm.unit", ".in_projection", ".mlp.swiglu")  # a layer of each kind


@dataclass(frozen=True)
class Trial:
    """One layer to run against its reference.

    Attributes:
        path: name of the checks and of the row in the receipt.
        layer, choice: as built, and what it says it is.
        rows: input, a leaf.
        reference: in fp64.
        roundings: of one tensor by name: "out", "input" or a parameter.
        native: the same in plain PyTorch in the same precision.
        wanted: the backend that must run, where it is not the requested one.
        scope: of the forward pass.
        steps: how many to run; the last one is looked at.
    """

    path: str
    layer: Any
    choice: Any
    rows: Any
    reference: Function
    roundings: Callable[[str], Roundings]
    native: Function | None = None
    wanted: str = ""
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    steps: int = 1


def try_layer(bench: Bench, trial: Trial) -> None:
    """Forward and every gradient of one layer, and what ran it."""
    parameters = dict(trial.layer.named_parameters())
    with torch.no_grad():
        shape = trial.layer(trial.rows).shape
    gradient = bench.randn(*shape, dtype=trial.rows.dtype)
    with plain_convolutions():
        for _ in range(trial.steps):
            seen = layer_step(trial.layer, trial.rows, gradient, trial.scope)
    wanted = reference_step(trial.reference, trial.rows, parameters, gradient)
    native = None
    if trial.native is not None and bench.wants_te:
        with tf32_products() if bench.device == "cuda" else nullcontext():
            native = function_step(trial.native, trial.rows, parameters, gradient)
    bench.ran_on(trial.path, trial.choice, seen.out, wanted=trial.wanted)
    with bench.scope(trial.path):
        bench.check("dtype", seen.out.dtype == trial.rows.dtype, str(seen.out.dtype))
        plain = native.out if native is not None else None
        bench.compare("forward", seen.out, wanted.out, roundings=trial.roundings("out"), native=plain)
        for name, value in wanted.grads.items():
            plain = native.grads[name] if native is not None else None
            rounded, scale = trial.roundings(name), wanted.scales.get(name)
            bench.compare(f"grad.{name}", seen.grads[name], value, roundings=rounded, native=plain, scale=scale)
    if trial.rows.dtype is torch.bfloat16 and trial.path.endswith(_HELD_TO_MEMORY):
        bench.layer_keeps_nothing(trial.path, trial.layer, trial.rows, enter=trial.scope)
