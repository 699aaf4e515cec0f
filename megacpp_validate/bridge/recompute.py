"""Recomputation of layers, by the checkpoint that may: Transformer Engine's, in the order that its scales are kept for.

Under delayed scaling Transformer Engine lays the scales of each first pass of a layer aside, and gives the oldest ones
to whichever second pass comes next. So passes have to be run again in the order in which they were run, each of them,
as micro-batches and pipelines do it. One backward pass through two passes of a layer takes the later one first, and a
pass that is never run again leaves its scales to the next: gradients are then rounded with another pass's scales,
without a word (seen with 2.12.0 and 2.20.2). Here both raise.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from . import imports as te
from .errors import BridgeError
from .te_fp8 import te_recompute, te_state

# --- recompute owner --------------------------------------------------------------------------------------------------
# Who owns the recomputation of low-precision layers: Transformer Engine's checkpoint, never torch's.
#
# torch's checkpoint knows nothing of scales. Begun inside the low-precision scope, it runs its function again outside
# of it, in high precision; with the scope inside its function, it takes in each amax twice, and the second pass
# rounds with other scales than the first. Neither raises in every case. Transformer Engine's checkpoint keeps scope
# and scales, and wants the scope around it: with the scope inside its function, 2.12.0 raises a KeyError, and under
# 2.20.2 no scale moves with the reentrant kind, without a word.


Owner = Literal["te", "torch"]

_TORCH: Final = torch.utils.checkpoint.__file__


class WrongRecomputeOwner(BridgeError, RuntimeError):
    """Low precision in what a checkpoint runs again without keeping its scales."""


def recompute_owners() -> tuple[Owner, ...]:
    """Whose checkpoints the code that asks runs in, the innermost first; () where it runs in none.

    Seen from the frames of this thread: the first pass of a function, and its second one, in a backward pass.
    """
    engine = _file_of_te()
    found: list[Owner] = []
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        owner: Owner | None = "torch" if file == _TORCH else "te" if file == engine else None
        if owner is not None and found[-1:] != [owner]:
            found.append(owner)
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


def refuse_torch_recompute(layer: str) -> None:
    """Refuse a layer in low precision that torch's checkpoint would run again.

    Raises:
        WrongRecomputeOwner: the code that asks runs in torch's checkpoint.
    """
    if "torch" in recompute_owners():
        raise WrongRecomputeOwner(
            f"{layer} computes in low precision inside torch's checkpoint, which does not keep its scales: the second "
            "pass would run in high precision, or take in each amax twice. Likely cause: the framework's own "
            "activation checkpointing was left on. Next step: recompute it by te_recompute inside the scope, or turn "
            "torch's checkpoint off for this block."
        )


def refuse_scope_in_recompute(place: str) -> None:
    """Refuse a low-precision scope that is entered in what a checkpoint runs again.

    Args:
        place: of the entry, "file:line".

    Raises:
        WrongRecomputeOwner: the code that asks runs in a checkpoint.
    """
    if owners := recompute_owners():
        whose = "torch's" if owners[0] == "torch" else "Transformer Engine's"
        raise WrongRecomputeOwner(
            f"the low-precision scope was entered at {place}, in what {whose} checkpoint runs again: each amax would "
            "be taken in twice. Likely cause: the scope is in the block, and the checkpoint around it. Next step: "
            "enter the scope once, outside, and recompute the block by te_recompute inside it."
        )


def _file_of_te() -> str:
    """Where Transformer Engine's checkpoint lies; empty where nothing of it is imported, so that it cannot run."""
    if te.TE.module not in sys.modules or not te.is_te_available():
        return ""
    entry = te.checkpoint()
    module = sys.modules.get(str(getattr(entry, "__module__", "")))
    return str(getattr(module, "__file__", "") or "")


# --- recompute --------------------------------------------------------------------------------------------------------


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
