"""Objects called again, and what only the CPU target looks at: each planted fault fails a check that names where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import expert_gemm, extra_state, fp8_scope, permute  # noqa: E402
from megacpp_validate.bridge import linear_walker as walker  # noqa: E402
from megacpp_validate.bridge import native_block as block  # noqa: E402
from megacpp_validate.native.attention import apply_rope, rope_tables  # noqa: E402
from megacpp_validate.native.grouped_gemm import grouped_gemm  # noqa: E402
from megacpp_validate.probes import expert_gemm as expert_probe  # noqa: E402
from megacpp_validate.probes import imports as imports_probe  # noqa: E402
from megacpp_validate.probes import linear_walker as walker_probe  # noqa: E402
from megacpp_validate.probes import native_block as block_probe  # noqa: E402
from megacpp_validate.probes import permute as permute_probe  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from megacpp_validate.probes.native_block import new_layer, new_sample  # noqa: E402
from tests.probes.planted_numbers import RECIPES, failed, new_bench  # noqa: E402

Patch = pytest.MonkeyPatch


def bench_of(probe: str, requested: str = "native") -> Bench:
    recipes = RECIPES if requested == "te" else ()
    return new_bench(probe, requested, recipes, production_recipe="delayed" if recipes else "")


def test_bits_and_tensors_that_are_missing() -> None:
    bench = bench_of("attention")
    one = torch.ones(2)
    bench.same_bits("same", [one, None], [one.clone(), None])
    bench.same_bits("missing", [one], [None])
    bench.same_bits("one bit", [one], [one * (1 + 2.0**-23)])
    assert failed(bench) == {"missing", "one bit"}


# --- experts ----------------------------------------------------------------------------------------------


def of_experts(patch: Patch, product: Callable[..., Any]) -> set[str]:
    bench = bench_of("expert_gemm")
    patch.setattr(expert_gemm, "grouped_gemm", product)
    expert_probe._again(bench)
    expert_probe._other_dtypes(bench)
    return failed(bench)


def test_experts_pass(monkeypatch: Patch) -> None:
    assert of_experts(monkeypatch, grouped_gemm) == set()


def test_weights_kept_from_the_first_call_are_seen(monkeypatch: Patch) -> None:
    kept: list[Any] = []

    def stale(rows: Any, weight: Any, counts: Any) -> Any:
        kept.append(weight.detach().clone())
        return grouped_gemm(
            rows, weight + (kept[0] - weight).detach() if kept[0].dtype == weight.dtype else weight, counts
        )

    assert "1.middle-idle.forward" in of_experts(monkeypatch, stale)


def test_rows_without_a_gradient_that_go_another_way_are_seen(monkeypatch: Patch) -> None:
    found = of_experts(monkeypatch, lambda rows, *rest: grouped_gemm(rows if rows.requires_grad else rows * 1.1, *rest))
    assert found == {
        f"{index}.{name}.frozen-rows" for index, name in enumerate(("all-busy", "middle-idle", "all-busy"))
    }


@pytest.mark.parametrize("dtype", ["fp16", "fp64"])
def test_a_fault_in_another_dtype_is_seen(monkeypatch: Patch, dtype: str) -> None:
    bad = expert_probe.DTYPES.get(dtype, {"fp16": torch.float16, "fp64": torch.float64}[dtype])
    found = of_experts(monkeypatch, lambda rows, *rest: grouped_gemm(rows * 1.5 if rows.dtype == bad else rows, *rest))
    assert found
    assert all(name.startswith(f"{dtype}.") for name in found)


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("wrong", [None, True])
def test_a_microbatch_that_is_not_told_to_the_experts_is_seen(monkeypatch: Patch, wrong: bool | None) -> None:
    forward = expert_gemm.TeExpertBank.forward
    monkeypatch.setattr(
        expert_gemm.TeExpertBank, "forward",
        lambda self, rows, counts, is_first_microbatch=None: forward(self, rows, counts, is_first_microbatch=wrong),
    )  # fmt: skip
    bench = bench_of("expert_gemm", "te")
    expert_probe._check_microbatch(bench)
    assert failed(bench) == {f"microbatch.{value}" for value in {True, False, None} - {wrong}}


# --- the A-block ------------------------------------------------------------------------------------------


def test_a_block_whose_second_call_differs_is_seen(monkeypatch: Patch) -> None:
    forward = block.NativeBlock.forward

    def grows(layer: Any, rows: Any, **options: Any) -> Any:
        calls = layer.__dict__["_calls"] = layer.__dict__.get("_calls", 0) + 1
        return forward(layer, rows, **options) * (1.0 if calls == 1 else 1.02)

    bench = bench_of("native_block")
    block_probe._check_again(bench, block)
    assert failed(bench) == set()
    monkeypatch.setattr(block.NativeBlock, "forward", grows)
    block_probe._check_again(bench, block)
    assert {"again.0.gqa4.d64.swiglu.bits", "again.1.gqa4.d64.swiglu.forward"} <= failed(bench)


@pytest.mark.usefixtures("te_double")
def test_a_microbatch_that_is_not_told_to_a_layer_of_the_block_is_seen(monkeypatch: Patch) -> None:
    bench = bench_of("native_block", "te")
    block_probe._check_microbatch(bench, block)
    assert failed(bench) == set()
    kind = type(new_layer(bench, block, new_sample(bench, block_probe.GATED, torch.float32)).te)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, rows, **given: forward(self, rows, rope=given.get("rope")))
    block_probe._check_microbatch(bench, block)
    assert failed(bench) == {"microbatch.True", "microbatch.False"}


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        (lambda length, width, **more: rope_tables(length, width, **{"base": 9000.0, **more}), "default.cos"),
        (lambda length, width, base=10000.0, **more: rope_tables(length, width, base=base**1.01, **more), "base.sin"),
        (lambda length, width, **more: tuple(x[1:] for x in rope_tables(length + 1, width, **more)), "default.rows"),
    ],
    ids=["base", "exponent", "first-position"],
)
def test_a_fault_of_the_rotary_tables_is_seen(monkeypatch: Patch, tables: Callable[..., Any], named: str) -> None:
    bench = bench_of("native_block")
    block_probe._check_rotation(bench)
    assert failed(bench) == set()
    monkeypatch.setattr(block_probe, "rope_tables", tables)
    block_probe._check_rotation(bench)
    assert f"rotation.{named}" in failed(bench)


def test_an_offset_that_is_ignored_is_seen(monkeypatch: Patch) -> None:
    bench = bench_of("native_block")
    monkeypatch.setattr(block_probe, "apply_rope", lambda x, cos, sin, offset: apply_rope(x, cos, sin))
    block_probe._check_rotation(bench)
    assert failed(bench) == {"rotation.default.rows", "rotation.base.rows"}


# --- dispatch ---------------------------------------------------------------------------------------------


def test_a_map_kept_from_the_first_call_is_seen(monkeypatch: Patch) -> None:
    bench = bench_of("permute")
    permute_probe._again(bench, permute)
    assert failed(bench) == set()
    keep = permute.Dispatch._keep
    monkeypatch.setattr(
        permute.Dispatch, "_keep", lambda self, *given: self.__dict__.setdefault("_kept", keep(self, *given))
    )
    permute_probe._again(bench, permute)
    assert "again.jagged.1.rows" in failed(bench)


def test_a_way_back_that_is_not_the_same_twice_is_seen(monkeypatch: Patch) -> None:
    bench, calls = bench_of("permute"), []
    unpermute = permute.Dispatch.unpermute

    def drifts(self: Any, *given: Any, **more: Any) -> Any:
        calls.append(self)
        return unpermute(self, *given, **more) * (1 + 2.0**-23 * (len(calls) % 2))

    monkeypatch.setattr(permute.Dispatch, "unpermute", drifts)
    permute_probe._again(bench, permute)
    assert "again.jagged.0.back.bits" in failed(bench)


# --- scopes and checkpoints -------------------------------------------------------------------------------


@pytest.mark.usefixtures("te_double")
def test_a_second_thread_that_is_let_in_is_seen(monkeypatch: Patch) -> None:
    bench = bench_of("imports", "te")
    imports_probe._check_second_thread(bench)
    assert failed(bench) == set()
    monkeypatch.setattr(fp8_scope, "_claim", lambda *_: None)
    imports_probe._check_second_thread(bench)
    assert "scope.second-thread.high" in failed(bench)


@pytest.mark.usefixtures("te_double")
def test_amax_values_that_are_reduced_beyond_their_owner_are_seen(monkeypatch: Patch) -> None:
    bench = bench_of("imports", "te")
    imports_probe._check_recipe_objects(bench)
    assert failed(bench) == set()
    scaling = fp8_scope.te_delayed_scaling
    monkeypatch.setattr(fp8_scope, "te_delayed_scaling", lambda *, reduce_amax: scaling(reduce_amax=True))
    imports_probe._check_recipe_objects(bench)
    assert failed(bench) == {"scope.delayed.single-owner"}


@pytest.mark.usefixtures("te_double")
def test_fp8_state_that_is_left_out_of_a_checkpoint_is_seen(monkeypatch: Patch) -> None:
    bench = bench_of("linear_walker", "te")
    walker_probe._check_filled_state(bench, walker)
    assert failed(bench) == set()

    def drop(layer: Any, state: Any, prefix: str, metadata: Any) -> None:
        state.pop(f"{prefix}_extra_state", None)

    monkeypatch.setattr(extra_state, "_leave_out_empty", drop)
    walker_probe._check_filled_state(bench, walker)
    assert failed(bench) == {"state.saved"}
