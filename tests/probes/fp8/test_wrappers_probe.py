"""The probe of wrapped tensors passes on tensors that are stored as vendors store them; every planted fault fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bridge"))
from megacpp_validate.bridge import quantized_tensor, torchao
from megacpp_validate.bridge.quantized_tensor import ScaledPayload
from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import wrappers
from megacpp_validate.probes.fp8 import wrappers as derive
from megacpp_validate.probes.fp8.wrappers import check_derived
from megacpp_validate.probes.order import Order, Target
from tests.bridge import te_tensors as te
from tests.bridge.torchao_ready import torch
from tests.probes.planted_numbers import failed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
Patch = pytest.MonkeyPatch


def new_bench() -> Bench:
    order = Order(
        "fp8_wrappers", "stack", Target("cpu", ""), "te", code="fp8.wrappers", stands_on=("quantized_tensor",)
    )
    return Bench(order)


ROWS, INNER, OUTER = wrappers.ROWS, wrappers.INNER, wrappers.OUTER


def _tensors(recipe: str) -> Iterator[tuple[str, Any]]:
    sizes = {"rows": (ROWS, INNER), "weight": (OUTER, INNER), "gradient": (ROWS, OUTER)}
    for name, (high, wide) in sizes.items():
        for ending, turned in (("", False), (".turned", True)):
            if recipe == "block":
                made = te.blocks(high, wide, square=name == "weight", turned=turned)
            elif recipe == "mxfp8":
                made = te.exponents(64, 96, turned=turned)
            else:
                made = te.one_scale(high, wide, turned=turned, gradient=name == "gradient")
            yield f"{name}{ending}", made


@pytest.fixture(autouse=True)
def _layers(monkeypatch: Patch) -> None:
    """Layers that run in silence: what they do is Transformer Engine's."""

    def trained(bench: Bench, recipe: str) -> Any:
        layer = SimpleNamespace(recipe=recipe)
        return layer, lambda one: None, SimpleNamespace(recipe=recipe)

    monkeypatch.setattr(wrappers, "_trained_layer", trained)
    monkeypatch.setattr(wrappers, "_quantized", lambda bench, layer: _tensors(layer.recipe))
    monkeypatch.setattr(
        wrappers, "_stored_layer", lambda bench, recipe: SimpleNamespace(weight=dict(_tensors(recipe))["weight"])
    )


def judged(recipe: str) -> Bench:
    bench = new_bench()
    wrappers.check_te(bench, recipe)
    return bench


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_every_recipe_passes(recipe: str) -> None:
    bench = judged(recipe)
    assert failed(bench) == set()
    assert len(bench.checks) > 35
    assert len(bench.quantizers) == 6


def test_torchao_passes() -> None:
    bench = new_bench()
    wrappers.check_torchao(bench)
    assert failed(bench) == set()
    assert len(bench.checks) > 25


def test_without_torchao_its_part_is_not_run(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torchao, "is_torchao_available", lambda: False)
    monkeypatch.setattr(torchao, "why_torchao_is_unavailable", lambda: "it is not here. Next step: install it.")
    with pytest.raises(CannotRun, match="it is not here"):
        wrappers.probe(new_bench())


def test_without_a_recipe_nothing_is_known_of_transformer_engine() -> None:
    bench = new_bench()
    with pytest.raises(CannotRun, match="no recipe"):
        wrappers.probe(bench)
    assert failed(bench) == set()


# --- planted ----------------------------------------------------------------------------------------------------------


def _planted(change: Any) -> Any:
    plain = quantized_tensor.read_payload

    def read(tensor: Any) -> Any:
        found = plain(tensor)
        return change(found) if isinstance(found, ScaledPayload) else found

    return read


def _with(handed: Any, **changes: Any) -> Any:
    return ScaledPayload(**{**vars(handed), **changes})


FAULTS = {
    "the scale is lost": lambda p: _with(p, scale=torch.ones_like(p.scale)),
    "the scale is inverted": lambda p: _with(p, scale=p.scale.reciprocal()),
    "the convention is the other": lambda p: _with(p, convention="divide"),
    "the scale is off by its last bit": lambda p: _with(p, scale=p.scale * (1 + 2.0**-23)),
    "the logical dtype is fp32": lambda p: _with(p, logical_dtype=torch.float32),
    "one value is another": lambda p: _with(p, payload=_flipped(p.payload)),
}


def _flipped(payload: Any) -> Any:
    bits = payload.contiguous().view(torch.uint8).clone()
    bits[0, 0] ^= 0x08
    return bits.view(payload.dtype)


@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_handed_over_wrong_fails(fault: str, recipe: str, monkeypatch: Patch) -> None:
    monkeypatch.setattr(quantized_tensor, "read_payload", _planted(FAULTS[fault]))
    bad = failed(judged(recipe))
    assert {name for name in bad if name.startswith(("rows.", "weight."))}
    if "lost" in fault:
        assert "rows.scale-matters" in bad
    if "dtype" in fault:
        assert "rows.logical" in bad
    else:
        assert {"rows.parity", "weight.parity", "gradient.turned.parity"} <= bad


def test_reading_that_dequantizes_fails(monkeypatch: Patch) -> None:
    plain = quantized_tensor.read_payload

    def read(tensor: Any) -> Any:
        tensor.dequantize() if not isinstance(tensor._data, type(None)) else None
        return plain(tensor)

    monkeypatch.setattr(quantized_tensor, "read_payload", read)
    assert "rows.reads-nothing" in failed(judged("delayed"))


