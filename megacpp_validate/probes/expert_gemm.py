"""The expert GEMM wrapper: parity with fp64 of the output and of the gradients of rows and of each expert's weight.

Its backend DeepGEMM has a cell of its own, `fp8_deep_gemm`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional

from .bench import DTYPES, Bench
from .bounds import Roundings, relative_error
from .emulation import Product, operand_roundings
from .low_precision import check_kept_weights
from .references import expert_bank
from .trial import Tensors, Trial, reference_pass, run_pass, try_case

# Rows of each expert, multiplied by an odd number: on a GPU because it is fast, and in FP8 because the errors of a few
# rows do not average out in the gradient of a weight (N x K values from only (N + K) x rows roundings).
ROUTINGS: Final[dict[str, tuple[int, ...]]] = {
    "all-busy": (3, 5, 1, 7),
    "first-idle": (0, 4, 9, 2),
    "middle-idle": (5, 0, 7, 3),
    "last-idle": (6, 1, 3, 0),
    "one-busy": (0, 0, 13, 0),
    "one-row": (0, 1, 0, 0),
}
QUICK: Final = ("all-busy", "middle-idle", "one-busy")
IN_FP8: Final = ("middle-idle", "all-busy", "one-busy")  # a quick run takes the first
EXPERTS: Final = 4
TIMES_ON_GPU: Final = 19
TIMES_IN_FP8: Final = 11


Bound = Callable[[Product, int], Roundings]
"""Roundings of a product whose sums have this length."""


@dataclass(frozen=True)
class Bank:
    """One call: rows [R, K] as a leaf, weights [E, N, K], rows of each expert, gradient of the output [R, N]."""

    rows: Any
    weights: Any
    counts: tuple[int, ...]
    gradient: Any

    @property
    def operands(self) -> dict[str, Any]:
        """Of the formulas: "rows", and the weight of each expert."""
        return {"rows": self.rows, **{f"weight{expert}": weight for expert, weight in enumerate(self.weights)}}

    def sizes(self) -> dict[str, Any]:
        """What a wrapper for it is made with."""
        experts, outputs, inputs = self.weights.shape
        return {"num_experts": experts, "in_features": inputs, "out_features": outputs, "dtype": self.weights.dtype}

    def exact(self) -> dict[str, Any]:
        """The pass in fp64."""
        return reference_pass(self.formula, self.operands, self.gradient)[0]

    def formula(self, given: Tensors) -> Any:
        """One linear layer an expert: [R, K] -> [R, N]."""
        return expert_bank(given["rows"], _weights_of(given), self.counts)

    def native(self, given: Tensors) -> Any:
        """The same by linear layers in the dtype of the operands, each of which has its own scales under a recipe."""
        parts = given["rows"].split(self.counts)
        return torch.cat([functional.linear(*pair) for pair in zip(parts, _weights_of(given), strict=True)])

    def roundings(self, bound: Bound) -> Callable[[str], Roundings]:
        """Of each tensor of a pass: an idle expert's sum has one product of nothing."""
        _, outputs, inputs = self.weights.shape

        def of(tensor: str) -> Roundings:
            if tensor.startswith("grad.weight"):
                return bound("wgrad", max(1, self.counts[int(tensor.removeprefix("grad.weight"))]))
            return bound("forward", inputs) if tensor == "forward" else bound("dgrad", outputs)

        return of


def _weights_of(given: Tensors) -> list[Any]:
    return [given[f"weight{expert}"] for expert in range(len(given) - 1)]


