"""The probe of the layer spec passes on both paths, and each planted fault fails the check that is meant for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge import layer_spec as spec
from megacpp_validate.bridge.backends import Refusal
from megacpp_validate.bridge.vendor import VendorEntryMissing
from megacpp_validate.native import mamba, recurrent
from megacpp_validate.native.norms import RMSNorm
from megacpp_validate.probes import layer_spec as probe
from tests.probes.planting import (
    RECIPES,
    Patch,
    Plant,
    changing,
    check_caught,
    failed,
    new_bench,
    run_probe,
)  # fmt: skip

run = partial(run_probe, probe)


@pytest.mark.parametrize("quick", [True, False])
def test_the_native_path_passes(quick: bool) -> None:
    bench = run("native", quick=quick)
    assert failed(bench) == set()
    assert {backend.claimed for backend in bench.backends} == {"native"}


@pytest.mark.usefixtures("te_double")
def test_transformer_engine_passes_in_every_recipe() -> None:
    bench = run("te", RECIPES)
    assert failed(bench) == set()
    assert {backend.path for backend in bench.backends if backend.claimed == "native"} == {"bf16.recurrent"}
    names = {check.name for check in bench.checks}
    for recipe in RECIPES:
        assert {f"{recipe}.in_projection.forward", f"{recipe}.mlp.swiglu.grad.fc1_weight"} <= names


@pytest.mark.usefixtures("te_double")
def test_attention_that_cannot_run_is_met_after_everything_else(monkeypatch: Patch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("cuDNN: set_attribute on a reshape operation")

    monkeypatch.setattr(te.dot_product_attention.require(), "forward", broken)
    bench = new_bench("layer_spec", "te", RECIPES)
    with pytest.raises(RuntimeError, match="reshape"):
        probe.probe(bench)
    assert failed(bench) == set()
    assert {"block.mlp.gelu.forward", "bf16.experts.forward"} <= {check.name for check in bench.checks}


def test_te_requested_and_not_there_is_no_pass() -> None:
    with pytest.raises(VendorEntryMissing):
        run("te")


def mlp_refused(real: Any) -> Any:
    off = Refusal("te", "device", "not today")
    return lambda features, name, device: off if name == "mlp" else real(features, name, device)


def argument(builder: str, **other: Any) -> Plant:
    """A builder that passes something else on."""
    return changing(spec, builder, lambda real: lambda *given, **named: real(*given, **{**named, **other}))


def of_scan(change: Callable[..., Any]) -> Plant:
    return changing(mamba, "ssd_chunked", lambda real: lambda *given, **named: change(partial(real, **named), *given))


def of_recurrence(change: Callable[..., Any]) -> Plant:
    return changing(recurrent, "matrix_recurrence_chunked", lambda real: partial(change, real))


def forget_between(real: Any, x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
    parts = [real(x[:, s], dt[:, s], a, b[:, s], c[:, s])[0] for s in (slice(0, 8), slice(8, None))]
    return torch.cat(parts, 1), None


FAULTS: dict[str, tuple[Plant, set[str]]] = {
    "another class": (
        changing(spec, "te_layer_spec", lambda real: lambda *given: {**real(*given), "norm": RMSNorm}),
        {"spec.te.norm"},
    ),
    "fallback": (changing(spec, "why_not_te", mlp_refused), {"spec.chosen.MLP", "fp32.mlp.gelu.backend"}),
    "a chunk forgotten": (of_scan(forget_between), {"bf16.mixer.forward", "bf16.mixer.grad.input"}),
    "queries of the row before": (
        of_recurrence(lambda real, q, *rest, **named: real(q.roll(1, 1), *rest, **named)), {"bf16.recurrent.forward"},
    ),
    "attention of another shape": (argument("te_attention_layer", num_gqa_groups=4), {"*.whole.*.parameters"}),
}  # fmt: skip


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize(("plant", "wanted"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_caught(plant: Plant, wanted: set[str]) -> None:
    check_caught(new_bench("layer_spec", "te"), probe.probe, plant, wanted)
