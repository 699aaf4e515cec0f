"""A planted NaN or Inf is named with its module, tensor, step and rank; a healthy run raises no alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn

from megacpp_validate.bridge.features import PRESETS
from megacpp_validate.training.language import Language
from megacpp_validate.training.layers import Build
from megacpp_validate.training.model import HybridModel
from megacpp_validate.training.parallel.non_finite import FiniteWatch, NonFinite, NotReproduced
from megacpp_validate.training.sizes import SIZES
from tests.training.parallel.gloo_ranks import on_ranks

pytestmark = pytest.mark.thorough


class Scaled(nn.Module):
    """Says what it is given, times a number that a test spoils; its gradient times another one."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.backward_factor = 1.0, 1.0

    def forward(self, rows: Any) -> Any:
        if self.backward_factor != 1.0 and rows.requires_grad:
            rows = rows + 0
            rows.register_hook(lambda gradient: gradient * self.backward_factor)
        return rows * self.factor


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scaled, self.between = nn.Linear(4, 4), Scaled(), 1.0

    def forward(self, rows: Any, *, bias: Any = None) -> tuple[Any, dict[str, Any]]:
        made = self.scaled(self.inner(rows)) * self.between
        return made if bias is None else made + bias, {"seen": made.detach()}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Part(), Part(), nn.Linear(4, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, rows: Any) -> Any:
        rows, _ = self.first(rows, bias=torch.ones(4))
        rows, _ = self.second(rows)
        return self.head(self.drop(rows))


def make() -> tuple[Small, Callable[[], Any]]:
    torch.manual_seed(5)
    model, rows = Small(), torch.randn(3, 4)

    def passes() -> Any:
        loss = model(rows).square().sum()
        loss.backward()
        return loss

    return model, passes


def spoil_weight(model: Small) -> None:
    with torch.no_grad():
        model.second.inner.weight[1, 2] = float("nan")


def put(name: str, attribute: str, value: float) -> Callable[[Small], None]:
    return lambda model: setattr(model.get_submodule(name), attribute, value)


INF = float("inf")


@pytest.mark.parametrize(
    ("plant", "module", "tensor", "flagged"),
    [
        (spoil_weight, "second.inner", "parameter weight", "second.inner"),
        (put("first.scaled", "factor", float("nan")), "first.scaled", "output", "first.scaled"),
        (put("second.scaled", "factor", INF), "second.scaled", "output", "second.scaled"),
        (put("second.scaled", "factor", 1e39), "second.scaled", "output", "second.scaled"),  # overflows fp32
        (put("first", "between", INF), "first", "output 0", "first"),
        (put("second.scaled", "backward_factor", float("nan")), "second.scaled", "gradient of the input", ""),
    ],
)
def test_what_was_planted_is_named(plant: Callable[[Small], None], module: str, tensor: str, flagged: str) -> None:
    model, passes = make()
    watch = FiniteWatch(model)
    watch.begin()
    assert watch.is_finite(passes())
    plant(model)
    model.zero_grad()
    watch.begin()
    loss = passes()
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert not watch.is_finite(loss, norm)
    assert flagged in watch.flagged() if flagged else watch.flagged() == ()
    found = watch.find(passes, step=17)
    assert (found.step, found.rank, found.module, found.tensor) == (17, 0, module, tensor)
    assert f"step 17, rank 0: the first value that is no number is the {tensor} of {module}" in found.words()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_is_run_again_with_the_same_chances() -> None:
    model, passes = make()
    watch, seen = FiniteWatch(model), []
    handle = model.drop.register_forward_hook(lambda module, given, out: seen.append(out.detach().clone()))
    watch.begin()
    passes()
    model.drop.train()
    with pytest.raises(NotReproduced, match="none when it was run again"):
        watch.find(passes, step=0)
    passes()
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    handle.remove()


