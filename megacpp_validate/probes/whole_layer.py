"""The attention layer of the spec as one: what the bridge builds for kind A, in training mode, against fp64.

It stands on the attention of the vendor, which has a cell of its own: where that one is red, this is red after it.

What the layer spec leaves to plain PyTorch and no other probe computes, in fp64 on the CPU: no vendor is asked.

Each is held to its formula written out, forward and every gradient; and the same call twice gives the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from ..evidence.receipt import Check
from ..native.mamba import Mamba2Mixer, ssd_chunked, ssd_sequential
from ..native.mlp import NormMLP
from ..native.norms import LayerNorm, NormLinear, RMSNorm
from ..native.recurrent import MatrixRecurrentBlock
from ..native.router import TopKRouter
from .bench import Bench
from .bounds import Roundings
from .emulation import EMULATED, operand_roundings, steps_of
from .low_precision import low_precision_ran
from .native_block import HEADS, SMALL, Case, Sample, block_trial, check_layers_ran, new_weights, parted
from .references import layers
from .trial import Formula, Tried, layer_trial, try_again, try_case

EPS: Final = 3e-5
WIDTH: Final = 24
FFN: Final = 40
ROWS: Final = (2, 7, WIDTH)
LENGTH: Final = 40  # more than one chunk of the scans, and no multiple of one
CHUNK: Final = 32
# The reference is in fp64 as well, so that there are as many roundings in it. The longest chain, a scan, multiplies
# and adds once a step on both sides; norms, exponentials and quotients before and after it add a few dozen.
EXACT: Final = Roundings(
    (("fp64", 2 * (2 * LENGTH + 48)),), 512, sum_format="fp64", why="the operations of both sides, each in fp64"
)
LOSSES: Final[dict[str, Any]] = {"aux_coefficient": 0.5, "z_coefficient": 0.25}


def check_native_layers(bench: Bench) -> None:
    """All of them."""
    made = {"dtype": torch.float64}
    for name in (*layers.PLAIN, *layers.GATES, layers.CLAMPED):
        layer = NormMLP(WIDTH, FFN, activation=name, eps=EPS, normalization="LayerNorm", bias=True, **made)  # type: ignore[arg-type]
        _check(bench, f"mlp.{name}", _filled(bench, layer), partial(layers.mlp, activation=name, eps=EPS, norm="layer"))
    _check(
        bench,
        "layer-norm",
        _filled(bench, LayerNorm(WIDTH, eps=EPS, **made)),
        partial(layers.layer_norm, eps=EPS),
    )
    layer = NormLinear(WIDTH, FFN, eps=EPS, normalization="LayerNorm", bias=True, **made)
    _check(bench, "norm-linear", _filled(bench, layer), partial(layers.layer_norm_linear, eps=EPS))
    sizes: dict[str, Any] = {"state": 8, "head_dim": 4, "groups": 2}
    mixer = Mamba2Mixer(WIDTH, **sizes, eps=EPS, chunk=CHUNK, **made)
    calm_mixer(bench, mixer)
    _check(bench, "mixer", mixer, partial(layers.mamba_mixer, **sizes, eps=EPS), LENGTH)
    block = MatrixRecurrentBlock(WIDTH, num_heads=4, key_dim=8, value_dim=4, eps=EPS, chunk=CHUNK, **made)
    _check(
        bench,
        "recurrent",
        _filled(bench, block),
        partial(layers.recurrent_block, heads=4, key_dim=8, value_dim=4, eps=EPS),
        LENGTH,
    )
    _check_scans(bench)
    _check_router(bench)
    _check_autocast(bench)


def calm_mixer(bench: Bench, mixer: Any, dtype: Any = torch.float64) -> Any:
    """Fill a mixer whose scan counts: steps of about 0.2, decays around 0.9 a step; the mixer is given back.

    A scan multiplies four projections. Left alone, one channel is now and then so large that it rules the norm of its
    group, whose gradient is then a small difference of large numbers: so taps, steps and directions vary little.
    """
    own = {"a_log": (-0.3, 0.3), "dt_bias": (-1.5, 0.3), "skip": (1.0, 0.1), "conv_bias": (0.0, 0.5)}
    own |= {"conv_weight": (0.0, 0.25)}
    with torch.no_grad():
        for name, value in mixer.named_parameters():
            usual = (1.0, 0.2) if value.dim() == 1 else (0.0, value.shape[-1] ** -0.5)
            mean, deviation = own.get(name, usual)
            value.copy_(mean + bench.randn(*value.shape, dtype=dtype, scale=deviation))
        mixer.in_projection.weight[-mixer.heads :] *= 0.3
        mixer.conv_bias[mixer.inner :] += 1.0
    return mixer


def _filled(bench: Bench, layer: Any) -> Any:
    """Every parameter away from where it starts: biases too, and products so large that clamps are reached."""
    with torch.no_grad():
        for value in layer.parameters():
            moved = bench.randn(*value.shape, dtype=torch.float64)
            value.add_(moved * (0.3 if value.dim() == 1 else value.shape[-1] ** -0.5))
            if value.shape[0] in (FFN, 2 * FFN) and value.dim() == 2:
                value.mul_(6.0)
    return layer


def _check(bench: Bench, name: str, layer: Any, formula: Formula, length: int = ROWS[1]) -> None:
    """One layer: forward and every gradient."""
    rows = (bench.randn(ROWS[0], length, WIDTH, dtype=torch.float64) + 0.5).requires_grad_()
    with torch.no_grad():
        shape = layer(rows).shape
    more = {"formula": formula, "roundings": lambda _: EXACT, "spread": layers.EXPANDED, "checks_dtype": False}
    try_again(bench, layer_trial(name, layer, rows, None, gradient=bench.randn(*shape, dtype=torch.float64), **more))


def _check_scans(bench: Bench) -> None:
    """The scans of Mamba-2 from a state that is not zero, and the state that they end in."""
    batch, heads, groups, width, size = 2, 4, 2, 3, 5
    randn = partial(bench.randn, dtype=torch.float64)
    x, state = randn(batch, LENGTH, heads, width), randn(batch, heads, width, size)
    dt, a = randn(batch, LENGTH, heads).abs() * 0.1, -randn(heads).abs() - 0.1
    b, c = randn(batch, LENGTH, groups, size), randn(batch, LENGTH, groups, size)
    leaves = [tensor.requires_grad_() for tensor in (x, dt, a, b, c, state)]
    of_y, of_state = randn(batch, LENGTH, heads, width), randn(batch, heads, width, size)
    wanted = layers.scan(*leaves)
    wanted_grads = torch.autograd.grad(wanted, leaves, (of_y, of_state))
    for name, scan in (("chunked", partial(ssd_chunked, chunk=CHUNK)), ("sequential", ssd_sequential)):
        seen = scan(*leaves[:5], initial_state=state)
        grads = torch.autograd.grad(seen, leaves, (of_y, of_state))
        with bench.scope(f"scan.{name}"):
            bench.compare("forward", seen[0], wanted[0], roundings=EXACT)
            bench.compare("state", seen[1], wanted[1], roundings=EXACT)
            for key, value, right in zip(("x", "dt", "a", "b", "c", "state"), grads, wanted_grads, strict=True):
                bench.compare(f"grad.{key}", value, right, roundings=EXACT)


def _check_router(bench: Bench) -> None:
    """Probabilities, both losses, and the gradients of all three together."""
    router = TopKRouter(WIDTH, 6, 2, **LOSSES, dtype=torch.float64)
    with torch.no_grad():
        router.weight.copy_(bench.randn(6, WIDTH, dtype=torch.float64, scale=WIDTH**-0.5))
    tokens = bench.randn(11, WIDTH, dtype=torch.float64, grad=True)
    upstream = bench.randn(11, 6, dtype=torch.float64)
    seen = router(tokens)
    probs, balance, z = layers.router(tokens, router.weight, 2)
    wanted = {"probs": probs, "aux": LOSSES["aux_coefficient"] * balance, "z": LOSSES["z_coefficient"] * z}
    found = {"probs": seen.probs, "aux": seen.aux_loss, "z": seen.z_loss}
    with bench.scope("router"):
        for name, value in wanted.items():
            bench.compare(name, found[name], value, roundings=EXACT)
            given = upstream if name == "probs" else torch.ones_like(value)
            leaves = (tokens, router.weight)
            grads = torch.autograd.grad(found[name], leaves, given, retain_graph=True)
            right = torch.autograd.grad(value, leaves, given, retain_graph=True)
            for leaf, own, other in zip(("tokens", "weight"), grads, right, strict=True):
                bench.compare(f"{name}.grad.{leaf}", own, other, roundings=EXACT)


def _check_autocast(bench: Bench) -> None:
    """Norms take their statistics in fp32 at least, in an autocast region too."""
    rows = bench.randn(*ROWS)
    norms: dict[str, Any] = {"rms": RMSNorm(WIDTH, eps=EPS), "layer": LayerNorm(WIDTH, eps=EPS)}
    for name, norm in norms.items():
        outside = norm(rows)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = norm(rows)
        same = inside.dtype == outside.dtype and torch.equal(inside, outside)
        bench.check(f"autocast.{name}", same, f"{inside.dtype} inside, {outside.dtype} outside, the same bits")


DTYPES: Final[dict[str, Any]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
GROUPS: Final = 2
DEFAULT_EPS: Final = 1e-5  # the bridge leaves it at the default that both paths have
ACTIVATION: Final = "swiglu"
LAYERS: Final = ("TransformerLayer", "LayerNormLinear", "DotProductAttention", "Linear", "LayerNormMLP")
# Name in the native block -> in Transformer Engine's layer.
NAMES: Final = {
    "qkv.layer_norm_weight": "self_attention.layernorm_qkv.layer_norm_weight",
    "qkv.weight": "self_attention.layernorm_qkv.weight",
    "out.weight": "self_attention.proj.weight",
    "mlp.layer_norm_weight": "layernorm_mlp.layer_norm_weight",
    "mlp.fc1_weight": "layernorm_mlp.fc1_weight",
    "mlp.fc2_weight": "layernorm_mlp.fc2_weight",
}


PLAIN: Final = Case("gqa4", ACTIVATION, GROUPS)
SMALL_ROWS: Final = Case("gqa4.small", ACTIVATION, GROUPS, extra=5, small=True)


def check_whole_layer(bench: Bench, spec: Any) -> None:
    """Forward and every gradient, in every precision."""
    for name in DTYPES:
        cases = (PLAIN, SMALL_ROWS) if not bench.quick else (SMALL_ROWS if name == "fp32" else PLAIN,)
        for case in cases:
            sample, path = _new_sample(bench, case, DTYPES[name]), f"{name}.whole.{case.name}"
            # In training mode: what drops anything out gives other values each time. Backward passes may sum in any
            # order.
            tried = _try(bench, spec, sample, path, steps=2, repeated=True)
            if tried is not None and bench.wants_te:
                check_layers_ran(bench, path, tried.seen["forward"], LAYERS)
    recipes = [recipe for recipe in bench.recipes if recipe in EMULATED] if bench.wants_te else []
    for recipe in recipes[:1] if bench.quick else recipes:  # the probe tells of any other
        # With larger branches, what each adds to the other's errors would widen FP8 bounds beyond use.
        sample, path = _new_sample(bench, PLAIN, torch.bfloat16, branches=0.5), f"{recipe}.whole.{PLAIN.name}"
        more = {"recipe": recipe, "enter": bench.low_precision(recipe), "steps": steps_of(recipe)}
        tried = _try(bench, spec, sample, path, **more)
        if tried is not None:
            bench.checks.append(_low_precision_ran(f"{path}.grad.applied", tried, recipe, sample))


def _try(bench: Bench, spec: Any, sample: Sample, path: str, **more: Any) -> Tried | None:
    """One case; None where the layer has other parameters: a check has failed, and there is nothing to compare."""
    layer, choice = _new_layer(bench, spec, sample, path)
    if layer is None:
        return None
    leaves = {"rows": sample.rows, **dict(layer.named_parameters())}
    call, named = partial(layer, sample.rows), partial(_named, sample)
    trial = block_trial(path, sample, call, leaves, lambda: choice, named=named, shown=_shown, **more)
    return try_case(bench, trial)


def _low_precision_ran(name: str, tried: Tried, recipe: Any, sample: Sample) -> Check:
    """That each of the four products did: a gradient that is too accurate was made of operands as they were."""
    last, parts = operand_roundings(recipe, "wgrad", len(sample.rows.flatten(0, 1))), []
    for weight in ("qkv.weight", "out.weight", "mlp.fc1_weight", "mlp.fc2_weight"):
        own = [part for part in tried.wanted if part.removeprefix("grad.").startswith(weight)]
        found, exact = ([one[part] for part in own] for one in (tried.seen, tried.wanted))
        error = 0.0
        if all(grad is not None for grad in found):
            wanted = torch.cat(exact)
            error = float((torch.cat(found).double() - wanted).norm() / wanted.norm())
        parts.append(low_precision_ran(error, last, f"{NAMES[weight]}, of its last product alone"))
    return Check(name, all(part.passed for part in parts), tuple(parts))


# --- tensors ----------------------------------------------------------------------------------------------


def _new_sample(bench: Bench, case: Case, dtype: Any, *, branches: float = 2.0) -> Sample:
    batch, length, hidden, ffn = (2, 128, 512, 1024) if bench.device == "cuda" else (1, 24, 64, 96)
    length, width, size = length + case.extra, hidden // HEADS, SMALL if case.small else 1.0
    case = replace(case, width=width)
    weights = new_weights(bench, case, hidden, ffn, branches, size)
    return Sample(
        case,
        bench.randn(batch, length, hidden, dtype=dtype, grad=True, scale=size),
        {name: weight.to(dtype) for name, weight in weights.items()},
        bench.randn(batch, length, hidden, dtype=dtype),
        rope=None,
        eps=DEFAULT_EPS,
    )


def _new_layer(bench: Bench, spec: Any, sample: Sample, path: str) -> tuple[Any, Any]:
    """The layer as the bridge builds it, with the weights of a sample, and what was chosen.

    It is None where it has other parameters: a check has failed, and there is nothing to compare.
    """
    hidden, ffn = sample.weights["mlp.fc2_weight"].shape
    choice = spec.kind_spec("A", device=bench.device).choice
    made = {"dtype": sample.rows.dtype, "device": bench.device}
    if bench.wants_te:
        layer = spec.te_attention_layer(
            hidden=hidden, ffn_hidden=ffn, num_heads=HEADS, num_gqa_groups=GROUPS, layer_number=1, **made
        )
    else:
        layer = spec.native_layer_spec()["A"](hidden, ffn, HEADS, hidden // HEADS, GROUPS, **made)
    own, order = dict(layer.named_parameters()), _interleaved(sample)
    wanted = {NAMES[name] if bench.wants_te else name: tuple(value.shape) for name, value in sample.weights.items()}
    found = {name: tuple(parameter.shape) for name, parameter in own.items()}
    bench.check(f"{path}.parameters", found == wanted, str(found))
    if found != wanted:
        return None, choice
    with torch.no_grad():
        for name, weight in sample.weights.items():
            moved = weight[order] if bench.wants_te and name == "qkv.weight" else weight
            own[NAMES[name] if bench.wants_te else name].copy_(moved)
    return layer.train(), choice


def _interleaved(sample: Sample) -> Any:
    """For each row of the layer's QKV weight its row in the native one.

    The layer's rows lie by group: the queries of a group, its key, its value (Megatron-LM's order, which Transformer
    Engine takes where `qkv_weight_interleaved` is left on); the native ones are all queries, all keys, all values.
    """
    width, share = sample.sizes.width, HEADS // GROUPS
    heads: list[int] = []
    for group in range(GROUPS):
        heads += [*range(group * share, (group + 1) * share), HEADS + group, HEADS + GROUPS + group]
    first = torch.tensor(heads, device=sample.rows.device)[:, None] * width
    return (first + torch.arange(width, device=sample.rows.device)).flatten()


# --- names ------------------------------------------------------------------------------------------------


def _named(sample: Sample, seen: dict[str, Any]) -> dict[str, Any]:
    """A pass by native names."""
    if f"grad.{NAMES['qkv.weight']}" not in seen:
        return parted(seen, sample)
    found = {"forward": seen["forward"], "grad.rows": seen["grad.rows"]}
    found |= {f"grad.{name}": seen[f"grad.{own}"] for name, own in NAMES.items()}
    if (joint := found["grad.qkv.weight"]) is not None:
        found["grad.qkv.weight"] = torch.empty_like(joint)
        found["grad.qkv.weight"][_interleaved(sample)] = joint
    return parted(found, sample)


def _shown(name: str) -> str:
    """As Transformer Engine's layer has it: a part of it is none of what stands under "mlp" in this cell."""
    own = name.removeprefix("grad.")
    head, part = ("qkv.weight", own.removeprefix("qkv.weight")) if own.startswith("qkv.weight.") else (own, "")
    return f"grad.{NAMES[head]}{part}" if head in NAMES else name
