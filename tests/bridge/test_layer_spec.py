"""Which class stands for each kind, by feature; and the layers that are built by whichever may be used."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import backends  # noqa: E402
from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.bridge import layer_spec as spec  # noqa: E402
from megacpp_validate.bridge.errors import (  # noqa: E402
    BridgeError,
    NotDivisible,
    UnknownName,
    WeightMismatch,
    WrongDtype,
    WrongOption,
)
from megacpp_validate.bridge.features import FEATURES, Features, read_features  # noqa: E402
from megacpp_validate.native.mamba import Mamba2Mixer  # noqa: E402
from megacpp_validate.native.mlp import NormMLP  # noqa: E402
from megacpp_validate.native.norms import NormLinear, RMSNorm  # noqa: E402

KINDS = ("A", "M", "E", "R", "MLP", "norm", "head")
CLASSES = {
    "A": "TransformerLayer",
    "M": "LayerNormLinear",
    "E": "GroupedLinear",
    "MLP": "LayerNormMLP",
    "norm": "RMSNorm",
}
MADE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
OFF = read_features("off")


def named(features: Features) -> dict[str, str]:
    return {kind: found.__name__ for kind, found in spec.te_layer_spec(features).items() if found is not None}


@pytest.mark.usefixtures("te_double")
def test_the_table_by_transformer_engine() -> None:
    table = spec.te_layer_spec()
    assert tuple(table) == KINDS
    assert named(Features()) == CLASSES
    assert table["R"] is None
    assert table["head"] is None


def test_the_table_without_transformer_engine() -> None:
    assert spec.te_layer_spec() == dict.fromkeys(KINDS)


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("feature", FEATURES)
def test_a_flag_turns_off_its_own_kind_and_no_other(feature: str) -> None:
    own = {kind for kind, name in spec.FEATURE_OF.items() if name == feature}
    assert named(read_features(**{feature: False})) == {kind: name for kind, name in CLASSES.items() if kind not in own}


@pytest.mark.usefixtures("te_double")
def test_what_is_chosen_is_recorded() -> None:
    chosen = spec.layer_spec(device="cpu")
    assert tuple(chosen) == KINDS
    for kind, entry in chosen.items():
        by_te = kind in CLASSES
        assert entry.layer.__name__ == (CLASSES[kind] if by_te else entry.native.__name__)
        assert entry.choice.observed == ("te" if by_te else "native")
        assert not entry.choice.fell_back
    assert sum(backends.recorded_choices().values()) == len(KINDS)


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


def build(kind: str, features: Features) -> Any:
    if kind == "norm":
        return spec.build_norm(16, features=features, **MADE)
    if kind == "mlp":
        return spec.build_mlp(16, 32, features=features, **MADE)
    return spec.build_mamba_mixer(16, state=4, head_dim=8, groups=2, chunk=4, features=features, **MADE)


NATIVE = {"norm": RMSNorm, "mlp": NormMLP, "mixer": Mamba2Mixer}


def copied(source: Any, target: Any) -> None:
    with torch.no_grad():
        for name, value in target.named_parameters():
            value.copy_(dict(source.named_parameters())[name])


def is_te(module: Any) -> bool:
    return type(module).__module__.startswith("transformer_engine")


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("kind", NATIVE)
def test_both_paths_agree_and_say_which_they_are(kind: str) -> None:
    torch.manual_seed(0)
    by_te, native = build(kind, Features()), build(kind, OFF)
    assert (by_te.choice.observed, native.choice.observed) == ("te", "native")
    assert type(native) is NATIVE[kind]
    assert is_te(by_te.in_projection if kind == "mixer" else by_te)
    assert set(by_te.state_dict()) == set(native.state_dict())
    copied(native, by_te)
    rows = torch.randn(2, 7, 16)
    outputs = [layer(rows) for layer in (by_te, native)]
    torch.testing.assert_close(*outputs)
    gradient = torch.randn_like(outputs[0])
    for output in outputs:
        output.backward(gradient)
    for name, value in native.named_parameters():
        torch.testing.assert_close(dict(by_te.named_parameters())[name].grad, value.grad, msg=name)


@pytest.mark.usefixtures("te_double")
def test_a_mixer_starts_from_the_native_values_and_draws_no_more() -> None:
    torch.manual_seed(7)
    native, state = build("mixer", OFF), torch.get_rng_state()
    torch.manual_seed(7)
    mixer = build("mixer", Features())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, mixer.state_dict()[name]) for name, value in native.state_dict().items())
    assert [name for name, _ in mixer.named_parameters()] == [name for name, _ in native.named_parameters()]


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
def test_a_projection_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(hidden: int, width: int, *, eps: float, dtype: Any, device: Any) -> Any:
        return NormLinear(hidden, width, normalization="LayerNorm", eps=eps, dtype=dtype, device=device)

    monkeypatch.setattr(spec, "te_mamba_in_projection", renamed)
    with pytest.raises(WeightMismatch, match=r"layer_norm_bias.*Next step"):
        build("mixer", Features())


@pytest.mark.usefixtures("te_double")
def test_the_attention_layer_is_one_layer() -> None:
    layer = spec.te_attention_layer(
        hidden=32, ffn_hidden=64, num_heads=4, num_gqa_groups=2, layer_number=1, **MADE
    )  # fmt: skip
    assert layer(torch.randn(2, 5, 32)).shape == (2, 5, 32)


BAD = {
    "kind": (lambda: spec.kind_spec("X"), UnknownName),
    "activation": (lambda: spec.build_mlp(16, 16, activation="tanh", **MADE), UnknownName),
    "recipe": (lambda: spec.build_mamba_mixer(16, state=4, head_dim=8, recipe="fp6", **MADE), UnknownName),
    "head size": (lambda: spec.build_mamba_mixer(16, state=4, head_dim=5, **MADE), NotDivisible),
    "groups": (lambda: spec.build_mamba_mixer(16, state=4, head_dim=8, groups=3, **MADE), NotDivisible),
    "no groups": (lambda: spec.build_mamba_mixer(16, state=4, head_dim=8, groups=0, **MADE), NotDivisible),
    "norm eps": (lambda: spec.build_norm(16, eps=-1.0, **MADE), WrongOption),
    "norm eps nan": (lambda: spec.build_norm(16, eps=math.nan, **MADE), WrongOption),
    "norm width": (lambda: spec.build_norm(0, **MADE), WrongOption),
    "norm dtype": (lambda: spec.build_norm(16, **{**MADE, "dtype": torch.int32}), WrongDtype),
    "mlp eps": (lambda: spec.build_mlp(16, 16, eps=math.inf, **MADE), WrongOption),
    "mlp width": (lambda: spec.build_mlp(16, -16, **MADE), WrongOption),
    "mixer eps": (lambda: spec.build_mamba_mixer(16, state=4, head_dim=8, eps=-1.0, **MADE), WrongOption),
    "mixer width": (lambda: spec.build_mamba_mixer(16.0, state=4, head_dim=8, **MADE), WrongOption),
    "no head size": (lambda: spec.build_mamba_mixer(16, state=4, head_dim=0, **MADE), NotDivisible),
}


@pytest.mark.parametrize(("call", "error"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_a_next_step(call: Any, error: type[BridgeError]) -> None:
    with pytest.raises(error, match="Next step"):
        call()
