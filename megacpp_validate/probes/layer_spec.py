"""The layer spec: what is built for each kind, and the numbers of each layer that is built from it.

The layer of kind A comes last: where its attention cannot run, which has a cell of its own, all others were judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from ..native.mamba import Mamba2Mixer
from ..native.mlp import NormMLP
from ..native.norms import NormLinear, RMSNorm, rms_norm
from . import emulation as counted
from . import references as reference
from .bench import DTYPES, Bench
from .native_block import check_whole_layer
from .observe import is_te
from .trial import Formula, Trial, formula_of, layer_trial, try_case

BY_TE: Final = ("A", "M", "E", "MLP", "norm")
EPS: Final = 3e-5  # not the default of any layer: one that ignores what it is given shows
MAMBA3_STATE: Final = 128  # its default, with which the rows of the in-projection are a multiple of 32, too
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
    """The tables; then each layer in every precision."""
    spec = bench.bridge()
    with bench.scope("spec"):
        _check_tables(bench, spec)
    sizes = _Sizes() if bench.device == "cpu" or bench.quick else _Sizes(256, 512, 32, 16, 32, 131)
    with bench.scope("checkpoints"):
        _check_names(bench, spec, sizes)
    _check_rows(bench, spec, sizes)
    for name in DTYPES:
        for row in LAYERS:
            _check(bench, spec, sizes, row, name)
        _check_experts(bench, spec, sizes, name)
        for row in SCANS if not bench.quick or name == "bf16" else ():  # by precision, nothing else of them differs
            _check(bench, spec, sizes, row, name)
    for recipe in bench.judged_recipes(""):
        for row in IN_RECIPES:
            _check(bench, spec, sizes, row, "bf16", recipe)
    for name in DTYPES:
        for row in BY_LIGER:
            _check(bench, spec, sizes, row, name)
        _check_head_loss(bench, sizes, name)
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
        right = isinstance(found, type) and is_te(found) if by_te else found is None
        bench.check(f"te.{kind}", right, str(found))
        entry = chosen.get(kind)
        if entry is None:
            bench.check(f"chosen.{kind}", False, "there is no such row")
            continue
        wanted = "te" if by_te else "native"
        reasons = "; ".join(refusal.reason for refusal in entry.choice.refusals)
        right = entry.choice.observed == wanted and entry.layer is (found if by_te else native[kind])
        bench.check(f"chosen.{kind}", right, f"{entry.layer.__qualname__} by {entry.choice.observed} {reasons}".strip())


def _check_rows(bench: Bench, spec: Any, sizes: _Sizes) -> None:
    """The parts of Mamba-3's in-projection by `mamba_ssm/modules/mamba3.py`: names, order and widths."""
    made = {"dtype": torch.float32, "device": bench.device, **sizes.mixer, "state": MAMBA3_STATE}
    layer = spec.build_mamba_in_projection(sizes.hidden, "mamba3", **made)
    inner, directions, angles = 2 * sizes.hidden, sizes.mixer["groups"] * MAMBA3_STATE, MAMBA3_STATE // 4
    heads = inner // sizes.head_dim
    wanted = [inner, inner, directions, directions, heads, heads, heads, angles]
    names = ["z", "x", "B", "C", "dd_dt", "dd_A", "trap", "angle"]
    seen = list(layer.rows.items())
    bench.check("in_projection3.rows", seen == list(zip(names, wanted, strict=True)), str(layer.rows))


def _check_names(bench: Bench, spec: Any, sizes: _Sizes) -> None:
    """Layers by TE read and write the checkpoints of native ones."""
    made, hidden = {"dtype": torch.float32, "device": bench.device}, sizes.hidden
    pairs: dict[str, Iterable[Any]] = {
        "norm": (spec.build_norm(hidden, **made), RMSNorm(hidden, **made)),
        "mlp": (spec.build_mlp(hidden, sizes.ffn, **made), NormMLP(hidden, sizes.ffn, **made)),
        "mixer": (build(hidden, **sizes.mixer, **made) for build in (spec.build_mamba_mixer, Mamba2Mixer)),
    }
    for name, (layer, plain) in pairs.items():
        other = set(layer.state_dict()) ^ set(plain.state_dict())
        wrong = layer.load_state_dict(plain.state_dict(), strict=False)
        bench.check(name, not (other or wrong.missing_keys or wrong.unexpected_keys), ", ".join(sorted(other)))


