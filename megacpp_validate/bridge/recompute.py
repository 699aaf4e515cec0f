"""Recomputation of layers, by the checkpoint that may: Transformer Engine's, in the order that its scales are kept for.

Under delayed scaling Transformer Engine lays the scales of each first pass of a layer aside, and gives the oldest ones
to whichever second pass comes next. So passes have to be run again in the order in which they were run, each of them,
as micro-batches and pipelines do it. One backward pass through two passes of a layer takes the later one first, and a
pass that is never run again leaves its scales to the next: gradients are then rounded with another pass's scales,
without a word (seen with 2.12.0 and 2.20.2). Here both raise.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from . import imports as te
from .errors import BridgeError
from .te_fp8 import te_recompute, te_state


class RecomputeOutOfOrder(BridgeError, RuntimeError):
    """A second pass that Transformer Engine would give the scales of another first pass."""


def recompute(function: Callable[..., Any], *tensors: Any, use_reentrant: bool, tp_group: Any = None) -> Any:
    """Run `function(*tensors)`, keep nothing of what is inside, and run it again in the backward pass.

    To be called inside the low-precision scope, which it keeps for the second pass. Where Transformer Engine cannot be
    used it is torch's checkpoint.

    Args:
        function: of layers, with or without low precision.
        tensors: its arguments.
        use_reentrant: which of the two kinds, as in torch.
        tp_group: of the ranks that share a layer.

    Raises:
        RecomputeOutOfOrder: in the backward pass, under delayed scaling: an older pass of a layer was not run again.
    """
    if te.checkpoint() is None:
        return torch_checkpoint(function, *tensors, use_reentrant=use_reentrant)
    if not torch.is_grad_enabled():
        return function(*tensors)
    return te_recompute(_Passes(function), *tensors, use_reentrant=use_reentrant, tp_group=tp_group)


_numbers: Final = itertools.count()
_laid_aside: Final[WeakKeyDictionary[Any, deque[int]]] = WeakKeyDictionary()  # of each layer: passes not run again yet


class _Passes:
    """A function that is run twice, and looks which layers it runs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._number, self._is_second = function, next(_numbers), False

    def __call__(self, *given: Any, **options: Any) -> Any:
        here, look = threading.get_ident(), self._take if self._is_second else self._lay_aside
        self._is_second = True
        handle = register_module_forward_pre_hook(
            lambda layer, _: look(layer) if threading.get_ident() == here else None
        )
        try:
            return self._function(*given, **options)
        finally:
            handle.remove()

    def _lay_aside(self, layer: Any) -> None:
        if hasattr(layer, "fp8_meta"):
            state = te_state()
            if state["enabled"] and state["recipe"].delayed():
                _laid_aside.setdefault(layer, deque()).append(self._number)

    def _take(self, layer: Any) -> None:
        passes = _laid_aside.get(layer)
        if passes is None or self._number not in passes:
            return
        if passes[0] != self._number:
            raise RecomputeOutOfOrder(
                f"a pass of {type(layer).__name__} is run again before an older one is: it would take that one's "
                "scales. Likely cause: one backward pass through several passes of it, or a pass whose backward pass "
                "never ran. Next step: run the backward pass of each forward pass, the oldest first, and what needs no "
                "gradients under torch.no_grad(); then start from the last checkpoint."
            )
        passes.popleft()
