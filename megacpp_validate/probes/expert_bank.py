"""Expert banks as probes run them: tensors, a pass through the wrapper, and the formulas that it is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..native.grouped_gemm import grouped_gemm_loop
from .bench import Bench
from .bounds import Roundings
from .emulation import Product
from .memory import Enter
from .references.experts import expert_bank
from .trial import Tensors, reference_pass, run_pass

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
        return expert_bank(given["rows"], _weights(given), self.counts)

    def native(self, given: Tensors) -> Any:
        """The plain loop in the dtype of the operands."""
        return grouped_gemm_loop(given["rows"], torch.stack(_weights(given)), self.counts)

    def roundings(self, bound: Bound) -> Callable[[str], Roundings]:
        """Of each tensor of a pass: an idle expert's sum has one product of nothing."""
        _, outputs, inputs = self.weights.shape

        def of(tensor: str) -> Roundings:
            if tensor.startswith("grad.weight"):
                return bound("wgrad", max(1, self.counts[int(tensor.removeprefix("grad.weight"))]))
            return bound("forward", inputs) if tensor == "forward" else bound("dgrad", outputs)

        return of


def _weights(given: Tensors) -> list[Any]:
    return [given[f"weight{expert}"] for expert in range(len(given) - 1)]


def new_bank(
    bench: Bench, counts: Sequence[int], inputs: int, outputs: int, dtype: Any, *, strided: bool = False
) -> Bank:
    """Normal rows, and weights with which outputs are about 1; `strided` rows are not contiguous."""
    total = sum(counts)
    rows = bench.randn(inputs, total, dtype=dtype).t() if strided else bench.randn(total, inputs, dtype=dtype)
    weights = bench.randn(len(counts), outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    return Bank(rows.requires_grad_(), weights, tuple(counts), bench.randn(total, outputs, dtype=dtype))


def new_layer(bench: Bench, bank: Bank, backends: Sequence[str] = ("te", "native"), fp8_when: str = "faster") -> Any:
    """The wrapper with the weights of a bank."""
    made = bench.bridge("expert_gemm").ExpertGemm(
        **bank.sizes(), device=bench.device, backends=tuple(backends), fp8_when=fp8_when
    )
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


def run_bank(layer: Any, bank: Bank, enter: Enter = nullcontext, **options: Any) -> dict[str, Any]:
    """Forward in the scope and backward, as `named` has it."""
    return named(
        run_pass(lambda: layer(bank.rows, bank.counts, **options), leaves_of(layer, bank), bank.gradient, enter)
    )
