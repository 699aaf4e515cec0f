"""The expert bank in block-scaled FP8 by DeepGEMM: every product, layout and cast, held to fp64.

Forward, the gradient of the rows and that of the weights are held to fp64 by bounds that follow from the roundings, and
to the exact products of the very operands that block scaling gives. What the kernels are handed is read off the calls.
The casts give the bits of their references in plain torch.

Every operand is rounded to E4M3 for the product at hand:

| product              | left                                   | right                                   |
|----------------------|----------------------------------------|-----------------------------------------|
| output               | rows, 1 x 128 along the features       | weights, 128 x 128                      |
| gradient of the rows | gradient, 1 x 128 along the features   | weights, 128 x 128, transposed          |
| gradient of a weight | gradient^T, 1 x 128 along the tokens   | rows^T, 128 tokens x 128 features       |

Tokens are cut into blocks within an expert, whose last block is as long as what is left: padding with zeros changes no
scale.

What is refused, how few rows are too few, and when a kept weight is rounded anew is plain Python: tests/bridge holds
that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch

from ...bridge.expert_gemm import SWITCH
from ...evidence.receipt import Compiler
from ..bench import Bench
from ..bounds import Roundings, low_precision_ran, relative_error
from ..emulation import LARGEST, Block, operand_roundings, round_to_fp8
from ..expert_gemm import Bank, new_bank, new_layer, run_bank
from ..trial import Tensors

BF16: Final = torch.bfloat16
WIDTHS: Final = {"cuda": (512, 384), "cpu": (256, 128)}  # in, out
# Rows of each expert: padded and not, none at all, one alone, and as many for all, which is one launch.
ROUTINGS: Final[dict[str, tuple[int, ...]]] = {
    "uneven": (130, 57, 301, 64),
    "idle": (0, 256, 0, 95),
    "one-busy": (0, 0, 300, 0),
    "one-row": (0, 1, 0, 0),
    "even": (200, 140, 129, 256),
}
QUICK: Final = ("uneven", "even")
FEW: Final = (3, 0, 17, 1)
PRODUCTS: Final = ("forward", "grad.rows", "grad.weight")
COLUMNS: Final = ("none", "vectors", "blocks")
SMALLEST_AMAX: Final = 1e-30  # zeros have a scale; DeepGEMM's casts take no less than 1e-4 (utils/math.py, 0.1.3)
HEIGHT: Final = 256
WIDTH: Final = 384


@patch.dict(os.environ, {SWITCH: "always"})
def probe(bench: Bench) -> None:
    """Run it, however few the rows."""
    if not bench.order.target.deep_gemm:
        _check_lacking(bench)
        return
    bridge = bench.bridge("deep_gemm")
    if not bridge.DEEP_GEMM.is_available():
        bench.cannot_run(bridge.DEEP_GEMM.why_unavailable())
    for name, part in PARTS.items():
        with bench.scope(name):
            part(bench)
    _check_stream(bench)
    bank = new_block_bank(bench, ROUTINGS["uneven"])
    bench.layer_keeps_nothing("deep_gemm", new_block_layer(bench, bank), bank.rows, bank.counts)
    _check_compiler(bench)


def _check_lacking(bench: Bench) -> None:
    """A target whose row has no DeepGEMM: the bridge refuses it there, and says why."""
    refusal = bench.bridge("deep_gemm").why_not_deep_gemm(bench.device, BF16, *WIDTHS["cpu"])
    surprise = f"surprise: DeepGEMM can be used here, and the row of {bench.order.target.id} has it not"
    said = surprise if refusal is None else refusal.reason
    bench.check("bridge-refuses", refusal is not None, said)
    bench.unsupported = f"the row of {bench.order.target.id} has no DeepGEMM: {said}"


def new_block_bank(bench: Bench, counts: tuple[int, ...]) -> Bank:
    """Tensors in bf16, in whole blocks."""
    return new_bank(bench, counts, *WIDTHS[bench.device], BF16)


def new_block_layer(bench: Bench, bank: Bank) -> Any:
    """A bank on DeepGEMM; the native one stands behind it, so that a fallback shows."""
    return new_layer(bench, bank, ("deep_gemm", "native"))


# --- rows sorted by expert ----------------------------------------------------------------------------------------


def _check_contiguous(bench: Bench) -> None:
    for name in QUICK if bench.quick else ROUTINGS:
        with bench.scope(name):
            _check_products(bench, name)


def _check_products(bench: Bench, name: str) -> None:
    bank = new_block_bank(bench, ROUTINGS[name])
    layer = new_block_layer(bench, bank)
    with watching_kernels(bench) as calls:
        seen = run_bank(layer, bank)
    bench.ran_on("expert_gemm", layer.choice, seen["forward"], wanted="deep_gemm")
    _check_operands(bench, name, calls)
    rounded = block_scaled_pass(bank, power_of_two=bench.order.target.arch != "sm_90")
    exact, native = bank.exact(), {name: tensor.to(BF16) for name, tensor in rounded.items()}
    # Between two additions in fp32, a kernel sums 128 products in Hopper's FP8 accumulator.
    roundings = operand_roundings("block", "forward", 128)
    why = f"operands taken as E4M3 has them, which a product in bf16 would miss; apart from them {roundings.why}"
    kept = replace(roundings, steps=roundings.steps[1:], why=why)
    _compare(bench, bank, "", seen, exact, roundings, native)
    _compare(bench, bank, ".of-rounded-operands", seen, rounded, kept)
    for product in PRODUCTS:  # an error far below that of E4M3 is no success: it was computed in something else
        own = [(seen[name].flatten(), exact[name].flatten()) for name in exact if name.startswith(product)]
        error = relative_error(*(torch.cat(side) for side in zip(*own, strict=True)))
        part = low_precision_ran(error, Roundings((("e4m3", 2),), 1))
        bench.check(f"{product}.rounded", part.passed, f"relative error {error:.3g}, at least {part.bound:.3g} wanted")


def block_scaled_pass(bank: Bank, *, power_of_two: bool) -> dict[str, Any]:
    """The pass as exact sums, in fp64, of the very operands that the kernels multiply."""

    def scale_blocks(amax: Any) -> Any:
        inverse = amax.clamp(min=SMALLEST_AMAX) * (1.0 / LARGEST["e4m3"])
        return 1.0 / (torch.exp2(torch.ceil(torch.log2(inverse))) if power_of_two else inverse)

    line, square = (
        partial(round_to_fp8, name="e4m3", block=Block(high, 128), scale_blocks=scale_blocks) for high in (1, 128)
    )
    rows, gradients = (one.detach().split(bank.counts) for one in (bank.rows, bank.gradient))
    parts = list(zip(rows, gradients, map(square, bank.weights), strict=True))
    of_weights = {f"grad.weight{expert}": line(g.T) @ square(x) for expert, (x, g, _) in enumerate(parts)}
    out, of_rows = [line(x) @ w.T for x, _, w in parts], [line(g) @ w for _, g, w in parts]
    return {"forward": torch.cat(out), "grad.rows": torch.cat(of_rows), **of_weights}


def _compare(
    bench: Bench, bank: Bank, suffix: str, seen: Tensors, wanted: Tensors, found: Roundings, native: Any = None
) -> None:
    """Output, gradient of the rows, and gradient of each expert's weight."""

    def roundings(name: str) -> Roundings:
        # values of the smaller operand of an outer product
        count = bank.counts[int(name.removeprefix("grad.weight"))] if name.startswith("grad.weight") else 0
        return replace(found, independent=count * min(bank.weights.shape[1:]) or None)

    bench.compare_pass(seen, wanted, roundings, native=native, shown=lambda name: f"{name}{suffix}")


