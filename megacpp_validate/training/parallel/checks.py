"""Checks while a run trains on several ranks: finite values, conserved tokens, equal replicas.

The errors here have `check`, the name of the check, and `where`, what it names: step, ranks, module, tensor, experts.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import distributed
from torch.utils import _pytree as pytree

from .. import TrainingError

# Odd, so that a product with it loses nothing modulo 2^64; the golden ratio's, as in Knuth, TAOCP 6.4.
_FACTOR: Final = -7046029254386353131
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SHOWN: Final = 4
_PIECE: Final = 1 << 22  # elements at once: a digest takes 24 bytes of scratch for each


class CheckFailed(TrainingError, ArithmeticError):
    """Values that are not what they must be.

    Attributes:
        check: which check failed.
        where: what it names, JSON values.
    """

    check: ClassVar[str]

    def __init__(self, text: str, where: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.where = dict(where)


class NotFinite(CheckFailed):
    """A value that is NaN or infinite; the weights are those from before the step."""

    check = "watch"


class TokensNotConserved(CheckFailed):
    """Rows that are lost, doubled, at another expert, or other rows than those sent."""

    check = "conservation"


class ReplicaDiverged(CheckFailed):
    """Ranks that hold other bits where they should hold the same."""

    check = "replicas"


# --- tokens


def digest_chunks(rows: Any, sizes: Sequence[int]) -> Any:
    """[C] int64: a number for each chunk, of the bits of its rows and of their order; 0 for a chunk without rows.

    The bits of element i of a chunk, as a whole number, are multiplied by an odd number of their own, (2 i + 1) times
    `_FACTOR`, and summed modulo 2^64: a single element that differs always shows, rows that are swapped or lost show
    but by a chance of about 2^-64.

    Args:
        rows: [R, D], any dtype.
        sizes: rows of each chunk, which sum to R.
    """
    numbers = rows.detach().contiguous().view(_INTEGERS[rows.element_size()]).to(torch.int64)
    width, device = rows.shape[1], rows.device
    counts = torch.tensor(list(sizes), dtype=torch.int64, device=device)
    chunk = torch.repeat_interleave(torch.arange(len(sizes), device=device), counts, output_size=rows.shape[0])
    first = counts.cumsum(0) - counts
    place = torch.arange(rows.shape[0], device=device) - first[chunk]
    index = place.unsqueeze(1) * width + torch.arange(width, device=device)
    weighted = ((numbers + 1) * ((2 * index + 1) * _FACTOR)).sum(dim=1)
    return torch.zeros(len(sizes), dtype=torch.int64, device=device).index_add(0, chunk, weighted)


def check_rows(stage: str, expected: Any, seen: Any, group: Any) -> None:
    """Compare digests of chunks with those of the sender: a collective call, that raises on all ranks or on none.

    Args:
        stage: "dispatch", where the E chunks of a rank are by source rank and then by its own experts, or "combine",
            where they are by expert of the layer.
        expected, seen: [E] digests of the sender, and of this rank.
        group: process group; None is the whole world.

    Raises:
        TokensNotConserved: with the stage, the experts and the sender of the first chunk.
    """
    ranks, experts = distributed.get_world_size(group), expected.numel()
    each, faults = experts // ranks, []
    for place in gather_equal((expected != seen).to(torch.int64), group).flatten().nonzero().flatten().tolist():
        rank, chunk = divmod(place, experts)
        source, local = divmod(chunk, each)
        faults.append((rank * each + local if stage == "dispatch" else chunk, source, rank))
    if faults:
        shown = [f"expert {expert} from rank {source} to rank {rank}" for expert, source, rank in faults[:_SHOWN]]
        raise TokensNotConserved(
            f"{stage}: rows of {'; of '.join(shown)} differ from what was sent ({len(faults)} chunks in all). Likely "
            "cause: rows that were dropped, swapped or overwritten between the router and the experts. Next step: "
            "compare the sizes of the chunks and the order in which they are sorted on both ranks.",
            {"stage": stage, "experts": sorted({expert for expert, _, _ in faults}), "source": faults[0][1]},
        )


def check_routed(sent: Sequence[int], routing_map: Any, group: Any = None) -> None:
    """Compare the rows for each expert with those that the routers chose: a collective call, as `check_rows`.

    Args:
        sent: [E] rows of this rank for each expert.
        routing_map: [T, E] bool, of this rank's router.
        group: process group; None is the whole world.

    Raises:
        TokensNotConserved: with the experts and the first rank whose rows they are.
    """
    routed = routing_map.sum(dim=0).to(torch.int64)
    table = gather_equal(torch.stack([routed, routed.new_tensor([int(count) for count in sent])]), group).tolist()
    faults = [
        (rank, expert, by_router, permuted)
        for rank, counts in enumerate(table)
        for expert, (by_router, permuted) in enumerate(zip(*counts, strict=True))
        if by_router != permuted
    ]
    if faults:
        shown = [f"expert {expert}, rank {rank}: routed {one}, sent {other}" for rank, expert, one, other in faults]
        raise TokensNotConserved(
            f"rows are lost or doubled on their way to the experts ({len(faults)} places): "
            f"{'; '.join(shown[:_SHOWN])}. Likely cause: a dispatch by another routing map than the router's. Next "
            "step: pass both the same routing.",
            {"experts": sorted({expert for _, expert, _, _ in faults}), "source": faults[0][0]},
        )


def share_of_balance_loss(probs: Any, routing_map: Any, group: Any = None) -> Any:
    """This rank's part of the load-balancing loss over the tokens of all ranks; the parts sum to the loss of one rank.

    The loss is E * sum_e f_e P_e (`native.router.load_balancing_loss`). f_e has no gradient and is counted over the
    group; P_e is a mean, of which a rank has its own terms. So no gradient crosses ranks, and gradients of the parts
    are summed over them, not averaged.

    Args:
        probs: [T, E] softmax over all experts, of this rank's tokens; T may be 0.
        routing_map: [T, E] bool.
        group: ranks with other tokens of the same batch; None is the whole world.

    Returns:
        [] in the dtype of `probs`.
    """
    experts = probs.shape[1]
    seen = torch.cat([routing_map.sum(dim=0), routing_map.new_full((1,), 1, dtype=torch.int64) * probs.shape[0]])
    distributed.all_reduce(seen, group=group)
    assigned, tokens = seen[:-1].to(probs.dtype), seen[-1].clamp(min=1).to(probs.dtype)
    return experts * (assigned / assigned.sum().clamp(min=1) * probs.sum(dim=0)).sum() / tokens


def gather_parts(mine: Any, group: Any = None) -> list[Any]:
    """Tensors of one shape of all ranks.

    By `all_gather`, a name that torch 2.11 and 2.13 share; the one into a whole tensor was renamed in 2.13.
    """
    if not distributed.is_initialized():
        return [mine]
    parts = [torch.empty_like(mine) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(parts, mine, group=group)
    return parts


def gather_equal(mine: Any, group: Any = None) -> Any:
    """Tensors of one shape of all ranks, [...] -> [ranks, ...]."""
    return torch.stack(gather_parts(mine, group))


# --- replicas


def check_replicas(named: Iterable[tuple[str, Any]], *, what: str = "parameter", group: Any = None) -> int:
    """Compare tensors of all ranks bit by bit: a collective call, that raises on all ranks or on none.

    Args:
        named: names and tensors of this rank, in the same order on all ranks.
        what: kind of the tensors.
        group: process group; None is the whole world.

    Returns:
        How many were compared.

    Raises:
        ReplicaDiverged: with the first tensor, its kind, and the ranks whose bits are not those of most (of two halves,
            not those of the lowest rank); or lists of other names, shapes or dtypes.
    """
    local = dict(named)
    device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    shapes = "\n".join(f"{name} {one.dtype} {tuple(one.shape)}" for name, one in local.items())
    listed = int.from_bytes(hashlib.sha256(shapes.encode()).digest()[:8], "big", signed=True)
    _compare_columns([f"list of {what}s"], gather_equal(torch.tensor([listed], device=device), group), what, group)
    if local:
        mine = torch.stack([digest_tensor(one) for one in local.values()])
        _compare_columns(list(local), gather_equal(mine, group), what, group)
    return len(local)


def digest_tensor(tensor: Any) -> Any:
    """[] int64 of the bits of a tensor and their places; a single element that differs always shows."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, piece in enumerate(tensor.detach().reshape(-1).split(_PIECE)):
        if piece.numel():  # pieces in another order are another tensor
            total += digest_chunks(piece.unsqueeze(0), (1,))[0] * (2 * number + 1)
    return total


