"""Faults of what a checkpoint keeps of FP8 layers, planted in the double of Transformer Engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacpp_validate.bridge.extra_state import WrongState
from megacpp_validate.probes.fp8 import resume
from tests.probes.planting import Patch, Plant, changing, check_caught, failed, fp8_bench, module


def bench_of(stack: str = "te1", **order: Any) -> Any:
    bench = fp8_bench("resume", **order)
    bench.order = replace(bench.order, stack=stack)
    return bench


def loading(change: Callable[[Any, dict[str, Any]], object]) -> Plant:
    """change(layer, states before) after a layer took a state over."""

    def make(plain: Any) -> Any:
        def changed(self: Any, state: Any) -> None:
            keys = [key for key in ("scaling_fwd", "scaling_bwd") if key in self.fp8_meta]
            before = {key: (self.fp8_meta[key].amax_history.clone(), self.fp8_meta[key].scale.clone()) for key in keys}
            plain(self, state)
            if "scaling_fwd" in self.fp8_meta:
                change(self.fp8_meta, before)

        return changed

    return changing(lambda: module("layer").TransformerEngineBaseModule, "set_extra_state", make)


def history_stays(meta: Any, before: Any) -> object:
    return before and meta["scaling_fwd"].amax_history.copy_(before["scaling_fwd"][0])


def no_state(patch: Patch) -> None:
    patch.setattr(module("layer").TransformerEngineBaseModule, "set_extra_state", lambda self, state: None)


FAULTS: dict[str, tuple[Plant, str]] = {
    "history stays": (loading(history_stays), "delayed.used.state"),
    "history one row off": (
        loading(lambda meta, _: meta["scaling_bwd"].amax_history.copy_(meta["scaling_bwd"].amax_history.roll(1, 0))),
        "delayed.fresh.loaded",
    ),
    "not saved": (no_state, "delayed.used.step"),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "caught"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_what_is_loaded(te_double: None, plant: Plant, caught: str) -> None:
    check_caught(bench_of(), resume.probe, plant, {caught})


def test_every_recipe_continues_with_the_same_bits(te_double: None) -> None:
    resume.probe(bench := bench_of())
    parts = [f"{how}.{what}" for how in ("fresh", "used") for what in ("loaded", "step", "state")]
    wanted = {f"{recipe}.{part}" for recipe in ("delayed", "current", "block") for part in parts}
    assert {check.name for check in bench.checks} == wanted | {"delayed.as-it-is.loaded"}
    assert failed(bench) == set()


def test_without_transformer_engine_there_is_no_state() -> None:
    resume.probe(bench := bench_of(requested="native"))
    assert (failed(bench), bool(bench.unsupported)) == (set(), True)
    plant = changing(torch.nn.ModuleDict, "load_state_dict", lambda _: lambda *__, **___: None)
    check_caught(bench_of(requested="native"), resume.probe, plant, {"native.loaded"})


def refusing(patch: Patch) -> None:
    """As in Transformer Engine 2.16.1 and from 2.17.1 on."""

    def make(plain: Any) -> Any:
        def set_extra_state(self: Any, state: Any) -> None:
            if state is not None and state.numel() and os.environ.get(resume.UNPICKLING) != "1":
                raise RuntimeError("Refusing to load pickled Transformer Engine extra state.")
            plain(self, state)

        return set_extra_state

    changing(lambda: module("layer").TransformerEngineBaseModule, "set_extra_state", make)(patch)


def test_a_release_that_refuses_its_own_state(te_double: None, monkeypatch: Patch) -> None:
    refusing(monkeypatch)
    with pytest.raises(WrongState, match=f"Refusing to load pickled.*{resume.UNPICKLING}=1"):
        resume.probe(bench := bench_of())
    monkeypatch.setenv(resume.UNPICKLING, "1")
    resume.probe(bench := bench_of())
    assert failed(bench) == set()


def test_states_of_other_stacks(te_double: None, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv(resume.STATES, str(tmp_path))
    seen = []
    for stack in ("te1", "te2", "te1"):
        resume.probe(bench := bench_of(stack))
        seen.append([check.name for check in bench.checks if check.name.startswith("from.")])
        assert failed(bench) == set()
    of = lambda stack: [f"from.{stack}.{recipe}" for recipe in ("delayed", "current", "block")]  # noqa: E731
    assert seen == [[], of("te1"), of("te2")]
    states = torch.load(tmp_path / "te2.pt", weights_only=True)
    next(iter(states["current"]["values"].values())).add_(1.0)
    torch.save(states, tmp_path / "te2.pt")
    resume.probe(bench := bench_of())
    assert failed(bench) == {"from.te2.current"}
