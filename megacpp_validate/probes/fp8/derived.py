"""What is derived from an FP8 tensor without arithmetic: a view, a slice, a copy keeps its payload and its scale.

Whatever class comes out, its values must be those of the same deed done to the dequantized tensor, bit by bit: moving
values about rounds nothing. A deed that a release does not know may be refused, aloud; that is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter, methodcaller
from typing import Any, Final

import torch

from ..bench import Bench

# What every release keeps in FP8 (`float8_tensor.py`, `float8_blockwise_tensor.py`, 2.12.0 and 2.20.2): each of these
# must come out quantized. All else may come out dequantized, or be refused.
KEPT: Final = {
    "Float8Tensor": ("view", "reshape", "detach", "clone"),
    "Float8BlockwiseQTensor": ("detach", "clone"),
    "MXFP8Tensor": ("detach", "clone"),
}


def deeds(rows: int, width: int) -> Mapping[str, Callable[[Any], Any]]:
    """By name, on a matrix [rows, width]."""
    return {
        "view": methodcaller("view", 2, rows // 2, width),
        "view-back": lambda one: one.view(2, rows // 2, width).view(rows, width),
        "view-aten": lambda one: torch.ops.aten.view.default(one, [2, rows // 2, width]),
        "reshape": methodcaller("reshape", 4, rows // 4, width),
        "flatten": methodcaller("reshape", -1),
        "transpose": methodcaller("t"),
        "slice": itemgetter(slice(rows // 4, rows // 2)),
        "select": itemgetter(3),
        "split": lambda one: torch.split(one, rows // 2)[1],
        "detach": methodcaller("detach"),
        "clone": methodcaller("clone"),
        "clone-of-view": lambda one: one.view(2, rows // 2, width).clone(),
        "contiguous": methodcaller("contiguous"),
        "parameter": partial(torch.nn.Parameter, requires_grad=False),
        "to-fp32": methodcaller("to", torch.float32),
        "to-device": lambda one: one.to(one.device),
    }


def check_derived(bench: Bench, name: str, tensor: Any) -> None:
    """Do each deed to a quantized tensor, and to what it dequantizes to; the checks are `NAME.DEED`.

    Args:
        bench: of the probe.
        name: of the checks.
        tensor: a matrix, quantized, with its values as they lie (not turned bytes alone).
    """
    exact, plain = (tensor.dequantize(dtype=dtype) for dtype in (torch.float32, tensor.dtype))
    kept, count = KEPT.get(type(tensor).__name__, ()), 0
    for deed, function in deeds(*tensor.shape).items():
        try:
            with torch.no_grad():
                made = function(tensor)
                seen, quantized = _values(bench, made)
        except Exception as fault:
            said = f"refused: {type(fault).__name__}: {fault}"
            bench.check(f"{name}.{deed}", deed not in kept, said)
            continue
        count += 1
        # What is no FP8 tensor any more may have gone through the dtype that the tensor says it has.
        wanted = [function(one).float() for one in ((exact,) if quantized else (exact, plain))]
        same = any(seen.shape == one.shape and torch.equal(seen, one) for one in wanted)
        words = f"a {type(made).__name__} {tuple(seen.shape)}, {'quantized' if quantized else 'dequantized'}"
        said = words if same else f"{words}, {_difference(seen, wanted[-1])}"
        bench.check(f"{name}.{deed}", same and (quantized or deed not in kept), said)
    again = bool(torch.equal(tensor.dequantize(dtype=torch.float32), exact))
    bench.check(f"{name}.left-alone", again and count > 0, f"the tensor itself is as it was after {count} deeds")


def _values(bench: Bench, made: Any) -> tuple[Any, bool]:
    """In fp32: from payload and scale where it is quantized, else as they are; and which of both."""
    bridge = bench.bridge("quantized_tensor")
    if not bridge.is_quantized(made):
        return made.detach().float(), False
    payload = bridge.read_payload(made)
    if not isinstance(payload, bridge.ScaledPayload):
        raise LookupError(f"{type(made).__name__} hands nothing over: {payload}")
    return payload.values(torch.float32), True


def _difference(seen: Any, wanted: Any) -> str:
    if seen.shape != wanted.shape:
        return f"wanted {tuple(wanted.shape)}"
    ratio = float(seen.double().norm() / wanted.double().norm().clamp_min(1e-300))
    return f"and its norm is {ratio:.6g} times that of the same of the dequantized tensor"
