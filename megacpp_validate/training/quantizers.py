"""The state of layers of Transformer Engine while they train: quantizers, and how delayed scaling moves.

Nothing here is configured: quantizers and states are read off the very layers that the steps ran through.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from ..bridge.backends import Choice
from ..bridge.te_fp8 import te_amax_state
from ..evidence.loss_curve import HistorySeen, QuantizerSeen

# Names of the tensors that the quantizers of one product are for, in Transformer Engine's order (`FP8FwdTensors`,
# `FP8BwdTensors` of `pytorch/constants.py`, 2.12 to 2.20); a layer with more products has them one after the other.
FORWARD: Final = ("input", "weight", "output")
BACKWARD: Final = ("gradient", "input gradient")
USED: Final = {"input", "weight", "gradient"}  # the others stay in high precision
_LARGEST: Final = {"e4m3": 448.0, "e5m2": 57344.0}


def low_layers(model: Any) -> dict[str, Any]:
    """Name -> layer of Transformer Engine whose products ran in low precision."""
    return {
        name: module
        for name, module in model.named_modules()
        # Attention has quantizers and no weights: its products are in low precision in other recipes than these.
        if next(iter(module.parameters(recurse=False)), None) is not None
        and _quantizers(module, forward=True)
        and _quantizers(module, forward=False)
    }


def delayed_scaling(model: Any) -> Iterator[tuple[str, bool, Any, Any]]:
    """Layer, whether forward, amax history [L, n] and scales [n] of each direction of delayed scaling."""
    for name, layer in low_layers(model).items():
        for forward in (True, False):
            state = layer.fp8_meta.get("scaling_fwd" if forward else "scaling_bwd")
            if getattr(state, "amax_history", None) is not None:
                yield name, forward, *te_amax_state(layer, forward=forward)


def used_quantizers(model: Any) -> Iterator[tuple[str, bool, int, str, Any]]:
    """Layer, whether forward, place among the layer's, tensor, and quantizer of every tensor that is cast."""
    for name, layer in low_layers(model).items():
        for forward, names in ((True, FORWARD), (False, BACKWARD)):
            for place, quantizer in enumerate(_quantizers(layer, forward=forward)):
                tensor = names[place % len(names)]
                if tensor in USED and quantizer is not None:
                    yield name, forward, place, tensor, quantizer


def see_quantizers(model: Any) -> tuple[QuantizerSeen, ...]:
    """Every quantizer of a tensor that is cast, layer by layer; equal ones of the experts of a bank are one row."""
    return tuple(
        dict.fromkeys(
            QuantizerSeen(name, tensor, type(quantizer).__name__, format_of(quantizer))
            for name, _, _, tensor, quantizer in used_quantizers(model)
        )
    )


def see_experts(choices: Mapping[str, Choice]) -> tuple[QuantizerSeen, ...]:
    """The operands of every part that took DeepGEMM in its last call, all of which it takes in E4M3."""
    took = [part for part, one in choices.items() if one.observed == "deep_gemm"]
    return tuple(QuantizerSeen(part, tensor, "deep_gemm", "e4m3") for part in took for tensor in sorted(USED))


def format_of(quantizer: Any) -> str:
    """The format that a quantizer casts to: "e4m3", "e5m2", or what it says otherwise."""
    dtype = getattr(quantizer, "dtype", "")
    dtype_name = str(getattr(dtype, "name", dtype)).lower()
    return next((name for name in _LARGEST if name in dtype_name), dtype_name or "unknown")


class HistoryWatch:
    """Compares the state of delayed scaling after some steps with that after the next one.

    Args:
        model: whose layers are watched.
        before: numbers of the steps after which the state is kept.

    Attributes:
        seen: how the state moved in the step after each of them; empty where no layer has any.
    """

    def __init__(self, model: Any, *, before: Collection[int]) -> None:
        self._model, self._steps = model, before
        self._before: dict[Any, tuple[Any, float, float]] = {}
        self.seen: list[HistorySeen] = []

    def look(self, step: int) -> None:
        """At the state after a step."""
        if step - 1 not in self._steps and step not in self._steps:
            return
        now = dict(self._read())
        if step - 1 in self._steps:
            self._compare(step, [(self._before[key], one) for key, one in now.items() if key in self._before])
        self._before = now

    def _compare(self, step: int, pairs: Sequence[Any]) -> None:
        not_rolled = not_collected = 0
        worst = 0.0
        for (old, scale_before, _), (new, scale, largest) in pairs:
            not_rolled += not (torch.equal(new[1:-1], old[2:]) and float(new[0]) == 0)
            not_collected += not float(new[-1]) > 0
            # The maximum is taken before the oldest row, old[1], leaves.
            amax = max(float(new[1:].max()), float(old[1]))
            worst = max(worst, _error(scale, scale_before, amax, largest))
        if pairs:
            self.seen.append(HistorySeen(step, len(pairs), not_rolled, not_collected, worst))

    def _read(self) -> Iterator[tuple[Any, tuple[Any, float, float]]]:
        """Tensor -> history [L] on the CPU, scale, and the largest value of its format."""
        states = {(name, forward): state for name, forward, *state in delayed_scaling(self._model)}
        for name, forward, place, _, quantizer in used_quantizers(self._model):
            if (name, forward) in states:
                history, scale = (one.detach()[..., place].cpu().clone() for one in states[name, forward])
                yield (name, forward, place), (history, float(scale), _LARGEST.get(format_of(quantizer), math.nan))


def _error(scale: float, before: float, amax: float, largest: float) -> float:
    """Relative error of a scale against that of the recipe, margin 0; an amax of 0 leaves the scale as it was."""
    wanted = largest / amax if amax > 0 else before
    error = abs(scale / wanted - 1) if wanted else math.inf
    return error if math.isfinite(error) else 1e9  # JSON has no Inf; no bound is that wide


def _quantizers(module: Any, *, forward: bool) -> list[Any]:
    found = getattr(module, "quantizers", None)
    if not isinstance(found, dict) or not hasattr(module, "fp8_meta"):
        return []
    return list(found.get("scaling_fwd" if forward else "scaling_bwd") or [])
