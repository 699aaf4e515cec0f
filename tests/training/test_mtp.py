"""The head that predicts the token after the next one, beside the same written out over what can be predicted."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")

from megacpp_validate.bridge.features import PRESETS  # noqa: E402
from megacpp_validate.training.language import Language  # noqa: E402
from megacpp_validate.training.layers import Build  # noqa: E402
from megacpp_validate.training.model import (  # noqa: E402
    HybridModel,
)
from megacpp_validate.training.sizes import Size, read_size  # noqa: E402

EXACT = Build(PRESETS["off"], torch.float64)
# Of a mean of log 32 nats: a path to it meets below 2000 roundings of 2^-53, here and in the model.
NEAR = 1e-12


def read(size: Size) -> Any:
    return Language(size.grammar, seed=4).batch(0, 2, size.length + 1)


def written_out(model: HybridModel, tokens: Any) -> Any:
    """[] without the coefficient: T - 1 positions, each with a target, through the last layer by themselves."""
    stream = model.trunk(tokens[:, :-1]).stream[:, :-1]
    ahead, targets = model.embedding(tokens[:, 1:-1]), tokens[:, 2:]
    assert model.mtp is not None

    def normed(x: Any, weight: Any) -> Any:
        return x / (x.square().mean(-1, keepdim=True) + model.size.eps).sqrt() * weight

    left, right = model.mtp.projection.weight.chunk(2, dim=1)
    rows = (
        normed(stream, model.mtp.hidden_norm.weight) @ left.t() + normed(ahead, model.mtp.token_norm.weight) @ right.t()
    )
    rows = model.layers[-1](rows, (model.cos, model.sin)).rows
    surprise = -(normed(rows, model.norm.weight) @ model.head.weight.t()).log_softmax(-1)
    return surprise.gather(-1, targets.unsqueeze(-1)).mean()


@pytest.mark.parametrize("last", "AMER")
def test_it_is_the_head_of_the_paper_on_any_last_layer(last: str) -> None:
    """Positions are causal, so those without a target change nothing; whole experts, so that no choice turns."""
    quiet = {"num_experts": 2, "aux_coefficient": 0.0, "z_coefficient": 0.0}
    size = read_size("tiny", pattern=f"M{last}", mtp=True, mtp_coefficient=0.25, **quiet)
    model = HybridModel(size, EXACT, seed=0)
    tokens = read(size)
    losses = model.losses(tokens)
    mtp = losses.total - losses.language
    assert float(mtp.detach()) == pytest.approx(0.25 * float(written_out(model, tokens).detach()), abs=NEAR)
    (mine,) = torch.autograd.grad(mtp, [model.layers[-1].get_parameter(_first(model.layers[-1]))])
    assert float(mine.abs().sum()) > 0


def _first(layer: Any) -> str:
    return max(layer.named_parameters(), key=lambda named: named[1].numel())[0]