def _compare_columns(names: list[str], table: Any, what: str, group: Any) -> None:
    """Refuse columns of [ranks, names] with more than one value."""
    differs = (table != table[:1]).any(dim=0).nonzero().flatten().tolist()
    if not differs:
        return
    column = table[:, differs[0]].tolist()
    usual, _ = Counter(column).most_common(1)[0]  # of equal counts the first, that of the lowest rank
    world = distributed.get_process_group_ranks(group if group is not None else distributed.group.WORLD)
    ranks = [rank for rank, value in zip(world, column, strict=True) if value != usual]
    name = names[differs[0]]
    raise ReplicaDiverged(
        f"{name} differs between ranks, the first of {len(differs)}: rank {', '.join(map(str, ranks))} has other bits "
        f"than the rest of {world}. Likely cause: a {what} whose gradient was not summed over its group, other first "
        "weights, or a step that one rank left out. Next step: compare its gradient on these ranks in the first step "
        "that differs.",
        {"tensor": name.partition(" ")[0], "kind": what, "ranks": ranks},
    )


# --- finite values
#
# While a run trains, one flag on the device takes a reduction of what each module gives out; the host reads it once a
# step. Where the flag, a loss or a gradient is not finite, the step is run once more with every input, output,
# parameter and gradient looked at in the order in which they come up; the first that is not finite is named.


