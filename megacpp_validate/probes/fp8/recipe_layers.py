"""`LayerNormMLP` and `GroupedLinear` under a recipe: forward and every gradient, and what each product was given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from ...evidence.receipt import Check
from ..bench import Bench
from ..emulation import FORMATS, Recipe, emulated_grouped, emulated_mlp, operand_roundings
from ..expert_bank import Bank, leaves_of, named
from ..low_precision import Enter, low_precision_ran
from ..references import layer_roundings as counted
from ..references import layers as reference
from ..trial import Tensors, formula_pass, layer_trial, run_pass, try_case
from .quantizers import check_operands, watching_operands

EPS: Final = 1e-5
# Rows of each expert, in multiples of 16, which every recipe takes; one is idle, as in training.
COUNTS: Final = (48, 0, 112, 96)
TIMES_ON_GPU: Final = 2


@dataclass(frozen=True)
class _Sizes:
    rows: int
    hidden: int
    ffn: int


def _sizes(bench: Bench) -> _Sizes:
    """Multiples of 128, which every recipe takes."""
    return _Sizes(128, 128, 128) if bench.quick or bench.device == "cpu" else _Sizes(512, 384, 512)


def check_mlp(bench: Bench, recipe: Recipe, enter: Enter) -> None:
    """Norm and gated MLP as one layer; the checks are `fp8.RECIPE.mlp.*`."""
    sizes, path = _sizes(bench), f"fp8.{recipe}.mlp"
    layer = bench.bridge("imports").layernorm_mlp.require()(
        hidden_size=sizes.hidden, ffn_hidden_size=sizes.ffn, eps=EPS, bias=False, normalization="RMSNorm",
        activation="swiglu", params_dtype=torch.bfloat16, device=bench.device,
    )  # fmt: skip
    with torch.no_grad():
        for value in layer.parameters():
            mean, deviation = (1.0, 0.2) if value.dim() == 1 else (0.0, value.shape[-1] ** -0.5)
            value.copy_(mean + bench.randn(*value.shape, scale=deviation))
    rows = (bench.randn(sizes.rows, sizes.hidden) + 0.5).bfloat16().requires_grad_()
    precision = replace(counted.precision_of("bf16", recipe=recipe), smallest=sizes.hidden * min(sizes.rows, sizes.ffn))
    with enter() as opened:
        choice = opened.choice
    trial = layer_trial(
        path,
        layer,
        rows,
        choice,
        formula=partial(reference.mlp, activation="swiglu", eps=EPS),
        roundings=partial(counted.mlp_roundings, precision=precision, length=sizes.ffn, gated=True),
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
            part = low_precision_ran(float((found.double() - exact).norm() / exact.norm()), rounded)
            bench.checks.append(Check(f"{path}.{name}.applied", part.passed, (part,)))
