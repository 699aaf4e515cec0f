"""What a layer saves of delayed scaling, on the double: right where it is right, and each fault seen."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from recipe_bench import failed, new_bench

from megacpp_validate.probes.bench import Bench
from megacpp_validate.probes.fp8.saved_state import UNPICKLING, check_saved_state, unpickling_allowed

Patch = pytest.MonkeyPatch


def new_layer(bench: Bench) -> Any:
    layer = bench.bridge("imports").linear.require()(
        64, 96, bias=True, params_dtype=torch.bfloat16, device=bench.device
    )
    return layer.to(bench.device)


def enter_of(bench: Bench, recipe: str = "delayed") -> Any:
    scope = bench.bridge("fp8_scope")
    return partial(scope.low_precision, target="cpu", amax_reduction_group=scope.SINGLE_OWNER, recipe=recipe)


def look(seed: int = 0) -> Bench:
    bench = new_bench(seed=seed)
    shared = new_layer(bench).state_dict()

    def make() -> Any:
        layer = new_layer(bench)
        layer.load_state_dict({**shared, "_extra_state": torch.empty(0, dtype=torch.uint8)})
        return layer

    check_saved_state(bench, make, enter_of(bench), name="saved")
    return bench


@pytest.mark.parametrize("seed", range(5))
def test_what_is_right_passes(te_double: None, seed: int) -> None:
    bench = look(seed)
    assert not failed(bench)
    assert len(bench.checks) == 5


@pytest.mark.parametrize("key", ["scaling_fwd", "scaling_bwd"])
@pytest.mark.parametrize(("index", "what"), [(0, "scale"), (1, "history")])
def test_state_that_is_not_loaded_is_seen(te_double: None, monkeypatch: Patch, key: str, index: int, what: str) -> None:
    from transformer_engine.pytorch.layer import TransformerEngineBaseModule as Layer

    whole = Layer.set_extra_state

    def lossy(self: Any, state: Any) -> None:
        whole(self, state)
        if state is not None and state.numel():
            own = self.fp8_meta[key]
            (own.scale, own.amax_history)[index].fill_(float(index == 0))

    monkeypatch.setattr(Layer, "set_extra_state", lossy)
    found = failed(look())
    direction = "forward" if key == "scaling_fwd" else "backward"
    assert f"saved.{direction}.{what}" in found
    assert ("saved.next-step" in found) is (what == "scale"), "a scale is used in the next step, a history after it"


def test_state_that_is_not_saved_is_seen(te_double: None, monkeypatch: Patch) -> None:
    from transformer_engine.pytorch.layer import TransformerEngineBaseModule as Layer

    monkeypatch.setattr(Layer, "get_extra_state", lambda _: torch.empty(0, dtype=torch.uint8))
    found = failed(look())
    assert {f"saved.{way}.{what}" for way in ("forward", "backward") for what in ("history", "scale")} <= {*found}


@pytest.mark.parametrize("before", [None, "0"])
def test_what_was_set_is_put_back(before: str | None) -> None:
    variables = {} if before is None else {UNPICKLING: before}
    kept = dict(variables)
    with unpickling_allowed(variables):
        assert variables[UNPICKLING] == "1"
    assert variables == kept
