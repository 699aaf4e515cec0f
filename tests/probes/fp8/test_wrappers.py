"""The probe of wrapped tensors passes on tensors stored as vendors store them; every planted fault fails its check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megacpp_validate.bridge import quantized_tensor, torchao
from megacpp_validate.bridge.quantized_tensor import ScaledPayload
from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import wrappers as probe
from megacpp_validate.probes.fp8.wrappers import INNER, OUTER, ROWS, Watch, check_derived, watching_dequantizations
from megacpp_validate.probes.order import Order, Target
from tests.bridge import te_tensors as te
from tests.bridge.torchao_ready import torch
from tests.probes.planting import Patch, Plant, changing, check_caught, failed, putting

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def new_bench() -> Bench:
    stands_on = ("quantized_tensor",)
    return Bench(Order("fp8_wrappers", "stack", Target("cpu", ""), "te", code="fp8.wrappers", stands_on=stands_on))


def tensors(recipe: str) -> Iterator[tuple[str, Any]]:
    sizes = {"rows": (ROWS, INNER), "weight": (OUTER, INNER), "gradient": (ROWS, OUTER)}
    for name, (high, wide) in sizes.items():
        for ending, turned in (("", False), (".turned", True)):
            if recipe == "block":
                made = te.blocks(high, wide, square=name == "weight", turned=turned)
            else:
                made = te.one_scale(high, wide, turned=turned, gradient=name == "gradient")
            yield f"{name}{ending}", made


@pytest.fixture(autouse=True)
def _layers(monkeypatch: Patch) -> None:
    """Layers that run in silence: what they do is Transformer Engine's."""

    def made(bench: Bench, recipe: str) -> Any:
        stored = SimpleNamespace(weight=dict(tensors(recipe))["weight"])
        return SimpleNamespace(recipe=recipe), stored, lambda one: None

    monkeypatch.setattr(probe, "_layers", made)
    monkeypatch.setattr(probe, "_quantized", lambda bench, layer: tensors(layer.recipe))


def by(recipe: str) -> Callable[[Bench], None]:
    return lambda bench: probe.check_te(bench, recipe)


@pytest.mark.parametrize("judge", [by("delayed"), by("current"), by("block"), probe.check_torchao])
def test_what_is_right_passes(judge: Callable[[Bench], None]) -> None:
    bench = new_bench()
    judge(bench)
    assert failed(bench) == set()
    assert len(bench.checks) > 25
    assert len(bench.quantizers) == 6


def test_without_torchao_or_a_recipe_it_is_not_run(monkeypatch: Patch) -> None:
    with pytest.raises(CannotRun, match="no recipe"):
        probe.probe(new_bench())
    monkeypatch.setattr(torchao.TORCHAO, "is_available", lambda: False)
    monkeypatch.setattr(torchao.TORCHAO, "why_unavailable", lambda: "it is not here. Next step: install it.")
    with pytest.raises(CannotRun, match="it is not here"):
        probe.probe(new_bench())


def handing(**change: Callable[[Any], Any]) -> Plant:
    """What is handed over has other fields."""

    def make(plain: Any) -> Any:
        def read(tensor: Any) -> Any:
            found = plain(tensor)
            if not isinstance(found, ScaledPayload):
                return found
            return ScaledPayload(**{**vars(found), **{name: fault(found) for name, fault in change.items()}})

        return read

    return changing(quantized_tensor, "read_payload", make)


def reads(plain: Any) -> Any:
    return lambda tensor: (tensor._data is not None and tensor.dequantize(), plain(tensor))[1]


def silent_layers(patch: Patch) -> None:
    tensor, plain = te.one_scale(), probe._layers
    patch.setattr(probe, "_layers", lambda *given: (*plain(*given)[:2], lambda one: tensor.dequantize()))