def test_a_tensor_that_nobody_reads_fails(monkeypatch: Patch) -> None:
    monkeypatch.setattr(quantized_tensor, "_READERS", {})
    bench = new_bench()
    assert wrappers.check_tensor(bench, "rows", te.one_scale(), "tensor") is None
    assert failed(bench) == {"rows.handed-over"}


def test_a_layer_that_dequantizes_in_silence_fails(monkeypatch: Patch) -> None:
    def trained(bench: Bench, recipe: str) -> Any:
        tensor = te.one_scale()
        return SimpleNamespace(recipe=recipe), lambda one: tensor.dequantize(), SimpleNamespace(recipe=recipe)

    monkeypatch.setattr(wrappers, "_trained_layer", trained)
    bench = judged("delayed")
    assert failed(bench) == {"layer.silent", "stored.silent"}
    (detail,) = {check.detail for check in bench.checks if check.name == "layer.silent"}
    assert "Float8Tensor.dequantize at test_wrappers_probe.py" in detail


def test_a_watch_that_sees_nothing_fails_its_control(monkeypatch: Patch) -> None:
    from megacpp_validate.probes.fp8 import wrappers as dequantizations

    monkeypatch.setattr(dequantizations.Watch, "note", lambda self, what: None)
    assert {"control.method", "control.operator", "control.cast", "control.said"} <= failed(judged("delayed"))


def test_torchaos_scale_that_multiplies_fails(monkeypatch: Patch) -> None:
    monkeypatch.setattr(quantized_tensor, "read_payload", _planted(lambda p: _with(p, convention="multiply")))
    bench = new_bench()
    wrappers.check_torchao(bench)
    assert {"tensor.parity", "row.parity", "column.turned.parity"} <= failed(bench)


# --- derived ----------------------------------------------------------------------------------------------------------


def derived(tensor: Any = None) -> Bench:
    bench = new_bench()
    check_derived(bench, "derived", te.one_scale() if tensor is None else tensor)
    return bench


@pytest.mark.parametrize(
    "make",
    [te.one_scale, lambda: te.one_scale(gradient=True), lambda: te.blocks(256, 384, square=True),
     lambda: te.blocks(64, 256, square=False), te.exponents],
    ids=["one-scale", "gradient", "squares", "rows", "exponents"],
)  # fmt: skip
def test_what_is_derived_passes(make: Any) -> None:
    bench = derived(make())
    assert failed(bench) == set()
    assert len(bench.checks) == len(derive.deeds(8, 8)) + 1


def moving(change: Any, *places: str) -> Any:
    """change(new tensor, old one) after `moved`, where it is called by one of these."""

    def plant(patch: Patch) -> None:
        plain = te.Float8Tensor.moved

        def moved(self: Any, data: Any) -> Any:
            made = plain(self, data)
            if sys._getframe(1).f_code.co_name in places:
                change(made, self)
            return made

        patch.setattr(te.Float8Tensor, "moved", moved)

    return plant


def forget_scale(made: Any, _: Any) -> None:
    made._scale_inv = torch.ones_like(made._scale_inv)


def round_scale(made: Any, _: Any) -> None:
    made._scale_inv = made._scale_inv.bfloat16().float()


def lose_scale(made: Any, _: Any) -> None:
    made._scale_inv = None


def other_format(made: Any, _: Any) -> None:
    made._fp8_dtype = SimpleNamespace(name="kFloat8E5M2")


def from_the_start(made: Any, old: Any) -> None:
    made._data = old._data.flatten()[: made._data.numel()].view(made._data.shape)


def in_place(made: Any, old: Any) -> None:
    old._scale_inv.mul_(2.0)


DISPATCH = "__torch_dispatch__"
DERIVED = {
    "view-forgets-the-scale": (moving(forget_scale, "view"), "derived.view"),
    "reshape-forgets-the-scale": (moving(forget_scale, "reshape"), "derived.reshape"),
    "operator-forgets-the-scale": (moving(forget_scale, DISPATCH), "derived.slice"),
    "clone-rounds-the-scale": (moving(round_scale, "clone"), "derived.clone"),
    "clone-of-a-view": (moving(round_scale, "clone"), "derived.clone-of-view"),
    "detach-loses-the-scale": (moving(lose_scale, DISPATCH), "derived.detach"),
    "view-in-another-format": (moving(other_format, "view"), "derived.view-back"),
    "slice-of-the-start": (moving(from_the_start, DISPATCH), "derived.select"),
    "view-changes-its-source": (moving(in_place, "view"), "derived.left-alone"),
}


@pytest.mark.parametrize("fault", DERIVED)
def test_what_is_derived_wrong_fails(fault: str, monkeypatch: Patch) -> None:
    plant, caught = DERIVED[fault]
    plant(monkeypatch)
    assert caught in failed(derived())


def test_a_kept_deed_that_is_refused_fails(monkeypatch: Patch) -> None:
    def refuse(self: Any, *shape: int) -> Any:
        raise NotImplementedError("no views")

    monkeypatch.setattr(te.Float8Tensor, "view", refuse)
    bad = failed(derived())
    assert "derived.view" in bad
    assert "derived.view-back" not in bad  # a chain that ends in a refusal is loud


def test_a_view_that_is_dequantized_in_silence_fails(monkeypatch: Patch) -> None:
    monkeypatch.setattr(te.Float8Tensor, "view", lambda self, *shape: self.dequantize().view(*shape))
    assert "derived.view" in failed(derived())
