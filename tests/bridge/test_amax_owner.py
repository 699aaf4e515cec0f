"""Over which ranks amax is reduced, and what an evaluation or a rehearsal leaves behind: nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.amax_owner import SINGLE_OWNER, AmaxGroupMissing, pending_amax_kept, reduction_of
from megacpp_validate.bridge.te_fp8 import te_amax_state
from tests.bridge.scope_paths import low


def test_a_group_of_this_rank_is_taken_and_a_single_owner_reduces_with_nobody(world: Any) -> None:
    group = torch.distributed.new_group([0, 1])
    assert reduction_of(group) == (group, True)
    assert reduction_of(SINGLE_OWNER) == (None, False)


def test_what_is_no_group_of_this_rank_is_refused(world: Any) -> None:
    for owner in (None, torch.distributed.new_group([2, 3]), [0, 1], "world"):
        with pytest.raises(AmaxGroupMissing, match=r"Next step.*SINGLE_OWNER"):
            reduction_of(owner)


def new_layer() -> Any:
    return te.linear.require()(16, 16, bias=False, device="cpu")


def run(layer: Any, amax: float) -> None:
    with low():
        layer(torch.full((16, 16), amax))


def amaxes(layer: Any) -> list[float]:
    """Of its input: the collecting row first, the newest last."""
    return [float(value) for value in te_amax_state(layer, forward=True)[0][:, 0]]


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_leaves_no_trace(on_te: None, off: Any) -> None:
    layer = new_layer()
    run(layer, 1.0)
    with off():
        run(layer, 99.0)
    assert amaxes(layer)[0] == 0.0
    run(layer, 2.0)
    assert amaxes(layer)[-2:] == [1.0, 2.0]
    assert float(te_amax_state(layer, forward=True)[1][0]) == 224.0


def test_what_a_checkpoint_had_noted_is_kept(on_te: None) -> None:
    """Transformer Engine lists a loaded layer from its first pass on alone, and that may be an evaluation."""
    first, layer = new_layer(), new_layer()
    run(first, 1.0)
    te_amax_state(first, forward=True)[0][0, 1] = 7.0
    layer.set_extra_state(first.get_extra_state())
    with torch.no_grad(), pending_amax_kept(layer):
        run(layer, 99.0)
    assert te_amax_state(layer, forward=True)[0][0].tolist() == [0.0, 7.0, 0.0]


def test_both_homes_of_the_buffers_are_known(on_te: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the manager itself before 2.15, on its state since; none of them is no error."""
    history = torch.ones(4, 3)
    buffers = {"forward_recipe": [history[0]], "backward_recipe": [torch.ones(2)]}
    for manager in (SimpleNamespace(global_amax_buffer=buffers),
                    SimpleNamespace(quantization_state=SimpleNamespace(global_amax_buffer=buffers)),
                    SimpleNamespace()):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(te.fp8_state_manager, "_found", (manager, ""))
            with pending_amax_kept():
                history[0] = 9.0
        assert history[0, 0] == (1.0 if vars(manager) else 9.0)
    assert torch.equal(buffers["backward_recipe"][0], torch.ones(2))
