"""The weights of an A-block under native names and under Transformer Engine's.

The native block holds query, key and value as one weight `qkv.weight` [(H + 2G) x D, hidden], in that order; TE holds
them as three. Everything else has the same name and layout in both: in a gated MLP the first half of `mlp.fc1_weight`
[2F, hidden] goes through the activation, in TE as here (`LayerNormMLP`; `pytorch/ops/basic/activation.py`: "Transformer
Engine applies the gating function to the first half"). Nothing is computed, so a round trip is exact to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from .errors import NotDivisible, WeightMismatch
from .extra_state import is_extra_state

QKV: Final = "qkv.weight"
QKV_PARTS: Final = ("qkv.query_weight", "qkv.key_weight", "qkv.value_weight")


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
            "qkv.layer_norm_weight": (self.hidden,),
            QKV: (sum(self.segments), self.hidden),
            "out.weight": (self.hidden, self.heads * self.head_dim),
            "mlp.layer_norm_weight": (self.hidden,),
            "mlp.fc1_weight": (up, self.hidden),
            "mlp.fc2_weight": (self.hidden, self.ffn_hidden),
        }

    def shard(self, tp_size: int) -> BlockShape:
        """The sizes of one rank's share.

        Raises:
            NotDivisible: heads, groups or the MLP's width do not divide among the ranks.
        """
        counts = {"ffn_hidden": self.ffn_hidden, "heads": self.heads, "groups": self.groups}
        for name, count in counts.items():
            if tp_size < 1 or count % tp_size:
                raise NotDivisible(
                    f"{name} {count} does not divide into {tp_size} shares. Next step: choose a number of ranks that "
                    f"divides {count}."
                )
        return replace(self, **{name: count // tp_size for name, count in counts.items()})  # type: ignore[arg-type]


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
            "cut a whole state into the shares of the ranks, and cast weights of another dtype first."
        )
    return found
