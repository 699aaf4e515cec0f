"""Which class stands for each kind, by feature; and the layers that are built by whichever may be used."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.bridge import layer_spec as spec  # noqa: E402
from megacpp_validate.bridge.errors import (  # noqa: E402
    UnknownName,
    WeightMismatch,
    WrongDtype,
)
from megacpp_validate.bridge.features import Features, read_features  # noqa: E402
from megacpp_validate.native.mlp import NormMLP  # noqa: E402
from megacpp_validate.native.norms import NormLinear  # noqa: E402

KINDS = ("A", "M", "E", "R", "MLP", "norm", "head")
MADE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
OFF = read_features("off")


def test_the_table_without_transformer_engine() -> None:
    assert spec.te_layer_spec() == dict.fromkeys(KINDS)


FLAGS = {"A": "native_block", "M": "mamba_in_projection", "E": "expert_gemm", "MLP": "mlp", "norm": "norm"}
BY_FEATURES: dict[str, tuple[Features, set[str]]] = {
    **{flag: (read_features(**{flag: False}), set(FLAGS) - {kind}) for kind, flag in FLAGS.items()},
    "off": (OFF, set()),
    "experts": (read_features("experts"), {"E"}),
    "dense": (read_features("dense"), set(FLAGS) - {"E"}),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("features", "left"), BY_FEATURES.values(), ids=BY_FEATURES)
def test_a_flag_turns_one_kind_off_and_no_other(features: Features, left: set[str]) -> None:
    assert {kind for kind, found in spec.te_layer_spec(features).items() if found is not None} == left
    chosen = {kind: spec.kind_spec(kind, features, device="cpu") for kind in FLAGS}
    assert {kind for kind, entry in chosen.items() if entry.choice.observed == "te"} == left
    assert all(entry.layer is entry.native for kind, entry in chosen.items() if kind not in left)


@pytest.mark.usefixtures("te_double")
def test_a_release_without_a_class_gets_the_native_one() -> None:
    te.layernorm_mlp._found = (None, "this release has no LayerNormMLP")  # the fixture puts back what was there before
    entry = spec.kind_spec("MLP", device="cpu")
    assert entry.layer is NormMLP
    assert [(refusal.code, refusal.reason) for refusal in entry.choice.refusals] == [
        ("entry-missing", "this release has no LayerNormMLP")
    ]
    assert type(spec.build_mlp(16, 32, **MADE)) is NormMLP


# --- layers -----------------------------------------------------------------------------------------------------------


def is_te(module: Any) -> bool:
    return type(module).__module__.startswith("transformer_engine")


@pytest.mark.usefixtures("te_double")
def test_a_mixer_in_fp8_takes_te_only_where_its_width_fits() -> None:
    fits = spec.build_mamba_mixer(32, state=16, head_dim=4, recipe="delayed", **MADE)  # 64 + 64 + 32 + 16
    assert is_te(fits.in_projection)
    odd = spec.build_mamba_mixer(32, state=16, head_dim=8, recipe="delayed", **MADE)  # 64 + 64 + 32 + 8
    assert type(odd.in_projection) is NormLinear
    assert [refusal.code for refusal in odd.choice.refusals] == ["fp8-alignment"]
    assert "32 -> 168" in odd.choice.refusals[0].reason
    assert is_te(spec.build_mamba_mixer(32, state=16, head_dim=8, **MADE).in_projection)


@pytest.mark.usefixtures("te_double")
def test_a_mixer_by_te_draws_no_more_than_a_native_one() -> None:
    after = []
    for features in (read_features(), OFF):
        torch.manual_seed(0)
        spec.build_mamba_mixer(32, state=16, head_dim=8, features=features, **MADE)
        after.append(torch.rand(3))
    assert torch.equal(*after)


@pytest.mark.usefixtures("te_double")
def test_a_projection_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(hidden: int, width: int, *, eps: float, dtype: Any, device: Any) -> Any:
        layer = NormLinear(hidden, width, eps=eps, dtype=dtype, device=device)
        layer.layer_norm_bias = torch.nn.Parameter(torch.zeros(hidden))
        return layer

    monkeypatch.setattr(spec, "te_mamba_in_projection", renamed)
    with pytest.raises(WeightMismatch, match=r"layer_norm_bias.*Next step"):
        spec.build_mamba_mixer(16, state=4, head_dim=8, groups=2, chunk=4, **MADE)


BAD = {
    "kind": (lambda: spec.kind_spec("X"), UnknownName),
    "recipe": (lambda: spec.build_mamba_mixer(16, state=4, head_dim=8, recipe="fp6", **MADE), UnknownName),
    "head size": (lambda: spec.build_mamba_mixer(16, state=4, head_dim=5, **MADE), ValueError),
    "no groups": (lambda: spec.build_mamba_mixer(16, state=4, head_dim=8, groups=0, **MADE), ValueError),
    "eps by TE": (lambda: spec.build_norm(16, eps=math.nan, **MADE), ValueError),
    "dtype by TE": (lambda: spec.build_norm(16, **{**MADE, "dtype": torch.float64}), WrongDtype),
}


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("call", "error"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()
