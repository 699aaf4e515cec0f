"""Checkpoints of a tree with single layers by Transformer Engine in it: the names that plain PyTorch would have.

What TE adds is told in `extra_state`. A layer that stands in the place of a plain one also leaves it out when saving,
as long as it is empty. One that holds something is saved: without it delayed scaling would start again with scale 1.
`torch.distributed.checkpoint` asks only for what the model at hand names: before it loads FP8 state into fresh layers,
run one step in their scope, or the history starts anew.
"""

from __future__ import annotations

from typing import Any

from .extra_state import EXTRA_STATE, tolerate_extra_state


def keep_checkpoints_plain(layer: Any) -> Any:
    """The same TE layer, with an empty `_extra_state` neither saved nor wanted."""
    layer.register_state_dict_post_hook(_leave_out_empty)
    tolerate_extra_state(layer)
    return layer


def _leave_out_empty(layer: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:  # noqa: ARG001
    """torch's hook after `state_dict`."""
    added = state.get(prefix + EXTRA_STATE)
    if added is not None and not added.numel():
        del state[prefix + EXTRA_STATE]
