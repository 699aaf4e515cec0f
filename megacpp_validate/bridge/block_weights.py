"""The weights of an A-block under native names and under Transformer Engine's, and their tensor-parallel shards.

The native block holds query, key and value as one weight `qkv.weight` [(H + 2G) x D, hidden], in that order; TE holds
them as three. Everything else has the same name and layout in both: in a gated MLP the first half of `mlp.fc1_weight`
[2F, hidden] goes through the activation, in TE as here (`LayerNormMLP`; `pytorch/ops/basic/activation.py`: "Transformer
Engine applies the gating function to the first half"). Nothing is computed, so a round trip is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from .errors import NotDivisible, WeightMismatch
from .extra_state import is_extra_state

QKV: Final = "qkv.weight"
QKV_PARTS: Final = ("qkv.query_weight", "qkv.key_weight", "qkv.value_weight")
OUT: Final = "out.weight"
FC1: Final = "mlp.fc1_weight"
FC2: Final = "mlp.fc2_weight"
NORMS: Final = ("qkv.layer_norm_weight", "mlp.layer_norm_weight")


@dataclass(frozen=True)
class BlockShape:
    """The sizes of one A-block.

    Attributes:
        hidden: width of the residual stream.
        ffn_hidden: width F of the MLP.
        heads, groups, head_dim: H, G and D of the attention.
        gated: whether the MLP has a gate, so that `mlp.fc1_weight` has 2F rows.
    """

    hidden: int
    ffn_hidden: int
    heads: int
    groups: int
    head_dim: int
    gated: bool

    @property
    def segments(self) -> tuple[int, int, int]:
        """Rows of query, key and value in `qkv.weight`."""
        return self.heads * self.head_dim, self.groups * self.head_dim, self.groups * self.head_dim

    def native_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every native weight by name."""
        up = 2 * self.ffn_hidden if self.gated else self.ffn_hidden
        return {
            NORMS[0]: (self.hidden,),
            QKV: (sum(self.segments), self.hidden),
            OUT: (self.hidden, self.heads * self.head_dim),
            NORMS[1]: (self.hidden,),
            FC1: (up, self.hidden),
            FC2: (self.hidden, self.ffn_hidden),
        }

    def shard(self, tp_size: int) -> BlockShape:
        """The sizes of one rank's share.

        Raises:
            NotDivisible: heads, groups or the MLP's width do not divide among the ranks.
        """
        _check_divides("query heads", self.heads, tp_size)
        _check_divides("key and value groups", self.groups, tp_size)
        _check_divides("columns of the MLP", self.ffn_hidden, tp_size)
        ffn_hidden, heads, groups = self.ffn_hidden // tp_size, self.heads // tp_size, self.groups // tp_size
        return replace(self, ffn_hidden=ffn_hidden, heads=heads, groups=groups)


# --- native names and TE's --------------------------------------------------------------------------------


def to_native(weights: Mapping[str, Any]) -> dict[str, Any]:
    """TE's weights under native names; differentiable, because it only joins.

    Those of query [H * D, hidden], key and value [G * D, hidden] become one, [(H + 2 G) * D, hidden], in that order.
    """
    native = {name: weight for name, weight in weights.items() if name not in QKV_PARTS and not is_extra_state(name)}
    native[QKV] = torch.cat([weights[name] for name in QKV_PARTS])
    return native


def to_te(native: Mapping[str, Any], shape: BlockShape) -> dict[str, Any]:
    """Native weights under TE's names; views, nothing is copied."""
    weights = {name: weight for name, weight in native.items() if name != QKV}
    weights.update(zip(QKV_PARTS, native[QKV].split(shape.segments), strict=True))
    return weights


def check_native_state(state: Mapping[str, Any], shape: BlockShape, dtype: Any) -> dict[str, Any]:
    """The weights of a native state_dict, without extra state that TE may have left in it.

    Raises:
        WeightMismatch: a name is missing or unknown, or a weight has another shape or dtype; the text names all.
    """
    wanted = shape.native_shapes()
    found = {name: weight for name, weight in state.items() if not is_extra_state(name)}
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is unknown" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        seen = tuple(found[name].shape)
        if seen != wanted[name]:
            faults.append(f"{name} has shape {seen}, wanted {wanted[name]}")
        elif found[name].dtype != dtype:
            faults.append(f"{name} is {found[name].dtype}, wanted {dtype}, and a cast would round")
    if faults:
        raise WeightMismatch(
            f"the weights do not fit this block: {'; '.join(sorted(faults))}. Next step: compare the configurations; "
            "shard_native_state() makes a rank's share, and weights of another dtype are cast first."
        )
    return found


# --- tensor-parallel shards -------------------------------------------------------------------------------


def shard_native_state(state: Mapping[str, Any], shape: BlockShape, rank: int, tp_size: int) -> dict[str, Any]:
    """One rank's share of a whole native state: columns of QKV and fc1, rows of out and fc2, norms whole.

    QKV gives whole query heads, then whole groups of keys, then of values; a gated fc1 a part of each half. A plain
    chunk of the rows would give the first ranks only queries and the last only values.

    Args:
        state: the weights of a whole block.
        shape: its sizes.
        rank, tp_size: this rank, from 0, and how many share the weights.

    Raises:
        NotDivisible: something does not divide among the ranks, or there is no such rank.
        WeightMismatch: the state does not fit the shape.
    """
    shape.shard(tp_size)
    dtype = next((weight.dtype for name, weight in state.items() if not is_extra_state(name)), None)
    whole = check_native_state(state, shape, dtype)
    up = (shape.ffn_hidden,) * (2 if shape.gated else 1)
    return {
        **{name: whole[name].clone() for name in NORMS},
        QKV: _share(whole[QKV], 0, shape.segments, rank, tp_size),
        OUT: _share(whole[OUT], 1, shape.segments[:1], rank, tp_size),
        FC1: _share(whole[FC1], 0, up, rank, tp_size),
        FC2: _share(whole[FC2], 1, (shape.ffn_hidden,), rank, tp_size),
    }


def _share(weight: Any, dim: int, segments: Sequence[int], rank: int, tp_size: int) -> Any:
    """One rank's share along `dim`, taken from each segment by itself."""
    if not 0 <= rank < tp_size:
        raise NotDivisible(f"rank {rank} is not one of {tp_size}. Next step: pass 0 to {tp_size - 1}.")
    return torch.cat([part.chunk(tp_size, dim)[rank] for part in weight.split(segments, dim)], dim)


def _check_divides(what: str, count: int, ranks: int) -> None:
    if ranks < 1 or count % ranks:
        raise NotDivisible(
            f"{count} {what} do not divide into {ranks} shares. Next step: choose a number that divides {count}."
        )
