"""The vendor's checkpoint: it gives what the layers give without it, and what may go wrong in it is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megacpp_validate.bridge import imports as te
from megacpp_validate.diagnosis.checks import CheckKind, Precision, read_failed_check
from megacpp_validate.diagnosis.diagnose import diagnose_checks
from megacpp_validate.evidence.receipt import Check
from megacpp_validate.evidence.values import Cause
from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.fp8_linear import check_recompute
from tests.probes.imports_bench import failed, new_bench

pytestmark = pytest.mark.usefixtures("te_double")
RECIPES = ("delayed", "current", "block")
REENTRANT = {f"recompute.fp8.{recipe}.reentrant.{check}" for recipe in RECIPES for check in ("grad", "grad.applied")}


def run(bench: Bench | None = None) -> Bench:
    bench = bench or new_bench()
    check_recompute(bench)
    return bench


def test_it_passes_in_both_ways_and_every_recipe() -> None:
    for seed in range(5):
        bench = run(new_bench(seed=seed))
        assert failed(bench) == []
        assert not any("judged" in check.name for check in bench.checks)
        unsteady = [check.detail for check in bench.checks if "steady by itself" in check.detail]
        assert all(said.endswith(": none") for said in unsteady)
    names = {check.name for check in bench.checks}
    assert REENTRANT | {"recompute.bf16.not-reentrant.grad", "recompute.fp8.delayed.reentrant.history"} <= names


@contextmanager
def second_scope(**other: Any) -> Iterator[None]:
    """The scope that the second pass opens for itself is made with something else."""
    module = __import__("transformer_engine.pytorch.distributed", fromlist=["autocast"])
    real = module.autocast
    module.autocast = lambda **given: real(**{**given, **other})
    try:
        yield
    finally:
        module.autocast = real


def in_the_second_pass(patch: pytest.MonkeyPatch, around: Callable[[], Any]) -> None:
    """Of the reentrant kind alone."""
    kind = __import__("transformer_engine.pytorch.distributed", fromlist=["_CheckpointFunction"])._CheckpointFunction
    real = kind.backward

    def backward(ctx: Any, *grads: Any) -> Any:
        with around():
            return real(ctx, *grads)

    patch.setattr(kind, "backward", staticmethod(backward))


def test_a_second_pass_outside_of_the_scope_is_a_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_second_pass(monkeypatch, lambda: second_scope(enabled=False))
    bench = run()
    assert set(failed(bench)) == REENTRANT | {"recompute.fp8.delayed.reentrant.history"}
    read = [read_failed_check("imports", check) for check in bench.checks if not check.passed]
    assert diagnose_checks(read).cause is Cause.SILENT_FALLBACK
    assert {check.precision for check in read} == {Precision.LOW}


def test_a_second_pass_with_the_scales_of_the_next_step_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = te.fp8_state_manager.require()
    monkeypatch.setattr(manager, "get_old_fp8_meta_tensors_for_recompute", lambda _: None)
    bench = run()
    wanted = {
        f"recompute.fp8.delayed.{way}.{name}" for way in ("reentrant", "not-reentrant") for name in ("grad", "history")
    }
    assert wanted <= set(failed(bench))
    read = [read_failed_check("imports", check) for check in bench.checks if not check.passed]
    assert {check.kind for check in read} == {CheckKind.NUMBERS}


def test_a_layer_that_is_wrong_by_itself_is_not_judged_here() -> None:
    bench = new_bench()
    bench.checks += [Check("fp8.current.forward", False), Check("amax.step0.input.scale", False)]
    run(bench)
    assert {check.name for check in bench.checks if check.name.endswith("judged")} == {
        "recompute.fp8.current.judged", "recompute.fp8.delayed.judged",
    }  # fmt: skip
    assert not [check.name for check in bench.checks[2:] if not check.passed]