PARITY = {"rows.parity", "weight.parity", "gradient.turned.parity"}
UNREAD = dict.fromkeys(quantized_tensor._READERS)
FAULTS: dict[str, tuple[Callable[[Bench], None], Plant, set[str]]] = {
    "the scale is lost": (
        by("delayed"), handing(scale=lambda p: torch.ones_like(p.scale)), PARITY | {"rows.scale-matters"},
    ),
    "the scale is inverted": (by("block"), handing(scale=lambda p: p.scale.reciprocal()), PARITY),
    "the logical dtype": (by("delayed"), handing(logical_dtype=lambda p: torch.float32), {"rows.logical"}),
    "reading dequantizes": (by("delayed"), changing(quantized_tensor, "read_payload", reads), {"rows.reads-nothing"}),
    "nobody reads": (by("delayed"), putting(quantized_tensor, "_READERS", UNREAD), {"rows.handed-over"}),
    "silent layers": (by("delayed"), silent_layers, {"layer.silent", "stored.silent"}),
    "torchao's scale multiplies": (
        probe.check_torchao, handing(convention=lambda p: "multiply"),
        {"tensor.parity", "row.parity", "column.turned.parity"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("judge", "plant", "wanted"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(judge: Callable[[Bench], None], plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench(), judge, plant, wanted)


# --- derived ----------------------------------------------------------------------------------------------------------

MADE: dict[str, Callable[[], Any]] = {
    "one scale": te.one_scale,
    "gradient": lambda: te.one_scale(gradient=True),
    "squares": lambda: te.blocks(256, 384, square=True),
    "rows": lambda: te.blocks(64, 256, square=False),
    "exponents": te.exponents,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_is_derived_passes(make: Callable[[], Any]) -> None:
    bench = new_bench()
    check_derived(bench, "rows", make())
    assert failed(bench) == set()


def moving(change: Callable[[Any, Any], None], place: str) -> Plant:
    """change(new tensor, old one) after `moved`, where it is called by this method."""

    def make(plain: Any) -> Any:
        def moved(self: Any, data: Any) -> Any:
            made = plain(self, data)
            if sys._getframe(1).f_code.co_name == place:
                change(made, self)
            return made

        return moved

    return changing(te.Float8Tensor, "moved", make)


def scaled(change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    return lambda made, _: setattr(made, "_scale_inv", change(made._scale_inv))


def other_format(made: Any, _: Any) -> None:
    made._fp8_dtype = SimpleNamespace(name="kFloat8E5M2")


def inverted(reduced: Any) -> Any:
    """As a tensor is saved, with the scale in the place of its inverse."""
    rebuild, (data, kind, scale) = reduced
    return rebuild, (data, kind, 1.0 / scale)


DISPATCH = "__torch_dispatch__"
DERIVED: dict[str, Plant] = {
    "view forgets the scale": moving(scaled(torch.ones_like), "view"),
    "operator forgets the scale": moving(scaled(torch.ones_like), DISPATCH),
    "clone rounds the scale": moving(scaled(lambda one: one.bfloat16().float()), "clone"),
    "view in another format": moving(other_format, "view"),
    "a copy into a tensor, or its data, leaves the scale": putting(te.Float8Tensor, "take_scale", lambda *_: None),
    "saved with the scale": changing(
        te.Float8Tensor, "__reduce_ex__", lambda plain: lambda self, _: inverted(plain(self, _))
    ),
    "view changes its source": moving(lambda made, old: old._scale_inv.mul_(2.0), "view"),
}


@pytest.mark.parametrize("plant", DERIVED.values(), ids=DERIVED)
def test_what_is_derived_wrong_is_caught(plant: Plant) -> None:
    judge = lambda bench: check_derived(bench, "rows", te.one_scale())  # noqa: E731
    check_caught(new_bench(), judge, plant, {"rows.derived"})


# --- the watch --------------------------------------------------------------------------------------------------------


def watch(deed: Callable[[], Any]) -> Watch:
    with watching_dequantizations(quantized_tensor.saying) as seen:
        deed()
    return seen


def test_an_operator_that_knows_no_such_tensor_and_a_cast_in_the_backward_pass_are_counted() -> None:
    assert watch(lambda: te.one_scale() * 1.0).silent
    payload = quantized_tensor.read_payload(te.one_scale()).payload  # type: ignore[union-attr]
    rows = torch.ones(48, 32, requires_grad=True)
    rows.register_hook(lambda gradient: gradient * payload.to(torch.float32))
    seen = watch(lambda: (rows * 2).sum().backward())
    assert len(seen.silent) == len(seen.seen) == 1


def test_what_was_announced_is_not_silent_and_a_compiled_kernel_is_seen(monkeypatch: Patch) -> None:
    seen = watch(lambda: quantized_tensor.dequantize(te.blocks(8, 128, square=False), "nobody takes it"))
    assert [bool(one.because) for one in seen.seen] == [True]
    compiled = ModuleType("transformer_engine_torch")
    compiled.dequantize = lambda tensor, dtype: tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", compiled)
    assert watch(lambda: compiled.dequantize(1, 2)).silent == ["transformer_engine_torch.dequantize"]
