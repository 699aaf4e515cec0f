"""How far a tensor may lie from its reference, and where that bound comes from.

Every comparison is held to three things at once (design, section 4):

(a) its error is at most `K_NATIVE` times the error of native PyTorch in the same low precision, both against the same
    fp64 reference;
(b) its relative Frobenius error is below a bound derived from the mantissa bits, the number of roundings, the block
    size and the length K of the sums;
(c) the bound of (b) is so tight that this very tensor zeroed, half zeroed, halved, doubled or shuffled would not pass,
    and neither a wrong factor nor one wrong row hides in the norm.

NaN, Inf, another shape always fail.

Sources: Higham & Mary 2019, "A new approach to probabilistic rounding error analysis" (errors of independent roundings
add as squares); the factor on the native error is that of FlashAttention's tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from ..evidence.receipt import Check, Part

# A value rounded to p significant bits is off by at most u = 2^-p of itself, and by 0.4247 u in the root mean square:
# the error is uniform in an interval as wide as the spacing (1 / sqrt(3)), the value log-uniform within its binade
# (sqrt(3 / (8 ln 2)) = 0.7355).
RMS_OF_ROUNDING: Final = 0.7355 / math.sqrt(3.0)
# Errors pass through sums, softmax and norms that are not exactly norm-preserving; their norm is a random quantity.
SAFETY: Final = 2.0
FEW: Final = 16  # values of a tensor that is too small for a mean error
K_NATIVE: Final = 2.0
K_NATIVE_LARGEST: Final = 4.0  # the largest error is an extreme value: it scatters more than the norm does

SIGNIFICANT_BITS: Final = {
    "fp64": 53, "fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8, "e4m3": 4, "e5m2": 3, "e2m1": 2,
}  # fmt: skip


def unit_roundoff(name: str) -> float:
    """Largest relative error of rounding to nearest in this format: 2^-p for p significant bits."""
    return 2.0 ** -SIGNIFICANT_BITS[name]


@dataclass(frozen=True)
class Roundings:
    """What is rounded on the way to one tensor.

    Attributes:
        steps: (format, how many roundings in that format) in the order of computation.
        sum_length: K, the number of products in the longest sum.
        sum_format: format of the accumulator.
        amplification: by how much the computation magnifies relative errors, derived by whoever states it; 1 for
            linear maps of well-conditioned operands.
        why: what the roundings are, for the derivation that is shown.
        independent: how many values the smallest rounded operand holds, where that is fewer than the tensor has: an
            outer product has many elements and few independent errors.
    """

    steps: tuple[tuple[str, int], ...]
    sum_length: int
    sum_format: str = "fp32"
    amplification: float = 1.0
    why: str = ""
    independent: int | None = None

    def bound(self) -> float:
        """The relative Frobenius bound (b)."""
        squares = sum(count * (RMS_OF_ROUNDING * unit_roundoff(name)) ** 2 for name, count in self.steps)
        summing = math.sqrt(self.sum_length) * unit_roundoff(self.sum_format)
        return SAFETY * self.amplification * (math.sqrt(squares) + summing)

    def worst(self) -> float:
        """The same with every rounding at its worst and all of one sign."""
        each = sum(count * unit_roundoff(name) for name, count in self.steps)
        return self.amplification * (each + self.sum_length * unit_roundoff(self.sum_format))

    def derivation(self) -> str:
        """The same as a formula with its numbers."""
        terms = " + ".join(
            f"{count} x ({RMS_OF_ROUNDING:.3f} x 2^-{SIGNIFICANT_BITS[name]})^2" for name, count in self.steps
        )
        formats = ", ".join(f"{count} x {name}" for name, count in self.steps)
        amplified = f" x {self.amplification:g}" if self.amplification != 1.0 else ""
        return (
            f"{SAFETY:g}{amplified} x (sqrt({terms}) + sqrt({self.sum_length}) x "
            f"2^-{SIGNIFICANT_BITS[self.sum_format]}): {formats}; sums of {self.sum_length} in {self.sum_format}"
            + (f"; {self.why}" if self.why else "")
        )


def compare(
    name: str, observed: Any, reference: Any, *, roundings: Roundings, native: Any = None, scale: float | None = None
) -> Check:
    """Hold a tensor to its reference.

    Args:
        name: of the check.
        observed: what came out, any shape and floating dtype.
        reference: the same in fp64, from the same (already rounded) inputs.
        roundings: what is rounded on the way, from which (b) is derived.
        native: what native PyTorch gives in the same low precision; None where `observed` is that itself.
        scale: Frobenius norm against which errors are relative, where the reference is a difference of much larger
            terms and may vanish; the norm of the reference without it.
    """
    if observed is None:
        return Check(name, False, detail="there is no such tensor: it was never computed")
    if observed.shape != reference.shape:
        return Check(name, False, detail=f"shape {tuple(observed.shape)} instead of {tuple(reference.shape)}")
    seen, wanted = observed.detach().double(), reference.detach().double()
    bad = int((~torch.isfinite(seen)).sum())
    if bad:
        return check_of(name, part("finite", bad, 0.0, "no NaN and no Inf, ever"))
    if native is not None and not bool(torch.isfinite(native).all()):
        return Check(name, False, detail="native PyTorch gave NaN or Inf: there is nothing to compare with")
    if wanted.numel() == 0:
        return Check(name, True, detail=f"empty, shape {tuple(wanted.shape)}")
    norm = float(wanted.norm()) if scale is None else max(float(wanted.norm()), scale)
    if norm == 0.0:
        return check_of(name, part("zero", float(seen.abs().max()), 0.0, "the reference is zero"))
    parts = [_relative_error(seen, wanted, norm, roundings)]
    parts += _against_native(seen, wanted, norm, native, roundings)
    own = float(wanted.norm())
    if norm <= SAFETY * own:  # a reference that is smaller than that by cancellation shows no damage of its own
        roundings = replace(roundings, amplification=roundings.amplification * norm / own)
        factor, *beside = _factors(seen, wanted, native, roundings)
        parts += [_discriminates(wanted, own, roundings), factor]
        parts += [_worst_row("row", seen, wanted, roundings), _worst_element(seen, wanted, roundings)]
        if wanted.dim() > 1:
            parts.append(_worst_row("column", seen.mT, wanted.mT, roundings))
        parts += beside
    return check_of(name, *parts)


def part(name: str, observed: float, bound: float, derivation: str, *, at_least: bool = False) -> Part:
    """A part of a check: a value and its bound, a ceiling or with `at_least` a floor; NaN passes neither."""
    passed = observed >= bound if at_least else observed <= bound
    return Part(name, float(observed), bound, passed, derivation, at_least)


def check_of(name: str, *parts: Part, detail: str = "") -> Check:
    """A check that passes where each of its parts does."""
    return Check(name, all(one.passed for one in parts), parts, detail)


def _relative_error(seen: Any, wanted: Any, norm: float, roundings: Roundings) -> Part:
    """(b)."""
    bound, derivation = roundings.bound(), roundings.derivation()
    if wanted.numel() < FEW:  # too few errors to speak of their mean
        bound, derivation = max(bound, roundings.worst()), f"max(worst case = {roundings.worst():.3g}, {derivation})"
    return part("relative-error", float((seen - wanted).norm()) / norm, bound, derivation)


def _against_native(seen: Any, wanted: Any, norm: float, native: Any, roundings: Roundings) -> list[Part]:
    """(a), in the norm and at the worst element."""
    if native is None:
        return []
    plain = native.detach().double()
    last = roundings.steps[-1][0] if roundings.steps else roundings.sum_format
    u = unit_roundoff(last)
    (own, worst), (other, plain_worst) = (
        (float(off.norm()) / norm, float(off.abs().max())) for off in (seen - wanted, plain - wanted)
    )
    largest = float(wanted.abs().max())
    bits, error = SIGNIFICANT_BITS[last], f"error of native PyTorch in the same precision = {other:.3g}"
    of_largest = f"largest error of native PyTorch = {plain_worst:.3g}, 2^-{bits} x largest value = {largest:.3g}"
    near, far = K_NATIVE * max(other, u), K_NATIVE_LARGEST * max(plain_worst, u * largest)
    return [
        part("against-native", own, near, f"{K_NATIVE:g} x max({error}, 2^-{bits})"),
        part("largest-against-native", worst, far, f"{K_NATIVE_LARGEST:g} x max({of_largest})"),
    ]


def _damages(wanted: Any) -> dict[str, Any]:
    """The reference as it must not pass."""
    flat = wanted.flatten()
    middle = max(1, flat.numel() // 2)
    first, second = flat.clone(), flat.clone()
    first[:middle], second[middle:] = 0, 0
    # The half that holds more: what holds next to nothing is not missed when it is zero.
    half = min(first, second, key=lambda kept: float(kept.norm()))
    damages = {"zeros": torch.zeros_like(flat), "half zeros": half, "x0.5": flat * 0.5, "x2": flat * 2}
    if flat.numel() > 1:
        damages["shuffled"] = flat.roll(max(1, flat.numel() // 3))
    return damages


def _discriminates(wanted: Any, norm: float, roundings: Roundings) -> Part:
    """(c): the bound (b) is below half the error of the least visible damage to this very tensor."""
    flat = wanted.flatten()
    errors = {kind: float((bad - flat).norm()) / norm for kind, bad in _damages(wanted).items()}
    # A tensor whose values are all nearly alike is its own shuffle.
    errors = {kind: error for kind, error in errors.items() if kind != "shuffled" or error > 4 * roundings.bound()}
    kind = min(errors, key=lambda key: errors[key])
    why = f"half the error of this tensor when it is {kind} ({errors[kind]:.3g}): the bound itself must not let it pass"
    return part("bound-discriminates", roundings.bound(), errors[kind] / 2, why)


def _factors(seen: Any, wanted: Any, native: Any, roundings: Roundings) -> Iterator[Part]:
    """(c): the factor <observed, reference> / <reference, reference>. Independent errors average out in it.

    And beside that of native PyTorch: what a format does to all values, it does to both.
    """
    b, count = roundings.bound(), min(wanted.numel(), roundings.independent or wanted.numel())
    square, many = (wanted * wanted).sum(), wanted.numel() >= FEW
    # The error of a good quantiser is orthogonal to what it gives, not to what it got (Max 1960, "Quantizing for
    # minimum distortion"): <Q(x), x> = (1 - e^2) <x, x>, so the factor shrinks by e^2 = (b / SAFETY)^2. Seen on an
    # H200: -0.002 where e = 0.038, -0.004 where e = 0.059. Twice that is allowed.
    # 2^-11 stands for ties and underflow.
    bound = min(b, 6 * b / math.sqrt(count) + 2 * (b / SAFETY) ** 2 + 2.0**-11) if many else max(b, roundings.worst())
    factor = float((seen * wanted).sum() / square)
    shown = f"min(b, 6 b / sqrt({count}) + 2 (b / {SAFETY:g})^2 + 2^-11) with b = {b:.3g}"
    yield part("factor", abs(factor - 1.0), bound, f"{shown}: rounding errors do not add up to a factor")
    if native is not None and many:
        factor = float(((seen - native.detach().double()) * wanted).sum() / square)
        cut = 2.0**-9 if any(name.startswith("e") for name, _ in roundings.steps) else 2.0**-11
        bound = min(b, 6 * b / math.sqrt(count) + cut)
        shown = f"min(b, 6 b / sqrt({count}) + {cut:.3g}) with b = {b:.3g}"
        why = "two sets of rounding errors; the rest for ties, and for FP8 accumulators that cut"
        yield part("factor-of-native", abs(factor), bound, f"{shown}: {why}")


def _worst_row(axis: str, seen: Any, wanted: Any, roundings: Roundings) -> Part:
    """(c): no row along an axis is wrong as a whole; relative to the larger of its norm and the mean one."""
    width = wanted.shape[-1] if wanted.dim() else 1
    rows, off = wanted.reshape(-1, width).norm(dim=1), (seen - wanted).reshape(-1, width).norm(dim=1)
    typical = float((rows * rows).mean().sqrt())
    worst = float((off / rows.clamp_min(typical)).max())
    b = roundings.bound()
    why = f"b x (2 + 8 / sqrt({width})) with b = {b:.3g}: no {axis} of {width} is lost in the norm"
    return part(f"worst-{axis}", worst, b * (2 + 8 / math.sqrt(width)), why)


def _worst_element(seen: Any, wanted: Any, roundings: Roundings) -> Part:
    """(c): no element is wrong; relative to the larger of its size, its row's mean size and the mean one of all."""
    width = wanted.shape[-1] if wanted.dim() else 1
    flat, off = wanted.reshape(-1, width), (seen - wanted).reshape(-1, width).abs()
    typical = (flat * flat).mean(dim=1, keepdim=True).sqrt().clamp_min(float((flat * flat).mean().sqrt()))
    worst = float((off / torch.maximum(flat.abs(), typical)).max())
    b, count = roundings.bound(), wanted.numel()
    bound = b * (math.sqrt(2 * math.log(max(count, 2))) + 4)
    normal = f"twice the largest of {count} normal errors and 4 more standard deviations"
    return part("worst-element", worst, bound, f"b x (sqrt(2 ln {count}) + 4) with b = {b:.3g}: {normal}")


def relative_error(seen: Any, wanted: Any) -> float:
    """How far apart two tensors are in the Euclidean norm, relative to the second unless that is zero; may be NaN."""
    exact = wanted.detach().double()
    off, norm = float((seen.detach().double() - exact).norm()), float(exact.norm())
    return off / norm if norm else off


def low_precision_ran(error: float, roundings: Roundings, of: str = "") -> Part:
    """That an error is as large as low precision makes it: what is too accurate was not computed in it.

    Args:
        error: relative to the exact value, in the Euclidean norm.
        roundings: that must have been made.
        of: what it is the error of; nothing where the check's name says it.
    """
    floor = roundings.bound() / SAFETY / 2
    why = f"{of}: half the error that the roundings must make".removeprefix(": ")
    return part("low-precision-ran", error, floor, why, at_least=True)
