"""What benchmarks/fp8.py runs side by side: each layer through the bridge, as a raw call of Transformer Engine, and by
torch alone.

Every path is one step: forward and backward, gradients dropped before it, the casts to FP8 within it. The bridge's own
scope is entered by the bridge's path, Transformer Engine's by the raw one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch.nn import functional

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.amax_owner import SINGLE_OWNER
from megacpp_validate.bridge.fp8_scope import low_precision
from megacpp_validate.bridge.layer_spec import build_mlp
from megacpp_validate.bridge.linear_walker import swap_linears
from megacpp_validate.bridge.native_block import NativeBlock
from megacpp_validate.bridge.recipes import detect_target
from megacpp_validate.bridge.te_fp8 import te_block_scaling, te_current_scaling, te_delayed_scaling, te_scope
from megacpp_validate.native.attention import rope_tables
from megacpp_validate.native.block import ABlock
from megacpp_validate.native.mlp import NormMLP

BF16: Final = torch.bfloat16
RECIPES: Final = ("bf16", "delayed", "current", "block")
Recipe = Literal["bf16", "delayed", "current", "block"]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS: Final = 1e-5


@dataclass(frozen=True)
class Path:
    """One way to take a step.

    Attributes:
        side: "bridge", "raw TE" or "torch".
        recipe: what it computes in, and what is special about it.
        step: forward and backward.
    """

    side: str
    recipe: str
    step: Callable[[], Any]

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.side}, {self.recipe}"


class FellBack(RuntimeError):
    """A path of the bridge that did not run on Transformer Engine: its time would be of something else."""


def bridge_scope(recipe: str) -> AbstractContextManager[Any]:
    """The scope as a training loop enters it, anew for each step."""
    if recipe == "bf16":
        return nullcontext()
    return low_precision(target=detect_target(), amax_reduction_group=SINGLE_OWNER, recipe=recipe)


def raw_scope(recipe: str) -> AbstractContextManager[Any]:
    """Transformer Engine's own, its recipe made anew for each step as the bridge does."""
    if recipe == "bf16":
        return nullcontext()
    made = {
        "delayed": partial(te_delayed_scaling, reduce_amax=False), "current": te_current_scaling,
        "block": te_block_scaling,
    }[recipe]()  # fmt: skip
    return te_scope(enabled=True, recipe=made, amax_reduction_group=None)


