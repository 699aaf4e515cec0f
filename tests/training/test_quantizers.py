"""The audit of delayed scaling: what moves as it should is fine, and each way in which it does not is told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="not-run: there is no torch")
from torch import nn  # noqa: E402

from megacpp_validate.training.quantizers import HistoryWatch, see_quantizers  # noqa: E402

TOPS = {"scaling_fwd": 448.0, "scaling_bwd": 57344.0}
FORMATS = {"scaling_fwd": "kFloat8E4M3", "scaling_bwd": "kFloat8E5M2"}


class Float8Quantizer:
    def __init__(self, name: str) -> None:
        self.dtype = SimpleNamespace(name=name)


class Layer(nn.Module):
    """The state of a layer of Transformer Engine with one product: three tensors forward, two backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.fp8_meta: dict[str, Any] = {}
        self.quantizers: dict[str, Any] = {}
        for key, count in (("scaling_fwd", 3), ("scaling_bwd", 2)):
            self.fp8_meta[key] = SimpleNamespace(amax_history=torch.zeros(16, count), scale=torch.ones(count))
            self.quantizers[key] = [Float8Quantizer(FORMATS[key]) for _ in range(count)]

    def cast(self, amax: float) -> None:
        for key, used in (("scaling_fwd", (0, 1)), ("scaling_bwd", (0,))):
            for index in used:
                history = self.fp8_meta[key].amax_history
                history[0, index] = max(float(history[0, index]), amax)


def update(layer: Layer) -> None:
    """As `_amax_and_scale_update` of Transformer Engine does it."""
    for key, state in layer.fp8_meta.items():
        amax = state.amax_history.amax(0)
        state.scale.copy_(torch.where(amax > 0, TOPS[key] / amax, state.scale))
        state.amax_history.copy_(state.amax_history.roll(-1, 0))
        state.amax_history[0].zero_()


def freeze(_: Layer) -> None:
    """Nothing is updated."""


def never_roll(layer: Layer) -> None:
    for key, state in layer.fp8_meta.items():
        amax = state.amax_history.amax(0)
        state.scale.copy_(torch.where(amax > 0, TOPS[key] / amax, state.scale))


def keep_scale(layer: Layer) -> None:
    update(layer)
    for state in layer.fp8_meta.values():
        state.scale.fill_(1.0)


def take_newest(layer: Layer) -> None:
    update(layer)
    for key, state in layer.fp8_meta.items():
        newest = state.amax_history[-1]
        state.scale.copy_(torch.where(newest > 0, TOPS[key] / newest, state.scale))


def watch(move: Callable[[Layer], None], amaxes: list[float]) -> Any:
    model = nn.ModuleDict({"inner": Layer()})
    watcher = HistoryWatch(model, before={len(amaxes) - 2})
    for step, amax in enumerate(amaxes):
        if amax:
            model["inner"].cast(amax)
        move(model["inner"])
        watcher.look(step)
    (seen,) = watcher.seen
    assert seen.step == len(amaxes) - 1
    return seen


@pytest.mark.parametrize("amaxes", [[1.0, 2.0], [0.3] * 20, [1000.0, *[0.7] * 15, 0.9], [1000.0, *[0.7] * 16, 0.9]])
def test_what_moves_as_the_recipe_says_is_fine(amaxes: list[float]) -> None:
    seen = watch(update, amaxes)
    assert (seen.tensors, seen.not_rolled, seen.not_collected) == (3, 0, 0)
    assert seen.scale_error < 2.0**-22


@pytest.mark.parametrize(
    ("move", "amaxes", "wrong"),
    [
        (freeze, [1.0, 2.0, 3.0], {"not_rolled": 3, "not_collected": 3}),
        (never_roll, [1.0, 2.0, 3.0], {"not_rolled": 3, "not_collected": 3}),
        (keep_scale, [1.0, 2.0, 3.0], {"not_rolled": 0}),
        (take_newest, [5.0, 2.0, 3.0], {"not_rolled": 0}),
        (update, [1.0, 2.0, 0.0], {"not_rolled": 0, "not_collected": 3}),
    ],
)
def test_what_does_not_is_told(move: Callable[[Layer], None], amaxes: list[float], wrong: dict[str, int]) -> None:
    seen = watch(move, amaxes)
    assert {name: getattr(seen, name) for name in wrong} == wrong
    assert seen.not_rolled or seen.not_collected or seen.scale_error > 0.1


def test_the_casts_are_those_of_the_layers() -> None:
    model = nn.ModuleDict({"a": Layer(), "plain": nn.Linear(2, 2)})
    rows = see_quantizers(model)
    assert [(row.layer, row.tensor, row.kind, row.format) for row in rows] == [
        ("a", "input", "Float8Quantizer", "e4m3"),
        ("a", "weight", "Float8Quantizer", "e4m3"),
        ("a", "gradient", "Float8Quantizer", "e5m2"),
    ]
