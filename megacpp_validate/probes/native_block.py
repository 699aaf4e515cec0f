"""The A-block wrapper: parity with fp64, forward and every gradient; what it refuses.

The tensors of an A-block, and what the wrapper, plain torch and an emulated FP8 make of them.

A pass of an A-block beside its fp64 reference: output and every gradient, and which layers ran.

The attention layer of the spec as one: what the bridge builds for kind A, in training mode, against fp64.

It stands on the attention of the vendor, which has a cell of its own: where that one is red, this is red after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch.func import functional_call

from ..native.attention import rope_tables
from ..native.block import ABlock
from ..native.mlp import is_gated
from .attention import HEADS, options_of
from .bench import DTYPES, Bench
from .bounds import Roundings, low_precision_ran, relative_error
from .emulation import EMULATED, block_roundings, operand_roundings, precision_of
from .low_precision import check_kept_weights, check_layers_in_low_precision, watching_layers
from .observe import graph_nodes
from .references import block_step, visible
from .trial import Case, Formula, Tensors, Trial, Tried, try_case

EPS: Final = 3e-5  # not the default of any layer: one that ignores what it is given shows
PARTS: Final = ("query", "key", "value")
SMALL: Final = 2.0**-8  # rows of this size have a mean square of about eps


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


def new_sample(
    bench: Bench, case: Case, dtype: Any, *, branches: float = 2.0, turned: bool = True, eps: float = EPS
) -> Sample:
    """Inputs and weights; with `branches` of 2 each branch is about as large as the stream that it is added to."""
    batch, base, hidden, ffn = (2, 128, 512, 1024) if bench.device == "cuda" else (1 + turned, 24, 64, 96)
    length, size = case.length or base + case.extra, SMALL if case.small else 1.0
    case = case if turned else replace(case, width=hidden // HEADS)

    def rows() -> Any:
        if case.strided:
            return bench.randn(batch, length, 2 * hidden, dtype=dtype)[..., ::2].detach().requires_grad_()
        return bench.randn(batch, length, hidden, dtype=dtype, scale=size).detach().requires_grad_()

    first = rows() if turned else None
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
    options = options_of(bench, case, batch, length)
    return Sample(
        case,
        rows() if first is None else first,
        {name: weight.to(dtype) for name, weight in weights.items()},
        bench.randn(batch, length, hidden, dtype=dtype),
        rope_tables(length, case.width, device=bench.device) if turned else None,
        options,
        eps,
    )


def new_layer(bench: Bench, bridge: Any, sample: Sample) -> Any:
    """The wrapper with the weights of a sample."""
    weights, case = sample.weights, sample.case
    hidden, ffn = weights["mlp.fc2_weight"].shape
    sizes = {"hidden": hidden, "ffn_hidden": ffn, "num_heads": HEADS, "head_dim": case.width}
    made = {"activation": case.activation, "eps": EPS, "dtype": sample.rows.dtype, "device": bench.device}
    layer = bridge.NativeBlock(**sizes, num_gqa_groups=case.groups, **made)
    layer.load_native_state_dict(weights)
    return layer


def native_formula(sample: Sample) -> Formula:
    """The plain block, of parted operands."""
    case, (hidden, ffn) = sample.case, sample.weights["mlp.fc2_weight"].shape
    made = {"activation": case.activation, "eps": sample.eps, "dtype": sample.rows.dtype, "device": sample.rows.device}
    block = ABlock(hidden, ffn, HEADS, case.width, case.groups, **made)

    def formula(given: Tensors) -> Any:
        joint = _joined(given)
        return functional_call(block, joint, (joint.pop("rows"),), {"rope": sample.rope, **sample.options})

    return formula


def block_trial(
    path: str, sample: Sample, call: Callable[[], Any], parameters: Tensors, choice: Callable[[], Any], *,
    recipe: Any = None, **more: Any,
) -> Trial:  # fmt: skip
    """A pass of an A-block beside its fp64 reference.

    Args:
        path: of the checks.
        sample: that the pass is of.
        call: the block under test.
        parameters: of the block, by native names.
        choice: of the block.
        recipe: that its products are rounded by.
        more: of the trial.
    """
    case, (batch, length, hidden) = sample.case, sample.rows.shape
    seen = visible(batch, HEADS, length, device=sample.rows.device, **sample.options)
    wanted, shares = block_step(
        sample.rows, sample.weights, sample.gradient, seen, sample.rope, activation=case.activation,
        eps=sample.eps, heads=HEADS, groups=case.groups, width=case.width,
    )  # fmt: skip
    ffn, joint = sample.weights["mlp.fc2_weight"].shape[1], HEADS * case.width
    smallest = batch * length * min(hidden, ffn, case.groups * case.width)
    # What the rounded output moves in the scores' gradients is one number a query and head, <dO, O>.
    independent = {"qkv.weight.query": batch * length * HEADS, "qkv.weight.key": batch * length * HEADS}
    exact = parted(wanted, sample)
    # The weight of a single key is 1, so its score has no gradient: what is left is small beside that of the values.
    alone = {f"grad.{name}": float(exact["grad.qkv.weight.value"].norm()) for name in independent if length == 1}
    stored = "fp32" if sample.rows.dtype == torch.float32 else "bf16"

    def roundings(tensor: str) -> Roundings:
        name, by_te = tensor.removeprefix("grad."), choice().observed == "te"
        return block_roundings(
            name,
            shares,
            precision_of(stored, tf32=by_te and sample.rows.is_cuda, recipe=recipe),
            max(joint, batch * length, hidden, ffn),
            gated=is_gated(case.activation),
            independent=independent.get(name, smallest),
        )

    native = native_formula(sample)
    more = {"named": partial(parted, sample=sample), "recipe": recipe, "gradient": sample.gradient, **more}
    return Trial(
        path, call, {"rows": sample.rows, **parameters}, choice, native, roundings, native, exact=exact, scales=alone,
        operands=parted({"rows": sample.rows, **sample.weights}, sample), **more,
    )  # fmt: skip


def parted(tensors: Tensors, sample: Sample) -> dict[str, Any]:
    """The joint QKV weight, or its gradient, in its three parts, each held to its own norm."""
    width, groups, found = sample.case.width, sample.case.groups, dict[str, Any]()
    for name, tensor in tensors.items():
        if name.removeprefix("grad.") != "qkv.weight":
            found[name] = tensor
            continue
        sizes = [HEADS * width, groups * width, groups * width]
        parts = (None,) * 3 if tensor is None else tensor.detach().split(sizes)
        found |= dict(zip((f"{name}.{part}" for part in PARTS), parts, strict=True))
    return found


def _joined(given: Tensors) -> dict[str, Any]:
    """The other way round."""
    rest = {name: tensor for name, tensor in given.items() if not name.startswith("qkv.weight.")}
    return {**rest, "qkv.weight": torch.cat([given[f"qkv.weight.{part}"] for part in PARTS])}


def check_layers_ran(bench: Bench, path: str, out: Any, layers: Sequence[str]) -> None:
    """Every one of the layers is Transformer Engine's: one that is not hides behind the others."""
    ran = {name.rpartition(".")[2] for name in graph_nodes(out) if name.startswith("transformer_engine.")}
    missing = [name for name in layers if name not in ran]
    bench.check(f"{path}.layers", not missing, f"not seen: {', '.join(missing)}" if missing else ", ".join(layers))


