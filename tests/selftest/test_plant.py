"""Each kind of fault does what it says, tells that it did, and is an error where its patch point is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.catalog.bridge import Catalog  # noqa: E402
from megacpp_validate.evidence.selftest import Fault, Mutant  # noqa: E402
from megacpp_validate.probes.observe import observed_backends  # noqa: E402
from megacpp_validate.selftest.faults import FAULTS  # noqa: E402
from megacpp_validate.selftest.plant import PlantPointGone, plant  # noqa: E402
from tests.selftest.planting import planted, vendor, wrapper  # noqa: E402

pytestmark = pytest.mark.usefixtures("te_double")


def linear() -> Any:
    torch.manual_seed(0)
    layer = te.linear.require()(16, 32, params_dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    return layer


def rows() -> Any:
    torch.manual_seed(1)
    return torch.randn(6, 16, requires_grad=True)


def test_every_fault_has_code_that_plants_it() -> None:
    assert {*FAULTS, Fault.MISSING, Fault.ENTRY_LOST} == set(Fault)


def _nan_in_one(out: Any) -> Any:
    bad = torch.isnan(out)
    return bad.sum() == 1


OUTPUTS: dict[Fault, tuple[dict[str, Any], Callable[[Any, Any], Any]]] = {
    Fault.ZEROS: ({}, lambda out, plain: (out == 0).all()),
    Fault.HALF_ZEROS: ({}, lambda out, plain: (out[:3] == 0).all() and out[3:].equal(plain[3:])),
    Fault.SCALED: ({"factor": 1.01}, lambda out, plain: out.equal(plain * 1.01)),
    Fault.NEGATED: ({}, lambda out, plain: out.equal(-plain)),
    Fault.SHUFFLED: ({}, lambda out, plain: out[1:].equal(plain[:-1]) and out[0].equal(plain[-1])),
    Fault.NAN: ({}, lambda out, plain: _nan_in_one(out)),
}


@pytest.mark.parametrize("fault", OUTPUTS)
def test_an_output_is_damaged(fault: Fault) -> None:
    plain = linear()(rows()).detach()
    parameters, holds = OUTPUTS[fault]
    with planted(vendor("linear", fault, **parameters)) as trace:
        layer = linear()
        assert type(layer).__name__ == "Linear"
        assert trace.reached == 0
        out = layer(rows())
        assert holds(out.detach(), plain)
        assert observed_backends(out) == ("te",)
    assert trace.reached == 1
    assert linear()(rows()).equal(plain)


def step(layer: Any) -> dict[str, Any]:
    given = rows()
    out = layer(given)
    out.backward(torch.ones_like(out))
    return {"out": out.detach(), "inp": given.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}


@pytest.mark.parametrize("name", ["inp", "weight", "bias"])
def test_a_gradient_is_damaged_and_nothing_else(name: str) -> None:
    plain = step(linear())
    with planted(vendor("linear", Fault.SCALED, tensor=f"gradient.{name}", factor=2.0)) as trace:
        layer = linear()
        seen = step(layer)
        layer(rows())  # a second call must not damage it twice
    assert trace.reached == 1
    for key, value in plain.items():
        torch.testing.assert_close(seen[key], value * 2 if key == name else value)


GONE: dict[str, Mutant] = {
    "accessor": vendor("gone", Fault.ZEROS),
    "module": wrapper("gone.x", Fault.ZEROS),
    "no-attribute": wrapper("attention", Fault.ZEROS),
    "attribute": wrapper("attention.gone", Fault.ZEROS),
    "attribute-of-a-class": wrapper("fp8_scope.Zones.gone", Fault.ANSWERS, value=""),
    "attribute-of-a-value": vendor("fp8_state_manager.gone", Fault.SKIPPED),
    "row": wrapper("attention.REFUSED_OPTIONS", Fault.ENTRY_LOST, name="gone"),
    "not-callable": wrapper("attention.NATIVE_PATH", Fault.ZEROS),
}


@pytest.mark.parametrize("mutant", GONE.values(), ids=GONE)
def test_a_patch_point_that_is_gone_is_an_error(mutant: Mutant) -> None:
    with pytest.raises(PlantPointGone, match="Next step"):
        plant(mutant)


UNREACHED: dict[str, Mutant] = {
    "argument": vendor("linear", Fault.ARGUMENT_LOST, name="gone"),
    "gradient": vendor("linear", Fault.ZEROS, tensor="gradient.gone"),
    "halves-of-nothing": vendor("linear", Fault.HALVES_SWAPPED, name="gone"),
    "no-experts": vendor("linear", Fault.EXPERTS_EXCHANGED, first=0, second=1),
    "no-rope": vendor("linear", Fault.ROPE_LATE),
    "no-layer": vendor("linear", Fault.PARAMETERS_FRESH),
    "returns-nothing": vendor("linear", Fault.SKIPPED, returns="gone"),
}


@pytest.mark.parametrize("mutant", UNREACHED.values(), ids=UNREACHED)
def test_a_fault_that_does_not_apply_changes_nothing_and_is_not_reached(mutant: Mutant) -> None:
    plain = step(linear())
    with planted(mutant) as trace:
        assert all(value.equal(plain[name]) for name, value in step(linear()).items())
    assert trace.reached == 0


def test_every_shipped_mutant_has_its_patch_point(catalog: Catalog) -> None:
    gone = {}
    for row in catalog.mutants:
        try:
            with planted(row):
                pass
        except PlantPointGone as fault:
            gone[row.id] = str(fault)
    assert gone == {}
