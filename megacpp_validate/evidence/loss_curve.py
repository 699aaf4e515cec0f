"""A loss curve: what one training run recorded at each step, as one JSON file.

Written where the training runs, so it needs the standard library only. `evidence.loss_curve_file` reads it back.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from .whole_file import write_whole

CURVE_SCHEMA_ID: Final = "megacpp-validate/loss-curve/1"


@dataclass(frozen=True)
class LossCurve:
    """One run. The three series have one entry a recorded step, in the order of recording.

    Attributes:
        recipe: "bf16", or the FP8 recipe that was asked for.
        seed: of the weights.
        data: what the run was fed with, in its order: the hexadecimal SHA-256 of all its tokens. Equal for two runs
            if and only if each step of the one saw what the same step of the other saw.
        planned: number of steps that the run was started for. It is written before the first step, so that a run that
            stopped early cannot pass as a short one.
        steps: numbers of the steps, from 0; a whole run has 0 to `planned` - 1, each once.
        losses: mean loss of the step, in nats a token, before any scaling for backward.
        gradient_norms: L2 norm of all gradients of the step together, before clipping.
    """

    recipe: str
    seed: int
    data: str
    planned: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    gradient_norms: tuple[float, ...]
    schema_id: str = CURVE_SCHEMA_ID

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - pydantic's name and type


def curve_text(curve: LossCurve) -> str:
    """The curve as JSON; the same text for the same curve. JSON has no NaN and no Inf: such a number becomes null."""
    fields = asdict(curve)
    for name in ("losses", "gradient_norms"):
        fields[name] = [value if math.isfinite(value) else None for value in fields[name]]
    return json.dumps(fields, allow_nan=False) + "\n"


def write_curve(curve: LossCurve, path: Path) -> None:
    """Write a curve aside and rename it, so that there is a whole one or none.

    Raises:
        OSError: the place cannot be written.
    """
    write_whole(path, curve_text(curve))
