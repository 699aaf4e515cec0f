"""How much of a tensor an FP8 cast loses: what saturates, and what is flushed to zero.

Seen from outside: a linear layer whose weight is the identity gives back its input as it was cast, and the gradient of
its output too. Under delayed scaling the cast is that of the calls before, so of normal values with a known deviation
the share that is lost follows from the re-computed scale. Both sides are bounded: a step after a spike must lose small
values, or the spike was forgotten; a spike must saturate, or its own scale was used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..evidence.receipt import Check, Part
from .bench import Bench
from .bounds import unit_roundoff
from .emulation import LARGEST, FormatName
from .fp8_state import default_update
from .low_precision import Enter
from .references.delayed_scaling import Algorithm, DelayedRule, Update, new_state, next_state

ROWS: Final = 128
TENSORS: Final[dict[FormatName, str]] = {"e4m3": "input", "e5m2": "gradient"}
SMALLEST: Final[dict[FormatName, float]] = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}  # subnormal, above zero
# Small enough that a scale of 1 would lose several percent of each.
DEVIATION: Final[dict[FormatName, float]] = {"e4m3": 2.0**-6, "e5m2": 2.0**-12}
# Factors of the input and of the gradient. "settling" is not judged: it fills the history.
PHASES: Final = (
    ("settling", 1.0, 1.0),
    ("settling", 1.0, 1.0),
    ("steady", 1.0, 1.0),
    ("spike", 4.0, 4.0),
    ("settling", 1.0, 1.0),  # a spike that only the next call remembers is forgotten after this one
    ("shrunk", 2.0**-9, 2.0**-23),
)
STANDARD_DEVIATIONS: Final = 6.0
FEW: Final = 6.0  # more of them, where so few are expected that they are not normal (Poisson)
SHADE: Final = 2.0**-7  # values and results are rounded to bf16: what is counted begins that much earlier or later


@dataclass(frozen=True)
class _Cast:
    """A tensor before a cast and after it, with the scale that the cast must have had.

    Attributes:
        values: [M, K] before.
        kept: the same after.
        deviation: of the normal distribution that the values come from.
    """

    which: FormatName
    values: Any
    kept: Any
    scale: float
    deviation: float


def check_shares(
    bench: Bench,
    layer: Any,
    enter: Enter,
    *,
    length: int = 16,
    algorithm: Algorithm = "max",
    margin: int = 0,
    update: Update | None = None,
    name: str = "shares",
) -> None:
    """Shares of overflowed and underflowed elements of the input (E4M3) and the gradient of the output (E5M2).

    The checks are `NAME.PHASE.TENSOR.overflowed` and `.underflowed`.

    Args:
        bench: of the probe.
        layer: linear, [M, K] -> [M, K], with `weight` [K, K] and perhaps `bias` [K]; it has never run. What it holds is
            put back afterwards.
        enter: makes the scope of the recipe: delayed scaling, HYBRID.
        length, algorithm, margin, update: of the recipe, as in `fp8_state.check_delayed_state`.
        name: of the checks.

    Raises:
        ValueError: the layer is not square.
    """
    out_features, width = layer.weight.shape
    if out_features != width:
        raise ValueError(f"the layer is {width} -> {out_features}, not square. Next step: pass one that is.")
    how = update or default_update(bench.device)
    rules = {which: DelayedRule(LARGEST[which], algorithm, margin, how) for which in TENSORS}
    states = {which: new_state(length, 1) for which in TENSORS}
    held = [parameter.detach().clone() for parameter in layer.parameters()]
    try:
        _make_identity(layer)
        for phase, of_rows, of_gradient in PHASES:
            factors: dict[FormatName, float] = {"e4m3": of_rows, "e5m2": of_gradient}
            deviations = {which: DEVIATION[which] * factors[which] for which in TENSORS}
            values = {which: bench.randn(ROWS, width, dtype=torch.bfloat16, scale=deviations[which]) for which in rules}
            kept = _run(layer, enter, values["e4m3"], values["e5m2"])
            for which, tensor in TENSORS.items():
                scale = float(states[which].scale[0])
                if phase != "settling":
                    cast = _Cast(which, values[which], kept[which], scale, deviations[which])
                    bench.checks += _judge(f"{name}.{phase}.{tensor}", cast)
                amax = values[which].detach().abs().amax().cpu().reshape(1)
                states[which] = next_state(states[which], amax, rules[which])
    finally:
        with torch.no_grad():
            for parameter, old in zip(layer.parameters(), held, strict=True):
                parameter.copy_(old)


def _make_identity(layer: Any) -> None:
    """No sum has more than one term, and 1 is a value of every format: what comes out is what was cast."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        torch.nn.init.eye_(layer.weight)


