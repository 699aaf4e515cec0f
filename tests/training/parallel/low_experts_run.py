"""Delayed scaling with experts shared out over pairs of ranks, on a double of Transformer Engine, for a test."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import distributed

STEPS = 3


def histories_on_a_rank(planted: str) -> dict[str, Any]:
    """Layer and direction -> which rows of its amax history are filled, from 0, and over which ranks it is reduced.

    Args:
        planted: "" or a fault: "scopes", one for each layer.
    """
    from megacpp_validate.selftest.double import use_te_double

    use_te_double()
    from megacpp_validate.bridge import imports as te
    from megacpp_validate.bridge.fp8_scope import te_amax_state
    from megacpp_validate.training.parallel.goodput import Ledger
    from megacpp_validate.training.parallel.ranks import Rank
    from megacpp_validate.training.smoke.order import SmokeOrder
    from megacpp_validate.training.smoke.trainer import SmokeTrainer

    place, world = distributed.get_rank(), distributed.get_world_size()
    order = SmokeOrder(
        changes={"pattern": "AEMEAEA"}, plan={"world": world, "data": world, "expert_parallel": 2},
        steps=STEPS, precision="delayed", audit=True,
    )  # fmt: skip
    ledger = Ledger(began_ns=time.monotonic_ns())
    trainer = SmokeTrainer(order, Rank(place, world, place, "cpu", None, None), ledger)
    with pytest.MonkeyPatch.context() as patch:
        if planted == "scopes":
            patch.setattr(type(trainer.model), "_groups", _each_by_itself)
        trainer.run()
    found: dict[str, Any] = {}
    manager: Any = te.fp8_state_manager.require()
    groups = {id(state): (recipe.reduce_amax, group) for _, state, recipe, group in manager.states}
    for name, layer in trainer.model.named_modules():
        for forward in (True, False):
            state = getattr(layer, "fp8_meta", {}).get("scaling_fwd" if forward else "scaling_bwd")
            if state is not None:
                history = te_amax_state(layer, forward=forward)[0]
                reduces, group = groups[id(state)]
                ranks = tuple(distributed.get_process_group_ranks(group)) if reduces else ()
                found[f"{name} {'forward' if forward else 'backward'}"] = (
                    history[:, 0].nonzero().flatten().tolist(),
                    ranks,
                )
    return found


def _each_by_itself(model: Any, scope: Any) -> Any:
    from megacpp_validate.bridge.fp8_scope import group_scope

    for place in range(len(model.layers)):
        yield [place], group_scope([place], model.size.zones, [scope.dense])
