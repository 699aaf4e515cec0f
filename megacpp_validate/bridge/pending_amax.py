"""What an evaluation or a rehearsal has seen stays out of the scales of training.

Under delayed scaling a layer notes the amax of each pass, and the note is taken into its history where a scope ends
with gradients on. An evaluation in the scope, without gradients, leaves its notes behind: the next training step takes
them in as its own, and later ones round with scales of data that was never trained on (seen with 2.12.0 and 2.20.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from . import imports as te

_FORWARD: Final = "scaling_fwd"
_BACKWARD: Final = "scaling_bwd"


@contextmanager
def pending_amax_kept(model: Any = None) -> Iterator[None]:
    """Afterwards the notes of forward passes are those of before; what was noted inside is forgotten.

    Args:
        model: whose layers run inside: the notes of one that was loaded and has not run yet are known from it alone.
    """
    before = {amax.data_ptr(): amax.clone() for amax in (*_pending(), *_pending_of(model))}
    try:
        yield
    finally:
        with torch.no_grad():
            for amax in _pending():
                if amax.data_ptr() in before:
                    amax.copy_(before[amax.data_ptr()])
                else:  # of a layer that ran for the first time
                    amax.zero_()


@contextmanager
def delayed_scaling_kept(model: Any) -> Iterator[None]:
    """Afterwards scales and amax histories, forward and backward, are those of before: steps inside leave no trace.

    Of a layer that gets its state inside they are those of a new one: scales of 1, and no history. Each layer is asked
    for its own, since Transformer Engine lists those of a checkpoint only once they have run (2.20.2). A history that
    had another length before is cut, or filled up with zeros, as its first pass does (`adjust_amax_history_length`).

    Args:
        model: that holds all layers which run inside.
    """
    before = {place: (history.clone(), scale.clone()) for place, history, scale in _scaling_of(model)}
    try:
        yield
    finally:
        with torch.no_grad():
            for place, history, scale in _scaling_of(model):
                history.zero_()
                scale.fill_(1.0)
                if place in before:
                    known = before[place][0][: history.shape[0]]
                    history[: known.shape[0]].copy_(known)
                    scale.copy_(before[place][1])


def _scaling_of(model: Any) -> Iterator[tuple[tuple[str, str], Any, Any]]:
    """Layer and direction, amax history [steps, tensors] and scales [tensors], where there is a state."""
    for name, layer in model.named_modules():
        states = getattr(layer, "fp8_meta", None) or {}
        for direction in (_FORWARD, _BACKWARD):
            history = getattr(states.get(direction), "amax_history", None)
            if history is not None:
                yield (name, direction), history, states[direction].scale


def _pending_of(model: Any) -> Iterator[Any]:
    """The collecting rows of a model's layers, whether they are listed yet or not."""
    if model is not None:
        yield from (history[0] for (_, way), history, _ in _scaling_of(model) if way == _FORWARD)


def _pending() -> list[Any]:
    """The collecting row of each layer's forward history, [tensors] each: views of it."""
    manager = te.fp8_state_manager.require()
    state = getattr(manager, "quantization_state", manager)  # the class itself held it before 2.15
    buffers = getattr(state, "global_amax_buffer", {})
    return [amax for key, amaxes in buffers.items() if key.startswith("forward") for amax in amaxes]
