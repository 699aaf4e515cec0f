"""Loss curves read back, strictly: what is damaged, edited or contradicts itself is no evidence."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .loss_curve import CURVE_SCHEMA_ID, FIRST_CURVE_SCHEMA_ID, HistorySeen, LossCurve, QuantizerSeen
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


class _FirstCurveFile(BaseModel):
    """A curve of the first schema as JSON has it: null for a number that was not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    schema_id: Literal["megacpp-validate/loss-curve/1"]
    recipe: str = Field(min_length=1)
    seed: int
    data: str = Field(pattern=r"^[0-9a-f]{64}$")
    planned: int = Field(gt=0, le=_LONGEST_RUN)
    steps: list[int]
    losses: list[float | None]
    gradient_norms: list[float | None]


class _CurveFile(_FirstCurveFile):
    """A curve as it is written now."""

    schema_id: Literal["megacpp-validate/loss-curve/2"]  # type: ignore[assignment]
    part_losses: dict[str, list[float | None]]
    part_norms: dict[str, list[float | None]]
    quantizers: list[QuantizerSeen]
    histories: list[HistorySeen]
    made_with: dict[str, str]


def parse_curve(text: str | bytes, source: str = "the text") -> LossCurve:
    """A curve from its JSON text. A null in a series is read as NaN, which no gate passes.

    Raises:
        CurveInvalid: it is none.
    """
    try:
        read = _model_of(text).model_validate_json(text)
        refuse_what_json_hides(text)
    except ValidationError as fault:
        said = (f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in fault.errors()[:5])
        raise CurveInvalid(source, "; ".join(said)) from fault
    except ValueError as fault:
        raise CurveInvalid(source, str(fault)) from fault
    except RecursionError as fault:
        raise CurveInvalid(source, "it is nested too deep") from fault
    if contradictions := "; ".join(_find_contradictions(read)):
        raise CurveInvalid(source, contradictions)
    parts: dict[str, Any] = {}
    if isinstance(read, _CurveFile):
        parts = {
            "part_losses": {part: _numbers(values) for part, values in read.part_losses.items()},
            "part_norms": {part: _numbers(values) for part, values in read.part_norms.items()},
            "quantizers": tuple(read.quantizers),
            "histories": tuple(read.histories),
            "made_with": read.made_with,
        }
    return LossCurve(
        recipe=read.recipe,
        seed=read.seed,
        data=read.data,
        planned=read.planned,
        steps=tuple(read.steps),
        losses=_numbers(read.losses),
        gradient_norms=_numbers(read.gradient_norms),
        schema_id=read.schema_id,
        **parts,
    )


def read_curve(path: Path) -> LossCurve:
    """A curve from its file.

    Raises:
        CurveInvalid: it cannot be read, or is none.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for who writes to it
            raise CurveInvalid(str(path), "it is no regular file")
        text = path.read_bytes()
    except OSError as fault:
        raise CurveInvalid(str(path), f"it cannot be read: {fault.strerror or fault}") from fault
    return parse_curve(text, str(path))


def loss_curve_schema() -> dict[str, Any]:
    """The JSON schema of a loss curve."""
    schema = _CurveFile.model_json_schema()
    schema["title"] = "LossCurve"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": CURVE_SCHEMA_ID, **schema}


def _numbers(values: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(math.nan if value is None else value for value in values)


def _model_of(text: str | bytes) -> type[_FirstCurveFile]:
    """The schema that a text says it has; the newest where it says none that is known."""
    try:
        said = json.loads(text)
    except ValueError:
        return _CurveFile
    first = isinstance(said, dict) and said.get("schema_id") == FIRST_CURVE_SCHEMA_ID
    return _FirstCurveFile if first else _CurveFile


def _find_contradictions(read: _FirstCurveFile) -> Iterator[str]:
    losses, norms = {"losses": read.losses}, {"gradient_norms": read.gradient_norms}
    if isinstance(read, _CurveFile):
        losses |= {f"part_losses.{name}": values for name, values in read.part_losses.items()}
        norms |= {f"part_norms.{name}": values for name, values in read.part_norms.items()}
    for name, series in {**losses, **norms}.items():
        if len(series) != len(read.steps):
            yield f"{len(read.steps)} step{'' if len(read.steps) == 1 else 's'} and {len(series)} {name}"
    if any(value is not None and value < 0 for series in norms.values() for value in series):
        yield "a gradient norm below 0"