GATED: Final = Case("gqa4.d64.swiglu")
PLAIN: Final = Case("gqa1.d64.gelu", groups=8, activation="gelu", quick=True)
ODD: Final = Case("gqa4.d64.odd", extra=5, activation="geglu", quick=True)
LAYERS: Final = ("LayerNormLinear", "DotProductAttention", "Linear", "LayerNormMLP")
CASES: Final = (
    GATED,
    PLAIN,
    Case("gqa8.d128.swiglu", groups=1, width=128),
    ODD,
    Case("gqa4.d64.one-token", length=1, code="one-token"),
    Case("gqa4.d64.strided", strided=True, activation="srelu"),
    Case("gqa4.d64.small", small=True, quick=True),
)
REFUSED: Final = (
    Case("gqa4.d64.packed", options=("doc_ids",), code="packed-documents"),
    Case("gqa4.d64.window", options=("window",), code="local-window"),
)


def probe(bench: Bench) -> None:
    """Run it."""
    bridge = bench.bridge()
    for dtype in DTYPES:
        for case in CASES:
            if case.quick or not bench.quick:
                _run(bench, bridge, case, dtype)
    for case in REFUSED:
        _run(bench, bridge, case, "bf16")
    recipes = bench.judged_recipes("fp8.")
    for recipe in recipes:
        _run_recipe(bench, bridge, recipe)
    for recipe in recipes:
        _check_kept(bench, bridge, recipe)


def layer_trial(path: str, layer: Any, sample: Sample, **more: Any) -> Trial:
    """A pass of the wrapper."""
    own = {f"qkv.{part}_weight": f"qkv.weight.{part}" for part in PARTS}  # of Transformer Engine's layer
    parameters = {own.get(name, name): value for name, value in (layer.native or layer.te).named_parameters()}
    call = partial(layer, sample.rows, rope=sample.rope, **sample.options)
    return block_trial(path, sample, call, parameters, lambda: layer.choice, **more)


