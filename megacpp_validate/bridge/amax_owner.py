"""Over which ranks the amax of a shard is reduced, and what of it a rehearsal must leave as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final

import torch

from . import imports as te
from .errors import BridgeError

# --- the ranks that share an amax -------------------------------------------------------------------------------------
# Transformer Engine takes no group for the whole world. Ranks that hold other shards then pull the scales of this one,
# and ranks that do not come along hang the reduction; neither raises. So the group is required.


class Owner(Enum):
    """Who owns a shard, where that is no process group."""

    SINGLE = "this rank alone"


SINGLE_OWNER: Final = Owner.SINGLE
"""This rank alone owns its shard: its amax is reduced with no other rank, however large the world is."""


class AmaxGroupMissing(BridgeError, ValueError):
    """The reduction group of a shard's amax was not given by its owner, or is none of this rank's."""


class AmaxGroupChanged(BridgeError, RuntimeError):
    """The amax of a layer is to be reduced over another group than before, which Transformer Engine would not do."""


def reduction_of(owner: Any) -> tuple[Any, bool]:
    """The process group to reduce over, and whether to reduce at all.

    Args:
        owner: the process group of the ranks that hold the same shard; or `SINGLE_OWNER`; or None, only in a world of
            one rank.

    Raises:
        AmaxGroupMissing: None in a larger world, something that is no process group, or a group without this rank.
    """
    if owner is SINGLE_OWNER:
        return None, False
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    step = "Next step: pass the process group of the ranks that hold this shard, or SINGLE_OWNER."
    if owner is None:
        if ready and torch.distributed.get_world_size() > 1:
            raise AmaxGroupMissing(
                f"amax_reduction_group is None, and Transformer Engine would reduce over all ranks. {step}"
            )
        return None, True
    # `new_group` returns to the ranks outside of the group something else than a group.
    is_group = ready and isinstance(owner, torch.distributed.ProcessGroup)
    if not is_group or torch.distributed.get_rank(owner) < 0:
        raise AmaxGroupMissing(f"amax_reduction_group {owner!r} is no process group of this rank. {step}")
    return owner, True


# --- amax that an evaluation or a rehearsal leaves behind -------------------------------------------------------------
# Under delayed scaling a layer notes the amax of each pass, and the note is taken into its history where a scope ends
# with gradients on. An evaluation without gradients leaves its notes behind: the next training step takes them in as
# its own (seen with 2.12.0 and 2.20.2).

_FORWARD: Final = "scaling_fwd"


@contextmanager
def pending_amax_kept(model: Any = None) -> Iterator[None]:
    """Afterwards the notes of forward passes are those of before; what was noted inside is forgotten.

    Args:
        model: whose layers run inside: the notes of one that was loaded and has not run yet are known from it alone.
    """
    own = () if model is None else (history[0] for (_, way), history, _ in _scaling_of(model) if way == _FORWARD)
    before = {amax.data_ptr(): amax.clone() for amax in (*_pending(), *own)}
    try:
        yield
    finally:
        with torch.no_grad():
            for amax in _pending():
                kept = before.get(amax.data_ptr())
                amax.zero_() if kept is None else amax.copy_(kept)  # None: of a layer that ran for the first time


@contextmanager
def delayed_scaling_kept(model: Any) -> Iterator[None]:
    """Afterwards scales and amax histories, forward and backward, are those of before: steps inside leave no trace.

    A layer that gets its state inside has that of a new one: scales of 1, and no history. Each layer is asked for its
    own, since Transformer Engine lists those of a checkpoint only once they have run (2.20.2). A history that had
    another length before is cut, or filled up with zeros, as its first pass does (`adjust_amax_history_length`).

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
        for direction in (_FORWARD, "scaling_bwd"):
            history = getattr(states.get(direction), "amax_history", None)
            if history is not None:
                yield (name, direction), history, states[direction].scale


def _pending() -> list[Any]:
    """The collecting row of each layer's forward history, [tensors] each: views of it."""
    manager = te.fp8_state_manager.require()
    state = getattr(manager, "quantization_state", manager)  # the class itself held it before 2.15
    buffers = getattr(state, "global_amax_buffer", {})
    return [amax for key, amaxes in buffers.items() if key.startswith("forward") for amax in amaxes]