def _check_operands(bench: Bench, name: str, calls: list[Any]) -> None:
    """What the kernels were handed: E4M3 everywhere, and the blocks that the design says."""
    kinds = {"forward": ("input", "weight"), "grad.rows": ("gradient", "weight"), "grad.weight": ("gradient", "input")}
    found: dict[str, set[tuple[str, ...]]] = {}
    made_by = f"deep_gemm_cast in {'Triton' if bench.device == 'cuda' else 'torch'}"
    for call in calls:
        found.setdefault(call.product, set()).add(call.blocks)
        for kind, dtype, block in zip(kinds[call.product], call.dtypes, call.blocks, strict=True):
            if name == "uneven":
                bench.saw_quantizer(f"fp8.deep_gemm.{call.product}", kind, made_by, dtype, block)
    same = found == {product: {("1x128", "128x128")} for product in kinds}
    bench.check("operands.blocks", same, f"{ {product: sorted(seen) for product, seen in sorted(found.items())} }")
    dtypes = {dtype for call in calls for dtype in call.dtypes}
    bench.check("operands.e4m3", dtypes == {"float8_e4m3"}, f"dtypes {', '.join(sorted(dtypes)) or 'of no call'}")


class Call(NamedTuple):
    """One call of a kernel: the product that it is; dtype of both operands, and which values of each share a scale."""

    product: str
    dtypes: tuple[str, ...]
    blocks: tuple[str, ...]


