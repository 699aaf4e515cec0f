"""A loss curve: what one training run recorded at each step, as one JSON file.

Written where the training runs, so it needs the standard library only. `evidence.loss_curves` reads it back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from .receipt import Strict
from .whole_file import write_whole

CURVE_SCHEMA_ID: Final = "megacpp-validate/loss-curve/2"


@dataclass(frozen=True)
class QuantizerSeen(Strict):
    """A quantizer as it was found on a layer that ran.

    Attributes:
        layer: its name in the model.
        tensor: "input", "weight" or "gradient".
        kind: class name of the quantizer.
        format: "e4m3", "e5m2", or what it says otherwise.
    """

    layer: str
    tensor: str
    kind: str
    format: str


@dataclass(frozen=True)
class HistorySeen(Strict):
    """How the state of delayed scaling moved in one step, compared with a re-computation.

    Attributes:
        step: which one.
        tensors: how many were looked at.
        not_rolled: histories that did not move on by one row.
        not_collected: histories whose newest row is 0: nothing was measured.
        scale_error: the largest relative difference of a scale from that of the recipe.
    """

    step: int
    tensors: int
    not_rolled: int
    not_collected: int
    scale_error: float


@dataclass(frozen=True)
class LossCurve(Strict):
    """One run. The three series have one entry a recorded step, in the order of recording.

    Attributes:
        recipe: "bf16", or the FP8 recipe that was requested.
        seed: of the weights.
        data: what the run was fed with, in its order: the hexadecimal SHA-256 of all its tokens. Equal for two runs
            if and only if each step of the one saw what the same step of the other saw.
        planned: number of steps that the run was started for. It is written before the first step, so that a run that
            stopped early cannot pass as a short one.
        steps: numbers of the steps, from 0; a whole run has 0 to `planned` - 1, each once.
        losses: mean loss of the step, in nats a token, before any scaling for backward.
        gradient_norms: L2 norm of all gradients of the step together, before clipping.
        part_losses: part of the data -> its mean loss in each step.
        part_norms: part of the model -> the L2 norm of its gradients in each step, before clipping.
        quantizers: those of the last step that was looked at; none in BF16.
        histories: of delayed scaling, at a few steps.
        made_with: what trained it: "torch", "transformer_engine", "gpu".
    """

    recipe: str
    seed: int
    data: str
    planned: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    part_losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    part_norms: dict[str, tuple[float, ...]] = field(default_factory=dict)
    quantizers: tuple[QuantizerSeen, ...] = ()
    histories: tuple[HistorySeen, ...] = ()
    made_with: dict[str, str] = field(default_factory=dict)
    schema_id: str = CURVE_SCHEMA_ID


def curve_text(curve: LossCurve) -> str:
    """The curve as JSON; the same text for the same curve. JSON has no NaN and no Inf: such a number becomes null."""
    fields = asdict(curve)
    for name in ("losses", "gradient_norms"):
        fields[name] = _as_json(fields[name])
    for name in ("part_losses", "part_norms"):
        fields[name] = {part: _as_json(values) for part, values in fields[name].items()}
    return json.dumps(fields, allow_nan=False) + "\n"


def _as_json(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def write_curve(curve: LossCurve, path: Path) -> None:
    """Write a curve aside and rename it, so that there is a whole one or none.

    Raises:
        OSError: the place cannot be written.
    """
    write_whole(path, curve_text(curve))
