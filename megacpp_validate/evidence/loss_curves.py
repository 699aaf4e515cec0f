"""Loss curves read back, strictly: what is damaged, edited or contradicts itself is no evidence."""

from __future__ import annotations

import math
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import WrongArguments
from .loss_curve import CURVE_SCHEMA_ID, FIRST_CURVE_SCHEMA_ID, HistorySeen, LossCurve, QuantizerSeen
from .strict_json import FileInvalid, read_strict_json

SUFFIX: Final = ".curve"
_LONGEST_RUN: Final = 10_000_000


class CurveInvalid(FileInvalid):
    """A file that is not a loss curve."""

    kind = "loss curve"
    next_step = "train the run again"


@dataclass(frozen=True)
class CurveSet:
    """The curves that were trained together.

    Attributes:
        of: the cell that trained them; what the names of their files begin with.
        curves: by name of file.
        unreadable: every invalid file of them: a run that is lost, not one that passed.
    """

    of: str
    curves: tuple[LossCurve, ...]
    unreadable: tuple[CurveInvalid, ...] = ()


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


def parse_curve(text: str | bytes, file: Path = Path("the text")) -> LossCurve:
    """A curve from its JSON text. A null in a series is read as NaN, which no gate passes.

    Raises:
        CurveInvalid: the text is not a curve.
    """
    try:
        data = read_strict_json(text)
        first = isinstance(data, dict) and data.get("schema_id") == FIRST_CURVE_SCHEMA_ID
        read = (_FirstCurveFile if first else _CurveFile).model_validate_json(text)
    except ValidationError as fault:
        faults = (f"{'.'.join(map(str, error['loc'])) or 'the file'}: {error['msg']}" for error in fault.errors()[:5])
        raise CurveInvalid(file, "; ".join(faults)) from fault
    except ValueError as fault:
        raise CurveInvalid(file, str(fault)) from fault
    if contradictions := "; ".join(_find_contradictions(read)):
        raise CurveInvalid(file, contradictions)
    return LossCurve(**{name: _freeze(value) for name, value in read})


def read_curve(path: Path) -> LossCurve:
    """A curve from its file.

    Raises:
        CurveInvalid: the file cannot be read, or is not a curve.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for who writes to it
            raise CurveInvalid(path, "it is no regular file")
        text = path.read_bytes()
    except OSError as fault:
        raise CurveInvalid(path, f"it cannot be read: {fault.strerror or fault}") from fault
    return parse_curve(text, path)


def read_curves(folder: Path) -> tuple[CurveSet, ...]:
    """Every curve of a folder, a set a cell; files that are not called `[CELL.]RECIPE-SEED.curve` are left alone.

    Raises:
        WrongArguments: there is no such folder.
    """
    if not folder.is_dir():
        raise WrongArguments(
            f"there is no folder {folder}. Likely cause: a typing error, or no session wrote there. Next step: give "
            "the folder of receipts of a session of `fp8`."
        )
    curves: dict[str, list[LossCurve]] = {}
    unreadable: dict[str, list[CurveInvalid]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        of, _, name = path.name.removesuffix(SUFFIX).rpartition(".")
        try:
            curve = read_curve(path)
            if name != f"{curve.recipe}-{curve.seed}":
                raise CurveInvalid(path, f"it holds {curve.recipe} with seed {curve.seed}, which its name does not say")
        except CurveInvalid as fault:
            unreadable.setdefault(of, []).append(fault)
        else:
            curves.setdefault(of, []).append(curve)
    names = sorted(curves.keys() | unreadable.keys())
    return tuple(CurveSet(of, tuple(curves.get(of, ())), tuple(unreadable.get(of, ()))) for of in names)


def loss_curve_schema() -> dict[str, Any]:
    """The JSON schema of a loss curve."""
    schema = _CurveFile.model_json_schema()
    schema["title"] = "LossCurve"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": CURVE_SCHEMA_ID, **schema}


def _freeze(value: Any) -> Any:
    """Series as tuples, with NaN for a number that was not finite."""
    if isinstance(value, dict):
        return {name: _freeze(item) for name, item in value.items()}
    return tuple(math.nan if item is None else item for item in value) if isinstance(value, list) else value


def _find_contradictions(read: _FirstCurveFile) -> Iterator[str]:
    losses, norms = {"losses": read.losses}, {"gradient_norms": read.gradient_norms}
    if isinstance(read, _CurveFile):
        losses |= {f"part_losses.{name}": values for name, values in read.part_losses.items()}
        norms |= {f"part_norms.{name}": values for name, values in read.part_norms.items()}
    for name, series in {**losses, **norms}.items():
        if len(series) != len(read.steps):
            yield f"{len(read.steps)} steps and {len(series)} {name}"
    if any(value is not None and value < 0 for series in norms.values() for value in series):
        yield "a gradient norm below 0"
