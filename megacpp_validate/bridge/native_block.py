"""TE native block wrapper: LayerNormLinear, DotProductAttention, Linear, LayerNormMLP as one block, or plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import distributed, nn

from ..native.block import ABlock
from ..native.mlp import is_gated
from ..native.norms import check_eps
from . import imports as te
from .amax_owner import AmaxGroupMissing
from .attention import SINGLE, Masks, check_heads
from .backends import Choice, NoBackend, Refusal, choose
from .errors import NotDivisible, WeightMismatch, WrongDtype, WrongShape
from .extra_state import is_extra_state, tolerate_extra_state
from .features import PRODUCTION, Features, why_not_te
from .fused import turn_heads
from .recipes import ALIGNMENT, RECIPE_NAMES, TE_DTYPES
from .te_fp8 import te_state

NATIVE_PATH = "the native A-block of plain torch layers"

# --- weights ---------------------------------------------------------------------------------------------------------
# The weights of an A-block under native names and under Transformer Engine's.
# The native block holds query, key and value as one weight `qkv.weight` [(H + 2G) x D, hidden], in that order; TE holds
# them as three. Everything else has the same name and layout in both: in a gated MLP the first half of `mlp.fc1_weight`
# [2F, hidden] goes through the activation, in TE as here (`LayerNormMLP`; `pytorch/ops/basic/activation.py`:
# "Transformer Engine applies the gating function to the first half"). Nothing is computed, so a round trip is exact to
# the bit.

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


# --- low precision ----------------------------------------------------------------------------------------------------


def why_not_low(rows: Any, shape: BlockShape) -> Refusal | None:
    """Why the open low-precision scope cannot run these sizes: TE would raise in its first layer.

    The weight gradients sum over the tokens, so tokens must be the same multiple as widths: with 8 or 24 rows 2.12.0
    and 2.20.2 run the forward pass and raise in the backward pass (H200, 2026-11-21). The rule also holds without
    gradients: a reentrant recomputation runs its first pass without them, and both passes must take the same path.

    The function reads the state of TE and not the scopes of this thread: a recomputation runs after they closed, in
    another thread. The reason contains no number of a single call, so that the record holds it once.

    Args:
        rows: [B, T, hidden], of this rank.
        shape: of this rank's share.
    """
    state = te_state()
    if not state["enabled"]:
        return None
    kind = type(state["recipe"]).__name__
    align = ALIGNMENT[RECIPE_NAMES.get(kind, "delayed")]
    widths = (shape.hidden, sum(shape.segments), shape.segments[0], shape.ffn_hidden)
    if not any(size % align for size in (rows.shape[0] * rows.shape[1], *widths)):
        return None
    return Refusal(
        "te",
        "fp8-alignment",
        f"the tokens of this call, or a width among {', '.join(map(str, widths))}; under {kind} Transformer Engine "
        f"takes multiples of {align}. Next step: pad the tokens, or expect this block in the dtype of its parameters",
    )


def check_gathered_scales(tp_group: Any) -> None:
    """Refuse delayed scaling under sequence parallelism whose amax is not reduced over the tensor group.

    Each rank casts its own positions by its own scale and gathers the bytes; the reader applies its own scale to all of
    them (2.20.2, pytorch/distributed.py, _all_gather_fp8). Where scales differ, the rows of other ranks are wrong by a
    factor, and TE raises nothing. Current scaling reduces over the tensor group, and block scaling sends its scales.

    Args:
        tp_group: the tensor group.

    Raises:
        AmaxGroupMissing: the open scope reduces over other ranks, or not at all.
    """
    state = te_state()
    if not state["enabled"] or RECIPE_NAMES.get(type(state["recipe"]).__name__) != "delayed":
        return
    group, reduces = state["group"], getattr(state["recipe"], "reduce_amax", True)
    if reduces and group is None:  # None is the whole world
        return
    over = set(distributed.get_process_group_ranks(group)) if reduces else set()
    gathered = set(distributed.get_process_group_ranks(tp_group))
    if not gathered <= over:
        raise AmaxGroupMissing(
            f"delayed scaling reduces its amax over the ranks {sorted(over)}, and sequence parallelism gathers rows in "
            f"FP8 over {sorted(gathered)}: each rank would read the others' rows by its own scale. Next step: pass as "
            "amax_reduction_group a group that contains the tensor group."
        )


# --- block checks -----------------------------------------------------------------------------------------------------
# What an A-block refuses before it builds or runs a layer.


def check_rope(rope: Any, length: int, width: int) -> None:
    """Refuse tables that do not fit `length` tokens of heads of this size."""
    shapes = [tuple(table.shape) for table in rope]
    if len(shapes) != 2 or shapes[0] != shapes[1] or shapes[0][1:] != (width // 2,) or shapes[0][0] < length:
        raise WrongShape(
            f"rotary tables have shapes {', '.join(map(str, shapes))}; wanted cosine and sine, both [at least "
            f"{length}, {width // 2}]. Next step: make both by rope_tables(length, {width}) for the longest sequence."
        )


# --- native block -----------------------------------------------------------------------------------------------------


class TeBlock(nn.Module):
    """The A-block in TE classes: LayerNormLinear, DotProductAttention, Linear, LayerNormMLP.

    Args:
        shape: of the whole block, of all tensor-parallel ranks.
        activation: of the MLP; a gated one takes the first half of the up-projection as its gate.
        eps: of both norms.
        dtype, device: of the parameters.
        tp_size, tp_group: tensor parallelism; this rank holds its share of heads and of the MLP's columns.
        sequence_parallel: whether the stream holds this rank's positions only; needs tensor parallelism.
    """

    def __init__(
        self,
        shape: BlockShape,
        *,
        activation: Literal["gelu", "geglu", "srelu", "swiglu"],
        eps: float,
        dtype: Any,
        device: Any,
        tp_size: int = 1,
        tp_group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        hidden, queries, keys = shape.hidden, shape.segments[0], shape.segments[1]
        self.heads = shape.heads // tp_size, shape.groups // tp_size, shape.head_dim
        self.sequence_parallel = sequence_parallel
        self.qkv = te.layernorm_linear.require()(
            in_features=hidden,
            out_features=sum(shape.segments),
            eps=eps,
            bias=False,
            normalization="RMSNorm",
            parameters_split={"query": queries, "key": keys, "value": keys},
            parallel_mode="column" if tp_size > 1 else None,
            tp_size=tp_size,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            params_dtype=dtype,
            device=device,
        )
        self.attention = te.dot_product_attention.require()(
            num_attention_heads=shape.heads, kv_channels=shape.head_dim, num_gqa_groups=shape.groups, tp_size=tp_size,
            qkv_format="sbhd" if sequence_parallel else "bshd", attn_mask_type="causal", tp_group=tp_group,
        )  # fmt: skip
        self.out = te.linear.require()(
            in_features=queries, out_features=hidden, bias=False,
            parallel_mode="row" if tp_size > 1 else None, tp_size=tp_size, tp_group=tp_group,
            sequence_parallel=sequence_parallel, params_dtype=dtype, device=device,
        )  # fmt: skip
        self.mlp = te.layernorm_mlp.require()(
            hidden_size=hidden,
            ffn_hidden_size=shape.ffn_hidden,
            eps=eps,
            bias=False,
            normalization="RMSNorm",
            activation=activation,
            set_parallel_mode=tp_size > 1,
            tp_size=tp_size,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            params_dtype=dtype,
            device=device,
        )

    def forward(
        self, rows: Any, *, rope: tuple[Any, Any] | None = None, is_first_microbatch: bool | None = None
    ) -> Any:
        """Residual stream [B, T, hidden] -> [B, T, hidden]; `rope` is (cos, sin), each [at least T, D/2].

        With sequence parallelism the caller's stream is [B, T / tp, hidden]. The layers take it sequence first,
        [T / tp, B, hidden] and contiguous: TE gathers and scatters along the first axis of [tokens, hidden], so that
        the tokens of other ranks follow those of this rank (2.20.2, pytorch/distributed.py, gather_along_first_dim).
        """
        heads, groups, width = self.heads
        if self.sequence_parallel:
            rows = rows.transpose(0, 1).contiguous()
        mixed = self.qkv(rows, is_first_microbatch=is_first_microbatch)
        query, key, value = mixed.split([heads * width, groups * width, groups * width], dim=-1)
        shape = (*mixed.shape[:2], -1, width)
        if rope is not None:
            turn = _turn_sequence_first if self.sequence_parallel else _turn
            query, key = turn(query.reshape(shape), rope), turn(key.reshape(shape), rope)
        seen = self.attention(query.reshape(shape), key.reshape(shape), value.reshape(shape))
        rows = rows + self.out(seen, is_first_microbatch=is_first_microbatch)
        rows = rows + self.mlp(rows, is_first_microbatch=is_first_microbatch)
        return rows.transpose(0, 1).contiguous() if self.sequence_parallel else rows


class NativeBlock(nn.Module):
    """The whole A-block: x + out(attention(rope(qkv(norm(x))))), then x + mlp(norm(x)); causal, RMSNorm, no biases.

    TE's classes hold the parameters where TE is available, plain torch layers elsewhere. A single call that TE refuses
    (packed documents, a local window, sizes that FP8 does not take) runs on the plain layers with TE's parameters.

    Args:
        hidden: width of the residual stream.
        ffn_hidden: width F of the MLP.
        num_heads, head_dim, num_gqa_groups: H, D and G of the attention; G divides H.
        activation: of the MLP; a gated one takes the first half of the up-projection as its gate.
        eps: of both norms.
        dtype, device: of the parameters; torch's defaults without them.
        features: whether Transformer Engine may be taken.
        tp_size, tp_group: tensor parallelism, which only TE supports; the sizes above are those of all ranks.
        sequence_parallel: whether rows hold this rank's positions of each sequence, in order of rank; ignored without
            tensor parallelism. Each rank then has a part of the gradients of both norms. TE marks these parameters
            (`sequence_parallel`), and the caller sums the gradients.

    Attributes:
        choice: of the last call; None before the first.
        te: the block in TE classes, or None.
        native: the block of plain layers, or None where `te` holds the parameters.

    Raises:
        NotDivisible: heads, groups, widths and ranks do not divide.
        ValueError: an unknown activation, or a negative or non-finite eps.
        NoBackend: tensor parallelism without TE.
    """

    def __init__(
        self,
        *,
        hidden: int,
        ffn_hidden: int,
        num_heads: int,
        head_dim: int,
        num_gqa_groups: int,
        activation: Literal["gelu", "geglu", "srelu", "swiglu"] = "swiglu",
        eps: float = 1e-5,
        dtype: Any = None,
        device: Any = None,
        features: Features = PRODUCTION,
        tp_size: int = 1,
        tp_group: Any = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        device = torch.get_default_device() if device is None else device
        check_heads(num_heads, num_gqa_groups, head_dim, tp_size)
        check_eps(eps)
        whole = BlockShape(hidden, ffn_hidden, num_heads, num_gqa_groups, head_dim, is_gated(activation))
        self.shape, self.tp_size, self.features = whole.shard(tp_size), tp_size, features
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel and tp_size > 1
        self.choice: Choice | None = None
        self.te: TeBlock | None = None
        self.native: ABlock | None = None
        tolerate_extra_state(self)
        made: dict[str, Any] = {"activation": activation, "eps": eps, "dtype": dtype}
        plain = partial(ABlock, hidden, ffn_hidden, num_heads, head_dim, num_gqa_groups, **made)
        self._why_plain = why_not_te_block(features, dtype, device)
        if self._why_plain is not None:
            if (lacking := self._why_not_native()) is not None:
                raise NoBackend(f"no native_block can be made. te: {self._why_plain.reason}; native: {lacking.reason}")
            self.native = plain(device=device)
            return
        split = {"tp_size": tp_size, "tp_group": tp_group, "sequence_parallel": self.sequence_parallel}
        self.te = TeBlock(whole, device=device, **made, **split)
        # On meta: only its forward pass is used. In a tuple, so that its parameters are not registered here.
        self._plain = (plain(device="meta"),)

    def forward(
        self,
        rows: Any,
        *,
        rope: tuple[Any, Any] | None = None,
        doc_ids: Any = None,
        window: int | None = None,
        is_first_microbatch: bool | None = None,
    ) -> Any:
        """One step of the residual stream.

        Args:
            rows: [B, T, hidden] in the dtype of the parameters, or any under torch.autocast; [B, T / tp, hidden] with
                sequence parallelism.
            rope: (cos, sin), each [at least T, D/2], applied to query and key between QKV and attention.
            doc_ids: [B, T] integers, packed documents; TE refuses them.
            window: a query sees itself and the window - 1 keys before it; TE refuses it.
            is_first_microbatch: True casts the weights to FP8 and keeps the copies, False takes the kept copies, None
                casts in each call. The native path ignores it.

        Returns:
            [B, T, hidden], or [B, T / tp, hidden], in the dtype of `rows`.

        Raises:
            AmaxGroupMissing: sequence parallelism under delayed scaling whose amax is not reduced over `tp_group`.
            WrongShape, WrongDtype: rows, rope or a mask of another shape or dtype.
            WrongTarget: a mask on another device than the rows.
            MaskConflict, WrongOption: contradicting or invalid mask options.
            NoBackend: TE refuses, and the parameters are a tensor-parallel share.
        """
        masks = Masks(doc_ids=doc_ids, window=window)
        self._check(rows, rope, masks)
        taken = choose(
            "native_block", [("te", partial(self._why_not_te, rows, masks)), ("native", self._why_not_native)]
        )
        self.choice = taken
        if self.te is not None and taken.observed == "te":
            if self.sequence_parallel:
                check_gathered_scales(self.tp_group)
            return self.te(rows, rope=rope, is_first_microbatch=is_first_microbatch)
        options = {"rope": rope, "doc_ids": doc_ids, "window": window}
        if self.native is not None:
            return self.native(rows, **options)
        return torch.func.functional_call(self._plain[0], self._weights(), (rows,), options)

    def native_state_dict(self) -> dict[str, Any]:
        """A copy of the weights under `native.block.ABlock`'s names; under tensor parallelism, of this rank's share."""
        return {name: weight.detach().clone() for name, weight in self._weights().items()}

    def load_native_state_dict(self, state: Mapping[str, Any]) -> None:
        """Copy the weights of a native block, exact to the bit; TE's extra state in it is ignored.

        Kept FP8 copies of the weights become stale: the next call must not pass `is_first_microbatch=False`.

        Args:
            state: what `native_state_dict` or `ABlock.state_dict` gave; under tensor parallelism, this rank's share:
                whole heads of query, key and value each, and the same columns of both halves of a gated MLP.

        Raises:
            WeightMismatch: a name is missing or unknown, or a weight has another shape or dtype.
        """
        weights = dict(self._layers().named_parameters())
        given = check_native_state(state, self.shape, next(iter(weights.values())).dtype)
        given = given if self.te is None else to_te(given, self.shape)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(given[name])

    def _weights(self) -> dict[str, Any]:
        """The parameters themselves under native names, with their graph."""
        weights = dict(self._layers().named_parameters())
        return weights if self.te is None else to_native(weights)

    def _layers(self) -> Any:
        """The layers that hold the parameters."""
        return self.native if self.te is None else self.te

    def _why_not_te(self, rows: Any, masks: Masks) -> Refusal | None:
        if (refused := masks.refused_by("te")) is not None:
            return refused
        if self._length(rows) == 1:
            return Refusal("te", "one-token", SINGLE)
        dtype = next(self.parameters()).dtype
        refused = self._why_plain or why_not_te_block(self.features, dtype, rows.device)
        return refused or why_not_low(rows, self.shape)

    def _why_not_native(self) -> Refusal | None:
        if self.tp_size == 1:
            return None
        return Refusal(
            "native",
            "tensor-parallel",
            f"the plain layers do not communicate, and the parameters are one of {self.tp_size} shares. "
            "Next step: leave out the option that TE refuses, or use tp_size=1",
        )

    def _check(self, rows: Any, rope: tuple[Any, Any] | None, masks: Masks) -> None:
        shape = tuple(rows.shape)
        if len(shape) != 3 or shape[2] != self.shape.hidden or 0 in shape:
            raise WrongShape(
                f"rows have shape {shape}, wanted [B, T, {self.shape.hidden}] with at least one token. Next step: pass "
                "the residual stream, neither flattened nor split into heads."
            )
        length = self._length(rows)
        masks.check(shape[0], self.shape.heads, length, rows.device)
        wanted = next(self.parameters()).dtype
        if rows.dtype != wanted and not torch.is_autocast_enabled(rows.device.type):
            raise WrongDtype(f"rows are {rows.dtype}, the parameters {wanted}. Next step: cast, or use torch.autocast.")
        if rope is not None:
            check_rope(rope, length, self.shape.head_dim)

    def _length(self, rows: Any) -> int:
        """T of the whole sequences."""
        return rows.shape[1] * (self.tp_size if self.sequence_parallel else 1)


def why_not_te_block(features: Features, dtype: Any, device: Any) -> Refusal | None:
    """Why TE's classes cannot hold the parameters of a block; None where they can."""
    if (refused := why_not_te(features, "native_block", device)) is not None:
        return refused
    return None if dtype in TE_DTYPES else Refusal("te", "dtype", f"Transformer Engine has no layers in {dtype}")


def _turn(rows: Any, rope: tuple[Any, Any]) -> Any:
    """Rotary embedding over [B, T, H, D]; the result is contiguous, because TE's attention ignores strides."""
    return turn_heads(rows, rope[0], rope[1])


def _turn_sequence_first(rows: Any, rope: tuple[Any, Any]) -> Any:
    """The same over [T, B, H, D]."""
    return turn_heads(rows.transpose(0, 1), rope[0], rope[1]).transpose(0, 1).contiguous()