def new_bank(
    bench: Bench, counts: Sequence[int], inputs: int, outputs: int, dtype: Any, *, strided: bool = False
) -> Bank:
    """Normal rows, and weights with which outputs are about 1; `strided` rows are not contiguous."""
    total = sum(counts)
    rows = bench.randn(inputs, total, dtype=dtype).t() if strided else bench.randn(total, inputs, dtype=dtype)
    weights = bench.randn(len(counts), outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    return Bank(rows.requires_grad_(), weights, tuple(counts), bench.randn(total, outputs, dtype=dtype))


def new_layer(bench: Bench, bank: Bank, backends: Sequence[str] = ("te", "native")) -> Any:
    """The wrapper with the weights of a bank."""
    made = bench.bridge("expert_gemm").ExpertGemm(**bank.sizes(), device=bench.device, backends=tuple(backends))
    made.load_native_state_dict({"weight": bank.weights.detach()})
    return made


def leaves_of(layer: Any, bank: Bank) -> dict[str, Any]:
    """The rows, and the parameters of a wrapper: one, or one an expert."""
    return {"rows": bank.rows, **dict(layer.named_parameters())}


def named(seen: dict[str, Any]) -> dict[str, Any]:
    """A pass of a wrapper, the gradient of each expert's weight as "grad.weightE"."""
    weights = [seen[name] for name in seen if name not in ("forward", "grad.rows")]
    if len(weights) == 1 and weights[0] is not None:
        weights = list(weights[0].unbind(0))
    kept = {name: seen[name] for name in ("forward", "grad.rows")}
    return {**kept, **{f"grad.weight{expert}": weight for expert, weight in enumerate(weights)}}


def run_bank(layer: Any, bank: Bank) -> dict[str, Any]:
    """Forward and backward, as `named` has it."""
    return named(run_pass(partial(layer, bank.rows, bank.counts), leaves_of(layer, bank), bank.gradient))


# --- the probe --------------------------------------------------------------------------------------------------------


def probe(bench: Bench) -> None:
    """Run it."""
    for dtype in DTYPES:
        for routing in QUICK if bench.quick else ROUTINGS:
            with bench.scope(f"{dtype}.{routing}"):
                _plain(bench, dtype, routing)
    recipes = bench.judged_recipes("fp8.")
    for recipe in recipes:
        for routing in IN_FP8[:1] if bench.quick else IN_FP8:
            with bench.scope(f"fp8.{recipe}.{routing}"):
                _low_precision(bench, recipe, routing)
    if recipes:
        _odd_width(bench, recipes[0])
    _uses(bench, recipes)


def _trial(layer: Any, bank: Bank, bound: Bound, name: str = "expert_gemm", **more: Any) -> Trial:
    """One call of a wrapper, forward and backward."""
    return Trial(
        path="",
        call=lambda: layer(bank.rows, bank.counts),
        leaves=leaves_of(layer, bank),
        choice=lambda: layer.choice,
        formula=bank.formula,
        roundings=bank.roundings(bound),
        native=bank.native,
        operands=bank.operands,
        named=named,
        gradient=bank.gradient,
        ran_as=name,
        checks_dtype=False,
        **more,
    )


def _plain(bench: Bench, dtype: str, routing: str) -> None:
    """One routing in fp32 or bf16; the rows of one of them are not contiguous."""
    bank = _sample(bench, DTYPES[dtype], routing, strided=routing == "all-busy")
    in_tf32 = bench.wants_te and bench.device == "cuda" and dtype == "fp32"
    bound, name = partial(_summed, dtype, in_tf32), f"expert_gemm.{dtype}.{routing}"
    try_case(bench, _trial(new_layer(bench, bank), bank, bound, name))


def _low_precision(bench: Bench, recipe: Any, routing: str) -> None:
    """One routing under a recipe; each expert has scales of its own."""
    bank = _sample(bench, torch.bfloat16, routing, times=TIMES_IN_FP8)
    bound, name = partial(operand_roundings, recipe), f"expert_gemm.{recipe}.{routing}"
    tried = try_case(bench, _trial(new_layer(bench, bank), bank, bound, name, recipe=recipe))
    if tried.native is None:
        return  # another backend ran: a failed check says so
    for name in ("forward", "grad.rows"):  # an error far below that of the recipe is no success
        error, own = (relative_error(one[name], tried.wanted[name]) for one in (tried.seen, tried.native))
        said = f"relative error {error:.3g}; half of the recipe's own {own:.3g}"
        bench.check(f"{name}.rounded", error >= own / 2, said)


def _odd_width(bench: Bench, recipe: Any) -> None:
    """Widths that FP8 does not take: the call goes native, and says why."""
    weights = bench.randn(EXPERTS, 24, 40, scale=40**-0.5).bfloat16()
    rows = bench.randn(15, 40, dtype=torch.bfloat16, grad=True)
    bank = Bank(rows, weights, (5, 0, 7, 3), bench.randn(15, 24, dtype=torch.bfloat16))
    with bench.scope("fp8.odd-width"):
        more: dict[str, Any] = {"enter": bench.low_precision(recipe), "wanted": "native"}
        try_case(bench, _trial(new_layer(bench, bank), bank, partial(_summed, "bf16", False), **more))


def _uses(bench: Bench, recipes: tuple[Any, ...]) -> None:
    """Forward and backward leave nothing behind, and take the weights of this step, in FP8 too."""
    bank = _sample(bench, torch.bfloat16, "middle-idle")
    rows, counts = bank.rows.detach(), bank.counts
    bench.layer_keeps_nothing("bf16", new_layer(bench, bank), rows, counts)
    for recipe in recipes:
        scope, pair = bench.low_precision(recipe), (new_layer(bench, bank), new_layer(bench, bank))
        bench.layer_keeps_nothing(f"fp8.{recipe}", new_layer(bench, bank), rows, counts, enter=scope)
        check_kept_weights(bench, f"fp8.{recipe}.bank", pair, rows, bank.gradient, scope, counts)


def _sample(bench: Bench, dtype: Any, routing: str, *, times: int = 1, strided: bool = False) -> Bank:
    inputs, outputs, times = (256, 384, TIMES_ON_GPU) if bench.device == "cuda" else (32, 48, times)
    return new_bank(bench, [count * times for count in ROUTINGS[routing]], inputs, outputs, dtype, strided=strided)


# --- bounds -----------------------------------------------------------------------------------------------


def _summed(dtype: str, in_tf32: bool, product: Product, length: int) -> Roundings:
    if in_tf32:
        why = f"both operands of {product} rounded to TF32, which Transformer Engine's GEMMs take for fp32"
        return Roundings((("tf32", 2), ("fp32", 1)), length, why=why)
    return Roundings(((dtype, 1),), length, why=f"{product} summed in fp32 and rounded to {dtype}")
