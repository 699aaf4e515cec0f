"""What an A-block of Transformer Engine takes in low precision: sizes of its products, scales that ranks share."""

from __future__ import annotations

from typing import Any, Final

from torch import distributed

from .amax_owner import AmaxGroupMissing
from .backends import Refusal
from .block_weights import BlockShape
from .recipes import RecipeName
from .te_fp8 import te_state
from .walk_plan import ALIGNMENT

# Transformer Engine's recipes by class name, and what each wants the number of tokens to be a multiple of.
RECIPE_NAMES: Final[dict[str, RecipeName]] = {
    "DelayedScaling": "delayed",
    "Float8CurrentScaling": "current",
    "Float8BlockScaling": "block",
    "MXFP8BlockScaling": "mxfp8",
    "NVFP4BlockScaling": "nvfp4",
}
# The products of the weights' gradients sum over the tokens, in multiples of 16: with 8 or 24 rows 2.12.0 and 2.20.2
# take the forward pass and raise in the backward one (H200, 2026-11-21). It holds without gradients too, where 8 would
# do: a reentrant recomputation runs its first pass without them, and both passes must take the same path.
FP8_TOKENS: Final = 16
MXFP8_TOKENS: Final = ALIGNMENT["mxfp8"]


def why_not_low(rows: Any, shape: BlockShape) -> Refusal | None:
    """Why these sizes cannot run in the low-precision scope that is on: TE would raise in its first layer.

    Asked of Transformer Engine's own state, not of this thread's scopes: a recomputation in the backward pass runs
    after they are left, in another thread, and must take the path of its forward pass; and a scope may be
    somebody else's. The reason holds no number of a single call, so that it is recorded once.

    Args:
        rows: [B, T, hidden], of this rank.
        shape: of this rank's share.
    """
    state = te_state()
    if not state["enabled"]:
        return None
    kind = type(state["recipe"]).__name__
    recipe = RECIPE_NAMES.get(kind, "delayed")  # one that is not known here is held to what all of them want
    align, of_tokens = ALIGNMENT[recipe], MXFP8_TOKENS if recipe == "mxfp8" else FP8_TOKENS
    widths = (shape.hidden, sum(shape.segments), shape.segments[0], shape.ffn_hidden)
    if rows.shape[0] * rows.shape[1] % of_tokens == 0 and not any(width % align for width in widths):
        return None
    return Refusal(
        "te",
        "fp8-alignment",
        f"the tokens of this call, or a width among {', '.join(map(str, widths))}; under {kind} Transformer Engine "
        f"takes multiples of {of_tokens} tokens and of {align} columns. Next step: pad the tokens, or expect this "
        "block in the dtype of its parameters",
    )


def check_gathered_scales(tp_group: Any) -> None:
    """Refuse delayed scaling under sequence parallelism whose amax is not reduced over the tensor group.

    Each rank casts its own positions by its own scale, and the bytes are gathered; who reads them takes its own scale
    for all (2.20.2, pytorch/distributed.py, _all_gather_fp8). Where scales differ, the others' rows are wrong by a
    factor, and nothing is raised. Current scaling reduces over the tensor group by itself, and block scaling sends its
    scales along.

    Args:
        tp_group: the tensor group.

    Raises:
        AmaxGroupMissing: the scope that is open reduces over other ranks, or not at all.
    """
    state = te_state()
    if not state["enabled"] or RECIPE_NAMES.get(type(state["recipe"]).__name__) != "delayed":
        return
    over, reduces = state["group"], getattr(state["recipe"], "reduce_amax", True)
    if reduces and (over is None or _ranks(tp_group) <= _ranks(over)):  # None is the whole world
        return
    raise AmaxGroupMissing(
        f"delayed scaling under sequence parallelism takes its amax over rank(s) "
        f"{sorted(_ranks(over)) if reduces else 'of this process alone'}, and rows are gathered in FP8 over "
        f"{sorted(_ranks(tp_group))}: each rank would read the others' rows by its own scale. Likely cause: the group "
        "of the ranks that hold the same shard, as without sequence parallelism. Next step: pass as "
        "amax_reduction_group a group that has the tensor group in it."
    )


def _ranks(group: Any) -> set[int]:
    return set(distributed.get_process_group_ranks(group))
