"""What the DeepGEMM probe runs: expert banks and their tensors, and what its kernels are seen to be handed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ..bench import Bench

BF16: Final = torch.bfloat16
INPUTS: Final = 512
OUTPUTS: Final = 384
SMALL: Final = (256, 128)  # the same on a CPU


@dataclass(frozen=True)
class Sample:
    """One call: rows [R, K], weights [E, N, K], rows of each expert, gradient of the output [R, N]."""

    rows: Any
    weights: Any
    counts: tuple[int, ...]
    gradient: Any

    def sizes(self) -> dict[str, Any]:
        """What a bank of experts for it is made with."""
        experts, outputs, inputs = self.weights.shape
        return {"num_experts": experts, "in_features": inputs, "out_features": outputs, "dtype": self.weights.dtype}

    def as_leaves(self) -> Sample:
        """Rows and weights outside any graph, to be differentiated by."""
        rows, weights = (tensor.detach().requires_grad_() for tensor in (self.rows, self.weights))
        return Sample(rows, weights, self.counts, self.gradient)


@dataclass(frozen=True)
class Seen:
    """Output [R, N], gradient of the rows [R, K], gradient of the weights [E, N, K]."""

    out: Any
    rows: Any
    weights: Any

    def __getitem__(self, product: str) -> Any:
        return {"forward": self.out, "grad.rows": self.rows, "grad.weight": self.weights}[product]

    def to(self, dtype: Any) -> Seen:
        """The same in another dtype, outside any graph."""
        return Seen(*(tensor.detach().to(dtype) for tensor in (self.out, self.rows, self.weights)))


def new_sample(bench: Bench, counts: tuple[int, ...]) -> Sample:
    """Tensors in bf16 with outputs of about 1."""
    inputs, outputs = (INPUTS, OUTPUTS) if bench.device == "cuda" else SMALL
    return Sample(
        bench.randn(sum(counts), inputs, dtype=BF16, grad=True),
        bench.randn(len(counts), outputs, inputs, dtype=BF16, scale=inputs**-0.5),
        counts,
        bench.randn(sum(counts), outputs, dtype=BF16),
    )


def new_layer(bench: Bench, weights: Any, *, fp8_when: str = "always") -> Any:
    """A bank on DeepGEMM with these weights; the native one stands behind it, so that a fallback shows."""
    experts, outputs, inputs = weights.shape
    layer = bench.bridge("expert_gemm").ExpertGemm(
        num_experts=experts, in_features=inputs, out_features=outputs, dtype=weights.dtype, device=bench.device,
        backends=("deep_gemm", "native"), fp8_when=fp8_when,
    )  # fmt: skip
    layer.load_native_state_dict({"weight": weights.detach()})
    return layer


def run(
    layer: Any,
    sample: Sample,
    enter: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    first: bool | None = None,
) -> Seen:
    """Forward, in the scope where there is one, and backward. A bank has one parameter, or one an expert."""
    with enter():
        out = layer(sample.rows, sample.counts, is_first_microbatch=first)
    parameters = list(layer.parameters())
    of_rows, *of_weights = torch.autograd.grad(out, (sample.rows, *parameters), sample.gradient)
    return Seen(out, of_rows, of_weights[0] if len(of_weights) == 1 else torch.stack(of_weights))


# --- what the kernels are handed ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Handed:
    """One operand of a kernel: its dtype, the values that share a scale, and what made it."""

    dtype: str
    block: str
    made_by: str


@dataclass(frozen=True)
class Call:
    """One call of a kernel: the product that it is, and both operands."""

    product: str
    left: Handed
    right: Handed


class _Watched:
    """An accessor of a kernel whose calls are noted."""

    def __init__(self, entry: Any, note: Callable[[Any, Any], None]) -> None:
        self._entry, self._note = entry, note

    def require(self) -> Callable[..., Any]:
        kernel = self._entry.require()

        def call(left: Any, right: Any, *given: Any, **more: Any) -> Any:
            self._note(left, right)
            return kernel(left, right, *given, **more)

        return call


@contextmanager
def watching_kernels(bench: Bench) -> Iterator[list[Call]]:
    """While inside, every call of DeepGEMM's kernels through the bridge is noted, by the product that it makes."""
    module = bench.bridge("deep_gemm_product")
    calls: list[Call] = []

    def note(name: str, left: Any, right: Any) -> None:
        product = _product(name, calls)
        calls.append(Call(product, _handed(left, bench), _handed(right, bench)))

    names = ("grouped_fp8_gemm", "masked_fp8_gemm", "fp8_gemm")
    before = {name: getattr(module, name) for name in names}
    for name, entry in before.items():
        setattr(module, name, _Watched(entry, partial(note, name)))
    try:
        yield calls
    finally:
        for name, entry in before.items():
            setattr(module, name, entry)


def _product(name: str, before: list[Call]) -> str:
    """The first grouped product of a step is the output, the second the gradient of the rows; then come weights."""
    if name == "masked_fp8_gemm":
        return "masked"
    if name == "fp8_gemm" or len(before) >= 2:
        return "grad.weight"
    return "grad.rows" if before else "forward"


def _handed(operand: Any, bench: Bench) -> Handed:
    values, scales = operand
    high, wide = (ceil for ceil in (values.shape[-2] // scales.shape[-2], values.shape[-1] // scales.shape[-1]))
    made_by = "Triton" if bench.device == "cuda" else "torch"
    return Handed(
        str(values.dtype).removeprefix("torch.").removesuffix("fn"), f"{high}x{wide}", f"deep_gemm_cast in {made_by}"
    )