def test_flags_are_of_one_step_and_hooks_come_off() -> None:
    model, passes = make()
    before = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    watch = FiniteWatch(model)
    model.first.scaled.factor = INF
    passes()
    assert not watch.is_finite()
    model.first.scaled.factor = 1.0
    watch.begin()
    assert watch.is_finite(passes())
    assert not watch.is_finite(torch.tensor(float("nan")))
    with pytest.raises(NotReproduced):
        watch.find(passes, step=0)
    watch.close()
    assert {name: len(module._forward_hooks) for name, module in model.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_as_large_as_there_are_raise_no_alarm(dtype: Any) -> None:
    layer = nn.Identity()
    watch = FiniteWatch(layer)
    most = torch.finfo(dtype).max
    layer(torch.tensor([most, -most, 0.0], dtype=dtype))
    layer(torch.empty(0, dtype=dtype))
    assert watch.is_finite()
    layer((torch.ones(2, dtype=torch.int64), {"deep": [torch.tensor([1.0, float("nan")], dtype=dtype)]}))
    assert watch.flagged() == ("",)


@pytest.mark.parametrize("place", [1, 2, 4])
def test_the_hybrid_model_names_the_layer(place: int) -> None:
    size = SIZES["tiny"]
    model = HybridModel(size, Build(PRESETS["off"]), seed=0)
    tokens = Language(size.grammar, seed=0).batch(0, 2, size.length + 1)
    watch = FiniteWatch(model)

    def passes() -> Any:
        losses = model.losses(tokens)
        losses.total.backward()
        return losses.total.detach()

    assert watch.is_finite(passes())
    name, parameter = next(iter(model.layers[place].named_parameters()))
    with torch.no_grad():
        parameter.view(-1)[0] = float("nan")
    watch.begin()
    assert not watch.is_finite(passes())
    found = watch.find(passes, step=3)
    owner, _, part = f"layers.{place}.{name}".rpartition(".")
    assert (found.module, found.tensor) == (owner, f"parameter {part}")


def planted_on_a_rank() -> tuple[bool, NonFinite, tuple[str, ...]]:
    """Rank 2's second part is spoilt; what each rank makes goes into the sum that the next part of all reads."""
    rank = distributed.get_rank()
    model, _ = make()
    if rank == 2:
        model.first.inner.weight.data[0, 0] = INF

    def mix(module: Any, given: Any) -> Any:
        shared = given[0].detach().clone()
        distributed.all_reduce(shared)
        return (shared, *given[1:])

    model.second.register_forward_pre_hook(mix)
    watch = FiniteWatch(model)

    def passes() -> Any:
        loss = model(torch.randn(3, 4)).square().sum()
        loss.backward()
        return loss

    watch.begin()
    loss = passes()
    fine = watch.is_finite(loss)
    return fine, watch.find(passes, step=9), watch.flagged()


def test_the_rank_that_made_it_is_named_on_every_rank() -> None:
    seen = on_ranks(4, planted_on_a_rank)
    assert [fine for fine, _, _ in seen] == [False] * 4
    assert {found for _, found, _ in seen} == {seen[0][1]}
    found = seen[0][1]
    assert (found.step, found.rank, found.module, found.tensor) == (9, 2, "first.inner", "parameter weight")
    assert "second.inner" in seen[0][2]  # it reached the others, which are not accused


def planted_under_fsdp() -> tuple[bool, bool, NonFinite]:
    """Sharded parameters; rank 1 is given a NaN, which every gradient of every rank has in the end."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), init_device_mesh("cpu", (2,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    rows, watch = torch.randn(3, 4), FiniteWatch(model)

    def passes() -> Any:
        loss = model(rows).square().sum()
        loss.backward()
        return loss, nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])

    watch.begin()
    fine = watch.is_finite(*passes())
    model.zero_grad()
    if distributed.get_rank() == 1:
        rows[2, 1] = float("nan")
    watch.begin()
    return fine, watch.is_finite(*passes()), watch.find(passes, step=4)


def test_sharded_parameters_are_watched_too() -> None:
    for fine, spoilt, found in on_ranks(2, planted_under_fsdp):
        assert fine
        assert not spoilt
        assert (found.rank, found.module, found.tensor) == (1, "", "input")
