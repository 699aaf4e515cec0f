"""What the double does as Transformer Engine's graphs and checkpoints do, so that a bridge which minds it is tested."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacpp_validate.bridge import imports as te

pytestmark = pytest.mark.usefixtures("te_double")


def new_layer() -> Any:
    return te.linear.require()(16, 16, bias=False, device="cpu")


def rows(count: int = 16) -> Any:
    return torch.linspace(-1, 1, count * 16).view(count, 16).requires_grad_()


def graphed(**options: Any) -> Any:
    layer = new_layer()
    recipe = te.delayed_scaling.require()(amax_history_len=4)
    return te.make_graphed_callables.require()(layer, (rows(),), **{"enabled": True, "recipe": recipe, **options})


def scope() -> Any:
    return te.autocast.require()(enabled=True, recipe=te.delayed_scaling.require()(amax_history_len=4))


def history(layer: Any) -> list[float]:
    return [float(value) for value in layer.fp8_meta["scaling_fwd"].amax_history[:, 0]]


def test_the_warm_up_leaves_no_trace() -> None:
    layer = graphed()
    assert history(layer) == [0.0] * 4
    assert layer.weight.grad is None


def test_a_replay_outside_of_the_scope_is_in_low_precision_and_its_amax_waits() -> None:
    layer = graphed()
    out = layer(rows())
    assert not torch.equal(out, rows() @ layer.weight.t())
    assert history(layer) == [1.0, 0.0, 0.0, 0.0]
    with scope():
        layer(rows())
    assert history(layer) == [0.0, 0.0, 0.0, 1.0]


def test_a_replay_takes_what_can_be_broadcast() -> None:
    layer = graphed()
    with scope():
        assert layer(rows()[:1]).shape == (16, 16)
    with scope(), pytest.raises(RuntimeError, match="expand"):
        layer(rows(8))


def test_an_evaluation_runs_without_the_graph() -> None:
    layer = graphed().eval()
    assert layer(rows(8)).shape == (8, 16)
    assert torch.equal(layer(rows()), rows() @ layer.weight.t())


def test_kept_weights_want_to_be_told_the_first_micro_batch() -> None:
    layer = graphed(cache_quantized_params=True)
    with scope(), pytest.raises(ValueError, match="is_first_microbatch"):
        layer(rows())
    with scope():
        first = layer(rows(), is_first_microbatch=True)
    with torch.no_grad():
        layer.weight.zero_()
    with scope():
        assert layer(rows(), is_first_microbatch=False).count_nonzero() > 0
    assert first.count_nonzero() > 0


def test_modules_with_hooks_are_refused() -> None:
    layer = new_layer()
    layer.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="hooks"):
        te.make_graphed_callables.require()(layer, (rows(),))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_draws_the_same_random_numbers_again(reentrant: bool) -> None:
    seen = []

    def noisy(given: Any) -> Any:
        noise = torch.rand(16, 16)
        seen.append(noise)
        return given * noise

    out = te.checkpoint.require()(noisy, rows(), use_reentrant=reentrant)
    torch.rand(3)
    after = torch.get_rng_state()
    out.sum().backward()
    assert len(seen) == 2
    assert torch.equal(*seen)
    assert torch.equal(torch.get_rng_state(), after)
