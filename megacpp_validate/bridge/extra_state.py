"""The extra state that Transformer Engine's layers add to a checkpoint, and how it is kept from getting in the way.

A TE layer adds `_extra_state` to its `state_dict`: bytes with the scales and amax histories of delayed scaling, empty
where the layer never ran in FP8. A strict load of a native checkpoint into TE layers, or the reverse, would fail over
this key. So a missing state counts as empty, and the state of other layers is ignored. Layers without a state start
delayed scaling with scale 1: the first such load of a process logs a warning.

TE reads a filled one back through pickle; in 2.16.1 and from 2.17.1 on (2.17.0 loads) only with
NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import torch
from torch import nn

from .backends import LOG
from .errors import BridgeError, UnknownName, WeightMismatch
from .recipes import RECIPE_NAMES, RECIPES, RecipeName

# --- take over --------------------------------------------------------------------------------------------------------


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
            f"Transformer Engine built {name} with the plain parameters {built}, not {shapes}. Likely cause: the scope "
            "`te_quantized_weights`. Next step: build the layer outside of that scope, or run the upgrade canary."
        )
    for part, tensor in wanted.items():
        setattr(layer, part, tensor)
    layer.train(plain.training)
    return keep_checkpoints_plain(layer)


# --- plain checkpoints ------------------------------------------------------------------------------------------------
# A TE layer in the place of a plain layer saves no empty extra state, so that its checkpoint has the names of plain
# PyTorch. `torch.distributed.checkpoint` loads only keys that the model names: before it loads FP8 state into new
# layers, run one step in their scope, or the history starts again.


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
        state[key] = torch.empty(0, dtype=torch.uint8)  # TE's form of no state
    if any(next(wanted[key].parameters(), None) is not None for key in missing):
        _warn_of_no_state()


@cache  # once a process: a state that was lost looks like one that was empty
def _warn_of_no_state() -> None:
    LOG.warning(
        "a checkpoint has no FP8 state (%s) for layers of Transformer Engine, which start without scales and amax "
        "history. Likely cause: it comes from the native path. Next step: none, unless the run trained in delayed "
        "scaling; then use a checkpoint with the state.",
        EXTRA_STATE,
    )


# --- the FP8 state of a checkpoint, compared with the recipe of the run before anything is loaded ---

_SHOWN: Final = 3


class WrongState(BridgeError, ValueError):
    """The FP8 state of a checkpoint is of another recipe than its layers are to run."""


def recipe_of_state(state: Any) -> RecipeName | None:
    """The recipe whose state a layer's extra state is; None where it is empty, as in every recipe without a history.

    Args:
        state: bytes as a tensor of uint8, or None.
    """
    if state is None or not hasattr(state, "numel") or not state.numel():
        return None
    written = state.detach().cpu().numpy().tobytes()
    found = [name for kind, name in RECIPE_NAMES.items() if kind.encode() in written]
    return found[0] if found else "delayed"  # the only one that has something to write


def load_fp8_state_dict(
    module: Any, state: Mapping[str, Any], *, recipe: RecipeName | None, start_anew: bool = False, strict: bool = True
) -> Any:
    """`module.load_state_dict(state)`, refused as a whole where its FP8 state is of another recipe.

    Args:
        module: the whole model.
        state: of all of it.
        recipe: what the layers are to run; None where they stay in high precision.
        start_anew: delayed scaling may start with scales of 1 and without a history, as from a checkpoint in bf16.
        strict: as in torch.

    Returns:
        What torch's own gives.

    Raises:
        UnknownName: there is no such recipe.
        WrongState: the state is of another recipe, or the recipe wants one and there is none, or this release of
            Transformer Engine does not read it. Nothing was loaded.
    """
    _refuse_other_recipe(module, state, recipe, start_anew=start_anew)
    _try_one(module, state)
    return module.load_state_dict(state, strict=strict)


def _try_one(module: Any, state: Mapping[str, Any]) -> None:
    """Load one layer's state before any weight: what refuses one refuses all, and it is loaded anyway."""
    for name, layer in module.named_modules():
        written = state.get(_key(name))
        if not hasattr(layer, "fp8_meta") or recipe_of_state(written) is None:
            continue
        try:
            layer.set_extra_state(written)
        except Exception as fault:
            raise WrongState(
                f"Transformer Engine does not read the checkpoint's FP8 state, at the layer {name or 'at the root'}: "
                f"{type(fault).__name__}: {fault}. Nothing was loaded. Likely cause: 2.16.1, and 2.17.1 and later, do "
                "not unpickle by default. Next step: NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 for a checkpoint that "
                f"you trust, or remove {EXTRA_STATE} and pass start_anew=True."
            ) from fault
        return


def _key(name: str) -> str:
    return f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE


def _refuse_other_recipe(module: Any, state: Mapping[str, Any], recipe: RecipeName | None, *, start_anew: bool) -> None:
    if recipe is not None and recipe not in RECIPES:
        raise UnknownName(f"there is no recipe {recipe!r}. Next step: choose one of {', '.join(RECIPES)}.")
    names = [name for name, layer in module.named_modules() if hasattr(layer, "fp8_meta")]
    found = {name: recipe_of_state(state.get(_key(name))) for name in names}
    # Layers that train in bf16 may carry a state that they never use; one of a recipe with other state may not.
    others = {name: kind for name, kind in found.items() if kind is not None and kind != recipe}
    if recipe is not None and others:
        kind = next(iter(others.values()))
        raise WrongState(
            f"the checkpoint holds FP8 state of the recipe {kind} for {len(others)} layers ({_shown(others)}), and "
            f"they are to run {recipe}; nothing was loaded. Next step: continue in {kind}, or remove {EXTRA_STATE} "
            "from the checkpoint."
        )
    if recipe == "delayed" and found and not start_anew and not any(found.values()):
        raise WrongState(
            f"the checkpoint holds no FP8 state for {len(found)} layers ({_shown(found)}), and they are to run "
            "delayed scaling; nothing was loaded. Likely cause: a checkpoint in bf16 or in a recipe without a history. "
            "Next step: name that recipe, or pass start_anew=True to start with scales of 1."
        )


def _shown(names: Mapping[str, Any]) -> str:
    first = [name or "the root" for name in list(names)[:_SHOWN]]
    return ", ".join(first) + (", ..." if len(names) > _SHOWN else "")
