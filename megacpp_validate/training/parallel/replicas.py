"""What every rank of a group holds alike: kept so (gradients of norms are summed), and proved so (bit by bit).

Under sequence parallelism a rank norms its own positions, and a norm over the width of a head sees its own heads: the
gradient of such a weight is a part of the whole on each rank of the tensor group, and is summed over it before the
step (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2; Megatron-LM's `_allreduce_layernorm_grads`). A rank
that leaves one out trains a model of its own, and its loss hardly shows it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import distributed

from ..errors import TrainingError
from .token_counts import digest_chunks, gather_equal

# The mark that Megatron-LM and Transformer Engine put on such a parameter.
MARK: Final = "sequence_parallel"
_PIECE: Final = 1 << 22  # elements at once: a digest takes 24 bytes of scratch for each
_NOTHING: Final = 1  # the digest of a gradient that is not there; 0 is an empty tensor's


class ReplicaDiverged(TrainingError, ArithmeticError):
    """Ranks that hold other bits where they should hold the same.

    Attributes:
        name: of the first tensor.
        ranks: of the world, those whose bits are not those of most; of two halves, not those of the lowest rank.
        names: of all such tensors.
    """

    def __init__(self, text: str, name: str, ranks: tuple[int, ...], names: tuple[str, ...]) -> None:
        super().__init__(text)
        self.name, self.ranks, self.names = name, ranks, names


def check_replicas(named: Iterable[tuple[str, Any]], *, what: str = "parameter", group: Any = None) -> int:
    """Refuse tensors that are not bitwise the same on all ranks: a collective call, that raises on all or on none.

    Args:
        named: names and tensors, in the same order on all ranks; of a DTensor the part of this rank is compared, so the
            group is of ranks that hold the same part. None stands for a gradient that is not there.
        what: for the message: "parameter", "gradient", ...
        group: process group; None is the whole world.

    Returns:
        How many were compared.

    Raises:
        ReplicaDiverged: the first tensor, and the ranks at fault; or lists of other names, shapes or dtypes.
    """
    local = {name: _part(tensor) for name, tensor in named}
    device = next((part.device for part in local.values() if part is not None), _device(group))
    listed = gather_equal(torch.tensor([_digest_list(local)], device=device), group)
    _refuse_difference([f"the list of {what}s"], listed, what, group)
    if not local:
        return 0
    mine = torch.stack([digest_tensor(part, device) for part in local.values()])
    _refuse_difference(list(local), gather_equal(mine, group), what, group)
    return len(local)


def digest_tensor(tensor: Any | None, device: Any = None) -> Any:
    """[] int64 of the bits of a tensor and their places; a single element that is another always shows.

    Args:
        tensor: any shape and dtype; None is nothing.
        device: of the result, where there is no tensor.
    """
    if tensor is None:
        return torch.tensor(_NOTHING, device=device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(-1)
    for number, piece in enumerate(flat.split(_PIECE)):
        if piece.numel():  # pieces in another order are another tensor
            total += digest_chunks(piece.unsqueeze(0), (1,)).values[0] * (2 * number + 1)
    return total


def mark_split(parameters: Iterable[Any]) -> None:
    """Say of parameters that each rank of a tensor group sees a part of what they work on: norms, and norms of heads.

    What Transformer Engine's modules made with `sequence_parallel` hold is marked already.
    """
    for parameter in parameters:
        setattr(parameter, MARK, True)


def split_parameters(model: Any) -> dict[str, Any]:
    """Name -> parameter with that mark."""
    return {name: parameter for name, parameter in model.named_parameters() if getattr(parameter, MARK, False)}


def reduce_split_gradients(parameters: Mapping[str, Any], group: Any = None) -> tuple[str, ...]:
    """Sum the gradients of such parameters over the tensor group, once a step, after the last backward pass.

    All go in one all-reduce for each dtype, in fp32 at least, rounded once. A gradient that is not there counts as one
    of zeros: every rank of the group makes the same call.

    Args:
        parameters: as `split_parameters` gives them, the same on all ranks of the group.
        group: the tensor group; None is the whole world.

    Returns:
        Names of what was summed.
    """
    by_dtype: dict[Any, list[Any]] = {}
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        by_dtype.setdefault(torch.promote_types(parameter.grad.dtype, torch.float32), []).append(_part(parameter.grad))
    for dtype, parts in by_dtype.items():
        flat = torch.cat([part.reshape(-1).to(dtype) for part in parts])
        distributed.all_reduce(flat, group=group)
        for part, summed in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(summed.view_as(part))
    return tuple(parameters)


def _refuse_difference(names: list[str], table: Any, what: str, group: Any) -> None:
    """Refuse columns of [ranks, names] that are not of one value."""
    differs = (table != table[:1]).any(dim=0).nonzero().flatten().tolist()
    if not differs:
        return
    column = table[:, differs[0]].tolist()
    usual, _ = Counter(column).most_common(1)[0]  # of equal counts the first, that of the lowest rank
    world = distributed.get_process_group_ranks(group if group is not None else distributed.group.WORLD)
    ranks = tuple(rank for rank, value in zip(world, column, strict=True) if value != usual)
    first, others = names[differs[0]], tuple(names[place] for place in differs)
    more = f", the first of {len(others)}" if len(others) > 1 else ""
    raise ReplicaDiverged(
        f"{first} is not the same on all ranks{more}: rank {', '.join(map(str, ranks))} has other bits than the "
        f"rest of {world}. Likely cause: a {what} whose gradient was not summed over its group, other first weights, "
        "or a step that one rank left out. Next step: compare its gradient on these ranks in the first step that "
        "differs.",
        first,
        ranks,
        others,
    )


def _digest_list(local: Mapping[str, Any]) -> int:
    text = "\n".join(
        f"{name} {None if part is None else (part.dtype, tuple(part.shape))}" for name, part in local.items()
    )
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True)


def _part(tensor: Any) -> Any:
    """This rank's part of a DTensor; another tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _device(group: Any) -> Any:
    return "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