@contextmanager
def watching_kernels(bench: Bench) -> Iterator[list[Call]]:
    """While inside, every call of DeepGEMM's kernels through the bridge is noted, by the product that it makes."""
    module, calls = bench.bridge("deep_gemm"), list[Call]()

    def call(name: str, kernel: Callable[..., Any], *given: Any, **more: Any) -> Any:
        dtypes = tuple(str(values.dtype).removeprefix("torch.").removesuffix("fn") for values, _ in given[:2])
        blocks = tuple(
            "x".join(str(values.shape[axis] // scales.shape[axis]) for axis in (-2, -1)) for values, scales in given[:2]
        )
        calls.append(Call(_product(name, calls), dtypes, blocks))
        return kernel(*given, **more)

    with ExitStack() as watching:
        for name in ("grouped_fp8_gemm", "fp8_gemm"):
            kernel = getattr(module, name).require
            watched = SimpleNamespace(require=lambda name=name, kernel=kernel: partial(call, name, kernel()))
            watching.enter_context(patch.object(module, name, watched))
        yield calls


def _product(name: str, before: list[Call]) -> str:
    """The first grouped product of a step is the output, the second the gradient of the rows; then come weights."""
    if name == "fp8_gemm" or len(before) >= 2:
        return "grad.weight"
    return "grad.rows" if before else "forward"


def _check_stream(bench: Bench) -> None:
    """On a stream of its own every kernel waits for what that stream is still making."""
    if bench.device != "cuda":
        return
    bank = new_block_bank(bench, ROUTINGS["uneven"])
    layer = new_block_layer(bench, bank)
    rows = torch.zeros_like(bank.rows)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # about 10 ms, longer than the host takes to launch the rest
            rows.copy_(bank.rows)
            seen = layer(rows, bank.counts)
        stream.synchronize()
        bench.same_bits("stream", [seen], [layer(bank.rows, bank.counts)])


# --- what is not a number -----------------------------------------------------------------------------------------


def _check_not_a_number(bench: Bench) -> None:
    """A NaN comes out where it goes in, and nowhere else: a cast that saturates would hide it."""
    bank = new_block_bank(bench, FEW)
    layer = new_block_layer(bench, bank)
    for value in (float("nan"), float("inf")):
        rows = bank.rows.detach().clone()
        rows[1, 5] = value
        with torch.no_grad():
            out = layer(rows, bank.counts)
        lost = (~torch.isfinite(out)).all(dim=1).nonzero().flatten().tolist()
        found = (~torch.isfinite(out)).any(dim=1).nonzero().flatten().tolist()
        bench.check(str(value), lost == found == [1], f"not finite in rows {found}, wholly in {lost}")


# --- casts --------------------------------------------------------------------------------------------------------


def _check_casts(bench: Bench) -> None:
    """Every copy that a cast makes, bit by bit: values, scales, groups.

    Rows of zeros, of next to nothing and of large values are among them, and one value in a thousand is an outlier.
    """
    casts, counts = bench.bridge("deep_gemm"), ROUTINGS["uneven"]
    tokens = _odd(bench, bench.randn(sum(counts), WIDTH))
    weight = _odd(bench, bench.randn(2 * HEIGHT, WIDTH)).view(2, HEIGHT, WIDTH)
    tiles = casts.plan_tiles(counts, bench.device)
    strided = torch.stack([tokens, tokens], dim=1).view(len(tokens), -1)[:, :WIDTH]
    for power_of_two in (False, True):
        with bench.scope("powers-of-two" if power_of_two else "plain"):
            for columns in COLUMNS:
                how = {"columns": columns, "power_of_two": power_of_two}
                wanted = casts.cast_tokens_reference(tokens, tiles, **how)
                _same(bench, f"tokens.{columns}", casts.cast_tokens(tokens, tiles, **how), wanted)
                _same(bench, f"strided.{columns}", casts.cast_tokens(strided, tiles, **how), wanted)
                if columns != "none":
                    alone = casts.cast_tokens(tokens, tiles, rows=False, **how)
                    _same(bench, f"columns.{columns}", alone, (None, wanted[1]))
            for name, more in {"weight": {}, "weight.alone": {"turn": False}}.items():
                how = {"power_of_two": power_of_two, **more}
                _same(bench, name, [casts.cast_weight(weight, **how)], [casts.cast_weight_reference(weight, **how)])


def _odd(bench: Bench, values: Any) -> Any:
    """In bf16, with rows and values as no normal distribution has them."""
    values = torch.where(bench.rand(*values.shape) < 1e-3, values * 1e3, values)
    values[0], values[3] = 0.0, values[3] * 1e-9
    values[5] *= 1e6
    values[:, 7] = values[:, 7] * 1e-6
    return values.to(BF16)


def _same(bench: Bench, name: str, seen: Any, wanted: Any) -> None:
    """Every tensor of these copies has the same bits; None beside None."""
    first, again = ([tensor for copy in copies for tensor in copy or (None,)] for copies in (seen, wanted))
    bench.same_bits(name, first, again)


def _check_compiler(bench: Bench) -> None:
    """What compiled the kernels, and that its cache holds them."""
    mode, cache = bench.bridge("deep_gemm").compiler()
    bench.compilers.append(Compiler("deep_gemm", mode, str(cache)))
    if bench.device != "cuda":
        return  # nothing is compiled for a CPU
    found = sorted({path.name.rpartition(".")[0] for path in cache.glob("cache/kernel.*")})
    bench.check("compiler.cache", bool(found), f"{mode} into {cache}: {', '.join(found) or 'nothing'}")


PARTS: Final[dict[str, Callable[[Bench], None]]] = {
    "contiguous": _check_contiguous,
    "casts": _check_casts,
    "not-a-number": _check_not_a_number,
}