# --- numbers ----------------------------------------------------------------------------------------------------------


class _Made(NamedTuple):
    """A layer, its `Choice`, the layer in fp64, and the same in plain PyTorch; None where TE has nothing."""

    layer: Any
    choice: Any
    formula: Formula
    native: Formula | None


class _Row(NamedTuple):
    """One layer in every precision, forward and every gradient.

    Attributes:
        name: of the checks, after the precision.
        kind: of `counted.LAYERS`.
        make: bench, spec, sizes, and what a layer is made with.
        size: of the rows: 1, or so small that eps counts; in a recipe it is 1.
        memory: whether it is seen to leave nothing behind.
        wanted: the backend that must run, where it is not the requested one; "liger" only where it is installed.
    """

    name: str
    kind: str
    make: Callable[[Bench, Any, _Sizes, dict[str, Any]], _Made]
    size: float = 1.0
    memory: bool = False
    wanted: str = ""


def _norm(bench: Bench, spec: Any, sizes: _Sizes, made: dict[str, Any], **asked: bool) -> _Made:
    layer = bench.filled(spec.build_norm(sizes.ffn, eps=EPS, **asked, **made))

    def by(function: Callable[..., Any]) -> Formula:
        return lambda given: function(given["input"], given["weight"], eps=EPS)

    return _Made(layer, layer.choice, by(reference.rms_norm), by(rms_norm))


def _mlp(activation: Any, bench: Bench, spec: Any, sizes: _Sizes, made: dict[str, Any], **asked: bool) -> _Made:
    options = {"activation": activation, "eps": EPS}
    layer = bench.filled(spec.build_mlp(sizes.hidden, sizes.ffn, **options, **asked, **made))
    plain = NormMLP(sizes.hidden, sizes.ffn, **options, **made)
    return _Made(layer, layer.choice, partial(reference.mlp, **options), formula_of(plain))


def _in_projection(layout: str, bench: Bench, spec: Any, sizes: _Sizes, made: dict[str, Any]) -> _Made:
    options = {**sizes.mixer, **({"state": MAMBA3_STATE} if layout == "mamba3" else {})}
    layer = bench.filled(spec.build_mamba_in_projection(sizes.hidden, layout, **options, eps=EPS, **made))
    plain = NormLinear(sizes.hidden, layer.out_features, eps=EPS, device=made["device"])
    return _Made(layer, layer.choice, partial(reference.norm_linear, eps=EPS), formula_of(plain))


def _mixer(bench: Bench, spec: Any, sizes: _Sizes, made: dict[str, Any]) -> _Made:
    mixer = _new_mixer(bench, spec, sizes, made)
    plain = Mamba2Mixer(sizes.hidden, **sizes.mixer, eps=EPS, chunk=mixer.chunk, device=made["device"])
    return _Made(mixer, mixer.choice, partial(reference.mamba_mixer, **sizes.mixer, eps=EPS), formula_of(plain))


def _new_mixer(bench: Bench, spec: Any, sizes: _Sizes, made: dict[str, Any]) -> Any:
    chunk = 8 if sizes.length < 64 else 64
    mixer = spec.build_mamba_mixer(sizes.hidden, **sizes.mixer, eps=EPS, chunk=chunk, **made)
    # A scan multiplies four projections. Left alone, one channel is now and then so large that it rules the norm of its
    # group, whose gradient is then a small difference of large numbers: so taps, steps and directions vary little. With
    # these, steps are about 0.2 and decays around 0.9 a step.
    own = {"a_log": (-0.3, 0.3), "dt_bias": (-1.5, 0.3), "skip": (1.0, 0.1), "conv_bias": (0.0, 0.5)}
    bench.filled(mixer, **own, conv_weight=(0.0, 0.25))
    with torch.no_grad():
        mixer.in_projection.weight[-mixer.heads :] *= 0.3
        mixer.conv_bias[mixer.inner :] += 1.0
    return mixer