def _run(layer: Any, enter: Enter, rows: Any, gradient: Any) -> dict[FormatName, Any]:
    leaf = rows.clone().requires_grad_()
    with enter():
        out = layer(leaf)
    out.backward(gradient)
    layer.zero_grad(set_to_none=True)
    return {"e4m3": out.detach(), "e5m2": leaf.grad}


def _judge(name: str, cast: _Cast) -> list[Check]:
    if cast.kept is None or cast.kept.shape != cast.values.shape or not bool(torch.isfinite(cast.kept).all()):
        return [Check(name, False, detail="what was cast did not come out: no tensor, another shape, or not finite")]
    values, kept = cast.values.detach().double().abs(), cast.kept.double().abs()
    # Half a spacing below, and no further, is rounding. Small values lose more by it; those are not the largest.
    loss = (1.0 - unit_roundoff(cast.which)) * (1.0 - 2.0**-8)
    overflowed = (kept == kept.max()) & (kept > 0) & (kept < values * loss)
    underflowed = (kept == 0) & (values > 0)
    top, bottom = LARGEST[cast.which] / cast.scale / loss, SMALLEST[cast.which] / cast.scale / 2.0
    count = values.numel()
    return [
        _hold(f"{name}.overflowed", int(overflowed.sum()), count, _outside(top, cast.deviation), "above", top, cast),
        _hold(
            f"{name}.underflowed", int(underflowed.sum()), count, _inside(bottom, cast.deviation), "in", bottom, cast
        ),
    ]


def _outside(limit: float, deviation: float) -> tuple[float, float]:
    """Least and largest probability that a normal value lies outside of about +-limit."""
    wide, narrow = (limit * (1 + SHADE), limit * (1 - SHADE))
    return tuple(math.erfc(edge / deviation / math.sqrt(2.0)) for edge in (wide, narrow))  # type: ignore[return-value]


def _inside(limit: float, deviation: float) -> tuple[float, float]:
    """The same, inside."""
    wide, narrow = (limit * (1 + SHADE), limit * (1 - SHADE))
    return tuple(math.erf(edge / deviation / math.sqrt(2.0)) for edge in (narrow, wide))  # type: ignore[return-value]


def _hold(name: str, seen: int, count: int, odds: tuple[float, float], where: str, limit: float, cast: _Cast) -> Check:
    least, most = (
        count * p + sign * (STANDARD_DEVIATIONS * math.sqrt(count * p * (1.0 - p)) + FEW)
        for p, sign in zip(odds, (-1.0, 1.0), strict=True)
    )
    edge = f"|x| {'>' if where == 'above' else '<='} {limit:.3g} of normal values of deviation {cast.deviation:.3g}"
    odd = f"probability {odds[0]:.3g} to {odds[1]:.3g} ({edge}; the scale must be {cast.scale:.6g})"
    slack = f"{STANDARD_DEVIATIONS:g} binomial standard deviations and {FEW:g} of {count}"
    share = seen / count
    parts = [Part("share", share, most / count, share <= most / count, f"{odd}, and {slack} more")]
    if least > 0:
        floor = least / count
        parts.append(Part("least-share", share, floor, share >= floor, f"{odd}, but for {slack}", at_least=True))
    return Check(name, all(part.passed for part in parts), tuple(parts))