NonFinite = tuple[int, int, str, str]
"""The first value that is NaN or infinite: how many tensors came up before it, the rank, the module (empty for the
model itself), and the tensor: "input", "output", "parameter weight", "gradient of the input", "gradient of weight"."""


class FiniteWatch:
    """Watches the outputs of all modules of a model.

    Args:
        model: watched wherever its outputs hold tensors.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        # 0 as long as all is finite: 0 times a NaN or an Inf is NaN, and stays NaN in a sum.
        self._flag = torch.zeros((), device=next(model.parameters()).device)
        for module in model.modules():
            module.register_forward_hook(self._see)

    def is_finite(self, *values: Any) -> bool:
        """Whether `values` ([] tensors) and all outputs since the last call are finite on all ranks; the host waits."""
        total = self._flag + sum((value.detach().to(self._flag) * 0 for value in values), torch.zeros_like(self._flag))
        if distributed.is_initialized():
            distributed.all_reduce(total)  # a NaN of one rank is everyone's
        self._flag.zero_()
        return bool(total.isfinite())

    def find(self, replay: Callable[[], Any]) -> NonFinite | None:
        """Run the step again and find the first value that is not finite: the same on all ranks; None for none.

        Gradients of the model are None after it.

        Args:
            replay: the forward and backward passes of the step, from the weights that it began with; nothing in the
                model draws random numbers.
        """
        self._model.zero_grad(set_to_none=True)
        with look_at_everything(self._model) as looks:
            replay()
        self._model.zero_grad(set_to_none=True)
        found: list[Any] = [first_not_finite(looks)]
        if distributed.is_initialized():
            found = found * distributed.get_world_size()
            distributed.all_gather_object(found, found[0])
        return min(filter(None, found), default=None)

    def _see(self, module: Any, given: Any, out: Any) -> None:  # noqa: ARG002 - as torch calls it
        with torch.no_grad():
            for _, tensor in _find_tensors(out):
                low, high = torch.aminmax(tensor.detach())  # propagates NaN, in one pass
                self._flag.add_(low * 0).add_(high * 0)


Look = tuple[str, str, Any, int]
"""One tensor that came up: its module, which of the module's tensors, whether it is finite ([] bool, still on the
device), and a number that is equal in all looks at one gradient of an input or output; 0 for others."""


@contextmanager
def look_at_everything(model: Any) -> Iterator[list[Look]]:
    """A region in which every tensor that a module of the model takes, holds or gives is looked at; no host waits.

    A DTensor is looked at in the part of this rank. FSDP2 puts gradients of its parameters in place past autograd:
    these are not seen; those of inputs and outputs are.
    """
    looks: list[Look] = []

    def look(name: str, shown: str, same: int, value: Any) -> None:
        part = value.to_local() if hasattr(value, "to_local") else value
        looks.append((name, shown, part.detach().isfinite().all(), same))

    def look_at(name: str, kind: str, values: Any) -> None:
        for part, value in _find_tensors(values):
            shown = f"{kind} {part}".strip()
            look(name, shown, 0, value)
            if value.requires_grad:
                value.register_hook(partial(look, name, f"gradient of the {shown}", id(value)))

    def before(name: str, module: Any, given: Any, named: Mapping[str, Any]) -> None:
        for part, parameter in module.named_parameters(recurse=False):
            look(name, f"parameter {part}", 0, parameter)
        look_at(name, "input", given)
        look_at(name, "input", named)

    def after(name: str, module: Any, given: Any, out: Any) -> None:  # noqa: ARG001 - as torch calls it
        look_at(name, "output", out)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        for name, parameter in model.named_parameters():
            module, _, part = name.rpartition(".")
            if parameter.requires_grad:
                hooks.enter_context(parameter.register_hook(partial(look, module, f"gradient of {part}", 0)))
        yield looks


def first_not_finite(looks: Sequence[Look]) -> NonFinite | None:
    """The first look that is not finite; None where all are. The host waits here.

    A gradient that is looked at more than once is named after its consumer, which made it: the hook that was put on
    last, that of the input of the innermost module.
    """
    fine = torch.stack([finite for _, _, finite, _ in looks]).tolist() if looks else []
    if False not in fine:
        return None
    place = chosen = fine.index(False)
    while looks[place][3] and chosen + 1 < len(looks) and looks[chosen + 1][3] == looks[place][3]:
        chosen += 1
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    return place, rank, *looks[chosen][:2]


def _find_tensors(value: Any) -> Iterator[tuple[str, Any]]:
    """Floating-point tensors in what a module takes or gives, with where they lie in it: "0", "rows", "1.seen"."""
    only = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    for path, one in pytree.tree_flatten_with_path(only)[0]:
        if isinstance(one, torch.Tensor) and one.dtype.is_floating_point and one.dtype.itemsize > 1 and one.numel():
            yield ".".join(re.findall(r"\w+", pytree.keystr(path))), one
