"""Loss curves read back, strictly: what is damaged, edited or contradicts itself is no evidence."""

from __future__ import annotations

import math
import stat
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import WrongArguments
from .loss_curve import CURVE_SCHEMA_ID, HistorySeen, LossCurve, QuantizerSeen
from .strict_json import FileInvalid, list_errors, read_strict_json

SUFFIX: Final = ".curve"

# JSON has null for a number that was not finite.
Losses = list[float | None]
Norms = list[Annotated[float, Field(ge=0)] | None]


class CurveInvalid(FileInvalid):
    """A file that is not a loss curve."""

    kind = "loss curve"
    next_step = "train the run again"


class _CurveFile(BaseModel):
    """A curve as it is written now."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    schema_id: Literal["megacpp-validate/loss-curve/2"]
    recipe: str = Field(min_length=1)
    seed: int
    data: str = Field(pattern=r"^[0-9a-f]{64}$")
    planned: int = Field(gt=0, le=10_000_000)
    steps: list[int]
    losses: Losses
    gradient_norms: Norms
    part_losses: dict[str, Losses]
    part_norms: dict[str, Norms]
    quantizers: list[QuantizerSeen]
    histories: list[HistorySeen]
    made_with: dict[str, str]

    @model_validator(mode="after")
    def _require_a_value_a_step(self) -> _CurveFile:
        series = [self.losses, self.gradient_norms, *self.part_losses.values(), *self.part_norms.values()]
        if odd := [len(one) for one in series if len(one) != len(self.steps)]:
            raise ValueError(f"{len(self.steps)} steps, and a series of {odd[0]} values")
        return self


def parse_curve(text: str | bytes, file: Path = Path("the text")) -> LossCurve:
    """A curve from its JSON text. A null in a series is read as NaN, which no gate passes.

    Raises:
        CurveInvalid: the text is not a curve.
    """
    try:
        read_strict_json(text)
        read = _CurveFile.model_validate_json(text)
    except ValidationError as fault:
        raise CurveInvalid(file, list_errors(fault)) from fault
    except ValueError as fault:
        raise CurveInvalid(file, str(fault)) from fault
    return LossCurve(**{name: _freeze(value) for name, value in read})


def read_curve(path: Path) -> LossCurve:
    """A curve from its file.

    Raises:
        CurveInvalid: the file cannot be read, or is not a curve.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for who writes to it
            raise CurveInvalid(path, "it is not a regular file")
        text = path.read_bytes()
    except OSError as fault:
        raise CurveInvalid(path, f"it cannot be read: {fault.strerror or fault}") from fault
    return parse_curve(text, path)


def read_curves(folder: Path) -> dict[str, dict[str, list[LossCurve | CurveInvalid]]]:
    """Every curve of a folder: cell that trained it -> recipe -> its runs, invalid files among them.

    Cell and recipe are those of the name, `[CELL.]RECIPE-SEED.curve`; other files are left alone.

    Raises:
        WrongArguments: there is no such folder.
    """
    if not folder.is_dir():
        raise WrongArguments(
            f"there is no folder {folder}. Likely cause: a typing error, or no session wrote there. Next step: give "
            "the folder of receipts of a session of `fp8`."
        )
    found: dict[str, dict[str, list[LossCurve | CurveInvalid]]] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        cell, _, name = path.name.removesuffix(SUFFIX).rpartition(".")
        run: LossCurve | CurveInvalid
        try:
            run = read_curve(path)
            if name != f"{run.recipe}-{run.seed}":
                run = CurveInvalid(path, f"it holds {run.recipe} with seed {run.seed}, which its name does not say")
        except CurveInvalid as fault:
            run = fault
        found.setdefault(cell, {}).setdefault(name.rpartition("-")[0], []).append(run)
    return dict(sorted(found.items()))


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
