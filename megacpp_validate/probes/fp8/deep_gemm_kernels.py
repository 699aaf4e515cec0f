"""DeepGEMM's kernels in a probe: banks that run on them, what they are handed, casts, and weights that are kept.

The casts give the bits of their references in plain torch. What TE keeps of a weight is right as long as the caller
tells the truth about microbatches and every change is seen; here the weights are changed in every way that is known to
go past a tensor's version, and the caller tells nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from ..bench import Bench
from ..expert_bank import Bank, new_bank, new_layer, run_bank

BF16: Final = torch.bfloat16
INPUTS: Final = 512
OUTPUTS: Final = 384
SMALL: Final = (256, 128)  # the same on a CPU
COLUMNS: Final = ("none", "vectors", "blocks")
CAPACITY: Final = 70
HEIGHT: Final = 256
WIDTH: Final = 384


def new_block_bank(bench: Bench, counts: tuple[int, ...]) -> Bank:
    """Tensors in bf16, in whole blocks."""
    return new_bank(bench, counts, *((INPUTS, OUTPUTS) if bench.device == "cuda" else SMALL), BF16)


def new_block_layer(bench: Bench, bank: Bank, fp8_when: str = "always") -> Any:
    """A bank on DeepGEMM; the native one stands behind it, so that a fallback shows."""
    return new_layer(bench, bank, ("deep_gemm", "native"), fp8_when)


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


# --- casts --------------------------------------------------------------------------------------------------------


def check_casts(bench: Bench, counts: tuple[int, ...]) -> None:
    """Every copy that a cast makes, bit by bit: values, scales, groups, fingerprints.

    Rows of zeros, of next to nothing and of large values are among them, and one value in a thousand is an outlier.
    """
    casts = bench.bridge("deep_gemm_cast")
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
            for name, more in {"weight": {}, "weight.kept": {"keep": True}, "weight.alone": {"turn": False}}.items():
                how = {"power_of_two": power_of_two, **more}
                _same(bench, name, [casts.cast_weight(weight, **how)], [casts.cast_weight_reference(weight, **how)])
            _check_renewed(bench, casts, weight, power_of_two)
    if bench.device == "cuda":
        _check_masked(bench, casts)


def _check_renewed(bench: Bench, casts: Any, weight: Any, power_of_two: bool) -> None:
    """Blocks that changed are rounded again, the rest is left as it is."""
    kept = casts.cast_weight(weight, keep=True, power_of_two=power_of_two)
    other = weight.clone()
    other[1, 130, 5] *= -1  # the first block of the second row of blocks
    other[0, :, 128:256] *= 4
    kept.values[1, 0, 0] = 448.0  # in a block whose bits stay: what is not looked at again is not written
    casts.renew_weight(kept, other, power_of_two=power_of_two)
    wanted = casts.cast_weight_reference(other, keep=True, power_of_two=power_of_two)
    left = float(kept.values[1, 0, 0])
    bench.check("renewed.left-alone", left == 448.0, f"a mark in a block that did not change: {left}")
    kept.values[1, 0, 0] = wanted.values[1, 0, 0]
    _same(bench, "renewed", [kept], [wanted])


def _check_masked(bench: Bench, casts: Any) -> None:
    """The kernel and plain torch on a CPU, NaN past the counts."""
    rows = bench.randn(3, CAPACITY, WIDTH, dtype=BF16)
    rows[0, 3:], rows[1] = float("nan"), float("inf")
    counts = torch.tensor([3, 0, CAPACITY], dtype=torch.int32, device=bench.device)
    seen = casts.cast_masked(rows, counts)
    wanted = casts.cast_masked(rows.cpu(), counts.cpu())
    _same(bench, "masked", [tuple(one.cpu() for one in seen)], [wanted])


def _odd(bench: Bench, values: Any) -> Any:
    """In bf16, with rows and values as no normal distribution has them."""
    values = torch.where(bench.rand(*values.shape) < 1e-3, values * 1e3, values)
    values[0], values[3] = 0.0, values[3] * 1e-9
    values[5] *= 1e6
    values[:, 7] = values[:, 7] * 1e-6
    return values.to(BF16)


def _same(bench: Bench, name: str, seen: Any, wanted: Any) -> None:
    """Tensors of equal bytes, in equal places; None beside None."""
    pairs: list[tuple[Any, Any]] = []
    for one, other in zip(seen, wanted, strict=True):
        if (one is None) is not (other is None):
            return bench.check(name, False, "one copy was not made, or one too many")
        if one is not None:
            pairs += zip(one, other, strict=True)
    differ = [index for index, (one, other) in enumerate(pairs) if not _equal(one, other)]
    return bench.check(name, not differ, f"{len(pairs)} tensors, bit by bit; not the same: {differ or 'none'}")


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)))


# --- weights that are kept ----------------------------------------------------------------------------------------


def _in_place(weight: Any) -> None:
    with torch.no_grad():
        weight.neg_()


def _by_data(weight: Any) -> None:
    weight.data.neg_()


def _one_value(weight: Any) -> None:
    weight.data[0, 77, 130] += 1


def _two_swapped(weight: Any) -> None:
    weight.data[0, [3, 9], 5] = weight.data[0, [9, 3], 5]


def _by_an_optimizer(weight: Any) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, fused=weight.device.type == "cuda").step()
    weight.grad = None


def _through_other_memory(weight: Any) -> None:
    """As a collective writes into the flat buffer that parameters are views of."""
    flat = torch.empty(0, dtype=weight.dtype, device=weight.device).set_(weight.untyped_storage())
    flat.neg_()


CHANGES: Final[dict[str, Callable[[Any], None]]] = {
    "in-place": _in_place,
    "data": _by_data,
    "one-value": _one_value,
    "two-swapped": _two_swapped,
    "optimizer": _by_an_optimizer,
    "other-memory": _through_other_memory,
}


def check_kept(bench: Bench, counts: tuple[int, ...]) -> None:
    """After each change, what is kept gives the bits that rounding anew gives, forward and backward; and other ones."""
    bank = new_block_bank(bench, counts)
    for name, change in CHANGES.items():
        with bench.scope(name):
            layer = new_block_layer(bench, bank)
            before = run_bank(layer, bank, is_first_microbatch=True)
            again = run_bank(layer, bank, is_first_microbatch=False)
            bench.same_bits("unchanged", before.values(), again.values())
            change(layer.bank.weight)
            for first in (False, True):
                seen, wanted = run_bank(layer, bank, is_first_microbatch=first), run_bank(layer, bank)
                bench.same_bits(f"changed.{first}", seen.values(), wanted.values())
            moved = not torch.equal(wanted["forward"], before["forward"])
            bench.check("the-change-shows", moved, "other weights give another output")