def step_of(
    layer: Any, call: Callable[..., Any], rows: Any, scope: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Callable[[], None]:
    """A step of a layer: `call(rows)` in the scope, then the backward pass outside of it."""
    weights = [*layer.parameters()]
    made: dict[str, Any] = {}

    def step() -> None:
        rows.grad = None
        for weight in weights:
            weight.grad = None
        with scope():
            out = call(rows)
        if not made:
            made["gradient"] = torch.randn_like(out)
        out.backward(made["gradient"])

    return step


def observed(wrapper: Any, step: Callable[[], None]) -> Callable[[], None]:
    """The same step, run once to see that the wrapper took Transformer Engine; some choose when they are made."""
    _check(wrapper.choice)
    step()
    _check(wrapper.choice)
    return step


def _check(choice: Any) -> None:
    if choice is not None and choice.observed != "te":
        raise FellBack(f"the bridge took {choice.observed}: {'; '.join(refusal.reason for refusal in choice.refusals)}")


def cached(step: Callable[..., Any], flag: dict[str, bool | None]) -> None:
    """Let the weights be cast once, in this step, and be kept by all that follow."""
    flag["first"] = True
    step()
    flag["first"] = False


def paths_of(
    make: Callable[[], tuple[Any, Callable[..., Any]]],
    side: str,
    rows: Any,
    scope: Callable[[str], AbstractContextManager[Any]],
    *,
    keep_weights: Sequence[str] = (),
) -> list[Path]:
    """One side's path in each recipe, each with a layer of its own.

    Args:
        make: the layer, and its call: rows, is_first_microbatch -> rows.
        keep_weights: recipes that get a second path, whose weights are cast once and kept.
    """
    found = []
    for recipe, keeps in [*((name, False) for name in RECIPES), *((name, True) for name in keep_weights)]:
        layer, call = make()
        flag: dict[str, bool | None] = {"first": None}

        def run(given: Any, call: Any = call, flag: Any = flag) -> Any:
            return call(given, is_first_microbatch=flag["first"])

        step = step_of(layer, run, rows, partial(scope, recipe))
        if side == "bridge":
            step = observed(layer, step)
        if keeps:
            cached(step, flag)
        found.append(Path(side, f"{recipe}, weights kept" if keeps else recipe, step))
    return found


# --- the two layers ---------------------------------------------------------------------------------------------------


def mlp_paths(rows: Any, hidden: int, ffn: int) -> list[Path]:
    """RMSNorm and a GELU MLP, rows [N, hidden]."""
    plain = partial(NormMLP, hidden, ffn, activation="gelu", eps=EPS, dtype=BF16, device=rows.device)

    def bridge() -> tuple[Any, Any]:
        layer = build_mlp(hidden, ffn, activation="gelu", eps=EPS, dtype=BF16, device=rows.device)
        return layer, layer

    def raw() -> tuple[Any, Any]:
        layer = te.layernorm_mlp.require()(
            hidden, ffn, eps=EPS, bias=False, normalization="RMSNorm", activation="gelu", params_dtype=BF16,
            device=rows.device,
        )  # fmt: skip
        return layer, layer

    found = paths_of(bridge, "bridge", rows, bridge_scope, keep_weights=("delayed", "block"))
    found += paths_of(raw, "raw TE", rows, raw_scope, keep_weights=("delayed", "block"))
    layer = plain()
    found.append(Path("torch", "bf16", step_of(layer, layer, rows)))
    layer = plain()
    found.append(Path("torch.compile", "bf16", step_of(layer, torch.compile(layer, dynamic=False), rows)))
    for side, way in (("torch", scaled_mlp), ("torch.compile", torch.compile(scaled_mlp, dynamic=False))):
        layer = plain()
        found.append(Path(side, "_scaled_mm", step_of(layer, partial(way, layer), rows)))
    return found


def block_paths(rows: Any, sizes: dict[str, int], *, rope: bool) -> list[Path]:
    """The A-block, rows [B, T, hidden]; with rotary embedding, each side by its own code for it."""
    made = {"activation": "gelu", "eps": EPS, "dtype": BF16, "device": rows.device}
    tables = rope_tables(rows.shape[1], sizes["head_dim"], device=rows.device) if rope else None

    def bridge() -> tuple[Any, Any]:
        layer = NativeBlock(**sizes, **made)
        return layer, partial(layer, rope=tables)

    found = paths_of(bridge, "bridge", rows, bridge_scope, keep_weights=() if rope else ("delayed", "block"))
    found += paths_of(
        partial(raw_block, rows, sizes, rope=rope), "raw TE", rows, raw_scope,
        keep_weights=() if rope else ("delayed", "block"),
    )  # fmt: skip
    if not rope:
        layers = [ABlock(*sizes.values(), **made) for _ in range(2)]
        found.append(Path("torch", "bf16", step_of(layers[0], layers[0], rows)))
        compiled = torch.compile(layers[1], dynamic=False)
        found.append(Path("torch.compile", "bf16", step_of(layers[1], compiled, rows)))
    return found


def raw_block(rows: Any, sizes: dict[str, int], *, rope: bool) -> tuple[Any, Any]:
    """`te.TransformerLayer` of the same sizes and options, and its call."""
    layer = te.transformer_layer.require()(
        sizes["hidden"], sizes["ffn_hidden"], sizes["num_heads"], num_gqa_groups=sizes["num_gqa_groups"],
        kv_channels=sizes["head_dim"], layernorm_epsilon=EPS, hidden_dropout=0.0, attention_dropout=0.0,
        self_attn_mask_type="causal", normalization="RMSNorm", activation="gelu", bias=False, fuse_qkv_params=True,
        attn_input_format="bshd", params_dtype=BF16, device=rows.device,
    )  # fmt: skip
    if not rope:
        return layer, layer
    from transformer_engine.pytorch.attention import RotaryPositionEmbedding

    return layer, partial(layer, rotary_pos_emb=RotaryPositionEmbedding(sizes["head_dim"])(rows.shape[1]).to("cuda"))


# --- linear layers ----------------------------------------------------------------------------------------------------


def linear_paths(rows: Any, width: int, out: int, compiled: Callable[..., Any]) -> list[Path]:
    """A bias-free linear layer as the walker swaps it, rows [N, width]."""

    def plain() -> Any:
        tree = torch.nn.Sequential()
        tree.add_module("proj", torch.nn.Linear(width, out, bias=False, device=rows.device, dtype=BF16))
        return tree

    def bridge() -> tuple[Any, Any]:
        tree = plain()
        swap = swap_linears(tree, include=("proj",))
        tree.proj.choice = swap.choices["proj"]
        return tree.proj, tree.proj

    def raw() -> tuple[Any, Any]:
        layer = te.linear.require()(width, out, bias=False, params_dtype=BF16, device=rows.device)
        return layer, layer

    found = paths_of(bridge, "bridge", rows, bridge_scope) + paths_of(raw, "raw TE", rows, raw_scope)
    layer = plain()
    found.append(Path("torch", "bf16", step_of(layer, layer, rows)))
    for side, way in (("torch", scaled_linear), ("torch.compile", compiled)):
        layer = plain()
        found.append(
            Path(side, "_scaled_mm", step_of(layer, lambda x, way=way, layer=layer: way(x, layer.proj.weight), rows))
        )
    return found


class _ScaledLinear(torch.autograd.Function):
    """Rows [N, K] x weight [M, K] by three `torch._scaled_mm`: E4M3 forward, E5M2 gradients, one scale a tensor, taken
    from the tensor at hand. What the second operand of a product is must lie column by column.
    """

    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        low_rows, row_scale = to_low(rows, E4M3)
        low_weight, weight_scale = to_low(weight, E4M3)
        ctx.save_for_backward(low_rows, row_scale, low_weight, weight_scale)
        return torch._scaled_mm(
            low_rows, low_weight.t(), scale_a=row_scale, scale_b=weight_scale, out_dtype=BF16, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, Any]:
        low_rows, row_scale, low_weight, weight_scale = ctx.saved_tensors
        low, scale = to_low(gradients[0], E5M2)
        of_rows = torch._scaled_mm(
            low, low_weight.t().contiguous().t(), scale_a=scale, scale_b=weight_scale, out_dtype=BF16
        )
        of_weight = torch._scaled_mm(
            low.t().contiguous(), low_rows.t().contiguous().t(), scale_a=scale, scale_b=row_scale, out_dtype=BF16
        )
        return of_rows, of_weight


def to_low(tensor: Any, dtype: Any) -> tuple[Any, Any]:
    """The tensor in FP8, and the fp32 scale [] that gives it back when it is multiplied with it."""
    most = torch.finfo(dtype).max
    amax = tensor.abs().amax().float().clamp(min=1e-12)
    return (tensor.float() * (most / amax)).clamp(-most, most).to(dtype), amax / most


def scaled_linear(rows: Any, weight: Any) -> Any:
    """Rows [..., K] x weight [M, K] -> [..., M], every product in FP8."""
    flat = rows.reshape(-1, rows.shape[-1])
    return _ScaledLinear.apply(flat, weight).view(*rows.shape[:-1], weight.shape[0])


def scaled_mlp(layer: Any, rows: Any) -> Any:
    """`NormMLP` with both products in FP8, [..., hidden] -> [..., hidden]."""
    up = scaled_linear(layer.norm(rows), layer.fc1_weight)
    return scaled_linear(functional.gelu(up, approximate="tanh"), layer.fc2_weight)
