"""Which part of the bridge may take Transformer Engine: one flag a feature, presets of them, no global switch.

A preset or a feature is turned off from outside by `MEGACPP_DISABLE_TE_<PRESET>=1` or `MEGACPP_DISABLE_TE_<FEATURE>=1`;
`MEGACPP_DISABLE_TE=1` turns all of Transformer Engine off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from . import imports as te
from .backends import Refusal
from .errors import UnknownName


@dataclass(frozen=True)
class Features:
    """What may take Transformer Engine.

    Attributes:
        preset: the preset these come from; its own environment variable turns all of them off.
        attention: `bridge.attention`.
        native_block: the whole A-block.
        linear: the linear walker.
        expert_gemm: the MoE expert bank.
        permute: MoE dispatch.
        mamba_in_projection: norm and in-projection of the Mamba mixer as one layer.
        mlp: norm and MLP as one layer.
        norm: RMSNorm.
    """

    preset: str = "production"
    attention: bool = True
    native_block: bool = True
    linear: bool = True
    expert_gemm: bool = True
    permute: bool = True
    mamba_in_projection: bool = True
    mlp: bool = True
    norm: bool = True


TE_DEVICES: Final = frozenset({"cuda"})
FEATURES: Final = tuple(field.name for field in fields(Features) if field.name != "preset")
_OFF: Final = Features("off", **dict.fromkeys(FEATURES, False))

PRODUCTION: Final = Features()
PRESETS: Final[Mapping[str, Features]] = {
    "production": PRODUCTION,
    "experts": replace(_OFF, preset="experts", expert_gemm=True, permute=True),
    "dense": replace(PRODUCTION, preset="dense", expert_gemm=False, permute=False),
    "off": _OFF,
}

# FP8 presets that were tried and rolled back, and what was measured: the rows with `refused_by` of
# matrix/fp8_presets.toml. They are here so that a run that names one refuses to start.
ROLLED_BACK: Final = {
    "every-layer": "emulated casts show no gap in 300 steps; Nemotron-H keeps both ends of the stack in BF16",
    "mamba-scan": "a state that is cast at each token is off by 31% after 512 tokens, 1.9% in BF16",
    "recurrent-scan": "a state that is cast at each token is off by 31% after 512 tokens, 1.9% in BF16",
    "tied-embeddings": "rows of rare tokens are off by 3.4%, 0.2% in BF16",
    "auxiliary-heads": "logits are off by 3.7%, 0.3% in BF16",
    "routers": "8.8% of the tokens go to other experts, 1.1% in BF16",
    "score-projections": "scores are off by 3.7%, 0.3% in BF16",
    "graphs-and-recompute": "a graph that is replayed outside the scope freezes its amaxes, and nothing raises",
    "no-history": "30% of the gradient's values become 0 where the scale stays at 1",
    "blackwell-on-hopper": "Transformer Engine refuses MXFP8 on compute capability 9.0",
    "odd-sizes": "8 or 24 rows pass forward and raise in the backward pass",
}


def read_features(preset: str = "production", **flags: bool) -> Features:
    """A preset with single features turned on or off.

    Raises:
        UnknownName: there is no such preset or feature, or the preset was rolled back; the text says which there are.
    """
    if why := ROLLED_BACK.get(preset):
        raise UnknownName(
            f"the preset {preset!r} was rolled back: {why}. Next step: `megacpp-validate fp8-policy --preset {preset}`."
        )
    if preset not in PRESETS:
        raise UnknownName(f"there is no preset {preset!r}. Next step: choose one of {', '.join(PRESETS)}.")
    if unknown := sorted(set(flags) - set(FEATURES)):
        raise UnknownName(
            f"there is no feature {', '.join(map(repr, unknown))}. Next step: choose from {', '.join(FEATURES)}."
        )
    return replace(PRESETS[preset], **flags)  # type: ignore[arg-type]


def why_not_te(features: Features, feature: str, device: Any) -> Refusal | None:
    """Why this feature may not take Transformer Engine; None where it may.

    Args:
        features: the flags that hold.
        feature: which of them.
        device: torch device of the tensors or weights at hand.
    """
    if not te.is_te_available():
        return Refusal("te", "te-unavailable", te.why_te_is_unavailable())
    for name in (features.preset, feature):
        if not te.is_te_enabled_for(name):
            return Refusal("te", "switched-off", te.why_te_is_disabled_for(name))
    if not getattr(features, feature):
        return Refusal("te", "flag-off", f"the feature {feature} is off in the preset {features.preset}")
    kind = str(device).partition(":")[0]
    if kind not in TE_DEVICES:
        return Refusal("te", "device", f"the tensors lie on {kind}, where Transformer Engine has no kernels")
    return None
