"""Layers that say, while they run in low precision, when somebody else than their owner handles their state.

What goes wrong there raises nothing in Transformer Engine and shows as drift: torch's checkpoint around a layer
(`recompute`), and another amax reduction group than the one that the layer began with, which Transformer Engine
does not take: a layer stays in the buffer that its first pass put it into.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from .amax_owner import AmaxGroupChanged
from .open_scopes import current_scope
from .recompute import refuse_torch_recompute
from .te_fp8 import te_state

_VENDOR: Final = "transformer_engine"
_reduced_over: Final[WeakKeyDictionary[Any, tuple[Any, bool]]] = WeakKeyDictionary()


def watch_layers(model: Any) -> tuple[str, ...]:
    """Let every layer of Transformer Engine in a model look, before each pass in low precision, who owns it.

    To be called once the model is built; a second call changes nothing. Passes in high precision, passes outside of the
    bridge's scope, and compiled code are not looked at.

    Args:
        model: a module; it may be such a layer itself.

    Returns:
        Names of the layers in it.

    A watched layer raises:
        WrongRecomputeOwner: it runs in torch's checkpoint.
        AmaxGroupChanged: under delayed scaling, its amax is to be reduced over another group than before.
    """
    found = {name: layer for name, layer in model.named_modules() if type(layer).__module__.startswith(_VENDOR)}
    for layer in found.values():
        if _look not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_look)
    return tuple(found)


@contextmanager
def unwatched(modules: tuple[Any, ...]) -> Iterator[None]:
    """Take the look away from these modules for a while: graph capture refuses modules with hooks."""
    watched = []
    for module in modules:
        keys = [key for key, hook in module._forward_pre_hooks.items() if hook is _look]
        watched += [module] if keys else []
        for key in keys:
            del module._forward_pre_hooks[key]
    try:
        yield
    finally:
        for module in watched:
            module.register_forward_pre_hook(_look)


def _look(layer: Any, _: Any) -> None:
    if torch.compiler.is_compiling():
        return
    scope = current_scope()
    if scope is None or not scope.is_low:
        return
    refuse_torch_recompute(type(layer).__name__)
    if scope.recipe == "delayed" and torch.is_grad_enabled():
        _check_group(layer)


def _check_group(layer: Any) -> None:
    state = te_state()
    now = state["group"], bool(state["recipe"].reduce_amax)
    first = _reduced_over.setdefault(layer, now)
    if first[1] != now[1] or first[0] is not now[0]:
        raise AmaxGroupChanged(
            f"the amax of {type(layer).__name__} was reduced over {_said(first)} so far, and is to be reduced over "
            f"{_said(now)} now. Transformer Engine keeps the first one without a word. Likely cause: a first pass, "
            "such as a warm-up, ran with another group than training does. Next step: pass the same group from the "
            "first pass on, or build the layer anew."
        )


def _said(reduced: tuple[Any, bool]) -> str:
    group, reduces = reduced
    if not reduces:
        return "this rank alone"
    if group is None:
        return "the whole world"
    return f"ranks {torch.distributed.get_process_group_ranks(group)}"
