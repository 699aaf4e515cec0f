"""An evaluation or a rehearsal in the scope leaves no amax behind for the next training step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te
from megacpp_validate.bridge.fp8_scope import delayed_scaling_kept, pending_amax_kept, te_amax_state
from tests.bridge.scope_paths import low


def new_layer() -> Any:
    return te.linear.require()(16, 16, bias=False, device="cpu")


def run(layer: Any, amax: float) -> None:
    with low():
        layer(torch.full((16, 16), amax))


def amaxes(layer: Any) -> list[float]:
    """Of its input: the collecting row first, the newest last."""
    return [float(value) for value in te_amax_state(layer, forward=True)[0][:, 0]]


def step(layer: Any, amax: float) -> None:
    """Forward in the scope, backward outside."""
    given = torch.full((16, 16), amax, requires_grad=True)
    with low():
        out = layer(given)
    (out * amax).sum().backward()


def scaling(layer: Any) -> list[Any]:
    """Histories and scales of both directions, as they are now."""
    return [part.clone() for forward in (True, False) for part in te_amax_state(layer, forward=forward)]


def test_whole_steps_leave_no_trace(on_te: None) -> None:
    layer = new_layer()
    step(layer, 1.0)
    before = scaling(layer)
    with delayed_scaling_kept(layer):
        step(layer, 99.0)
        step(layer, 98.0)
        assert not any(map(torch.equal, scaling(layer), before))
    assert all(map(torch.equal, scaling(layer), before))


def test_a_layer_that_first_ran_inside_is_as_new(on_te: None) -> None:
    layer = new_layer()
    with pytest.raises(KeyError), delayed_scaling_kept(layer):  # noqa: PT012 - what is left behind is tested
        step(layer, 99.0)
        raise KeyError
    assert [(float(part.min()), float(part.max())) for part in scaling(layer)] == [(0.0, 0.0), (1.0, 1.0)] * 2
    step(layer, 2.0)
    assert (amaxes(layer)[-1], sum(amaxes(layer))) == (2.0, 2.0)


def test_a_state_that_was_loaded_and_has_not_run_yet_is_kept(on_te: None) -> None:
    """Transformer Engine lists it from its first pass on alone."""
    first, layer = new_layer(), new_layer()
    step(first, 1.0)
    layer.set_extra_state(first.get_extra_state())
    loaded = scaling(layer)
    assert float(loaded[1][0]) > 1
    with delayed_scaling_kept(layer):
        step(layer, 99.0)
    assert all(map(torch.equal, scaling(layer), loaded))


@pytest.mark.parametrize("length", [2, 6])
def test_a_history_of_another_length_is_kept_as_its_first_pass_makes_it(length: int) -> None:
    """Of a checkpoint that was saved under another length: the first pass puts a new tensor in its place."""
    layer, loaded = torch.nn.Module(), torch.arange(8.0).view(4, 2)
    state = SimpleNamespace(amax_history=loaded.clone(), scale=torch.tensor([3.0, 5.0]))
    layer.fp8_meta = {"scaling_fwd": state}
    with delayed_scaling_kept(layer):
        state.amax_history = torch.full((length, 2), 99.0)
        state.scale.fill_(7.0)
    wanted = torch.cat([loaded, torch.zeros(2, 2)])[:length]
    assert (state.amax_history.tolist(), state.scale.tolist()) == (wanted.tolist(), [3.0, 5.0])


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


def test_a_layer_that_is_evaluated_first_has_seen_nothing(on_te: None) -> None:
    layer = new_layer()
    with torch.no_grad():
        run(layer, 99.0)
    assert set(amaxes(layer)) == {0.0}


def test_what_was_noted_before_it_is_kept(on_te: None) -> None:
    """A weight that is stored in FP8 notes its amax in the optimizer's step, before the next scope."""
    layer = new_layer()
    run(layer, 1.0)
    te_amax_state(layer, forward=True)[0][0, 1] = 7.0
    with torch.no_grad():
        run(layer, 99.0)
    assert te_amax_state(layer, forward=True)[0][0].tolist() == [0.0, 7.0, 0.0]


def test_what_a_checkpoint_had_noted_is_kept(on_te: None) -> None:
    """Transformer Engine lists a loaded layer from its first pass on alone, and that may be an evaluation."""
    first, layer = new_layer(), new_layer()
    run(first, 1.0)
    te_amax_state(first, forward=True)[0][0, 1] = 7.0
    layer.set_extra_state(first.get_extra_state())
    with torch.no_grad(), pending_amax_kept(layer):
        run(layer, 99.0)
    assert te_amax_state(layer, forward=True)[0][0].tolist() == [0.0, 7.0, 0.0]


def test_it_is_put_back_after_an_exception(on_te: None) -> None:
    layer = new_layer()
    run(layer, 1.0)
    with pytest.raises(KeyError), torch.no_grad(), low():  # noqa: PT012 - what is left behind is tested
        layer(torch.full((16, 16), 99.0))
        raise KeyError
    assert amaxes(layer)[0] == 0.0


def test_training_takes_its_own_amax_in(on_te: None) -> None:
    layer = new_layer()
    run(layer, 3.0)
    assert amaxes(layer)[-1] == 3.0


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
