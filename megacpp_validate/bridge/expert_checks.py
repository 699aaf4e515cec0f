"""What an expert bank refuses before any kernel: sizes, rows and numbers of rows that do not fit it."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from .errors import TokenCountMismatch, WrongDtype, WrongOption, WrongShape, WrongTarget
from .row_map import whole_numbers


def check_sizes(num_experts: int, in_features: int, out_features: int) -> None:
    """Refuse sizes that are not whole numbers of 1 or more."""
    if not all(isinstance(size, Integral) for size in (num_experts, in_features, out_features)):
        raise WrongOption(
            f"{num_experts!r} experts of {in_features!r} -> {out_features!r} features: each must be a whole number. "
            "Next step: read them from the model's configuration."
        )
    if min(num_experts, in_features, out_features) < 1:
        raise WrongShape(
            f"{num_experts} experts of {in_features} -> {out_features} features: each must be 1 or more. Next step: "
            "read them from the model's configuration, divided among the ranks."
        )


def check_rows(
    rows: Any, rows_per_expert: Sequence[int] | Any, num_experts: int, in_features: int, held: Any
) -> tuple[int, ...]:
    """The numbers of rows as a tuple, after rows [R, K] and they are found to fit the bank that holds `held`."""
    if rows.dim() != 2 or rows.shape[1] != in_features:
        raise WrongShape(
            f"rows are {list(rows.shape)}; wanted [R, {in_features}]. Likely cause: batch and time are not "
            "flattened, or the rows are another layer's. Next step: pass rows as permute gives them."
        )
    _check_kind(rows, held)
    counts = whole_numbers(rows_per_expert)
    if len(counts) != num_experts or min(counts) < 0 or sum(counts) != rows.shape[0]:
        raise TokenCountMismatch(
            f"{len(counts)} numbers of rows that sum to {sum(counts)}, the least {min(counts, default=0)}, for "
            f"{num_experts} experts and {rows.shape[0]} rows. Likely cause: the numbers are of all ranks, or "
            "taken before tokens were dropped. Next step: pass rows and numbers of the same permute."
        )
    return counts


def check_masked(rows: Any, counts: Any, num_experts: int, in_features: int, held: Any) -> None:
    """The same for rows [E, M, K] with their counts on the device, whose values are not looked at."""
    if rows.dim() != 3 or rows.shape[0] != num_experts or rows.shape[2] != in_features:
        raise WrongShape(
            f"rows are {list(rows.shape)}; wanted [{num_experts}, M, {in_features}]. Likely cause: rows sorted by "
            "expert. Next step: pass them to forward, or lay them out with to_padded."
        )
    _check_kind(rows, held)
    if tuple(counts.shape) != (num_experts,) or counts.dtype != torch.int32 or counts.device != rows.device:
        raise TokenCountMismatch(
            f"counts are {counts.dtype} {list(counts.shape)} on {counts.device}; wanted int32 [{num_experts}] on "
            f"{rows.device}. Next step: counts.to({str(rows.device)!r}, torch.int32)."
        )
    if torch.is_grad_enabled() and (rows.requires_grad or held.requires_grad):
        raise WrongOption(
            "the masked layout has no gradients. Likely cause: a training step. Next step: torch.no_grad(), or "
            "forward, which takes rows sorted by expert."
        )


def _check_kind(rows: Any, held: Any) -> None:
    if rows.dtype != held.dtype:
        raise WrongDtype(
            f"rows are {rows.dtype} and the experts {held.dtype}. Next step: cast the rows, or make the experts in "
            f"{rows.dtype}."
        )
    if rows.device != held.device:
        raise WrongTarget(
            f"rows lie on {rows.device} and the experts on {held.device}. Next step: move them to one device."
        )
