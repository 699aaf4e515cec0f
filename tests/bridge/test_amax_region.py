"""Regions of another amax group: histories move once a pass, each layer's amax is reduced over its own group.

The double updates as NVTE_UNFUSED_FP8_UPDATE=1 does: each update moves each history, so that one too many shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.errors import BridgeError
from megacpp_validate.bridge.fp8_scope import (
    SINGLE_OWNER,
    AmaxGroupChanged,
    AmaxRegionMisplaced,
    amax_shared_with,
    current_scope,
    high_precision,
    low_precision,
    te_amax_state,
)
from megacpp_validate.bridge.layer_watch import recompute, watch_layers
from tests.bridge.scope_paths import low, on_path

STEPS = 3
WIDTH = 16


@pytest.fixture
def world(te_double: None) -> Iterator[Any]:
    """Four ranks of torch's fake backend, of which this is rank 0, and the double of Transformer Engine."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        with on_path("te"):
            yield torch.distributed.group.WORLD
    finally:
        torch.distributed.destroy_process_group()


def faults_of(world: Any, owner: Any, *, pattern: str = "EAEA", recomputed: bool = False) -> list[str]:
    """What goes wrong in three steps of layers, A in the scope of the world, E in regions of an owner; [] if nothing.

    Every layer gets rows of its own, so that what each has noted is known: the amax of its own rows and gradient.
    """
    layers = [te.linear.require()(WIDTH, WIDTH, bias=False, device="cpu") for _ in pattern]
    seen: list[dict[str, list[float]]] = [{"forward": [], "backward": []} for _ in pattern]
    with reductions() as reduced:
        for step in range(STEPS):
            outs, gradients = [], []
            with low_precision(target="cpu", amax_reduction_group=world, recipe="delayed"):
                for place, (letter, layer) in enumerate(zip(pattern, layers, strict=True)):
                    size = float(2 + place + 7 * step)
                    rows = torch.full((WIDTH, WIDTH), size, requires_grad=True)
                    outs.append(run(layer, rows, letter, owner, recomputed))
                    gradients.append(torch.full((WIDTH, WIDTH), size / 4))
                    seen[place]["forward"].append(size)
                    seen[place]["backward"].append(size / 4)
            reduced.append(("end of the forward passes", None))
            torch.autograd.backward(outs, gradients)
    return [*_wrong_histories(pattern, layers, seen), *_wrong_groups(pattern, layers, reduced, world, owner)]


def run(layer: Any, rows: Any, letter: str, owner: Any, recomputed: bool) -> Any:
    def call() -> Any:
        return recompute(layer, rows, use_reentrant=False) if recomputed else layer(rows)

    if letter == "A":
        return call()
    with amax_shared_with(owner):
        return call()


