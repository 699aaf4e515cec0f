"""The extra state that Transformer Engine's layers add to a checkpoint, and how it is kept from getting in the way.

A TE layer adds `_extra_state` to its `state_dict`: bytes with the scales and amax histories of delayed scaling, empty
where the layer never ran in FP8. Left alone, a checkpoint of the native path would not load strictly into TE layers,
for the key is missing, nor the other way round, for it is unknown. So a missing one is taken for empty, and one of
layers that are not there is left out. Where layers with weights get none, their first steps under delayed scaling run
with scale 1: the first such load of a process is warned of, the others are logged for debugging. Nobody can tell a
state that was lost from one that was empty, so a run that never used FP8 sees that one line, too.

TE reads a filled one back through pickle, and from 2.17 on only with NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from torch import nn

from .backends import LOG
from .errors import WeightMismatch

# --- take over --------------------------------------------------------------------------------------------------------
# A layer by Transformer Engine in the place of a plain one: the same parameters, mode and names in checkpoints.


def take_over(layer: Any, plain: Any, name: str) -> Any:
    """Give a TE layer the parameters of a plain one, under the same names. The plain one keeps them, too.

    Parameters are handed over and not copied: values, gradients, ties, `requires_grad`, hooks on them and an optimizer
    that already holds them stay right, and no second copy of the weights is made.

    Args:
        layer: by Transformer Engine, just built.
        plain: the layer it stands in for.
        name: what to call it in an error.

    Raises:
        WeightMismatch: the layer has other parameters than the plain one.
    """
    wanted = dict(plain.named_parameters())
    shapes = {part: tuple(tensor.shape) for part, tensor in wanted.items()}
    built = {part: tuple(tensor.shape) for part, tensor in layer.named_parameters() if type(tensor) is nn.Parameter}
    if built != shapes:
        raise WeightMismatch(
            f"Transformer Engine built {name} with the plain parameters {built}, not {shapes}. Likely cause: it was "
            "built inside `te_quantized_weights`, or this release names them otherwise. Next step: build it outside of "
            "that scope, or run the upgrade canary."
        )
    for part, tensor in wanted.items():
        setattr(layer, part, tensor)
    layer.train(plain.training)
    return keep_checkpoints_plain(layer)


# --- extra state ------------------------------------------------------------------------------------------------------


# --- plain checkpoints ------------------------------------------------------------------------------------------------
# Checkpoints of a tree with single layers by Transformer Engine in it: the names that plain PyTorch would have.
#
# What TE adds is told in `extra_state`. A layer that stands in the place of a plain one also leaves it out when
# saving, as long as it is empty. One that holds something is saved: without it delayed scaling would start again with
# scale 1. `torch.distributed.checkpoint` asks only for what the model at hand names: before it loads FP8 state into
# fresh layers, run one step in their scope, or the history starts anew.


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


# --- extra state ------------------------------------------------------------------------------------------------------


EXTRA_STATE: Final = "_extra_state"

_warned: Final[set[str]] = set()  # the place of the first load without it


def is_extra_state(name: str) -> bool:
    """Whether a key of a state_dict is extra state and no weight."""
    return name.rpartition(".")[2] == EXTRA_STATE


def tolerate_extra_state(module: Any) -> None:
    """Let `module` load checkpoints without extra state, or with that of layers it has not; weights stay strict."""
    module.register_load_state_dict_pre_hook(_fit_extra_state)


def _fit_extra_state(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    wanted = {
        f"{prefix}{name}.{EXTRA_STATE}" if name else f"{prefix}{EXTRA_STATE}": layer
        for name, layer in module.named_modules()
        if type(layer).get_extra_state is not nn.Module.get_extra_state
    }
    for key in [key for key in state if key.startswith(prefix) and is_extra_state(key) and key not in wanted]:
        del state[key]
    missing = wanted.keys() - state.keys()
    for key in missing:
        state[key] = torch.empty(0, dtype=torch.uint8)  # what TE takes for "there is none"
    if any(next(wanted[key].parameters(), None) is not None for key in missing):
        place = prefix.rstrip(".") or "the module"
        LOG.log(
            logging.DEBUG if _warned else logging.WARNING,
            "%s: this checkpoint has no FP8 state (%s) for %d layers of Transformer Engine, which start without scales "
            "and amax history. Likely cause: it is of the native path, or was saved without it. Next step: nothing "
            "where the run did not train in delayed scaling; else take a checkpoint that has it.",
            place,
            EXTRA_STATE,
            len(missing),
        )
        _warned.add(place)