def _recurrent(bench: Bench, spec: Any, sizes: _Sizes, made: dict[str, Any]) -> _Made:
    entry = spec.kind_spec("R", device=bench.device)
    layer = entry.layer(sizes.hidden, **sizes.recurrent, eps=EPS, chunk=8, **made)
    layer = bench.filled(layer, input_bias=(-2.0, 0.3), forget_bias=(0.5, 0.3))
    keys = layer.num_heads * layer.key_dim
    with torch.no_grad():
        # Keys like queries and gates alike, so that each row reads itself at least: where q S comes near zero, the norm
        # that follows it makes noise of it, in any precision.
        layer.in_projection.weight[keys : 2 * keys] = layer.in_projection.weight[:keys]
        layer.in_projection.weight[-2 * layer.num_heads :] *= 0.2
    heads = {key.removeprefix("num_"): value for key, value in sizes.recurrent.items()}
    return _Made(layer, entry.choice, partial(reference.recurrent_block, **heads, eps=EPS), None)


IN_PROJECTIONS: Final = (
    _Row("in_projection", "norm_linear", partial(_in_projection, "mamba2"), SMALL, memory=True),
    _Row("in_projection3", "norm_linear", partial(_in_projection, "mamba3"), SMALL),
)
MLPS: Final = (
    _Row("mlp.swiglu", "gated_mlp", partial(_mlp, "swiglu"), memory=True),
    _Row("mlp.gelu", "plain_mlp", partial(_mlp, "gelu"), SMALL),
)
NORMS: Final = (_Row("norm.unit", "norm", _norm, memory=True), _Row("norm.small", "norm", _norm, SMALL))
LAYERS: Final = (*NORMS, *MLPS, *IN_PROJECTIONS)
BY_LIGER: Final = (
    _Row("norm.liger", "norm", partial(_norm, liger=True), SMALL, wanted="liger"),
    _Row("mlp.liger", "gated_mlp", partial(_mlp, "swiglu", liger=True), memory=True, wanted="liger"),
)
# The mixer against the recurrence, one row after another, and the block that TE has nothing for.
SCANS: Final = (_Row("mixer", "mixer", _mixer), _Row("recurrent", "recurrent", _recurrent, wanted="native"))
IN_RECIPES: Final = (*IN_PROJECTIONS, *MLPS)


def _check(bench: Bench, spec: Any, sizes: _Sizes, row: _Row, precision: str, recipe: Any = None) -> None:
    """One row in one precision, or under a recipe; a layer of each kind leaves nothing behind on the device."""
    dtype, path = DTYPES[precision], f"{recipe or precision}.{row.name}"
    made = {"dtype": dtype, "device": bench.device, **({"recipe": recipe} if row in IN_PROJECTIONS else {})}
    layer, choice, formula, native = row.make(bench, spec, sizes, made)
    # Under a recipe: a number of rows that it takes.
    shape = (8, 32 if sizes.length < 64 else 128) if recipe else (sizes.batch, sizes.length)
    width = sizes.ffn if row.kind == "norm" else sizes.hidden  # a second width for norms
    rows = ((bench.randn(*shape, width) + 0.5) * (1.0 if recipe else row.size)).to(dtype).requires_grad_(True)
    stored = counted.precision_of(precision, tf32=bench.wants_te and bench.device == "cuda", recipe=recipe)
    if recipe:
        widest = layer.out_features if row in IN_PROJECTIONS else sizes.ffn
        stored = replace(stored, smallest=sizes.hidden * min(shape[0] * shape[1], widest))
    if row.kind == "recurrent":  # plain PyTorch multiplies fp32 as fp32
        stored = replace(stored, operand="", gradient="")
    length = {"gated_mlp": sizes.ffn, "plain_mlp": sizes.ffn, "mixer": 2 * sizes.hidden}.get(row.kind, width)
    roundings = partial(counted.layer_roundings, row.kind, precision=stored, length=length)
    given: dict[str, Any] = {"formula": formula, "roundings": roundings, "native": native}
    wanted = _wanted(bench, "") if row.wanted == "liger" else row.wanted
    given |= {"spread": reference.EXPANDED, "recipe": recipe, "wanted": wanted}
    try_case(bench, layer_trial(path, layer, rows, choice, **given))
    if row.memory and precision == "bf16":
        bench.layer_keeps_nothing(path, layer, rows, enter=bench.low_precision(recipe) if recipe else nullcontext)