@contextmanager
def reductions() -> Iterator[list[tuple[Any, Any]]]:
    """Where each amax lies that is reduced in here, and over which group; the fake backend sends nothing."""
    made: list[tuple[Any, Any]] = []
    real = torch.distributed.all_reduce

    def noted(tensor: Any, operation: Any, group: Any = None) -> Any:
        made.append((tensor.data_ptr(), group))
        return real(tensor, operation, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", noted)
        yield made


def _wrong_histories(pattern: str, layers: list[Any], seen: list[dict[str, list[float]]]) -> list[str]:
    wrong = []
    for place, letter in enumerate(pattern):
        for direction in ("forward", "backward"):
            history = te_amax_state(layers[place], forward=direction == "forward")[0][:, 0]
            found = [float(amax) for amax in history[-STEPS:]]
            if found != seen[place][direction]:
                wrong.append(f"{direction} history of {letter}{place}: {found}, saw {seen[place][direction]}")
    return wrong


def _wrong_groups(pattern: str, layers: list[Any], reduced: list[tuple[Any, Any]], world: Any, owner: Any) -> list[str]:
    wrong = []
    for place, letter in enumerate(pattern):
        wanted = world if letter == "A" else owner
        for forward in (True, False):
            row = te_amax_state(layers[place], forward=forward)[0][0].data_ptr()
            groups = [group for where, group in reduced if where == row]
            if groups != ([] if wanted is SINGLE_OWNER else [wanted] * STEPS):
                wrong.append(f"groups of {letter}{place}, {'forward' if forward else 'backward'}: {len(groups)}")
    return wrong


@pytest.mark.parametrize("pattern", ["EAEA", "AEA", "EE"])
@pytest.mark.parametrize("alone", [True, False])
def test_histories_move_once_a_pass_and_each_layer_has_its_group(world: Any, pattern: str, alone: bool) -> None:
    owner = SINGLE_OWNER if alone else torch.distributed.new_group([0, 2])
    assert faults_of(world, owner, pattern=pattern) == []


def test_layers_keep_their_groups_where_they_are_recomputed(world: Any) -> None:
    """The second pass runs outside of every scope, and without a group; only how often histories move differs."""
    found = faults_of(world, torch.distributed.new_group([0, 2]), recomputed=True)
    with reductions() as reduced:
        owner = torch.distributed.new_group([0, 2])
        layer = te.linear.require()(WIDTH, WIDTH, bias=False, device="cpu")
        with low_precision(target="cpu", amax_reduction_group=world, recipe="delayed"):
            out = run(layer, torch.ones(WIDTH, WIDTH, requires_grad=True), "E", owner, recomputed=True)
        out.sum().backward()
    rows = {te_amax_state(layer, forward=forward)[0][0].data_ptr() for forward in (True, False)}
    assert {group for where, group in reduced if where in rows} == {owner}
    assert found  # Transformer Engine ends a scope of its own around each second pass


def test_a_layer_keeps_the_group_of_its_first_region(world: Any) -> None:
    layer = te.linear.require()(WIDTH, WIDTH, bias=False, device="cpu")
    watch_layers(layer)
    rows = torch.ones(WIDTH, WIDTH)
    with low(amax_reduction_group=world, recipe="delayed"):
        for _ in range(2):
            with amax_shared_with(SINGLE_OWNER):
                layer(rows)
        with pytest.raises(AmaxGroupChanged, match=r"this rank alone so far.*over ranks \[0, 1, 2, 3\] now"):
            layer(rows)


# --- where there is none ----------------------------------------------------------------------------------


def in_another_thread() -> None:
    raised: list[BaseException] = []

    def enter() -> None:
        try:
            amax_shared_with(SINGLE_OWNER)
        except BridgeError as fault:
            raised.append(fault)

    with low():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    raise raised[0]


def in_high_precision() -> None:
    with low(), high_precision("a head"), amax_shared_with(SINGLE_OWNER):
        pytest.fail("entered")


def twice() -> None:
    with low(), amax_shared_with(SINGLE_OWNER), amax_shared_with(SINGLE_OWNER):
        pytest.fail("entered")


def made_in_an_earlier_scope() -> None:
    with low():
        region = amax_shared_with(SINGLE_OWNER)
    with low(), region:
        pytest.fail("entered")


@pytest.mark.parametrize(("enter", "said"), [
    (lambda: amax_shared_with(SINGLE_OWNER), "outside of every scope"),
    (in_another_thread, "outside of every scope of this thread"),
    (in_high_precision, r"inside the one entered at .*test_amax_region.py:\d+"),
    (twice, r"entered at .*test_amax_region.py:\d+ inside the one entered at .*test_amax_region.py:\d+"),
    (made_in_an_earlier_scope, "inside another scope than it was made in"),
])  # fmt: skip
def test_a_region_out_of_place_is_refused(either: str, enter: Callable[[], None], said: str) -> None:
    with pytest.raises(AmaxRegionMisplaced, match=said + r".*Next step: enter low_precision first"):
        enter()
    assert current_scope() is None
