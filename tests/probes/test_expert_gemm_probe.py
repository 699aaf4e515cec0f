"""The expert GEMM probe: both backends pass as they are, and every planted fault fails a check."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge import deep_gemm, expert_gemm, fp8_scope  # noqa: E402
from megacpp_validate.bridge.backends import Refusal  # noqa: E402
from megacpp_validate.bridge.features import read_features  # noqa: E402
from megacpp_validate.native.grouped_gemm import grouped_gemm, grouped_gemm_loop  # noqa: E402
from megacpp_validate.probes import expert_gemm as probe_module  # noqa: E402
from megacpp_validate.probes.bench import Bench  # noqa: E402
from megacpp_validate.probes.expert_bank import new_bank  # noqa: E402
from tests.deep_gemm_double import install  # noqa: E402
from tests.probes import planted_numbers  # noqa: E402
from tests.probes.planted_numbers import (  # noqa: E402
    RECIPES,
    failed,
    half_of_the_rows,
    in_gradient,
    new_bench,
    one_nan,
    run_probe,
)

Fault = Callable[[Any], Any]


run = partial(run_probe, probe_module)


VALUES: dict[str, Fault] = {
    **planted_numbers.VALUES,
    "half zeros": half_of_the_rows,
    "shuffled": lambda tensor: tensor.roll(1, 0),
    "one NaN": partial(one_nan, at=0),  # the last rows are padding in FP8
}


def on_output(fault: Fault) -> Callable[..., Any]:
    return lambda product, rows, weights, counts: fault(product(rows, weights, counts))


def on_gradient(which: str, fault: Fault) -> Callable[..., Any]:
    def faulty(product: Any, rows: Any, weights: Any, counts: Any) -> Any:
        rows = in_gradient(fault)(rows) if which == "rows" else rows
        weights = in_gradient(fault)(weights) if which == "weights" else weights
        return product(rows, weights, counts)

    return faulty


def of_one_expert(fault: Fault) -> Fault:
    return lambda weights: torch.cat([fault(weights[:1]), weights[1:]])


def on_weights(fault: Fault) -> Callable[..., Any]:
    return lambda product, rows, weights, counts: product(rows, fault(weights), counts)


def shifted_counts(product: Any, rows: Any, weights: Any, counts: Any) -> Any:
    """A row of the second busy expert is taken for one of the first."""
    busy = [expert for expert, count in enumerate(counts) if count]
    if len(busy) < 2:
        return product(rows, weights, counts)
    moved = list(counts)
    moved[busy[0]] += 1
    moved[busy[1]] -= 1
    return product(rows, weights, moved)


FAULTS: dict[str, Callable[..., Any]] = {
    **{f"output {kind}": on_output(fault) for kind, fault in VALUES.items()},
    **{
        f"gradient of {which} {kind}": on_gradient(which, VALUES[kind])
        for which in ("rows", "weights")
        for kind in ("zeros", "x1.01", "x2", "sign", "shuffled", "one NaN")
    },
    "gradient of one weight scaled": on_gradient("weights", of_one_expert(VALUES["x1.01"])),
    "gradient of one weight zeroed": on_gradient("weights", of_one_expert(VALUES["zeros"])),
    "weights of another expert": on_weights(lambda weights: weights.roll(1, 0)),
    "two experts swapped": on_weights(lambda weights: weights[[0, 1, 3, 2]]),
    "one expert's weight halved": on_weights(of_one_expert(VALUES["x0.5"])),
    "a row of another expert": shifted_counts,
    "a bias that is not there": on_output(lambda out: out + 0.05),
    "gradients of idle experts left as they were": on_gradient(
        "weights", lambda gradient: torch.where(gradient.abs().sum((1, 2), keepdim=True) == 0, 1.0, gradient)
    ),
}


@pytest.mark.parametrize("seed", range(5))
def test_the_native_path_passes(seed: int) -> None:
    bench = run(seed=seed)
    assert failed(bench) == set()
    assert {row.claimed for row in bench.backends} == {"native"}


@pytest.mark.usefixtures("te_double")
def test_te_passes_in_every_recipe_and_is_seen() -> None:
    bench = run("te", RECIPES)
    assert failed(bench) == set()
    native = {row.path for row in bench.backends if row.claimed == "native"}
    assert native == {"expert_gemm"}, "no rows, and widths that FP8 does not take"
    assert all("te" in row.observed for row in bench.backends if row.path != "expert_gemm")


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_native_path(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    monkeypatch.setattr(expert_gemm, "grouped_gemm", lambda *given: fault(grouped_gemm, *given))
    assert failed(run())


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("recipes", [(), ("current",)])
@pytest.mark.parametrize("kind", VALUES)
def test_faults_in_what_te_returns(monkeypatch: pytest.MonkeyPatch, kind: str, recipes: tuple[str, ...]) -> None:
    original = expert_gemm.TeExpertBank.forward
    monkeypatch.setattr(
        expert_gemm.TeExpertBank, "forward", lambda *given, **more: VALUES[kind](original(*given, **more))
    )
    found = failed(run("te", recipes))
    assert "bf16.middle-idle.forward" in found
    if recipes:
        assert "fp8.current.middle-idle.forward" in found


@pytest.mark.usefixtures("te_double")
@pytest.mark.parametrize("kind", ["zeros", "x1.01", "x2", "sign", "shuffled", "one NaN"])
def test_faults_in_the_gradients_that_te_returns(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    original = expert_gemm.TeExpertBank.forward
    monkeypatch.setattr(
        expert_gemm.TeExpertBank,
        "forward",
        lambda self, rows, *given, **more: original(self, in_gradient(VALUES[kind])(rows), *given, **more),
    )
    assert "bf16.middle-idle.grad.rows" in failed(run("te"))


@pytest.mark.usefixtures("te_double")
def test_weights_that_reach_te_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    original = expert_gemm.TeExpertBank.weight_of
    monkeypatch.setattr(expert_gemm.TeExpertBank, "weight_of", lambda self, e: original(self, (e + 1) % 4))
    found = failed(run("te"))
    assert "bf16.middle-idle.forward" in found
    assert "weights.bf16.round-trip" not in found, "the map is its own inverse: only the product tells"


@pytest.mark.parametrize("name", ["_weights", "native_state_dict"])
def test_weights_that_are_not_mapped_exactly(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "native_state_dict":
        original = expert_gemm.ExpertGemm.native_state_dict
        monkeypatch.setattr(
            expert_gemm.ExpertGemm, name, lambda self: {key: value * 1.001 for key, value in original(self).items()}
        )
    else:
        monkeypatch.setattr(
            expert_gemm.ExpertGemm, name, lambda self: list(self.bank.weight.detach().half().to(self.bank.weight))
        )
    assert "weights.fp32.round-trip" in failed(run())


@pytest.mark.usefixtures("te_double")
def test_fp8_that_is_not_computed_in_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fp8_scope.low_precision
    monkeypatch.setattr(
        fp8_scope, "low_precision", lambda **given: original(**{**given, "features": read_features("off")})
    )
    found = failed(run("te", ("current",)))
    assert {"fp8.current.middle-idle.forward.rounded", "fp8.current.middle-idle.grad.rows.rounded"} <= found
    assert "fp8.current.middle-idle.forward" not in found, "bf16 is nearer to fp64 than FP8 is"


@pytest.mark.usefixtures("te_double")
def test_rows_that_are_not_padded_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_gemm, "te_state", lambda: {"enabled": False})
    with pytest.raises(ValueError, match="multiples of 16"):
        run("te", ("current",))


@pytest.mark.usefixtures("te_double")
def test_a_fallback_where_te_is_requested_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_gemm, "why_not_te", lambda *_: Refusal("te", "planted", "planted"))
    assert "bf16.middle-idle.expert_gemm.bf16.middle-idle.backend" in failed(run("te"))


@pytest.mark.usefixtures("te_double")
def test_a_native_path_that_claims_to_be_te_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def looped(self: Any, rows: Any, counts: Any, **_: Any) -> Any:
        return grouped_gemm_loop(rows, torch.stack([self.weight_of(expert) for expert in range(4)]), counts)

    monkeypatch.setattr(expert_gemm.TeExpertBank, "forward", looped)
    found = failed(run("te"))
    assert "fp32.middle-idle.expert_gemm.fp32.middle-idle.backend" in found
    assert "fp32.middle-idle.forward" not in found


def test_a_weight_without_a_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        expert_gemm, "grouped_gemm", lambda rows, weight, counts: grouped_gemm(rows, weight.detach(), counts)
    )
    found = failed(run())
    assert {"bf16.middle-idle.grad.weight0", "bf16.middle-idle.grad.weight1"} <= found


@pytest.mark.usefixtures("te_double")
def test_a_recipe_that_nothing_emulates_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "recipes", ("nvfp4",))  # the double has no such GPU
    assert failed(run("te", ("nvfp4",))) == {"fp8.nvfp4.reference"}


@pytest.mark.parametrize("check", ["rank", "width", "dtype", "sum", "number", "negative"])
def test_a_refusal_that_is_not_made(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    monkeypatch.setattr(expert_gemm.ExpertGemm, "_check", lambda self, rows, counts: tuple(counts))
    assert f"refuses.{check}" in failed(run())


# --- DeepGEMM, where it can be imported -------------------------------------------------------------------


def test_an_absent_deep_gemm_is_said_and_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = new_bench("expert_gemm", "te", arch="sm_90", deep_gemm=True)
    probe_module._deep_gemm(bench)
    assert failed(bench) == set()
    assert [row.path for row in bench.backends] == ["expert_gemm.deep_gemm"]
    assert bench.backends[0].observed == ()


def in_blocks(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """DeepGEMM's part alone, with kernels in torch in its place."""
    install(monkeypatch)
    sizes = probe_module._sample

    def whole_blocks(bench: Bench, dtype: Any, routing: str, **more: Any) -> Any:
        made = sizes(bench, dtype, routing, **more)
        return new_bank(bench, [count * 19 for count in made.counts], 256, 128, dtype)

    monkeypatch.setattr(probe_module, "_sample", whole_blocks)
    bench = new_bench("expert_gemm", "te", arch="sm_90", deep_gemm=True, quick=False)
    probe_module._deep_gemm(bench)
    return bench


