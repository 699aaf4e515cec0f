"""`checkpoint`: recomputation that keeps FP8 state right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint as recompute
from torch.utils.checkpoint import set_checkpoint_early_stop

from .quantization import FP8GlobalStateManager as Manager


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function(*args)` and run it again in the backward pass, with the scales of the first time."""
    kwargs.pop("use_reentrant", True)  # either way gives the same values
    if kwargs.pop("distribute_saved_activations", False) or kwargs.pop("get_rng_state_tracker", None) is not None:
        raise NotImplementedError("the double of Transformer Engine distributes no activations")
    kwargs.pop("tp_group", None)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    kept = Manager.snapshot()

    @contextmanager
    def during(phase: Literal["forward", "recompute"]) -> Iterator[None]:
        before = Manager.phase, Manager.snapshot()
        Manager.phase = phase
        if phase == "recompute":
            Manager.restore(kept)
        try:
            yield
        finally:
            Manager.phase = before[0]
            if phase == "recompute":
                Manager.restore(before[1])

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return during("forward"), during("recompute")

    with set_checkpoint_early_stop(False):
        return recompute(function, *args, use_reentrant=False, context_fn=contexts, **kwargs)
