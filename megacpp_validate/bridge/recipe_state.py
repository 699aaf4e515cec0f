"""The FP8 state of a checkpoint, held to the recipe that it is to be trained on in: before anything is loaded.

Only delayed scaling has state. What Transformer Engine does where it does not fit was seen on an H200 (2026-11-21).
2.12.0 takes the state of delayed scaling into a layer that runs current scaling, and drops it at the next step with a
warning; a layer of delayed scaling that gets none keeps the scales and histories of other weights. 2.20.2 refuses to
read such state without NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1, when the weights of that layer and of those before it
are loaded. So the whole model is looked at first, from its root.

Nothing is unpickled here: a class that is named in a pickle stands there by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .errors import BridgeError, UnknownName
from .extra_state import EXTRA_STATE
from .native_block import RECIPE_NAMES
from .recipes import RECIPES, RecipeName

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
    check_fp8_state(module, state, recipe=recipe, start_anew=start_anew)
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
                f"{type(fault).__name__}: {fault}. Nothing was loaded. Likely cause: from 2.17 on it does not unpickle "
                "unless it is told to. Next step: NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1 where the checkpoint can be "
                f"trusted, or take {EXTRA_STATE} out of it and pass start_anew=True."
            ) from fault
        return


def _key(name: str) -> str:
    return f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE


def check_fp8_state(
    module: Any, state: Mapping[str, Any], *, recipe: RecipeName | None, start_anew: bool = False
) -> None:
    """The same without loading anything; raises as `load_fp8_state_dict`."""
    if recipe is not None and recipe not in RECIPES:
        raise UnknownName(f"there is no recipe {recipe!r}. Next step: choose one of {', '.join(RECIPES)}.")
    layers = [name for name, layer in module.named_modules() if hasattr(layer, "fp8_meta")]
    found = {name: recipe_of_state(state.get(_key(name))) for name in layers}
    # Layers that train in bf16 may carry a state that they never use; one of a recipe with other state may not.
    others = {name: kind for name, kind in found.items() if kind is not None and kind != recipe}
    if recipe is not None and others:
        kind = next(iter(others.values()))
        raise WrongState(
            f"the checkpoint holds FP8 state of the recipe {kind} for {len(others)} layers ({_shown(others)}), and "
            f"they are to run {recipe}; nothing was loaded. Likely cause: the recipe was changed since. Next "
            f"step: go on in {kind}, or take {EXTRA_STATE} out of the checkpoint."
        )
    if recipe == "delayed" and layers and not start_anew and not any(found.values()):
        raise WrongState(
            f"the checkpoint holds no FP8 state for {len(layers)} layers ({_shown(found)}), and they are to run "
            "delayed scaling; nothing was loaded. Likely cause: it was written in bf16, or in a recipe without a "
            "history. Next step: name that recipe, or pass start_anew=True to begin with scales of 1."
        )


def _shown(names: Mapping[str, Any]) -> str:
    first = [name or "the root" for name in list(names)[:_SHOWN]]
    return ", ".join(first) + (", ..." if len(names) > _SHOWN else "")