def _run(bench: Bench, bridge: Any, case: Case, dtype: str) -> None:
    """One case in one dtype, outside of FP8."""
    sample, path = new_sample(bench, case, DTYPES[dtype]), f"{dtype}.{case.name}"
    layer = new_layer(bench, bridge, sample)
    trial = layer_trial(path, layer, sample, code=case.code, ran_as=f"native_block.{path}")
    out = try_case(bench, trial).seen["forward"]
    if bench.wants_te and not case.code:
        check_layers_ran(bench, path, out, LAYERS)
    if case is PLAIN and dtype == "bf16":
        bench.layer_keeps_nothing(dtype, layer, sample.rows, rope=sample.rope, draws=True)


def _run_recipe(bench: Bench, bridge: Any, recipe: Any) -> None:
    """A gated and a plain block under one FP8 recipe, and one that it does not take."""
    enter = bench.low_precision(recipe)
    for case in (GATED,) if bench.quick else (GATED, PLAIN):
        # With branches as large as elsewhere, what each adds to the other's errors would widen FP8 bounds beyond use.
        sample, path = new_sample(bench, case, torch.bfloat16, branches=0.5), f"fp8.{recipe}.{case.name}"
        layer = new_layer(bench, bridge, sample)
        trial = layer_trial(path, layer, sample, recipe=recipe, ran_as=f"native_block.{path}")
        with watching_layers(_low_layers(layer)) as watched:
            try_case(bench, trial)
        check_layers_in_low_precision(bench, path, recipe, watched)
        if case is GATED:
            bench.layer_keeps_nothing(f"fp8.{recipe}", layer, sample.rows, enter=enter, rope=sample.rope, draws=True)
    sample, path = new_sample(bench, ODD, torch.bfloat16), f"fp8.{recipe}.{ODD.name}"
    trial = layer_trial(path, new_layer(bench, bridge, sample), sample, enter=enter, ran_as=f"native_block.{path}")
    try_case(bench, replace(trial, code="fp8-alignment"))


def _low_layers(layer: Any) -> dict[str, Any]:
    """The layers of the block that compute in low precision; none where it is made of plain ones."""
    return {} if layer.te is None else {name: getattr(layer.te, name) for name in ("qkv", "out", "mlp")}


def _check_kept(bench: Bench, bridge: Any, recipe: Any) -> None:
    """Each layer of the block takes the weights of this step, in FP8, and no others."""
    sample = new_sample(bench, GATED, torch.bfloat16)
    layers, weights = [_low_layers(new_layer(bench, bridge, sample)) for _ in range(2)], sample.weights
    widths = {"qkv": weights["qkv.weight"].shape, "out": weights["out.weight"].shape}
    widths["mlp"] = 2 * weights["mlp.fc2_weight"].shape[:1]
    for name, (out, wide) in widths.items():
        rows, gradient = (bench.randn(*sample.rows.shape[:2], size, dtype=torch.bfloat16) for size in (wide, out))
        if name in layers[0]:
            pair, path = (layers[0][name], layers[1][name]), f"fp8.{recipe}.{name}"
            check_kept_weights(bench, path, pair, rows, gradient, bench.low_precision(recipe))


# --- the attention layer of the spec as one ---------------------------------------------------------------------------

GROUPS: Final = 2
DEFAULT_EPS: Final = 1e-5  # the bridge leaves it at the default that both paths have
WHOLE_LAYERS: Final = ("TransformerLayer", "LayerNormLinear", "DotProductAttention", "Linear", "LayerNormMLP")
# Name in the native block -> in Transformer Engine's layer.
NAMES: Final = {
    "qkv.layer_norm_weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "qkv.weight": "self_attention.layernorm_qkv.weight",
    "out.weight": "self_attention.proj.weight",
    "mlp.layer_norm_weight": "layernorm_mlp.layer_norm_weight",
    "mlp.fc1_weight": "layernorm_mlp.fc1_weight",
    "mlp.fc2_weight": "layernorm_mlp.fc2_weight",
}


WHOLE: Final = Case("gqa4")
WHOLE_SMALL: Final = Case("gqa4.small", extra=5, small=True)


