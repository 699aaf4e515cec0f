"""Loss curves read back, strictly: what is damaged, edited or contradicts itself is no evidence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .loss_curve import CURVE_SCHEMA_ID, LossCurve
from .strict_json import refuse_what_json_hides

_LONGEST_RUN: Final = 10_000_000


class CurveInvalid(ValueError):
    """A text that is no loss curve.

    Attributes:
        source: where it came from.
        reason: what is wrong with it, every fault named.
    """

    def __init__(self, source: str, reason: str) -> None:
        self.source = source
        self.reason = reason
        super().__init__(
            f"{source} is no loss curve: {reason}. Likely cause: it was edited, cut short, or written by another "
            "version. Next step: train the run again."
        )


class _CurveFile(BaseModel):
    """A curve as JSON has it: null for a number that was not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    schema_id: Literal["megacpp-validate/loss-curve/1"]
    recipe: str = Field(min_length=1)
    seed: int
    data: str = Field(pattern=r"^[0-9a-f]{64}$")
    planned: int = Field(gt=0, le=_LONGEST_RUN)
    steps: list[int]
    losses: list[float | None]
    gradient_norms: list[float | None]


def parse_curve(text: str | bytes, source: str = "the text") -> LossCurve:
    """A curve from its JSON text. A null in a series is read as NaN, which no gate passes.

    Raises:
        CurveInvalid: it is none.
    """
    try:
        read = _CurveFile.model_validate_json(text)
        refuse_what_json_hides(text)
    except ValidationError as fault:
        said = (f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in fault.errors()[:5])
        raise CurveInvalid(source, "; ".join(said)) from fault
    except ValueError as fault:
        raise CurveInvalid(source, str(fault)) from fault
    if contradictions := "; ".join(_find_contradictions(read)):
        raise CurveInvalid(source, contradictions)
    return LossCurve(
        recipe=read.recipe,
        seed=read.seed,
        data=read.data,
        planned=read.planned,
        steps=tuple(read.steps),
        losses=tuple(math.nan if value is None else value for value in read.losses),
        gradient_norms=tuple(math.nan if value is None else value for value in read.gradient_norms),
    )


def read_curve(path: Path) -> LossCurve:
    """A curve from its file.

    Raises:
        CurveInvalid: it cannot be read, or is none.
    """
    try:
        text = path.read_bytes()
    except OSError as fault:
        raise CurveInvalid(str(path), f"it cannot be read: {fault.strerror or fault}") from fault
    return parse_curve(text, str(path))


def loss_curve_schema() -> dict[str, Any]:
    """The JSON schema of a loss curve."""
    schema = _CurveFile.model_json_schema()
    schema["title"] = "LossCurve"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": CURVE_SCHEMA_ID, **schema}


def _find_contradictions(read: _CurveFile) -> Iterator[str]:
    for name, series in (("losses", read.losses), ("gradient_norms", read.gradient_norms)):
        if len(series) != len(read.steps):
            yield f"{len(read.steps)} steps and {len(series)} {name}"
    if any(value is not None and value < 0 for value in read.gradient_norms):
        yield "a gradient norm below 0"
