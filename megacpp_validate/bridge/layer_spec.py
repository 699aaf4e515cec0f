"""TE layer-spec dispatcher: which class stands for each layer kind, by feature, and how the fused ones are built.

Each kind has a feature of its own (`bridge.features`); there is no switch for all of them. What Transformer Engine has
nothing for is None in its table, and native in the spec.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import nn

from ..native.block import ABlock
from ..native.grouped_gemm import ExpertBank
from ..native.mamba import Layout, Mamba2Mixer, in_projection_rows
from ..native.mlp import NormMLP
from ..native.norms import NormLinear, RMSNorm, check_eps
from ..native.recurrent import MatrixRecurrentBlock
from . import imports as te
from .backends import Candidate, Choice, Refusal, choose
from .errors import UnknownName, WrongDtype
from .extra_state import keep_checkpoints_plain, take_over
from .features import PRODUCTION, Features, why_not_te
from .liger import LigerNorm, LigerNormMLP, ask_liger
from .linear_walker import cuda_devices
from .recipes import ALIGNMENT, TE_DTYPES, RecipeName
from .vendor import Entry

Kind = Literal["A", "M", "E", "R", "MLP", "norm", "head"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)

FEATURE_OF: Final[Mapping[Kind, str]] = {
    "A": "native_block", "M": "mamba_in_projection", "E": "expert_gemm", "MLP": "mlp", "norm": "norm",
}  # fmt: skip
"""Kind -> the feature that lets it take TE; those that TE has nothing for are not in it."""

MlpActivation = Literal["gelu", "geglu", "srelu", "swiglu"]


_ENTRY_OF: Final[Mapping[Kind, Entry[type]]] = {
    "A": te.transformer_layer, "M": te.layernorm_linear, "E": te.grouped_linear, "MLP": te.layernorm_mlp,
    "norm": te.rmsnorm,
}  # fmt: skip


def te_layer_spec(features: Features = PRODUCTION) -> dict[str, type | None]:
    """Layer kind -> TE class; None where TE has no class for it, or the feature is off."""
    spec: dict[str, type | None] = dict.fromkeys(KINDS)
    for kind, feature in FEATURE_OF.items():
        if why_not_te(features, feature, "cuda") is None:
            spec[kind] = _ENTRY_OF[kind]()
    return spec


def te_mamba_in_projection(hidden: int, width: int, *, eps: float, dtype: Any, device: Any) -> Any:
    """The Mamba in-projection with its norm fused: [..., hidden] -> [..., width]."""
    return te.layernorm_linear.require()(
        in_features=hidden,
        out_features=width,
        eps=eps,
        bias=False,
        normalization="RMSNorm",
        zero_centered_gamma=False,
        params_dtype=dtype,
        device=device,
    )


def te_mlp(hidden: int, ffn_hidden: int, *, activation: MlpActivation, eps: float, dtype: Any, device: Any) -> Any:
    """Norm and MLP as one layer: [..., hidden] -> [..., hidden]."""
    return te.layernorm_mlp.require()(
        hidden_size=hidden,
        ffn_hidden_size=ffn_hidden,
        eps=eps,
        bias=False,
        normalization="RMSNorm",
        activation=activation,
        params_dtype=dtype,
        device=device,
    )


def te_attention_layer(
    *, hidden: int, ffn_hidden: int, num_heads: int, num_gqa_groups: int, layer_number: int, dtype: Any, device: Any
) -> Any:
    """A whole attention layer with its MLP: [B, T, hidden] -> [B, T, hidden]."""
    return te.transformer_layer.require()(
        hidden,
        ffn_hidden,
        num_heads,
        num_gqa_groups=num_gqa_groups,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layer_number=layer_number,
        self_attn_mask_type="causal",
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        fuse_qkv_params=True,
        attn_input_format="bshd",
        params_dtype=dtype,
        device=device,
    )


# --- layer spec ---

NATIVE_PATH = "the native layer of each kind"


@dataclass(frozen=True)
class KindSpec:
    """What to build for one kind of layer.

    Attributes:
        kind: which.
        layer: the class to build: by TE where that may be used. For M that is the class of the mixer's in-projection,
            which `build_mamba_mixer` puts into the native mixer.
        native: the native class of the whole kind.
        choice: what was asked for, what was taken, and why.
    """

    kind: Kind
    layer: type
    native: type
    choice: Choice


def native_layer_spec() -> dict[str, type]:
    """Layer kind -> the native class."""
    return {
        "A": ABlock, "M": Mamba2Mixer, "E": ExpertBank, "R": MatrixRecurrentBlock, "MLP": NormMLP, "norm": RMSNorm,
        "head": nn.Linear,
    }  # fmt: skip


def layer_spec(features: Features = PRODUCTION, *, device: Any = "cuda") -> dict[str, KindSpec]:
    """Layer kind -> what to build, with the choice recorded.

    Args:
        features: what may take Transformer Engine.
        device: where the layers will lie.
    """
    return {kind: kind_spec(kind, features, device=device) for kind in KINDS}


def kind_spec(kind: Kind, features: Features = PRODUCTION, *, device: Any = "cuda") -> KindSpec:
    """What to build for one kind.

    Raises:
        UnknownName: there is no such kind.
    """
    if kind not in KINDS:
        raise UnknownName(f"there is no layer kind {kind!r}. Next step: choose from {', '.join(KINDS)}.")
    native = native_layer_spec()[kind]
    choice = _choose(kind, features, device)
    found = te_layer_spec(features)[kind] if choice.observed == "te" else None
    return KindSpec(kind, found or native, native, choice)


def _choose(
    kind: Kind, features: Features, device: Any, refusal: Refusal | None = None, ahead: Sequence[Candidate] = ()
) -> Choice:
    """TE or native for one kind; `refusal` is another reason against TE, `ahead` are candidates asked before it."""
    if kind not in FEATURE_OF:
        return choose("layer_spec", (("native", lambda: None),))

    def ask() -> Refusal | None:
        refused = why_not_te(features, FEATURE_OF[kind], device) or refusal
        if refused is None and (missing := _ENTRY_OF[kind].why_missing()):
            return Refusal("te", "entry-missing", missing)
        return refused

    return choose("layer_spec", (*ahead, ("te", ask), ("native", lambda: None)))


# --- layers, by whichever may be used ---------------------------------------------------------------------------------


def build_norm(
    hidden: int,
    *,
    eps: float = 1e-5,
    dtype: Any,
    device: Any,
    features: Features = PRODUCTION,
    liger: bool = False,
) -> Any:
    """RMSNorm with `weight` [hidden]: [..., hidden] -> [..., hidden]; `choice` says which it is.

    Args:
        liger: whether Liger's kernel is asked for before Transformer Engine's.

    Raises:
        ValueError: an eps that is negative or not finite, or a width below 1.
        WrongDtype: a dtype that TE, which is to be used, does not take.
    """
    choice = _choose("norm", features, device, ahead=ask_liger(device, dtype, wanted=liger))
    if choice.observed == "te":
        _check_te(eps, dtype)
        layer = te.rmsnorm.require()(hidden, eps=eps, dtype=dtype, device=device)
        return _with_choice(keep_checkpoints_plain(layer), choice)
    kind = LigerNorm if choice.observed == "liger" else RMSNorm
    return _with_choice(kind(hidden, eps=eps, dtype=dtype, device=device), choice)


def build_mlp(
    hidden: int,
    ffn_hidden: int,
    *,
    activation: MlpActivation = "swiglu",
    eps: float = 1e-5,
    dtype: Any,
    device: Any,
    features: Features = PRODUCTION,
    liger: bool = False,
) -> Any:
    """RMSNorm and MLP: [..., hidden] -> [..., hidden]; `choice` says which it is. `liger` is as in `build_norm`.

    Both paths have `layer_norm_weight` [hidden], `fc1_weight` [F, hidden] (gated: [2F, hidden], the gate first) and
    `fc2_weight` [hidden, F], and start from the same distribution.

    Raises:
        ValueError: an eps that is negative or not finite, or a width below 1.
        WrongDtype: a dtype that TE, which is to be used, does not take.
    """
    liger = liger and activation == "swiglu"  # of its gated kernels only this one has the formula of the native layer
    choice = _choose("MLP", features, device, ahead=ask_liger(device, dtype, wanted=liger))
    if choice.observed == "te":
        _check_te(eps, dtype)
        layer = te_mlp(hidden, ffn_hidden, activation=activation, eps=eps, dtype=dtype, device=device)
        return _with_choice(keep_checkpoints_plain(layer), choice)
    kind = LigerNormMLP if choice.observed == "liger" else NormMLP
    return _with_choice(kind(hidden, ffn_hidden, activation=activation, eps=eps, dtype=dtype, device=device), choice)


def build_mamba_mixer(
    hidden: int,
    *,
    dtype: Any,
    device: Any,
    features: Features = PRODUCTION,
    recipe: RecipeName | None = None,
    **more: Any,
) -> Any:
    """The native Mamba-2 mixer with norm and in-projection as one layer of TE: [B, T, hidden] -> [B, T, hidden].

    Names and initial values of the parameters are those of the native mixer; `choice` says what the in-projection is.

    Args:
        hidden, more: as `native.mamba.Mamba2Mixer` takes them.
        dtype, device: of the parameters.
        features: what may take Transformer Engine.
        recipe: the low precision that it is to run in, if any: then the width of the in-projection must fit its GEMM,
            or it stays native.

    Raises:
        UnknownName: there is no such recipe.
        ValueError: a head size that does not divide the inner width, groups that do not divide the heads, an eps that
            is negative or not finite, or a size below 1.
        WrongDtype: a dtype that TE, which is to be used, does not take.
    """
    mixer = Mamba2Mixer(hidden, dtype=dtype, device=device, **more)
    mixer.in_projection = _project(mixer.in_projection, features, recipe)
    return _with_choice(mixer, mixer.in_projection.choice)


def build_mamba_in_projection(
    hidden: int, layout: Layout, *, expand: int = 2, eps: float = 1e-5, dtype: Any, device: Any,
    features: Features = PRODUCTION, recipe: RecipeName | None = None, **sizes: int,
) -> Any:  # fmt: skip
    """RMSNorm and the fused in-projection of a Mamba-2 or Mamba-3 mixer: [..., hidden] -> [..., sum of `rows`].

    `choice` says which it is, and `rows` what its output is split into: name -> width, in order.

    Args:
        layout, sizes: as `native.mamba.in_projection_rows` takes them, but for the inner width, expand * hidden.
        hidden, expand, eps, dtype, device, features, recipe: as `build_mamba_mixer` takes them.

    Raises:
        UnknownName, ValueError, WrongDtype: as `build_mamba_mixer`.
    """
    rows = in_projection_rows(layout, inner=expand * hidden, **sizes)
    plain = NormLinear(hidden, sum(rows.values()), eps=eps, dtype=dtype, device=device)
    layer = _project(plain, features, recipe)
    layer.rows = rows
    return layer


def _project(plain: NormLinear, features: Features, recipe: RecipeName | None) -> Any:
    """An in-projection by TE with the parameters of a plain one, or the plain one; with its `choice`."""
    hidden, width, device, dtype = plain.in_features, plain.out_features, plain.weight.device, plain.weight.dtype
    choice = _choose("M", features, device, _why_not_aligned(hidden, width, recipe))
    if choice.observed != "te":
        return _with_choice(plain, choice)
    _check_te(plain.eps, dtype)
    with torch.random.fork_rng(cuda_devices([plain])):  # TE draws weights that nobody will see
        layer = te_mamba_in_projection(hidden, width, eps=plain.eps, dtype=dtype, device=device)
    return _with_choice(take_over(layer, plain, "the Mamba in-projection"), choice)


def _why_not_aligned(hidden: int, width: int, recipe: RecipeName | None) -> Refusal | None:
    if recipe is None:
        return None
    if recipe not in ALIGNMENT:
        raise UnknownName(f"there is no recipe {recipe!r}. Next step: choose from {', '.join(ALIGNMENT)}.")
    align = ALIGNMENT[recipe]
    if hidden % align == 0 and width % align == 0:
        return None
    return Refusal(
        "te", "fp8-alignment", f"{hidden} -> {width} features; the {recipe} recipe wants multiples of {align}"
    )


def _check_te(eps: float, dtype: Any) -> None:
    """Refuse what TE accepts and computes wrongly (eps, ValueError) or does not support (dtype, WrongDtype)."""
    check_eps(eps)
    if dtype is not None and dtype not in TE_DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in TE_DTYPES)
        raise WrongDtype(
            f"Transformer Engine has no layers of {dtype}. Next step: build in one of {names}, or turn the feature off."
        )


def _with_choice(layer: Any, choice: Choice) -> Any:
    layer.choice = choice
    return layer
