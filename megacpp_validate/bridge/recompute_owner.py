"""Who owns the recomputation of low-precision layers: Transformer Engine's checkpoint, never torch's.

torch's checkpoint knows nothing of scales. Begun inside the low-precision scope, it runs its function again outside of
it, in high precision; with the scope inside its function, it takes in each amax twice, and the second pass rounds with
other scales than the first. Neither raises in every case. Transformer Engine's checkpoint keeps scope and scales, and
wants the scope around it: with the scope inside its function, 2.12.0 raises a KeyError, and under 2.20.2 no scale moves
with the reentrant kind, without a word.
"""

from __future__ import annotations

import sys
from typing import Final, Literal

import torch.utils.checkpoint

from . import imports as te
from .errors import BridgeError

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
