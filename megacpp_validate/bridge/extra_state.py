"""The extra state that Transformer Engine's layers add to a checkpoint, and how it is kept from getting in the way.

A TE layer adds `_extra_state` to its `state_dict`: bytes with the scales and amax histories of delayed scaling, empty
where the layer never ran in FP8. Left alone, a checkpoint of the native path would not load strictly into TE layers,
for the key is missing, nor the other way round, for it is unknown. So a missing one is taken for empty, and one of
layers that are not there is left out.

TE reads a filled one back through pickle, and from 2.17 on only with NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

EXTRA_STATE: Final = "_extra_state"


def is_extra_state(name: str) -> bool:
    """Whether a key of a state_dict is extra state and no weight."""
    return name.rpartition(".")[2] == EXTRA_STATE


def tolerate_extra_state(module: Any) -> None:
    """Let `module` load checkpoints without extra state, or with that of layers it has not; weights stay strict."""
    module.register_load_state_dict_pre_hook(_fit_extra_state)


def _fit_extra_state(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    wanted = {
        f"{prefix}{name}.{EXTRA_STATE}" if name else f"{prefix}{EXTRA_STATE}"
        for name, layer in module.named_modules()
        if type(layer).get_extra_state is not nn.Module.get_extra_state
    }
    for key in [key for key in state if key.startswith(prefix) and is_extra_state(key) and key not in wanted]:
        del state[key]
    for key in wanted:
        state.setdefault(key, torch.empty(0, dtype=torch.uint8))  # what TE takes for "there is none"
