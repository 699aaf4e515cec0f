"""What an evaluation or a rehearsal has seen stays out of the scales of training.

Under delayed scaling a layer notes the amax of each pass, and the note is taken into its history where a scope ends
with gradients on. An evaluation in the scope, without gradients, leaves its notes behind: the next training step takes
them in as its own, and later ones round with scales of data that was never trained on (seen with 2.12.0 and 2.20.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import imports as te


@contextmanager
def pending_amax_kept() -> Iterator[None]:
    """Afterwards the notes of forward passes are those of before; what was noted inside is forgotten."""
    before = {amax.data_ptr(): amax.clone() for amax in _pending()}
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
def delayed_scaling_kept() -> Iterator[None]:
    """Afterwards scales and amax histories, forward and backward, are those of before: steps inside leave no trace.

    Of a layer that ran for the first time inside they are those of a new one: scales of 1, and no history.
    """
    before = {one.data_ptr(): one.clone() for one in (*_buffer("amax_history"), *_buffer("scale"))}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, new in (("amax_history", 0.0), ("scale", 1.0)):
                for one in _buffer(name):
                    one.copy_(before[one.data_ptr()]) if one.data_ptr() in before else one.fill_(new)


def _pending() -> list[Any]:
    """The collecting row of each layer's forward history, [tensors] each: views of it."""
    return _buffer("amax", "forward")


def _buffer(name: str, direction: str = "") -> list[Any]:
    """What Transformer Engine lists of all layers under delayed scaling.

    Args:
        name: "amax", "amax_history" ([steps, tensors] each), "scale" ([tensors] each).
        direction: "forward", "backward", or both.
    """
    manager = te.fp8_state_manager.require()
    state = getattr(manager, "quantization_state", manager)  # the class itself held it before 2.15
    buffers = getattr(state, f"global_{name}_buffer", {})
    return [tensor for key, tensors in buffers.items() if key.startswith(direction) for tensor in tensors]
