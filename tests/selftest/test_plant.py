"""Every kind of fault has its code, every mutant its patch point; what a fault does shows in the selftest's kills."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.catalog.bridge import Catalog  # noqa: E402
from megacpp_validate.evidence.selftest import Fault, Mutant  # noqa: E402
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


def step(layer: Any) -> dict[str, Any]:
    given = rows()
    out = layer(given)
    out.backward(torch.ones_like(out))
    return {"out": out.detach(), "inp": given.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}


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
    "no-layer": vendor("linear", Fault.PARAMETERS_FRESH),
    "returns-nothing": vendor("linear", Fault.SKIPPED, returns="gone"),
}


@pytest.mark.parametrize("mutant", UNREACHED.values(), ids=UNREACHED)
def test_a_fault_that_does_not_apply_changes_nothing_and_is_not_reached(mutant: Mutant) -> None:
    plain = step(linear())
    with planted(mutant) as trace:
        assert all(value.equal(plain[name]) for name, value in step(linear()).items())
    assert trace.reached == 0


# A planted function that misses a parameter would raise, and pass for a fault that is caught.
NEEDED: dict[Fault, set[str]] = {
    Fault.ANSWERS: {"value"}, Fault.ENTRY_LOST: {"name"}, Fault.SCALED: {"factor"},
    Fault.ARGUMENT: {"name", "value"}, Fault.ARGUMENT_LOST: {"name"}, Fault.ARGUMENT_SCALED: {"name", "factor"},
    Fault.ARGUMENT_ROLLED: {"name", "axis"},
}  # fmt: skip


def test_every_shipped_mutant_has_its_parameters_and_its_patch_point(catalog: Catalog) -> None:
    gone = {}
    for row in catalog.mutants:
        assert NEEDED.get(row.fault, set()) <= row.parameters.keys(), row.id
        try:
            with planted(row):
                pass
        except PlantPointGone as fault:
            gone[row.id] = str(fault)
    assert gone == {}