def _wanted(bench: Bench, otherwise: str) -> str:
    """Liger where it is installed and has kernels; `otherwise` elsewhere."""
    return "liger" if bench.device == "cuda" and bench.bridge("liger").LIGER.is_available() else otherwise


def _check_head_loss(bench: Bench, sizes: _Sizes, name: str) -> None:
    """The loss of the head without its logits: a mean with some targets left out, and a sum, in one vector."""
    liger, dtype = bench.bridge("liger"), DTYPES[name]
    count, vocabulary, ignored = sizes.batch * sizes.length, 3 * sizes.ffn + 5, 7
    rows = bench.randn(2, count, sizes.hidden, dtype=dtype, grad=True)
    weight = bench.randn(vocabulary, sizes.hidden, dtype=dtype, grad=True, scale=sizes.hidden**-0.5)
    # A power of two: divided by another number, the entry of each target, most of a gradient, is one constant, and
    # its rounding a factor of the whole gradient (0.12% in bf16, H200, 2026-11-28).
    even = 1 << (count.bit_length() - 2)
    targets = bench.randint(vocabulary - ignored - 1, 2, count) + ignored + 1
    targets[0, bench.rand(count).argsort()[even:]] = targets[1, ::5] = ignored
    kept = targets != ignored

    def run() -> Any:
        mean = liger.linear_cross_entropy(rows[0], weight, targets[0], ignore_index=ignored)
        masked = targets[1].masked_fill(~kept[1], -100)
        return torch.stack([mean, liger.linear_cross_entropy(rows[1], weight, masked, reduction="sum") / even])

    def formula(given: Any) -> Any:
        logits = (given["input"] @ given["weight"].t()).to(torch.promote_types(given["input"].dtype, torch.float32))
        losses = logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        return (losses * kept).sum(1) / even

    stored = counted.precision_of(name)
    length = max(count, vocabulary)
    roundings = partial(counted.layer_roundings, "head_loss", precision=stored, length=length)
    leaves = {"input": rows, "weight": weight}
    choice = partial(liger.choose_head_loss, dtype=dtype, device=bench.device)
    # Gradients of the forward pass are rounded again when they are scaled: next to a power of two, all to one side.
    gradient = torch.tensor([1.0, -0.75], device=bench.device)
    more: dict[str, Any] = {"native": formula, "gradient": gradient, "wanted": _wanted(bench, "native")}
    more |= {"tf32": False, "checks_dtype": False}
    try_case(bench, Trial(f"{name}.head_loss", run, leaves, choice, formula, roundings, **more))


def _check_experts(bench: Bench, spec: Any, sizes: _Sizes, name: str) -> None:
    """The class of kind E, forward only: its gradients, paddings and recipes have a cell of their own."""
    dtype, counts, path = DTYPES[name], [16, 0, 32, 16], f"{name}.experts"
    precision = counted.precision_of(name, tf32=bench.wants_te and bench.device == "cuda")
    entry = spec.kind_spec("E", device=bench.device)
    by_te = entry.choice.observed == "te"
    made = {"bias": False, "params_dtype": dtype} if by_te else {"dtype": dtype}
    bank = entry.layer(len(counts), sizes.hidden, sizes.ffn, **made, device=bench.device)
    weights = [getattr(bank, f"weight{expert}") for expert in range(len(counts))] if by_te else list(bank.weight)
    with torch.no_grad():
        for weight in weights:
            weight.copy_(bench.randn(*weight.shape, scale=sizes.hidden**-0.5))
    rows = bench.randn(sum(counts), sizes.hidden, dtype=dtype, grad=True)
    out = bank(rows, counts)
    bench.ran_on(path, entry.choice, out)
    rounded = counted.Count(1, 2).roundings(precision, sizes.hidden, "exact products, rounded once")
    exact = reference.expert_bank(rows.detach().double(), [one.detach().double() for one in weights], counts)
    bench.compare(f"{path}.forward", out, exact, roundings=rounded)
