"""Which part of each native weight of a layer lies with which rank of a tensor group: cut, and joined again.

A weight is a row of segments along one axis. Of some each rank has its share, whole heads or columns; others, such as
the directions b and c that all heads of M share, every rank has whole. A plain chunk of the weight would give the first
ranks only queries and the last only values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from ...bridge.errors import WeightMismatch
from ..errors import WrongSize
from ..sizes import Letter, Size

# Not Megatron-LM's mark alone, `tensor_model_parallel`: Transformer Engine puts that on every weight of its linear
# layers, the experts' too, whether they are split or not (2.20.2, pytorch/module/grouped_linear.py, reset_parameters).
SHARE_MARK: Final = "megacpp_tensor_share"
MEGATRON_MARK: Final = "tensor_model_parallel"
MAMBA_EXPAND: Final = 2


@dataclass(frozen=True)
class Cut:
    """How one weight is cut.

    Attributes:
        segments: (length, whether ranks share it out), in order, along the axis.
        axis: 0, or 1 for the columns of an out-projection.
    """

    segments: tuple[tuple[int, bool], ...]
    axis: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether every rank has the whole weight."""
        return not any(split for _, split in self.segments)

    def take(self, weight: Any, rank: int, ranks: int) -> Any:
        """One rank's share of a whole weight, a copy."""
        parts = weight.split([length for length, _ in self.segments], dim=self.axis)
        mine = [
            part.chunk(ranks, dim=self.axis)[rank] if split else part
            for part, (_, split) in zip(parts, self.segments, strict=True)
        ]
        return torch.cat(mine, dim=self.axis)

    def join(self, shares: Sequence[Any]) -> Any:
        """The whole weight from every rank's share, by rank; of a segment that all have, that of rank 0."""
        lengths = [length // len(shares) if split else length for length, split in self.segments]
        parts = [share.split(lengths, dim=self.axis) for share in shares]
        joined = [
            torch.cat(same, dim=self.axis) if split else same[0]
            for same, (_, split) in zip(zip(*parts, strict=True), self.segments, strict=True)
        ]
        return torch.cat(joined, dim=self.axis)

    def kept(self, share: Any, ranks: int) -> Any:
        """What of a share every rank has, flattened."""
        lengths = [length // ranks if split else length for length, split in self.segments]
        parts = zip(share.split(lengths, dim=self.axis), self.segments, strict=True)
        return torch.cat([share.new_empty(0), *(part.flatten() for part, (_, split) in parts if not split)])


def plan_cuts(letter: Letter, size: Size) -> dict[str, Cut]:
    """Native name of each weight of a layer -> how it is cut.

    Raises:
        WrongSize: a kind of layer that is not split.
    """
    if letter == "A" and size.attention == "gqa":
        return _attention_cuts(size)
    if letter == "M":
        return _mamba_cuts(size)
    if letter == "R":
        return _recurrent_cuts(size)
    kind = f"A of attention {size.attention!r}" if letter == "A" else letter
    raise WrongSize(
        f"a layer {kind} is not split over a tensor group. Likely cause: tensor_parallel beside a part that has no "
        "split form. Next step: set tensor_parallel to 1, or build that part whole on every rank."
    )


def cut_state(state: Mapping[str, Any], cuts: Mapping[str, Cut], rank: int, ranks: int) -> dict[str, Any]:
    """One rank's share of the weights of a whole layer, copies.

    Args:
        state: native name -> weight, as a layer of one rank gives it.
        cuts: as `plan_cuts` gives them.
        rank, ranks: which share of how many; `plan.why_not` has checked that they divide.

    Raises:
        WeightMismatch: other names than the cuts have.
    """
    _check_names(state, cuts)
    return {name: cut.take(state[name], rank, ranks) for name, cut in cuts.items()}


def join_states(shares: Sequence[Mapping[str, Any]], cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """The weights of a whole layer from every rank's share, by rank: the inverse of `cut_state`, exact to the bit.

    Raises:
        WeightMismatch: other names than the cuts have, or ranks that differ in what all have.
    """
    for share in shares:
        _check_names(share, cuts)
    for name, cut in cuts.items():
        kept = [cut.kept(share[name], len(shares)) for share in shares]
        if drifted := [rank for rank, part in enumerate(kept) if not torch.equal(part, kept[0])]:
            raise WeightMismatch(
                f"{name} of rank {', '.join(map(str, drifted))} differs from that of rank 0 in what every rank has. "
                "Likely cause: its gradient was not summed over the tensor group, or the shares are of different "
                "steps. Next step: join shares of one step; sum what replicas.split_parameters names."
            )
    return {name: cut.join([share[name] for share in shares]) for name, cut in cuts.items()}


def mark_shares(parameters: Iterable[Any]) -> None:
    """Say of parameters that each rank of the tensor group has another part of them, not a copy."""
    for parameter in parameters:
        setattr(parameter, SHARE_MARK, True)
        setattr(parameter, MEGATRON_MARK, True)


def share_parameters(model: Any) -> Iterator[tuple[str, Any]]:
    """Name and parameter with that mark: a norm over the whole model counts them on every rank, all others once."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, SHARE_MARK, False):
            yield name, parameter


def _split(*lengths: int, axis: int = 0) -> Cut:
    return Cut(tuple((length, True) for length in lengths), axis)


def _whole(length: int) -> Cut:
    return Cut(((length, False),))


def _attention_cuts(size: Size) -> dict[str, Cut]:
    queries, keys = size.num_heads * size.head_dim, size.num_gqa_groups * size.head_dim
    return {
        "qkv.layer_norm_weight": _whole(size.hidden),
        "qkv.weight": _split(queries, keys, keys),
        "out.weight": _split(queries, axis=1),
        "mlp.layer_norm_weight": _whole(size.hidden),
        "mlp.fc1_weight": _split(size.ffn_hidden, size.ffn_hidden),
        "mlp.fc2_weight": _split(size.ffn_hidden, axis=1),
    }


def _mamba_cuts(size: Size) -> dict[str, Cut]:
    inner = MAMBA_EXPAND * size.hidden
    heads, directions = inner // size.mamba_head_dim, 2 * size.mamba_state
    mixed = Cut(((inner, True), (directions, False)))
    return {
        "in_projection.layer_norm_weight": _whole(size.hidden),
        "in_projection.weight": Cut(((inner, True), (inner, True), (directions, False), (heads, True))),
        "conv_weight": mixed,
        "conv_bias": mixed,
        "a_log": _split(heads),
        "skip": _split(heads),
        "dt_bias": _split(heads),
        "norm_weight": _split(inner),
        "out_projection.weight": _split(inner, axis=1),
    }


def _recurrent_cuts(size: Size) -> dict[str, Cut]:
    heads = size.recurrent_heads
    keys, values = heads * size.recurrent_key_dim, heads * size.recurrent_value_dim
    return {
        "in_projection.layer_norm_weight": _whole(size.hidden),
        "in_projection.weight": _split(keys, keys, values, values, heads, heads),
        "input_bias": _split(heads),
        "forget_bias": _split(heads),
        "norm_weight": _split(values),
        "out_projection.weight": _split(values, axis=1),
    }


def _check_names(state: Mapping[str, Any], cuts: Mapping[str, Cut]) -> None:
    if state.keys() != cuts.keys():
        raise WeightMismatch(
            f"missing: {', '.join(sorted(cuts.keys() - state.keys())) or 'nothing'}; unknown: "
            f"{', '.join(sorted(state.keys() - cuts.keys())) or 'nothing'}. Likely cause: weights of another kind of "
            "layer. Next step: cut each layer's weights by the cuts of its letter."
        )
