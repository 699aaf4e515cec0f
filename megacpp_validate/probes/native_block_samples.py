"""The tensors of an A-block, and what the wrapper, plain torch and an emulated FP8 make of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ..native.attention import attention
from ..native.block import ABlock
from ..native.mlp import activation, gated_activation, is_gated
from ..native.norms import rms_norm
from ..native.rope import apply_rope, rope_tables
from .bench import Bench
from .emulation import emulated_linear
from .low_precision import Enter
from .observe import marking_vendor_layers
from .references.attention import visible
from .references.block import Sizes

HEADS: Final = 8
EPS: Final = 3e-5  # not the default of any layer: one that ignores what it is given shows
SMALL: Final = 2.0**-8  # rows of this size have a mean square of about eps


@dataclass(frozen=True)
class Case:
    """One shape, and what the call asks for besides.

    Attributes:
        name: of the checks.
        activation: of the MLP.
        groups: key and value heads; query heads are 8.
        width: head size D.
        extra: tokens added to the length that the bench takes.
        length: tokens, where the case has a length of its own.
        small: whether rows are so small that eps counts in both norms.
        strided: whether rows are not contiguous.
        options: of the call, which Transformer Engine refuses.
        code: of that refusal.
    """

    name: str
    activation: Any = "swiglu"
    groups: int = 2
    width: int = 64
    extra: int = 0
    length: int = 0
    small: bool = False
    strided: bool = False
    options: tuple[str, ...] = ()
    code: str = ""


@dataclass
class Sample:
    """The tensors of one case in one dtype.

    Attributes:
        rows: [B, T, hidden], a leaf.
        weights: by native names.
        gradient: of the output.
        rope: (cos, sin); None without rotation.
        options: of the call.
        eps: of both norms.
    """

    case: Case
    rows: Any
    weights: dict[str, Any]
    gradient: Any
    rope: tuple[Any, Any] | None
    options: dict[str, Any] = field(default_factory=dict)
    eps: float = EPS

    @property
    def sizes(self) -> Sizes:
        """What the reference needs besides the weights."""
        return Sizes(HEADS, self.case.groups, self.case.width, self.case.activation, self.eps)

    def seen(self) -> Any:
        """[B, H, T, T]: which key each query sees."""
        batch, length, _ = self.rows.shape
        return visible(batch, HEADS, length, device=self.rows.device, **self.options)


def new_sample(bench: Bench, case: Case, dtype: Any, *, branches: float = 2.0) -> Sample:
    """Inputs and weights; with `branches` of 2 each branch is about as large as the stream that it is added to."""
    gpu = bench.device == "cuda"
    hidden, ffn, batch = (512, 1024, 2) if gpu else (64, 96, 2)
    base = 128 if gpu else 24
    length = case.length or base + case.extra
    size = SMALL if case.small else 1.0
    if case.strided:
        rows = bench.randn(batch, length, 2 * hidden, dtype=dtype)[..., ::2]
    else:
        rows = bench.randn(batch, length, hidden, dtype=dtype, scale=size)
    joint, up = HEADS * case.width, 2 * ffn if is_gated(case.activation) else ffn
    qkv = bench.randn((HEADS + 2 * case.groups) * case.width, hidden, scale=hidden**-0.5)
    qkv[:joint] *= 0.5  # scores have a deviation of 1/2, so that no query rests on one key alone
    weights = {
        "qkv.layer_norm_weight": 1.0 + bench.randn(hidden, scale=0.2),
        "qkv.weight": qkv,
        "out.weight": bench.randn(hidden, joint, scale=branches * joint**-0.5 * size),
        "mlp.layer_norm_weight": 1.0 + bench.randn(hidden, scale=0.2),
        "mlp.fc1_weight": bench.randn(up, hidden, scale=hidden**-0.5),
        "mlp.fc2_weight": bench.randn(hidden, ffn, scale=branches * ffn**-0.5),
    }
    options: dict[str, Any] = {}
    if "doc_ids" in case.options:
        options["doc_ids"] = bench.randint(2, batch, length).cumsum(-1) // 5
    if "window" in case.options:
        options["window"] = 7
    return Sample(
        case,
        rows.detach().requires_grad_(),
        {name: weight.to(dtype) for name, weight in weights.items()},
        bench.randn(batch, length, hidden, dtype=dtype),
        rope_tables(length, case.width, device=bench.device),
        options,
    )


def new_layer(bench: Bench, bridge: Any, sample: Sample) -> Any:
    """The wrapper with the weights of a sample."""
    weights = sample.weights
    layer = bridge.NativeBlock(
        hidden=weights["out.weight"].shape[0],
        ffn_hidden=weights["mlp.fc2_weight"].shape[1],
        num_heads=HEADS,
        head_dim=sample.case.width,
        num_gqa_groups=sample.case.groups,
        activation=sample.case.activation,
        eps=EPS,
        dtype=sample.rows.dtype,
        device=bench.device,
    )
    layer.load_native_state_dict(weights)
    return layer


def layer_step(layer: Any, sample: Sample, enter: Enter) -> dict[str, Any]:
    """Forward in the scope, backward outside: output and gradients, of weights by native names."""
    sample.rows.grad = None
    layer.zero_grad(set_to_none=True)
    with enter(), marking_vendor_layers():
        out = layer(sample.rows, rope=sample.rope, **sample.options)
    out.backward(sample.gradient.to(out.dtype))
    parts = {name: weight.grad for name, weight in (layer.native or layer.te).named_parameters()}
    if layer.te is not None:
        split = [parts.pop(f"qkv.{part}_weight") for part in ("query", "key", "value")]
        parts["qkv.weight"] = None if any(part is None for part in split) else torch.cat(split)
    return {"out": out, "rows": sample.rows.grad, **parts}


def layer_inputs(bench: Bench, sample: Sample) -> dict[str, tuple[Any, Any]]:
    """For each layer of the block alone: rows that it takes, and the gradient of what it gives."""
    weights = sample.weights
    widths = {"qkv": weights["qkv.weight"].shape, "out": weights["out.weight"].shape}
    widths["mlp"] = 2 * weights["mlp.fc2_weight"].shape[:1]
    shape, dtype = sample.rows.shape[:2], sample.rows.dtype
    return {
        name: (bench.randn(*shape, wide, dtype=dtype), bench.randn(*shape, out, dtype=dtype))
        for name, (out, wide) in widths.items()
    }


def native_step(sample: Sample) -> dict[str, Any]:
    """The plain block in the same precision."""
    case, weights = sample.case, sample.weights
    block = ABlock(
        weights["out.weight"].shape[0], weights["mlp.fc2_weight"].shape[1], HEADS, case.width, case.groups,
        activation=case.activation, eps=sample.eps, dtype=sample.rows.dtype, device=sample.rows.device,
    )  # fmt: skip
    block.load_state_dict(weights)
    rows = sample.rows.detach().clone().requires_grad_()
    out = block(rows, rope=sample.rope, **sample.options)
    out.backward(sample.gradient)
    return {"out": out, "rows": rows.grad, **{name: weight.grad for name, weight in block.named_parameters()}}


def emulated_step(sample: Sample, recipe: Any) -> dict[str, Any]:
    """The plain block with the operands of its four linear layers rounded as the recipe rounds them."""
    case, width = sample.case, sample.case.width
    rows = sample.rows.detach().clone().requires_grad_()
    weights = {name: weight.detach().clone().requires_grad_() for name, weight in sample.weights.items()}
    normed = rms_norm(rows, weights["qkv.layer_norm_weight"], eps=sample.eps)
    mixed = emulated_linear(normed, weights["qkv.weight"], recipe)
    parts = mixed.split([HEADS * width, case.groups * width, case.groups * width], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts)
    if sample.rope is not None:
        query, key = apply_rope(query, *sample.rope), apply_rope(key, *sample.rope)
    attended = attention(query, key, value).transpose(1, 2).flatten(2)
    stream = rows + emulated_linear(attended, weights["out.weight"], recipe)
    normed = rms_norm(stream, weights["mlp.layer_norm_weight"], eps=sample.eps)
    up = emulated_linear(normed, weights["mlp.fc1_weight"], recipe)
    acted = gated_activation(up, case.activation) if is_gated(case.activation) else activation(up, case.activation)
    out = stream + emulated_linear(acted, weights["mlp.fc2_weight"], recipe)
    out.backward(sample.gradient)
    return {"out": out, "rows": rows.grad, **{name: weight.grad for name, weight in weights.items()}}
