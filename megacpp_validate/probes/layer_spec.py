"""The layer spec: what is built for each kind, and the numbers of each layer that is built from it.

The layer of kind A comes last: where its attention cannot run, which has a cell of its own, all others were judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from ..native.mamba import Mamba2Mixer
from ..native.mlp import NormMLP
from ..native.norms import NormLinear, RMSNorm, rms_norm
from .bench import Bench
from .emulation import EMULATED, emulated_linear, emulated_mlp
from .references import layers as reference
from .references import roundings as counted
from .references.experts import expert_bank
from .references.layers import Tensors
from .trial import formula_of, layer_trial, try_case
from .whole_layer import check_native_layers, check_whole_layer

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
BY_TE: Final = ("A", "M", "E", "MLP", "norm")
FEATURES: Final = {"A": "native_block", "M": "mamba_in_projection", "E": "expert_gemm", "MLP": "mlp", "norm": "norm"}
EPS: Final = 3e-5  # not the default of any layer: one that ignores what it is given shows
SMALL: Final = 4e-3  # size of rows whose mean square is about EPS: another eps shows in them


@dataclass(frozen=True)
class _Sizes:
    """Widths of the layers, and an odd number of rows."""

    hidden: int = 64
    ffn: int = 96
    state: int = 16
    head_dim: int = 4
    key_dim: int = 16
    length: int = 19
    batch: int = 16

    @property
    def mixer(self) -> dict[str, Any]:
        """Of the Mamba mixer; the width of its in-projection is a multiple of 32."""
        return {"state": self.state, "head_dim": self.head_dim, "groups": 2}

    @property
    def recurrent(self) -> dict[str, Any]:
        """Of the recurrent block."""
        return {"num_heads": 8, "key_dim": self.key_dim, "value_dim": self.key_dim // 2}


def probe(bench: Bench) -> None:
    """The tables and flags; then each layer in every precision."""
    spec = bench.bridge()
    with bench.scope("spec"):
        _check_tables(bench, spec)
        _check_flags(bench, spec)
    with bench.scope("refuses"):
        _check_refusals(bench, spec)
    sizes = _Sizes() if bench.device == "cpu" or bench.quick else _Sizes(256, 512, 32, 16, 32, 131)
    with bench.scope("A"):
        _check_attention_layer(bench, spec, sizes)
    with bench.scope("checkpoints"):
        _check_names(bench, spec, sizes)
    for name in DTYPES:
        _check_norm(bench, spec, sizes, name)
        _check_mlp(bench, spec, sizes, name)
        _check_in_projection(bench, spec, sizes, name)
        _check_experts(bench, spec, sizes, name)
        if not bench.quick or name == "bf16":  # what of them is native differs by precision in nothing else
            _check_mixer(bench, spec, sizes, name)
            _check_recurrent(bench, spec, sizes, name)
    if bench.device == "cpu":
        with bench.scope("native"):
            check_native_layers(bench)
    for recipe in bench.recipes if bench.wants_te else ():
        _check_recipe(bench, spec, sizes, recipe)
    check_whole_layer(bench, spec)


# --- tables -----------------------------------------------------------------------------------------------------------


def _check_tables(bench: Bench, spec: Any) -> None:
    """Which class stands for each kind, and what was chosen."""
    table, native = spec.te_layer_spec(), spec.native_layer_spec()
    kinds = ["A", "M", "E", "R", "MLP", "norm", "head"]
    bench.check("kinds", list(table) == list(native) == kinds, ", ".join(table))
    chosen = spec.layer_spec(device=bench.device)
    for kind in kinds:
        found = table[kind]
        by_te = kind in BY_TE and bench.wants_te
        right = isinstance(found, type) and _is_te(found) if by_te else found is None
        bench.check(f"te.{kind}", right, str(found))
        entry = chosen.get(kind)
        if entry is None:
            bench.check(f"chosen.{kind}", False, "there is no such row")
            continue
        wanted = "te" if by_te else "native"
        reasons = "; ".join(refusal.reason for refusal in entry.choice.refusals)
        right = entry.choice.observed == wanted and entry.layer is (found if by_te else native[kind])
        bench.check(f"chosen.{kind}", right, f"{entry.layer.__qualname__} by {entry.choice.observed} {reasons}".strip())


def _check_flags(bench: Bench, spec: Any) -> None:
    """One flag turns one kind off and no other; presets."""
    read = bench.bridge("features").read_features
    whole = {kind for kind, found in spec.te_layer_spec().items() if found is not None}
    for kind, feature in FEATURES.items():
        left = {other for other, found in spec.te_layer_spec(read(**{feature: False})).items() if found is not None}
        bench.check(f"flag.{feature}", left == whole - {kind}, f"by TE without it: {', '.join(sorted(left)) or 'none'}")
        entry = spec.kind_spec(kind, read(**{feature: False}), device=bench.device)
        right = entry.choice.observed == "native" and entry.layer is entry.native
        bench.check(f"flag.{feature}.native", right, f"{entry.layer.__qualname__} by {entry.choice.observed}")
    for preset, wanted in {"off": set(), "experts": {"E"}, "dense": whole - {"E"}}.items():
        left = {kind for kind, found in spec.te_layer_spec(read(preset)).items() if found is not None}
        bench.check(f"preset.{preset}", left == wanted & whole, f"by TE: {', '.join(sorted(left)) or 'none'}")


def _check_refusals(bench: Bench, spec: Any) -> None:
    """Bad input: an error of the project with the next step."""
    errors, made = bench.bridge("errors"), {"dtype": torch.float32, "device": bench.device}
    mixer = partial(spec.build_mamba_mixer, 64, state=16, **made)
    bench.refuses("kind", errors.UnknownName, lambda: spec.kind_spec("X", device=bench.device))
    bench.refuses("activation", errors.UnknownName, lambda: spec.build_mlp(64, 64, activation="tanh", **made))
    bench.refuses("recipe", errors.UnknownName, lambda: mixer(head_dim=8, recipe="fp6"))
    bench.refuses("head-size", errors.NotDivisible, lambda: mixer(head_dim=24))
    bench.refuses("groups", errors.NotDivisible, lambda: mixer(head_dim=32, groups=3))
    if bench.wants_te:
        double = {"dtype": torch.float64, "device": bench.device}
        bench.refuses("dtype", errors.WrongDtype, lambda: spec.build_norm(64, **double))
    unaligned = mixer(head_dim=32, recipe="delayed")  # 2 x 128 + 2 x 16 + 4 = 292
    code = "fp8-alignment" if bench.wants_te else None
    refusals = [refusal.code for refusal in unaligned.choice.refusals]
    right = unaligned.choice.observed == "native" and (code is None or refusals == [code])
    bench.check("alignment", right and type(unaligned.in_projection) is NormLinear, ", ".join(refusals))


def _check_attention_layer(bench: Bench, spec: Any, sizes: _Sizes) -> None:
    """Kind A is built: names, shapes and dtype of its parameters; `whole_layer` has its numbers."""
    heads, groups, width = 4, 2, sizes.hidden // 4
    made = {"dtype": torch.bfloat16, "device": bench.device}
    if bench.wants_te:
        layer = spec.te_attention_layer(
            hidden=sizes.hidden, ffn_hidden=sizes.ffn, num_heads=heads, num_gqa_groups=groups, layer_number=1, **made
        )
        names = "self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp"
    else:
        layer = spec.native_layer_spec()["A"](sizes.hidden, sizes.ffn, heads, width, groups, **made)
        names = "qkv", "out", "mlp"
    norm_and_qkv, out, mlp = names
    wanted = {
        f"{norm_and_qkv}.layer_norm_weight": (sizes.hidden,),
        f"{norm_and_qkv}.weight": ((heads + 2 * groups) * width, sizes.hidden),
        f"{out}.weight": (sizes.hidden, heads * width),
        f"{mlp}.layer_norm_weight": (sizes.hidden,),
        f"{mlp}.fc1_weight": (2 * sizes.ffn, sizes.hidden),
        f"{mlp}.fc2_weight": (sizes.hidden, sizes.ffn),
    }
    found = {name: tuple(value.shape) for name, value in layer.named_parameters()}
    bench.check("parameters", found == wanted, str(found))
    dtypes = {value.dtype for value in layer.parameters()}
    bench.check("dtype", dtypes == {torch.bfloat16}, str(dtypes))


def _check_names(bench: Bench, spec: Any, sizes: _Sizes) -> None:
    """Layers by TE read and write the checkpoints of native ones, and a mixer starts from the same values."""
    made = {"dtype": torch.float32, "device": bench.device}
    pairs: dict[str, tuple[Any, Any]] = {
        "norm": (spec.build_norm(sizes.hidden, **made), RMSNorm(sizes.hidden, **made)),
        "mlp": (spec.build_mlp(sizes.hidden, sizes.ffn, **made), NormMLP(sizes.hidden, sizes.ffn, **made)),
    }
    torch.manual_seed(bench.order.seed)
    mixer = spec.build_mamba_mixer(sizes.hidden, **sizes.mixer, **made)
    torch.manual_seed(bench.order.seed)
    native = Mamba2Mixer(sizes.hidden, **sizes.mixer, **made)
    pairs["mixer"] = mixer, native
    for name, (layer, plain) in pairs.items():
        same = set(layer.state_dict()) == set(plain.state_dict())
        wrong = layer.load_state_dict(plain.state_dict(), strict=False)
        read = not (wrong.missing_keys or wrong.unexpected_keys)
        bench.check(name, same and read, ", ".join(sorted(set(layer.state_dict()) ^ set(plain.state_dict()))))
    torch.manual_seed(bench.order.seed)
    again = spec.build_mamba_mixer(sizes.hidden, **sizes.mixer, **made).state_dict()
    equal = [name for name, value in native.state_dict().items() if torch.equal(again[name], value)]
    bench.check("mixer.first-values", len(equal) == len(native.state_dict()), f"equal: {', '.join(equal)}")


def _is_te(kind: type) -> bool:
    return kind.__module__.startswith("transformer_engine")


# --- numbers ----------------------------------------------------------------------------------------------------------


def _filled(bench: Bench, layer: Any, **own: tuple[float, float]) -> Any:
    """A layer with weights of its own for each seed, such that its outputs are of size 1.

    Args:
        layer: whose parameters to fill.
        own: mean and deviation of parameters that are neither weights of a norm nor of a product.
    """
    with torch.no_grad():
        for name, value in layer.named_parameters():
            last = name.rpartition(".")[2]
            if last in own:
                mean, deviation = own[last]
            else:
                mean, deviation = (1.0, 0.2) if value.dim() == 1 else (0.0, value.shape[-1] ** -0.5)
            value.copy_(mean + bench.randn(*value.shape, scale=deviation))
    return layer


def _rows(bench: Bench, *shape: int, dtype: Any, size: float = 1.0) -> Any:
    """Input of this size whose mean is not zero: a norm that takes it away shows."""
    return ((bench.randn(*shape) + 0.5) * size).to(dtype).requires_grad_(True)


def _try(bench: Bench, path: str, layer: Any, choice: Any, rows: Any, formula: Any, roundings: Any, native: Any = None,
         **more: Any) -> None:  # fmt: skip
    """One layer, forward and every gradient; a layer of each kind leaves nothing behind on the device."""
    spread = reference.EXPANDED
    trial = layer_trial(
        path, layer, rows, choice, formula=formula, roundings=roundings, native=native, spread=spread, **more
    )
    try_case(bench, trial)
    if rows.dtype is torch.bfloat16 and path.endswith((".norm.unit", ".in_projection", ".mlp.swiglu")):
        bench.layer_keeps_nothing(path, layer, rows, enter=trial.enter)


def _precision(bench: Bench, name: str, recipe: Any = None) -> counted.Precision:
    return counted.precision_of(name, tf32=bench.wants_te and bench.device == "cuda", recipe=recipe)


def _check_norm(bench: Bench, spec: Any, sizes: _Sizes, name: str) -> None:
    """RMSNorm, on rows of size 1 and on rows where eps counts."""
    dtype, precision = DTYPES[name], _precision(bench, name)
    for case, size in {"unit": 1.0, "small": SMALL}.items():
        layer = _filled(bench, spec.build_norm(sizes.hidden, eps=EPS, dtype=dtype, device=bench.device))
        rows = _rows(bench, sizes.batch, sizes.length, sizes.hidden, dtype=dtype, size=size)
        _try(
            bench,
            f"{name}.norm.{case}",
            layer,
            layer.choice,
            rows,
            lambda given: reference.rms_norm(given["input"], given["weight"], EPS),
            lambda tensor: counted.norm_roundings(tensor, precision, sizes.hidden),
            lambda given: rms_norm(given["input"], given["weight"], eps=EPS),
        )


def _check_mlp(bench: Bench, spec: Any, sizes: _Sizes, name: str) -> None:
    """Gated and plain, and rows where eps counts."""
    dtype, precision = DTYPES[name], _precision(bench, name)
    for case, gated, size in (("swiglu", True, 1.0), ("gelu", False, SMALL)):
        made = {"activation": case, "eps": EPS, "dtype": dtype, "device": bench.device}
        layer = _filled(bench, spec.build_mlp(sizes.hidden, sizes.ffn, **made))
        rows = _rows(bench, sizes.batch, sizes.length, sizes.hidden, dtype=dtype, size=size)
        _try(
            bench,
            f"{name}.mlp.{case}",
            layer,
            layer.choice,
            rows,
            partial(reference.mlp, activation=case, eps=EPS),
            partial(counted.mlp_roundings, precision=precision, length=sizes.ffn, gated=gated),
            formula_of(NormMLP(sizes.hidden, sizes.ffn, **made)),
        )


def _mixer(bench: Bench, spec: Any, sizes: _Sizes, dtype: Any, recipe: Any = None) -> Any:
    """A mixer whose scan counts: steps of about 0.2, decays around 0.9 a step."""
    made = {"eps": EPS, "chunk": 8 if sizes.length < 64 else 64, "dtype": dtype, "device": bench.device}
    mixer = spec.build_mamba_mixer(sizes.hidden, **sizes.mixer, recipe=recipe, **made)
    # A scan multiplies four projections. Left alone, one channel is now and then so large that it rules the norm of its
    # group, whose gradient is then a small difference of large numbers: so taps, steps and directions vary little.
    own = {"a_log": (-0.3, 0.3), "dt_bias": (-1.5, 0.3), "skip": (1.0, 0.1), "conv_bias": (0.0, 0.5)}
    _filled(bench, mixer, conv_weight=(0.0, 0.25), **own)
    with torch.no_grad():
        mixer.in_projection.weight[-mixer.heads :] *= 0.3
        mixer.conv_bias[mixer.inner :] += 1.0
    return mixer


def _check_in_projection(bench: Bench, spec: Any, sizes: _Sizes, name: str) -> None:
    """The in-projection of the mixer alone, on rows where eps counts."""
    dtype, precision = DTYPES[name], _precision(bench, name)
    mixer = _mixer(bench, spec, sizes, dtype)
    rows = _rows(bench, sizes.batch, sizes.length, sizes.hidden, dtype=dtype, size=SMALL)
    _try(
        bench,
        f"{name}.in_projection",
        mixer.in_projection,
        mixer.choice,
        rows,
        partial(reference.norm_linear, eps=EPS),
        partial(counted.norm_linear_roundings, precision=precision, length=sizes.hidden),
        formula_of(NormLinear(sizes.hidden, mixer.in_projection.out_features, eps=EPS, device=bench.device)),
    )


def _check_mixer(bench: Bench, spec: Any, sizes: _Sizes, name: str) -> None:
    """The whole mixer against the recurrence, one row after another."""
    dtype, precision = DTYPES[name], _precision(bench, name)
    mixer = _mixer(bench, spec, sizes, dtype)
    rows = _rows(bench, sizes.batch, sizes.length, sizes.hidden, dtype=dtype)
    native = Mamba2Mixer(sizes.hidden, **sizes.mixer, eps=EPS, chunk=mixer.chunk, device=bench.device)
    _try(
        bench,
        f"{name}.mixer",
        mixer,
        mixer.choice,
        rows,
        partial(reference.mamba_mixer, **sizes.mixer, eps=EPS),
        partial(counted.mixer_roundings, precision=precision, length=2 * sizes.hidden),
        formula_of(native),
    )


def _check_recurrent(bench: Bench, spec: Any, sizes: _Sizes, name: str) -> None:
    """The recurrent block, which TE has nothing for, against its recurrence."""
    dtype = DTYPES[name]
    entry = spec.kind_spec("R", device=bench.device)
    layer = entry.layer(sizes.hidden, **sizes.recurrent, eps=EPS, chunk=8, dtype=dtype, device=bench.device)
    layer = _filled(bench, layer, input_bias=(-2.0, 0.3), forget_bias=(0.5, 0.3))
    keys = layer.num_heads * layer.key_dim
    with torch.no_grad():
        # Keys like queries and gates alike, so that each row reads itself at least: where q S comes near zero, the norm
        # that follows it makes noise of it, in any precision.
        layer.in_projection.weight[keys : 2 * keys] = layer.in_projection.weight[:keys]
        layer.in_projection.weight[-2 * layer.num_heads :] *= 0.2
    heads = {key.removeprefix("num_"): value for key, value in sizes.recurrent.items()}
    _try(
        bench,
        f"{name}.recurrent",
        layer,
        entry.choice,
        _rows(bench, sizes.batch, sizes.length, sizes.hidden, dtype=dtype),
        partial(reference.recurrent_block, **heads, eps=EPS),
        partial(counted.recurrent_roundings, precision=counted.precision_of(name), length=sizes.hidden),
        wanted="native",
    )


def _check_experts(bench: Bench, spec: Any, sizes: _Sizes, name: str) -> None:
    """The class of kind E, forward only: its gradients, paddings and recipes have a cell of their own."""
    dtype, counts = DTYPES[name], [16, 0, 32, 16]
    entry = spec.kind_spec("E", device=bench.device)
    shape = sizes.hidden, sizes.ffn
    if entry.choice.observed == "te":
        bank = entry.layer(len(counts), *shape, bias=False, params_dtype=dtype, device=bench.device)
        weights = [getattr(bank, f"weight{expert}") for expert in range(len(counts))]
    else:
        bank = entry.layer(len(counts), *shape, dtype=dtype, device=bench.device)
        weights = list(bank.weight)
    with torch.no_grad():
        for weight in weights:
            weight.copy_(bench.randn(*weight.shape, scale=sizes.hidden**-0.5))
    rows = bench.randn(sum(counts), sizes.hidden, dtype=dtype, grad=True)
    out = bank(rows, counts)
    rounded = counted.Count(1, 2).roundings(_precision(bench, name), sizes.hidden, "exact products, rounded once")
    bench.ran_on(f"{name}.experts", entry.choice, out)
    bench.compare(
        f"{name}.experts.forward",
        out,
        expert_bank(rows.detach().double(), [one.detach().double() for one in weights], counts),
        roundings=rounded,
    )


# --- FP8 --------------------------------------------------------------------------------------------------------------


def _check_recipe(bench: Bench, spec: Any, sizes: _Sizes, recipe: Any) -> None:
    """MLP and in-projection under one recipe, on a number of rows that it takes."""
    if recipe not in EMULATED:
        bench.check(f"{recipe}.reference", False, "there is no emulation of this recipe to judge it by")
        return
    fp8, precision = bench.bridge("fp8_scope"), _precision(bench, "bf16", recipe)
    scope = partial(
        fp8.low_precision, target=bench.order.target.id, amax_reduction_group=fp8.SINGLE_OWNER, recipe=recipe
    )
    steps = 2 if recipe == "delayed" else 1  # its scales come from the step before; see `emulation`
    count = 32 if sizes.length < 64 else 128

    def norm_linear(given: Tensors) -> Any:
        normed = rms_norm(given["input"], given["layer_norm_weight"], eps=EPS)
        return emulated_linear(normed, given["weight"], recipe)

    mixer = _mixer(bench, spec, sizes, torch.bfloat16, recipe)
    precision = replace(precision, smallest=sizes.hidden * min(8 * count, mixer.in_projection.out_features))
    _try(
        bench,
        f"{recipe}.in_projection",
        mixer.in_projection,
        mixer.choice,
        _rows(bench, 8, count, sizes.hidden, dtype=torch.bfloat16),
        partial(reference.norm_linear, eps=EPS),
        partial(counted.norm_linear_roundings, precision=precision, length=sizes.hidden),
        norm_linear,
        enter=scope,
        steps=steps,
    )
    precision = replace(precision, smallest=sizes.hidden * min(8 * count, sizes.ffn))
    for case, gated in (("swiglu", True), ("gelu", False)):
        made = {"activation": case, "eps": EPS, "dtype": torch.bfloat16, "device": bench.device}
        layer = _filled(bench, spec.build_mlp(sizes.hidden, sizes.ffn, **made))
        _try(
            bench,
            f"{recipe}.mlp.{case}",
            layer,
            layer.choice,
            _rows(bench, 8, count, sizes.hidden, dtype=torch.bfloat16),
            partial(reference.mlp, activation=case, eps=EPS),
            partial(counted.mlp_roundings, precision=precision, length=sizes.ffn, gated=gated),
            partial(emulated_mlp, recipe=recipe, activation=case, eps=EPS),
            enter=scope,
            steps=steps,
        )