def test_deep_gemm_passes_where_it_rounds_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = in_blocks(monkeypatch)
    assert failed(bench) == set()
    assert {row.observed for row in bench.backends} == {("deep_gemm",)}


def on_product(fault: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = deep_gemm._multiply
        monkeypatch.setattr(deep_gemm, "_multiply", lambda *given: fault(original(*given)))

    return plant


def on_weight(fault: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        original = deep_gemm.cast_weight
        monkeypatch.setattr(deep_gemm, "cast_weight", lambda weight, **how: original(fault(weight), **how))

    return plant


def bf16_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def product(rows: Any, weights: Any, counts: Any, **_: Any) -> Any:
        return grouped_gemm_loop(rows, weights, counts)

    monkeypatch.setattr(expert_gemm, "deep_gemm_grouped", product)


DEEP_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "bf16 in its place": bf16_in_its_place,
    "one scale for all": on_weight(lambda weight: weight.to(torch.float8_e4m3fn).to(weight.dtype)),
    "weights of another expert": on_weight(lambda weight: weight.roll(1, 0)),
    **{kind: on_product(fault) for kind, fault in VALUES.items()},
}


@pytest.mark.parametrize("name", DEEP_FAULTS)
def test_faults_of_deep_gemm(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    DEEP_FAULTS[name](monkeypatch)
    assert "deep_gemm.middle-idle.forward.of-rounded-operands" in failed(in_blocks(monkeypatch))


def test_faults_of_its_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    original = deep_gemm._weight_gradient
    monkeypatch.setattr(deep_gemm, "_weight_gradient", lambda *given: original(*given).roll(1, 0))
    assert "deep_gemm.middle-idle.grad.weight0" in failed(in_blocks(monkeypatch))
