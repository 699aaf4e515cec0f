"""The expert GEMM wrapper: parity with fp64 of the output and of the gradients of rows and of each expert's weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ..evidence.receipt import Backend
from ..native.grouped_gemm import grouped_gemm_loop
from .bench import Bench
from .bounds import Roundings
from .emulation import EMULATED, Product, emulated_grouped, operand_roundings
from .expert_uses import check_expert_uses
from .observe import recording_argument
from .references.deep_gemm import block_scaled_experts
from .references.experts import reference_experts
from .trial import tf32_products

DTYPES: Final[dict[str, Any]] = {"fp32": torch.float32, "bf16": torch.bfloat16}

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


@dataclass(frozen=True)
class Sample:
    """One call: rows [R, K] as a leaf, weights [E, N, K], rows of each expert, upstream gradient [R, N]."""

    rows: Any
    weights: Any
    counts: tuple[int, ...]
    gradient: Any


@dataclass(frozen=True)
class Seen:
    """What a path gave: output [R, N], gradient of the rows [R, K], and of each weight, E of [N, K]."""

    out: Any
    rows: Any
    weights: tuple[Any, ...]


Bound = Callable[[Product, int], Roundings]  # of a product whose sums have this length


def probe(bench: Bench) -> None:
    """Run it."""
    bridge = bench.bridge()
    for dtype in DTYPES:
        for routing in QUICK if bench.quick else ROUTINGS:
            with bench.scope(f"{dtype}.{routing}"):
                _plain(bench, bridge, dtype, routing)
    if bench.wants_te:
        for recipe in bench.recipes:
            for routing in IN_FP8[:1] if bench.quick else IN_FP8:
                with bench.scope(f"fp8.{recipe}.{routing}"):
                    _low_precision(bench, bridge, recipe, routing)
        _odd_width(bench, bridge)
        _deep_gemm(bench, bridge)
    if bench.device == "cpu":  # plain Python decides it: no GPU need say it again
        with bench.scope("again"):
            _again(bench, bridge)
            if bench.wants_te:
                _check_microbatch(bench, bridge)
        if not bench.wants_te:
            with bench.scope("native"):
                _other_dtypes(bench, bridge)
    check_expert_uses(bench, partial(_layer, bench, bridge), ROUTINGS["middle-idle"], TIMES_ON_GPU)
    _weights(bench, bridge)
    _no_rows(bench, bridge)
    _refusals(bench, bridge)


def _plain(bench: Bench, bridge: Any, dtype: str, routing: str) -> None:
    """One routing in fp32 or bf16; the rows of one of them are not contiguous."""
    sample = _sample(bench, DTYPES[dtype], routing, strided=routing == "all-busy")
    layer = _layer(bench, bridge, sample.weights)
    seen = _run(layer, sample)
    bench.ran_on(f"expert_gemm.{dtype}.{routing}", layer.choice, seen.out)
    in_tf32 = bench.wants_te and bench.device == "cuda" and dtype == "fp32"

    def bound(product: Product, length: int) -> Roundings:
        if in_tf32:
            why = f"both operands of {product} rounded to TF32, which Transformer Engine's GEMMs take for fp32"
            return Roundings((("tf32", 2), ("fp32", 1)), length, why=why)
        return Roundings(((dtype, 1),), length, why=f"{product} summed in fp32 and rounded to {dtype}")

    with tf32_products(in_tf32):
        native = _native(sample) if bench.wants_te else None
    _compare(bench, sample, seen, native, bound)


def _low_precision(bench: Bench, bridge: Any, recipe: str, routing: str) -> None:
    """One routing under a recipe; each expert has scales of its own."""
    if recipe not in EMULATED:
        bench.check("reference", False, f"nothing emulates {recipe}: there is no bound to hold it to")
        return
    scopes = bench.bridge("fp8_scope")
    sample = _sample(bench, torch.bfloat16, routing, times=TIMES_IN_FP8)
    layer = _layer(bench, bridge, sample.weights)
    # Delayed scaling takes its scales from the steps before: one of them, on the same tensors.
    for _ in range(2):
        scope = scopes.low_precision(
            target=bench.order.target.id, recipe=recipe, amax_reduction_group=scopes.SINGLE_OWNER
        )
        seen = _run(layer, sample, scope)
    bench.ran_on(f"expert_gemm.{recipe}.{routing}", layer.choice, seen.out)
    leaf = sample.rows.detach().requires_grad_()
    weights = [weight.detach().requires_grad_() for weight in sample.weights.unbind(0)]
    out = emulated_grouped(leaf, weights, sample.counts, recipe)
    gradients = torch.autograd.grad(out, (leaf, *weights), sample.gradient)
    native = Seen(out, gradients[0], gradients[1:])
    _compare(bench, sample, seen, native, lambda product, length: operand_roundings(recipe, product, length))
    _is_rounded(bench, sample, seen, native)


def _again(bench: Bench, bridge: Any) -> None:
    """One object called again: the same bits for the same call; others for other rows, routings and weights."""
    layer = _layer(bench, bridge, _sample(bench, torch.float32, "all-busy").weights)
    for index, routing in enumerate(("all-busy", "middle-idle", "all-busy")):
        sample = _sample(bench, torch.float32, routing)
        with torch.no_grad():  # as an optimizer does
            held = list(layer.parameters())
            pieces = (sample.weights,) if len(held) == 1 else sample.weights.unbind(0)
            for into, given in zip(held, pieces, strict=True):
                into.copy_(given)
        seen, again = _run(layer, sample), _run(layer, sample)
        with bench.scope(f"{index}.{routing}"):
            bench.same_bits("bits", (seen.out, seen.rows, *seen.weights), (again.out, again.rows, *again.weights))
            _compare(bench, sample, again, None, _fp32)
            frozen = layer(sample.rows.detach(), sample.counts)
            bench.same_bits("frozen-rows", [seen.out], [frozen])


def _check_microbatch(bench: Bench, bridge: Any) -> None:
    """Whether FP8 weights are rounded anew is told to Transformer Engine."""
    sample = _sample(bench, torch.float32, "all-busy")
    layer = _layer(bench, bridge, sample.weights)
    for value in (True, False, None):
        with recording_argument(layer, "is_first_microbatch") as seen:
            layer(sample.rows, sample.counts, is_first_microbatch=value)
        bench.check(f"microbatch.{value}", [given for _, given in seen] == [value], f"seen {seen}")


def _other_dtypes(bench: Bench, bridge: Any) -> None:
    """Dtypes that the plain path takes besides."""
    for name, dtype in {"fp16": torch.float16, "fp64": torch.float64}.items():
        sample = _sample(bench, dtype, "middle-idle")
        seen = _run(_layer(bench, bridge, sample.weights), sample)
        with bench.scope(name):
            _compare(bench, sample, seen, None, partial(_rounded_to, name))


def _is_rounded(bench: Bench, sample: Sample, seen: Seen, emulated: Seen) -> None:
    """An error far below that of the recipe is no success: the product was computed in something else."""
    reference = reference_experts(sample.rows, sample.weights, sample.counts, sample.gradient)
    for name, own, plain, exact in (
        ("forward", seen.out, emulated.out, reference.out),
        ("grad.rows", seen.rows, emulated.rows, reference.rows),
    ):
        error, wanted = (float((tensor.detach().double() - exact).norm() / exact.norm()) for tensor in (own, plain))
        bench.check(
            f"{name}.rounded", error >= wanted / 2, f"relative error {error:.3g}; half of the recipe's own {wanted:.3g}"
        )


def _odd_width(bench: Bench, bridge: Any) -> None:
    """Widths that FP8 does not take: the call goes native, and says why."""
    recipes = bench.recipes
    if not recipes:
        return
    scopes = bench.bridge("fp8_scope")
    counts = (5, 0, 7, 3)
    weights = bench.randn(EXPERTS, 24, 40, scale=40**-0.5).bfloat16()
    sample = Sample(
        bench.randn(sum(counts), 40, dtype=torch.bfloat16, grad=True), weights, counts,
        bench.randn(sum(counts), 24, dtype=torch.bfloat16),
    )  # fmt: skip
    layer = _layer(bench, bridge, weights)
    scope = scopes.low_precision(
        target=bench.order.target.id, recipe=recipes[0], amax_reduction_group=scopes.SINGLE_OWNER
    )
    with bench.scope("fp8.odd-width"):
        seen = _run(layer, sample, scope)
        bench.ran_on("expert_gemm", layer.choice, seen.out, wanted="native")
        _compare(bench, sample, seen, None, _bf16)


def _deep_gemm(bench: Bench, bridge: Any) -> None:
    """DeepGEMM, where the target lists it; it is the second backend, so the environment may lack it."""
    if not bench.order.target.deep_gemm:
        return
    deep_gemm = bench.bridge("deep_gemm")
    if not deep_gemm.is_deep_gemm_available():
        why = deep_gemm.why_deep_gemm_is_unavailable()
        bench.backends.append(Backend("expert_gemm.deep_gemm", "deep_gemm", "", (), (f"deep_gemm: {why}",)))
        bench.check("deep_gemm.present", True, f"absent, and asked only where it is named: {why}")
        return
    for routing in IN_FP8[:1] if bench.quick else IN_FP8:
        with bench.scope(f"deep_gemm.{routing}"):
            _in_blocks(bench, bridge, routing)


def _in_blocks(bench: Bench, bridge: Any, routing: str) -> None:
    """Block-scaled FP8, held to fp64 and to the products of the very operands that its casts give."""
    sample = _sample(bench, torch.bfloat16, routing)
    layer = _layer(bench, bridge, sample.weights, backends=("deep_gemm", "native"), fp8_when="always")
    seen = _run(layer, sample)
    bench.ran_on("expert_gemm", layer.choice, seen.out, wanted="deep_gemm")
    power_of_two = bench.order.target.arch != "sm_90"
    rounded = block_scaled_experts(
        sample.rows, sample.weights, sample.counts, sample.gradient, power_of_two=power_of_two
    )
    bench.compare(
        "forward.of-rounded-operands",
        seen.out,
        rounded.out,
        roundings=_accumulated(0, "E4M3 operands are taken as they are, which a product in bf16 would miss"),
    )
    native = Seen(
        rounded.out.bfloat16(), rounded.rows.bfloat16(), tuple(weight.bfloat16() for weight in rounded.weights)
    )
    _compare(
        bench, sample, seen, native, lambda product, _: _accumulated(2, f"operands of {product} rounded in blocks")
    )


def _weights(bench: Bench, bridge: Any) -> None:
    """Weights map to the native layout and back exactly, whoever holds them; all are ordinary parameters."""
    for name, dtype in DTYPES.items():
        weights = bench.randn(EXPERTS, 24, 16, dtype=dtype)
        layer = _layer(bench, bridge, weights)
        state = layer.native_state_dict()
        same = set(state) == {"weight"} and state["weight"].dtype == dtype and torch.equal(state["weight"], weights)
        bench.check(f"weights.{name}.round-trip", same, f"{', '.join(state)} of {weights.numel()} values, exactly")
        registered = sum(parameter.numel() for parameter in layer.parameters() if parameter.requires_grad)
        bench.check(f"weights.{name}.parameters", registered == weights.numel(), f"{registered} values are trained")


def _no_rows(bench: Bench, bridge: Any) -> None:
    """No token goes to this rank: no rows, and a gradient of zeros for every weight."""
    weights = bench.randn(EXPERTS, 24, 16, dtype=torch.bfloat16)
    layer = _layer(bench, bridge, weights)
    empty = torch.empty(0, 16, dtype=torch.bfloat16, device=bench.device).requires_grad_()
    sample = Sample(empty, weights, (0,) * EXPERTS, torch.empty(0, 24, dtype=torch.bfloat16, device=bench.device))
    with bench.scope("bf16.no-rows"):
        seen = _run(layer, sample)
        bench.ran_on("expert_gemm", layer.choice, seen.out, wanted="native")
        _compare(bench, sample, seen, None, _bf16)


# --- wrong input ------------------------------------------------------------------------------------------


def _refusals(bench: Bench, bridge: Any) -> None:
    """What must be refused before any kernel, by class, with a next step."""
    errors = bench.bridge("errors")
    weights = bench.randn(EXPERTS, 24, 16, dtype=torch.bfloat16)
    layer = _layer(bench, bridge, weights)
    rows = bench.randn(15, 16, dtype=torch.bfloat16)
    sizes = {"num_experts": EXPERTS, "in_features": 16, "out_features": 24, "device": bench.device}
    calls: dict[str, tuple[type[BaseException], Callable[[], Any]]] = {
        "rank": (errors.WrongShape, lambda: layer(rows[None], (5, 0, 7, 3))),
        "width": (errors.WrongShape, lambda: layer(rows[:, :8], (5, 0, 7, 3))),
        "dtype": (errors.WrongDtype, lambda: layer(rows.float(), (5, 0, 7, 3))),
        "sum": (errors.TokenCountMismatch, lambda: layer(rows, (5, 0, 7, 2))),
        "number": (errors.TokenCountMismatch, lambda: layer(rows, (5, 7, 3))),
        "negative": (errors.TokenCountMismatch, lambda: layer(rows, (5, -1, 8, 3))),
        "no-experts": (errors.WrongShape, lambda: bridge.ExpertGemm(**{**sizes, "num_experts": 0})),
        "backend": (errors.UnknownName, lambda: bridge.ExpertGemm(**sizes, backends=("cutlass",))),
        "weights": (errors.WeightMismatch, lambda: layer.load_native_state_dict({"weight": weights[1:]})),
    }
    for name, (error, call) in calls.items():
        bench.refuses(f"refuses.{name}", error, call)


# --- one call, and what it is held to ---------------------------------------------------------------------


def _sample(bench: Bench, dtype: Any, routing: str, *, times: int = 1, strided: bool = False) -> Sample:
    inputs, outputs, times = (256, 384, TIMES_ON_GPU) if bench.device == "cuda" else (32, 48, times)
    counts = tuple(count * times for count in ROUTINGS[routing])
    total = sum(counts)
    rows = bench.randn(inputs, total, dtype=dtype).t() if strided else bench.randn(total, inputs, dtype=dtype)
    weights = bench.randn(EXPERTS, outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    return Sample(rows.requires_grad_(), weights, counts, bench.randn(total, outputs, dtype=dtype))


def _layer(
    bench: Bench, bridge: Any, weights: Any, backends: Sequence[str] = ("te", "native"), fp8_when: str = "faster"
) -> Any:
    experts, outputs, inputs = weights.shape
    layer = bridge.ExpertGemm(
        num_experts=experts, in_features=inputs, out_features=outputs, dtype=weights.dtype, device=bench.device,
        backends=backends, fp8_when=fp8_when,
    )  # fmt: skip
    layer.load_native_state_dict({"weight": weights})
    return layer


def _run(layer: Any, sample: Sample, scope: Any = None) -> Seen:
    """Forward, in the scope where there is one, and backward. A bank has one parameter, or one an expert."""
    parameters = list(layer.parameters())
    if scope is None:
        out = layer(sample.rows, sample.counts)
    else:
        with scope:
            out = layer(sample.rows, sample.counts)
    of_rows, *of_weights = torch.autograd.grad(out, (sample.rows, *parameters), sample.gradient, allow_unused=True)
    if len(of_weights) == 1 and of_weights[0] is not None:
        of_weights = list(of_weights[0].unbind(0))
    return Seen(out, of_rows, tuple(of_weights))


def _native(sample: Sample) -> Seen:
    """The plain loop in the same precision."""
    leaf, weights = sample.rows.detach().requires_grad_(), sample.weights.detach().requires_grad_()
    out = grouped_gemm_loop(leaf, weights, sample.counts)
    of_rows, of_weights = torch.autograd.grad(out, (leaf, weights), sample.gradient)
    return Seen(out, of_rows, of_weights.unbind(0))


def _compare(bench: Bench, sample: Sample, seen: Seen, native: Seen | None, bound: Bound) -> None:
    """Output, gradient of the rows, and gradient of each expert's weight; that of an idle one is zeros, not None."""
    reference = reference_experts(sample.rows, sample.weights, sample.counts, sample.gradient)
    experts, outputs, inputs = sample.weights.shape
    bench.compare(
        "forward",
        seen.out,
        reference.out,
        roundings=bound("forward", inputs),
        native=None if native is None else native.out,
    )
    bench.compare(
        "grad.rows",
        seen.rows,
        reference.rows,
        roundings=bound("dgrad", outputs),
        native=None if native is None else native.rows,
    )
    for expert in range(experts):
        bench.compare(
            f"grad.weight{expert}",
            seen.weights[expert] if expert < len(seen.weights) else None,
            reference.weights[expert],
            roundings=bound("wgrad", max(1, sample.counts[expert])),
            native=None if native is None else native.weights[expert],
        )


def _rounded_to(name: str, product: Product, length: int) -> Roundings:
    wide = "fp64" if name == "fp64" else "fp32"  # the reference is in fp64 too, and has as many errors: two of each
    return Roundings(((name, 2 if name == "fp64" else 1),), length, wide, why=f"{product} summed in {wide}, rounded")


def _fp32(product: Product, length: int) -> Roundings:
    return Roundings((("fp32", 1),), length, why=f"{product} summed in fp32")


def _bf16(product: Product, length: int) -> Roundings:
    return Roundings((("bf16", 1),), length, why=f"{product} summed in fp32 and rounded to bf16")


def _accumulated(operands: int, why: str) -> Roundings:
    """DeepGEMM's products: 128 products at a time in Hopper's FP8 accumulator, which are then added in fp32."""
    steps = (("e4m3", operands), ("tf32", 4 * 4), ("bf16", 1)) if operands else (("tf32", 4 * 4), ("bf16", 1))
    cut = (
        "the accumulator keeps about 14 bits (arXiv:2412.19437, section 3.3.2): 4 roundings to 11 bits for each of the "
        "4 instructions of 32 products between two additions in fp32"
    )
    return Roundings(steps, 128, why=f"{why}; {cut}; rounded to bf16")
