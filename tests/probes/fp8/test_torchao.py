"""The probe of torchao passes where its products are emulated, and each planted fault fails its check."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from megacpp_validate.bridge import torchao
from megacpp_validate.probes.bench import Bench, CannotRun
from megacpp_validate.probes.fp8 import torchao as probe
from megacpp_validate.probes.fp8.torchao import LAYERS, one_rank
from megacpp_validate.probes.order import Order, Target
from tests.bridge.torchao_ready import torch
from tests.probes.planting import Patch, Plant, after, check_caught, failed, putting

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
LAYER = torchao.float8_linear.require()


def new_bench() -> Bench:
    order = Order("fp8_torchao", "stack", Target("cpu", ""), "te", code="fp8.torchao", stands_on=("torchao",))
    return Bench(order)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with one_rank("cpu") as made:
        yield made


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: Patch) -> None:
    torch._dynamo.reset()  # no graph of another test
    monkeypatch.setattr(torchao, "why_not_float8", lambda *_, **__: None)


def judge(mesh: Any, bench: Bench, recipe: Any = "tensorwise", *, all_gather: bool = False) -> None:
    probe.check_recipe(bench, mesh, recipe, "aot_eager", float8_all_gather=all_gather)


def test_without_torchao_and_on_a_cpu_nothing_is_known(monkeypatch: Patch) -> None:
    with pytest.raises(CannotRun, match="FP8 GPU"):
        probe.probe(new_bench())
    monkeypatch.setattr(torchao.TORCHAO, "is_available", lambda: False)
    monkeypatch.setattr(torchao.TORCHAO, "why_unavailable", lambda: "it is not here. Next step: install it.")
    with pytest.raises(CannotRun, match="it is not here"):
        probe.probe(new_bench())


@pytest.mark.parametrize(("recipe", "all_gather"), [case[:2] for case in probe.CASES])
def test_every_recipe_passes(recipe: str, all_gather: bool, mesh: Any) -> None:
    bench = new_bench()
    judge(mesh, bench, recipe, all_gather=all_gather)
    assert failed(bench) == set()
    rows = {(row.tensor, row.format, row.block) for row in bench.quantizers}
    assert ("input", "float8_e4m3", "tensor" if recipe == "tensorwise" else "row") in rows
    assert {row.kind for row in bench.quantizers} == {"Float8TrainingTensor"}


def in_bf16(self: Any, rows: Any) -> Any:
    return torch.nn.functional.linear(rows, self.weight, self.bias)


def in_bf16_when_compiled(patch: Patch) -> None:
    plain = LAYER.forward

    def chosen(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return (in_bf16 if torch.compiler.is_compiling() else plain)(self, rows)

    patch.setattr(LAYER, "forward", chosen)


def not_compiled(patch: Patch) -> None:
    patch.setattr(torch, "compile", lambda model, **options: model)


def eager(plant: Plant) -> Plant:
    """For faults that eager code shows: tracing takes most of the time."""
    return lambda patch: (not_compiled(patch), plant(patch))


def dequantizing(patch: Patch) -> None:
    plain, cast = LAYER.forward, torchao.cast_to_float8.require()

    def forward(self: Any, rows: Any) -> Any:
        cast(rows.detach(), torch.ones(()), torch.float8_e4m3fn).to_original_precision()
        return plain(self, rows)

    patch.setattr(LAYER, "forward", forward)


def ran_as(recipe: Any) -> Plant:
    plain = torchao.float8_config
    return eager(putting(torchao, "float8_config", lambda _, **options: plain(recipe, **options)))


FAULTS: dict[str, tuple[str, Plant, set[str]]] = {
    "in bf16": (
        "tensorwise", putting(LAYER, "forward", in_bf16),
        {"eager.products", "compiled.products", "eager.fc1.wgrad.operands", "*.fc2.forward.in-fp8"},
    ),
    "in bf16 when compiled": ("tensorwise", in_bf16_when_compiled, {"compiled.products"}),
    "compiling gives up": ("tensorwise", not_compiled, {"compiled.regions"}),
    "all in FP8": ("rowwise_with_gw_hp", ran_as("rowwise"), {"eager.products"}),
    "dequantizes": ("tensorwise", eager(dequantizing), {"eager.silent"}),
    "scaled output": (
        "tensorwise", eager(after(LAYER, "forward", lambda out: out * 1.03)),
        {f"eager.{name}.forward" for name in LAYERS},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("recipe", "plant", "wanted"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_caught(recipe: str, plant: Plant, wanted: set[str], mesh: Any) -> None:
    found = check_caught(new_bench(), partial(judge, mesh, recipe=recipe), plant, wanted)
    assert plant is not in_bf16_when_compiled or all(name.startswith("compiled.") for name in found)
