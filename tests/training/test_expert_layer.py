"""Parts of the hybrid model that a size or a form turns on: shared experts, capacity, ways to them, recompute."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.deep_gemm import cast_weight  # noqa: E402
from megacpp_validate.bridge.expert_gemm import SWITCH  # noqa: E402
from megacpp_validate.bridge.features import PRESETS  # noqa: E402
from megacpp_validate.bridge.fp8_scope import (  # noqa: E402
    amax_shared_with,
    current_scope,
    low_precision,
)
from megacpp_validate.training import (  # noqa: E402
    expert_layer,
    model,
)
from megacpp_validate.training.language import Language  # noqa: E402
from megacpp_validate.training.layers import Build  # noqa: E402
from megacpp_validate.training.model import HybridModel, Scopes, build_layer  # noqa: E402
from megacpp_validate.training.optimizer import MasterAdamW, Schedule  # noqa: E402
from megacpp_validate.training.parallel.plan import ParallelPlan, Spread  # noqa: E402
from megacpp_validate.training.sizes import (  # noqa: E402
    Forms,
    Size,
    read_size,
)

EXACT = Build(PRESETS["off"], torch.float64)


def run(size: Size, build: Build = EXACT, *, batch: int = 2) -> tuple[Any, dict[str, Any]]:
    """The total loss and the tokens of each expert, and all gradients."""
    made = HybridModel(size, build, seed=0).to(build.dtype)  # the router too
    losses = made.losses(Language(size.grammar, seed=4).batch(0, batch, size.length + 1))
    losses.total.backward()
    return SimpleNamespace(total=losses.total.detach()), {name: weight.grad for name, weight in made.named_parameters()}


def far(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Relative, of the gradient that is off the most."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - value).norm() / value.norm()) for name, value in wanted.items())


def bound(size: Size) -> float:
    """How far another order of the same sums may be off in fp64, relative, by the model's own condition.

    To first order the error of any tensor is a sum over its roundings, each at most u and carried on by the same
    derivatives in every precision. The run in fp32 has one draw of that sum: its roundings, in units of u, are as large
    as those in fp64. Two runs in fp64 differ by two draws; 16 is for the largest tensor of each being another one.
    """
    _, narrow = run(size, Build(PRESETS["off"], torch.float32))
    _, wide = run(size)
    return 2 * 16 * far(narrow, wide) * 2.0**-53 / 2.0**-24


@pytest.mark.parametrize("moe", ["padded", "jagged"])
def test_every_way_to_the_experts_computes_the_same(moe: Any) -> None:
    size = read_size("tiny", pattern="ME")
    most = bound(size)
    assert most < 1e-10
    losses, found = run(size, replace(EXACT, forms=Forms(moe=moe)))
    wanted, gradients = run(size)
    assert far(found, gradients) <= most
    assert abs(float(losses.total - wanted.total)) <= most * float(wanted.total)


@pytest.mark.thorough
def test_recomputed_layers_give_the_same_bits_and_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    size = read_size("tiny", mtp=True)
    _, wanted = run(size)
    asked: list[bool] = []
    real = model.recompute

    def noted(*given: Any, use_reentrant: bool) -> Any:
        asked.append(use_reentrant)
        return real(*given, use_reentrant=use_reentrant)

    monkeypatch.setattr(model, "recompute", noted)
    _, found = run(size, replace(EXACT, forms=Forms(recompute=True)))
    assert asked == [False] * 5  # A, M, A, R, and R once more for the head of the token after the next one
    assert far(found, wanted) == 0
    with torch.no_grad():
        HybridModel(size, replace(EXACT, forms=Forms(recompute=True)), seed=0)(torch.zeros(1, 8, dtype=torch.int64))
    assert len(asked) == 5


@pytest.mark.parametrize("changes", [{}, {"attention": "mla", "kv_latent": 16, "rope_dim": 8}])
def test_a_residual_connection_in_the_next_norm_is_the_same_stream(changes: dict[str, Any]) -> None:
    size = read_size("tiny", pattern="AEEAE", mtp=True, **changes)
    losses, found = run(size, replace(EXACT, forms=Forms(fused_residual_norm=True)))
    wanted, gradients = run(size)
    assert abs(float(losses.total - wanted.total)) <= bound(size) * float(wanted.total)
    assert far(found, gradients) <= bound(size)


def test_jagged_experts_ask_for_fp8_where_it_is_named_and_keep_the_reason_against_it() -> None:
    size = read_size("tiny", pattern="AEE")
    model = HybridModel(size, replace(EXACT, forms=Forms("jagged", expert_backends=("deep_gemm", "native"))), seed=0)
    model(torch.zeros(1, 8, dtype=torch.int64))
    choice, zone = (model.choices()[f"layers.{place}.experts"] for place in (1, 2))
    assert (zone.requested, zone.observed) == ("jagged", "loop"), "the last layer is in a BF16 zone"
    assert (choice.requested, choice.observed) == ("deep_gemm", "loop")
    assert [(one.backend, one.code) for one in choice.refusals] == [("deep_gemm", "device"), ("jagged", "not-fused")]


def test_passes_of_a_step_share_rounded_experts_and_no_later_step_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    size = read_size("tiny", pattern="E", hidden=128, expert_width=128, bf16_last=0)
    forms, spread = Forms("jagged", expert_backends=("deep_gemm", "native")), Spread(ParallelPlan(accumulate=2))
    layer = build_layer("E", size, Build(PRESETS["off"], torch.bfloat16, forms=forms, spread=spread), seed=0, name="0")
    taken: list[Any] = []
    real = expert_layer.jagged_moe

    def noted(*given: Any, fp8: Any) -> Any:
        for seen, gemm in zip(fp8, (layer.up, layer.down), strict=True):
            wanted = cast_weight(gemm.bank.weight)
            assert all(torch.equal(one.float(), other.float()) for one, other in zip(seen, wanted, strict=True))
        taken.append(fp8[0])
        return real(*given)

    monkeypatch.setenv(SWITCH, "always")
    monkeypatch.setattr(expert_layer, "why_not_fp8", lambda *_: None)
    monkeypatch.setattr(expert_layer, "jagged_moe", noted)
    optimizer = MasterAdamW(layer.named_parameters(), Schedule(2, warm_up=0))
    for step in range(2):
        for first in (True, False):
            layer(torch.randn(2, 8, size.hidden).bfloat16(), None).rows.sum().backward()
            norm = optimizer.take_gradients(first=first)
        optimizer.update(step, norm)
    assert [one is taken[0] for one in taken] == [True, True, False, False]
    assert taken[2] is taken[3]


def test_experts_enter_a_region_of_the_scope_or_leave_it() -> None:
    """What each layer ran in, by the order of entries."""
    size = read_size("tiny", pattern="AMEEAR")
    entered: list[str] = []

    def scopes(name: str) -> Any:
        entered.append(name)
        if name == "experts":
            return amax_shared_with(None)
        return low_precision(target="cpu", amax_reduction_group=None)

    def ran(forms: Forms, scope: Any) -> list[str]:
        entered.clear()
        made = HybridModel(size, Build(PRESETS["off"], forms=forms), seed=0)
        for letter, layer in zip(size.letters, made.layers, strict=True):
            layer.register_forward_pre_hook(lambda *_, letter=letter: entered.append(letter + _state()))
        made.losses(Language(size.grammar, seed=4).batch(0, 1, size.length + 1), scope=scope)
        return list(entered)

    dense, experts = partial(scopes, "dense"), partial(scopes, "experts")
    assert ran(Forms(), Scopes(dense)) == ["A-", "dense", "M", "E", "E", "A", "R-"]
    assert ran(Forms(), Scopes(dense, experts)) == ["A-", "dense", "M", "experts", "E", "experts", "E", "A", "R-"]
    high = ran(Forms(low_precision_experts=False), Scopes(dense, experts))
    assert high == ["A-", "dense", "M", "E-", "E-", "A", "R-"]


def _state() -> str:
    """A minus where the bridge keeps a layer out of low precision; without Transformer Engine no scope is low."""
    scope = current_scope()
    return "-" if scope is not None and ("keeps" in scope.reason or "stay" in scope.reason) else ""


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_of_the_router_are_shares_of_the_step(accumulate: int) -> None:
    size = read_size("tiny", pattern="E", bf16_last=0, aux_coefficient=0.5, z_coefficient=0.1)
    build = replace(EXACT, spread=Spread(ParallelPlan(accumulate=accumulate)))
    rows = torch.randn(2, 8, size.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one, shared = (build_layer("E", size, made, seed=0, name="layers.0")(rows, None).loss for made in (EXACT, build))
    assert shared.item() == pytest.approx(one.item() / accumulate)