def check_whole_layer(bench: Bench, spec: Any) -> None:
    """Forward and every gradient, in every precision."""
    new = partial(new_sample, bench, turned=False, eps=DEFAULT_EPS)
    for name in DTYPES:
        cases = (WHOLE, WHOLE_SMALL) if not bench.quick else (WHOLE_SMALL if name == "fp32" else WHOLE,)
        for case in cases:
            sample, path = new(case, DTYPES[name]), f"{name}.whole.{case.name}"
            # In training mode: what drops anything out gives other values each time. Backward passes may sum in any
            # order.
            tried = _try_whole(bench, spec, sample, path, steps=2, repeated=True)
            if tried is not None and bench.wants_te:
                check_layers_ran(bench, path, tried.seen["forward"], WHOLE_LAYERS)
    recipes = [recipe for recipe in bench.recipes if recipe in EMULATED] if bench.wants_te else []
    for recipe in recipes[:1] if bench.quick else recipes:  # the probe tells of any other
        # With larger branches, what each adds to the other's errors would widen FP8 bounds beyond use.
        sample, path = new(WHOLE, torch.bfloat16, branches=0.5), f"{recipe}.whole.{WHOLE.name}"
        tried = _try_whole(bench, spec, sample, path, recipe=recipe)
        if tried is not None:
            _check_low_precision(bench, f"{path}.grad.applied", tried, recipe, sample)


def _try_whole(bench: Bench, spec: Any, sample: Sample, path: str, **more: Any) -> Tried | None:
    """The layer as the bridge builds it, with the weights of a sample.

    None where it has other parameters: a check has failed, and there is nothing to compare.
    """
    hidden, ffn = sample.weights["mlp.fc2_weight"].shape
    made = {"dtype": sample.rows.dtype, "device": bench.device}
    choice = spec.kind_spec("A", device=bench.device).choice
    if bench.wants_te:
        sizes = {"hidden": hidden, "ffn_hidden": ffn, "num_heads": HEADS, "num_gqa_groups": GROUPS}
        layer, names, order = spec.te_attention_layer(**sizes, layer_number=1, **made), NAMES, _interleaved(sample)
    else:
        layer = spec.native_layer_spec()["A"](hidden, ffn, HEADS, hidden // HEADS, GROUPS, **made)
        names, order = dict(zip(NAMES, NAMES, strict=True)), slice(None)
    own = dict(layer.named_parameters())
    wanted = {names[name]: (tuple(value.shape), value.dtype) for name, value in sample.weights.items()}
    found = {name: (tuple(parameter.shape), parameter.dtype) for name, parameter in own.items()}
    bench.check(f"{path}.parameters", found == wanted, str(found))
    if found != wanted:
        return None
    parameters = {name: own[names[name]] for name in sample.weights}
    with torch.no_grad():
        for name, weight in sample.weights.items():
            parameters[name].copy_(weight[order] if name == "qkv.weight" else weight)

    def named(seen: dict[str, Any]) -> dict[str, Any]:
        joint = seen["grad.qkv.weight"]
        if joint is not None:
            seen["grad.qkv.weight"] = torch.empty_like(joint)
            seen["grad.qkv.weight"][order] = joint
        return parted(seen, sample)

    call, shown = partial(layer.train(), sample.rows), _shown_by_te
    trial = block_trial(path, sample, call, parameters, lambda: choice, named=named, shown=shown, **more)
    tried = try_case(bench, trial)
    if path == f"bf16.whole.{WHOLE.name}":
        bench.layer_keeps_nothing(path, layer, sample.rows, draws=True)
    return tried


def _check_low_precision(bench: Bench, name: str, tried: Tried, recipe: Any, sample: Sample) -> None:
    """That each of the four products did: a gradient that is too accurate was made of operands as they were."""
    last, parts = operand_roundings(recipe, "wgrad", len(sample.rows.flatten(0, 1))), []
    for weight in ("qkv.weight", "out.weight", "mlp.fc1_weight", "mlp.fc2_weight"):
        own = [part for part in tried.wanted if part.removeprefix("grad.").startswith(weight)]
        found = [tried.seen[part] for part in own]
        error = 0.0
        if all(grad is not None for grad in found):
            error = relative_error(torch.cat(found), torch.cat([tried.wanted[part] for part in own]))
        parts.append(low_precision_ran(error, last, f"{NAMES[weight]}, of its last product alone"))
    bench.check_parts(name, *parts)


def _interleaved(sample: Sample) -> Any:
    """For each row of the layer's QKV weight its row in the native one.

    The layer's rows lie by group: the queries of a group, its key, its value (Megatron-LM's order, which Transformer
    Engine takes where `qkv_weight_interleaved` is left on); the native ones are all queries, all keys, all values.
    """
    width, share = sample.case.width, HEADS // GROUPS
    heads: list[int] = []
    for group in range(GROUPS):
        heads += [*range(group * share, (group + 1) * share), HEADS + group, HEADS + GROUPS + group]
    first = torch.tensor(heads, device=sample.rows.device)[:, None] * width
    return (first + torch.arange(width, device=sample.rows.device)).flatten()


def _shown_by_te(name: str) -> str:
    """As Transformer Engine's layer has it: a part of it is none of what stands under "mlp" in this cell."""
    head = next((one for one in NAMES if name.startswith(f"grad.{one}")), "")
    return name.replace(head, NAMES[head]) if head else name
