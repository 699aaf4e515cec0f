"""The torchao probe passes as torchao is, on a CPU that multiplies FP8 slowly; every planted fault fails by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bridge"))
from megacpp_validate.bridge import torchao
from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import torchao as probe_module
from megacpp_validate.probes.fp8.torchao import LAYERS, Tree, check_order, check_refusals, one_rank
from megacpp_validate.probes.order import Order, Target
from tests.bridge.torchao_ready import torch
from tests.probes.planted_numbers import failed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
Patch = pytest.MonkeyPatch
LAYER = torchao.float8_linear.require()


def new_bench() -> Bench:
    order = Order("fp8_torchao", "stack", Target("cpu", ""), "te", code="fp8.torchao", stands_on=("torchao",))
    return Bench(order)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with one_rank("cpu") as made:
        yield made


@pytest.fixture(autouse=True)
def _no_graph_of_another_test() -> None:
    torch._dynamo.reset()


@pytest.fixture
def fp8_on_cpu(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torchao, "why_not_float8", lambda *_, **__: None)


@pytest.fixture
def not_compiled(monkeypatch: Patch) -> None:
    """For faults that eager code shows: tracing takes most of the time, and is then told as missing."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)


def judged(mesh: Any, recipe: str = "tensorwise", *, float8_all_gather: bool = False) -> Bench:
    bench = new_bench()
    probe_module.check_recipe(bench, mesh, recipe, "aot_eager", float8_all_gather=float8_all_gather)
    return bench


def test_without_torchao_nothing_is_known(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torchao, "is_torchao_available", lambda: False)
    monkeypatch.setattr(torchao, "why_torchao_is_unavailable", lambda: "it is not here. Next step: install it.")
    bench = new_bench()
    with pytest.raises(CannotRun, match="it is not here"):
        probe_module.probe(bench)
    assert bench.checks == []


def test_on_a_cpu_refusals_and_order_hold_and_the_rest_is_not_run() -> None:
    bench = new_bench()
    with pytest.raises(CannotRun, match="FP8 GPU"):
        probe_module.probe(bench)
    assert failed(bench) == set()
    assert len(bench.checks) > 10


@pytest.mark.usefixtures("fp8_on_cpu")
@pytest.mark.parametrize(("recipe", "float8_all_gather"), [case[:2] for case in probe_module.CASES])
def test_every_recipe_passes(recipe: str, float8_all_gather: bool, mesh: Any) -> None:
    bench = judged(mesh, recipe, float8_all_gather=float8_all_gather)
    assert failed(bench) == set()
    assert len(bench.checks) > 25
    rows = {(row.tensor, row.format, row.block) for row in bench.quantizers}
    assert ("input", "float8_e4m3", "tensor" if recipe == "tensorwise" else "row") in rows
    assert {row.kind for row in bench.quantizers} == {"Float8TrainingTensor"}


# --- planted ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("why_compiled", "behind.compiled"),
        ("why_sharded", "behind.sharded"),
        ("why_not_meta", "behind.not-meta"),
        ("why_converted", "behind.converted"),
    ],
)
def test_a_look_that_sees_nothing_fails_its_check(where: str, name: str, mesh: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torchao, where, lambda _: "")
    bench = new_bench()
    check_order(bench, mesh)
    assert name in failed(bench)


def test_a_lane_that_takes_any_device_fails(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torchao, "why_not_float8", lambda *_, **__: None)
    bench = new_bench()
    check_refusals(bench)
    assert failed(bench) == {"cpu", "capability-8.0"}


def _plain(self: Any, rows: Any) -> Any:
    return torch.nn.functional.linear(rows, self.weight, self.bias)


@pytest.mark.usefixtures("fp8_on_cpu")
def test_a_layer_that_multiplies_in_bf16_fails(mesh: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(LAYER, "forward", _plain)
    bad = failed(judged(mesh))
    assert {"tensorwise.eager.products", "tensorwise.compiled.products", "tensorwise.eager.fc1.wgrad.operands"} <= bad
    assert {f"tensorwise.{kind}.fc2.forward.in-fp8" for kind in ("eager", "compiled")} <= bad


@pytest.mark.usefixtures("fp8_on_cpu")
def test_falling_back_only_when_compiled_fails_there_alone(mesh: Any, monkeypatch: Patch) -> None:
    plain = LAYER.forward

    def forward(self: Any, rows: Any) -> Any:
        return _plain(self, rows) if torch.compiler.is_compiling() else plain(self, rows)

    monkeypatch.setattr(LAYER, "forward", forward)
    bad = failed(judged(mesh))
    assert "tensorwise.compiled.products" in bad
    assert bad
    assert all(name.startswith("tensorwise.compiled.") for name in bad)


@pytest.mark.usefixtures("fp8_on_cpu")
def test_a_graph_of_other_layers_fails(mesh: Any, monkeypatch: Patch) -> None:
    other = Tree(torch.bfloat16)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: real(other, **options))
    assert "tensorwise.compiled.products" in failed(judged(mesh))


@pytest.mark.usefixtures("fp8_on_cpu", "not_compiled")
def test_compiling_that_gives_up_fails(mesh: Any) -> None:
    assert failed(judged(mesh)) == {"tensorwise.compiled.regions"}


@pytest.mark.usefixtures("fp8_on_cpu", "not_compiled")
@pytest.mark.parametrize(
    ("asked", "ran"),
    [
        ("tensorwise", "rowwise"),
        ("rowwise", "tensorwise"),
        ("rowwise_with_gw_hp", "rowwise"),
        ("rowwise", "rowwise_with_gw_hp"),
    ],
)
def test_another_recipe_fails(asked: Any, ran: Any, mesh: Any, monkeypatch: Patch) -> None:
    plain = torchao.float8_config
    monkeypatch.setattr(torchao, "float8_config", lambda _, **options: plain(ran, **options))
    bad = failed(judged(mesh, asked))
    assert any(name.endswith(".operands") for name in bad) or f"{asked}.eager.products" in bad


@pytest.mark.usefixtures("fp8_on_cpu", "not_compiled")
def test_a_layer_that_dequantizes_what_it_cast_fails(mesh: Any, monkeypatch: Patch) -> None:
    plain, cast = LAYER.forward, torchao.cast_to_float8.require()

    def forward(self: Any, rows: Any) -> Any:
        cast(rows.detach(), torch.ones(()), torch.float8_e4m3fn).to_original_precision()
        return plain(self, rows)

    monkeypatch.setattr(LAYER, "forward", forward)
    assert failed(judged(mesh)) == {"tensorwise.eager.silent", "tensorwise.compiled.regions"}


@pytest.mark.usefixtures("fp8_on_cpu", "not_compiled")
def test_an_output_that_is_scaled_fails(mesh: Any, monkeypatch: Patch) -> None:
    plain = LAYER.forward
    monkeypatch.setattr(LAYER, "forward", lambda self, rows: plain(self, rows) * 1.03)
    bad = failed(judged(mesh))
    assert {f"tensorwise.eager.{name}.forward" for name in LAYERS} <= bad


@pytest.mark.usefixtures("fp8_on_cpu", "not_compiled")
def test_scales_that_are_not_kept_fail(mesh: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(torchao, "after_step", lambda model: None)
    assert "tensorwise.all-gather.scales.after" in failed(judged(mesh, float8_all_gather=True))
