"""The layer A as latent attention: its formula, forward and every gradient; both ingress forms; TE; weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.features import PRESETS, PRODUCTION  # noqa: E402
from megacpp_validate.native.attention import rope_tables  # noqa: E402
from megacpp_validate.probes.bounds import Roundings  # noqa: E402
from megacpp_validate.training.layers import Build, MlaLayer  # noqa: E402
from megacpp_validate.training.sizes import Forms, read_size  # noqa: E402
from tests.native.reference_mla import reference_mla  # noqa: E402

SIZE = read_size("tiny", attention="mla", num_heads=3, num_gqa_groups=1, head_dim=16, kv_latent=24, rope_dim=6)
NATIVE = Build(PRESETS["off"], torch.float64)
FUSED = replace(NATIVE, forms=Forms(fused_mla_ingress=True))
LENGTH = 11
UNREAD = (None, None)  # the model's own tables, which are of another width


def draw(*shape: int, seed: int = 0, dtype: Any = torch.float64) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def weights(dtype: Any = torch.float64) -> dict[str, Any]:
    """Of a size at which every part of the layer counts."""
    shapes = {name: weight.shape for name, weight in MlaLayer(SIZE, NATIVE).native_state_dict().items()}
    drawn = {name: draw(*shape, seed=place) for place, (name, shape) in enumerate(shapes.items())}
    return {
        name: (2 * value / value.shape[-1] ** 0.5 if value.dim() == 2 else 1 + 0.3 * value).to(dtype)
        for name, value in drawn.items()
    }


def build(made: Build = NATIVE) -> Any:
    layer = MlaLayer(SIZE, made)
    layer.load_native_state_dict(weights(made.dtype))
    return layer


def outcome(layer: Any, *, added: Any = None) -> dict[str, Any]:
    """What the layer adds to the stream, and every gradient under native names."""
    dtype = layer.out.weight.dtype
    rows, upstream = draw(2, LENGTH, SIZE.hidden, seed=90, dtype=dtype), draw(2, LENGTH, SIZE.hidden, seed=91)
    rows.requires_grad_()
    step = layer(rows, UNREAD, **({} if added is None else {"added": added}))
    out = step.rows if step.added is None else step.rows + step.added
    layer.zero_grad()
    out.backward(upstream.to(dtype))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.grad)
    return {"out": out.detach() - rows.detach(), "rows": rows.grad, **layer.native_state_dict()}


def written_out(added: Any = None) -> dict[str, Any]:
    held = {name: weight.requires_grad_() for name, weight in weights().items()}
    rows = draw(2, LENGTH, SIZE.hidden, seed=90).requires_grad_()
    # The tables of a model are in fp32 whatever its dtype.
    rope = rope_tables(SIZE.length, SIZE.rope_dim)
    summed = rows if added is None else rows + added
    out = reference_mla(summed, held, rope, num_heads=SIZE.num_heads, head_dim=SIZE.head_dim, eps=SIZE.eps)
    found = torch.autograd.grad(out, [rows, *held.values()], draw(2, LENGTH, SIZE.hidden, seed=91))
    return {"out": (out - rows).detach(), **dict(zip(["rows", *held], found, strict=True))}


def furthest(seen: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The largest relative Frobenius error of the result and of every gradient."""
    assert seen.keys() == wanted.keys()
    return max(
        float((seen[name].double() - wanted[name].double()).norm() / wanted[name].double().norm()) for name in wanted
    )


def bound(dtype: str) -> float:
    """Forward 18 roundings: norm 2, product, norm of the latent 2, product, rotation, scores, weights, values, product,
    sum; norm 2, product, gate 2, product, sum. Backward twice as many at most. Sums of 64 products, or as many in all
    as there are rows and heads of one. The softmax passes on the absolute error of scores, and with weights of twice
    the size that keeps norms those are 2 * 2 * sqrt(D) / sqrt(D) = 4 large.
    """
    return Roundings(((dtype, 3 * 18),), 64, "fp64" if dtype == "fp64" else "fp32", amplification=4.0).bound()


@pytest.mark.parametrize("made", [NATIVE, FUSED], ids=["separate", "fused"])
def test_it_is_its_formula_forward_and_every_gradient(made: Build) -> None:
    assert furthest(outcome(build(made)), written_out()) < bound("fp64") < 1e-13


@pytest.mark.parametrize("forms", [Forms(), Forms(fused_residual_norm=True)])
def test_what_is_still_to_be_added_is_added_first(forms: Forms) -> None:
    added = draw(2, LENGTH, SIZE.hidden, seed=92)
    layer = build(replace(NATIVE, forms=forms))
    assert furthest(outcome(layer, added=added), written_out(added)) < bound("fp64")
    assert ("residual_norm" in layer.choices()) == forms.fused_residual_norm
    step = build(replace(NATIVE, forms=forms))(added, UNREAD)
    assert (step.added is not None) == forms.fused_residual_norm, "what its own norm could not take is left to the next"


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("forms", [Forms(), Forms(fused_mla_ingress=True)], ids=["separate", "fused"])
def test_a_build_by_transformer_engine_is_the_same_layer(forms: Forms) -> None:
    native, built = (build(Build(features, torch.float32, forms=forms)) for features in (PRESETS["off"], PRODUCTION))
    seen, wanted = outcome(built), outcome(native)
    taken = {part: choice.observed for part, choice in built.choices().items()}
    ingress = "fused" if forms.fused_mla_ingress else "separate"
    assert taken == {"norm": "te", "ingress": ingress, "latent_norm": "te", "mlp": "te", "attention": "te"}
    assert furthest(seen, wanted) < 2**0.5 * bound("fp32")  # of two that are rounded
    assert built.native_state_dict().keys() == native.native_state_dict().keys()
