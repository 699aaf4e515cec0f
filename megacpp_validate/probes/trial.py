"""The harness of every probe: one layer is run on its tensors, forward and backward, and held to a formula in fp64.

A pass is a mapping: "forward" -> the output, "grad.NAME" -> the gradient of the tensor NAME. A probe has a table of
cases, and makes a `Trial` of each: which tensors, how the bridge's layer is called, the formula, what is rounded on the
way to each tensor, the same in plain PyTorch, and which backend must run. Everything else is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.func import functional_call

from .bench import VENDOR_BACKENDS, Bench
from .bounds import Roundings
from .emulation import Emulated, Recipe, steps_of
from .observe import Enter

Tensors = Mapping[str, Any]
Formula = Callable[[Tensors], Any]
"""Tensors by name -> the output, differentiable."""


def run_pass(call: Callable[[], Any], leaves: Tensors, gradient: Any, enter: Enter = nullcontext) -> dict[str, Any]:
    """Forward in the scope, backward outside of it: the output with its graph, and the gradient of every leaf.

    Args:
        call: gives the output.
        leaves: tensors that require a gradient, by name.
        gradient: of the output; cast to the dtype of the output.
        enter: makes the scope anew.
    """
    for leaf in leaves.values():
        leaf.grad = None
    with enter():
        out = call()
    out.backward(gradient.to(out.dtype))
    return {"forward": out, **{f"grad.{name}": leaf.grad for name, leaf in leaves.items()}}


def formula_pass(formula: Formula, operands: Tensors, gradient: Any, dtype: Any = None) -> dict[str, Any]:
    """The same of a formula, on copies of the operands that lie alike: in their own dtype, or in `dtype`."""
    leaves = {name: _copied(tensor.detach(), dtype).requires_grad_() for name, tensor in operands.items()}
    return run_pass(lambda: formula(leaves), leaves, gradient.detach())


def _copied(tensor: Any, dtype: Any) -> Any:
    if dtype is not None or 0 in tensor.stride():  # what is expanded holds a value several times
        return tensor.clone().to(dtype or tensor.dtype)
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).copy_(tensor)


def reference_pass(
    formula: Formula, operands: Tensors, gradient: Any, spread: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, float]]:
    """A formula in fp64, from operands as they were rounded; and the norm of the terms of gradients that may cancel.

    Args:
        formula: written out.
        operands: by name; "input" is [..., D].
        gradient: of the output.
        spread: operands of which every row of the input is given its own copy, so that the terms of the sum that their
            gradient is are seen.
    """
    given = {name: tensor.detach().double() for name, tensor in operands.items()}
    rows = [name for name in spread if name in given]
    for name in rows:
        given[name] = given[name].expand(*operands["input"].shape[:-1], -1)
    found = formula_pass(formula, given, gradient)
    scales = {}
    for name in (f"grad.{row}" for row in rows):
        scales[name] = float(found[name].norm())
        found[name] = found[name].flatten(0, -2).sum(0)
    return {**found, "forward": found["forward"].detach()}, scales


@dataclass(frozen=True)
class Case:
    """One shape of attention or of a block around it, and what the call asks for besides.

    Attributes:
        name: of the checks.
        groups: key and value heads.
        heads: query heads.
        width: head size D.
        extra: tokens added to the length that the bench takes.
        length: tokens, where the case has a length of its own.
        causal: whether a query sees no later key.
        strided: whether no input is contiguous; of attention, the key not even along its last axis.
        small: whether rows of a block are so small that eps counts in both norms.
        activation: of a block's MLP.
        scale: factor on the scores that attention is made with; None is its default.
        options: of the call; the probe makes their tensors.
        code: of the refusal that Transformer Engine must give; empty where it must not.
        quick: whether a quick run takes it.
    """

    name: str
    groups: int = 2
    heads: int = 8
    width: int = 64
    extra: int = 0
    length: int = 0
    causal: bool = True
    strided: bool = False
    small: bool = False
    activation: Any = "swiglu"
    scale: float | None = None
    options: tuple[str, ...] = ()
    code: str = ""
    quick: bool = False


@contextmanager
def _tf32(backend: Any, *, allowed: bool) -> Iterator[None]:
    before = backend.allow_tf32
    backend.allow_tf32 = allowed
    try:
        yield
    finally:
        backend.allow_tf32 = before


@dataclass(frozen=True)
class Trial:
    """One case.

    Attributes:
        path: prefix of the checks; empty in a scope of the bench.
        call: the layer under test on its leaves.
        leaves: tensors of the layer that gradients are taken of, by name.
        choice: gives the wrapper's `Choice`, asked after the call.
        formula: in fp64.
        roundings: of a tensor of the pass: "forward", "input", ...
        native: the same in plain PyTorch; taken only where Transformer Engine is requested and a vendor's code ran.
            Under a recipe its linear layers are emulated.
        operands: of both formulas, by name; the leaves without them.
        named: the layer's pass with the names of the formula's, where they differ.
        gradient: of the output; drawn from the bench without one.
        wanted: the backend that must run, where it is not the requested one.
        code: of the refusal that Transformer Engine must give; any backend may take the call then.
        ran_as: name of the row of backends; the path without one.
        enter: scope of the forward pass; that of `recipe`, if there is one, in `try_case`.
        recipe: of the layer's products.
        steps: how many passes are run; the last one counts.
        repeated: whether the last two outputs must have the same bits; the check is "forward.repeated".
        tf32: whether plain PyTorch multiplies fp32 on a GPU as TF32, as Transformer Engine does.
        spread: as of `reference_pass`.
        exact: the pass in fp64, where it is known before.
        scales: of tensors that are small differences of large terms; see `bounds.compare`.
        checks_dtype: whether the output must have the dtype of the first leaf.
        shown: name of a tensor -> how checks name it.
    """

    path: str
    call: Callable[[], Any]
    leaves: Tensors
    choice: Callable[[], Any]
    formula: Formula
    roundings: Callable[[str], Roundings]
    native: Formula | None = None
    operands: Tensors = field(default_factory=dict)
    named: Callable[[dict[str, Any]], dict[str, Any]] = dict
    gradient: Any = None
    wanted: str = ""
    code: str = ""
    ran_as: str = ""
    enter: Enter = nullcontext
    recipe: Recipe | None = None
    steps: int = 1
    repeated: bool = False
    tf32: bool = True
    spread: tuple[str, ...] = ()
    exact: Mapping[str, Any] | None = None
    scales: Mapping[str, float] = field(default_factory=dict)
    checks_dtype: bool = True
    shown: Callable[[str], str] = str

    def run(self) -> dict[str, Any]:
        """One pass of the layer."""
        # cuDNN convolves fp32 as fp32 here, not as TF32, which is torch's default.
        with _tf32(torch.backends.cudnn, allowed=False):
            return run_pass(self.call, self.leaves, self.gradient, self.enter)


class Tried(NamedTuple):
    """The passes of a case: of the layer, of the formula in fp64, and of plain PyTorch where that was taken."""

    seen: dict[str, Any]
    wanted: Mapping[str, Any]
    native: dict[str, Any] | None


def try_case(bench: Bench, trial: Trial) -> Tried:
    """Run one case, record what ran it, and hold the output and every gradient to the formula."""
    # Copies: a layer that overwrites its input or its parameters must not change what it is held to.
    kept = {name: _copied(one.detach(), None) for name, one in (trial.operands or trial.leaves).items()}
    trial = replace(trial, operands=kept)
    if trial.recipe is not None:
        trial = replace(trial, enter=bench.low_precision(trial.recipe), steps=steps_of(trial.recipe))
    if trial.gradient is None:
        with torch.no_grad():
            out = trial.call()
        trial = replace(trial, gradient=bench.randn(*out.shape, dtype=out.dtype))
    passes = [trial.run() for _ in range(trial.steps)]
    seen, choice = passes[-1], trial.choice()
    with bench.scope(trial.path):
        if trial.code:
            codes = [refusal.code for refusal in choice.refusals if refusal.backend == "te"]
            said = f"Transformer Engine refused with {codes}; {choice.observed} took the call"
            bench.check("refused", codes == [trial.code] and choice.observed != "te", said)
        if trial.repeated:
            bench.same_bits("forward.repeated", [passes[-2]["forward"]], [seen["forward"]])
    wanted = trial.wanted or (choice.observed if trial.code else "")
    bench.ran_on(trial.ran_as or trial.path, choice, seen["forward"], wanted=wanted)
    return _compare(bench, trial, seen, plainly=choice.observed in VENDOR_BACKENDS)


def _compare(bench: Bench, trial: Trial, seen: dict[str, Any], *, plainly: bool) -> Tried:
    operands, native = trial.operands, None
    wanted, scales = trial.exact, trial.scales
    if wanted is None:
        wanted, spread = reference_pass(trial.formula, operands, trial.gradient, trial.spread)
        scales = {**scales, **spread}
    if trial.native is not None and bench.wants_te and plainly:
        products = torch.backends.cuda.matmul
        emulated = nullcontext() if trial.recipe is None else Emulated(trial.recipe)
        with emulated, _tf32(products, allowed=(trial.tf32 and bench.device == "cuda") or products.allow_tf32):
            native = formula_pass(trial.native, operands, trial.gradient)
    out, dtype = seen["forward"], next(iter(trial.leaves.values())).dtype
    seen = trial.named(seen)
    with bench.scope(trial.path):
        if trial.checks_dtype:
            bench.check("dtype", out.dtype == dtype, f"{out.dtype} from {dtype}")
        bench.compare_pass(seen, wanted, trial.roundings, native=native, scales=scales, shown=trial.shown)
    return Tried(seen, wanted, native)


def formula_of(module: Any) -> Formula:
    """A module as a formula of its input and parameters; its own are not read."""

    def call(given: Tensors) -> Any:
        parameters = {name: tensor for name, tensor in given.items() if name != "input"}
        return functional_call(module, parameters, (given["input"],))

    return call


def layer_trial(path: str, layer: Any, rows: Any, choice: Any, **more: Any) -> Trial:
    """The case of a module that takes rows: its leaves are "input" and its parameters."""
    leaves = {"input": rows, **dict(layer.named_parameters())}
    return Trial(path, lambda: layer(rows), leaves, lambda: choice, **more)
