"""A loss curve: what one training run recorded at each step, as one JSON file.

Written where the training runs, so what writes it needs the standard library only; on the host pydantic reads it back,
strictly: what is damaged, edited or contradicts itself is no evidence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import FileInvalid, WrongArguments
from .packed import unpack
from .receipt import Strict

SUFFIXES: Final = (".curve", ".curve.xz")  # as written, and as it may be kept
_SERIES: Final = ("losses", "gradient_norms")
_TABLES: Final = ("part_losses", "part_norms")
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
    data = asdict(curve)
    data |= {name: _as_json(data[name]) for name in _SERIES}
    data |= {name: {part: _as_json(values) for part, values in data[name].items()} for name in _TABLES}
    return json.dumps(data, allow_nan=False) + "\n"


def _as_json(values: Iterable[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


# --- On the host. ---


class CurveInvalid(FileInvalid):
    """A file that is not a loss curve."""

    kind = "loss curve"
    next_step = "train the run again"


def parse_curve(text: str | bytes, file: Path = Path("the text")) -> LossCurve:
    """A curve from its JSON text. A null in a series is read as NaN, which no gate passes.

    Raises:
        CurveInvalid: the text is not a curve.
    """
    from pydantic import TypeAdapter, ValidationError

    from .values import list_errors

    try:
        data = json.loads(text)
        numbers = {name: _from_json(data[name]) for name in (*_SERIES, *_TABLES)}
        curve = TypeAdapter(LossCurve).validate_json(json.dumps(data | numbers), strict=True)
    except ValidationError as fault:
        raise CurveInvalid(file, list_errors(fault)) from fault
    except (LookupError, TypeError, ValueError) as fault:
        raise CurveInvalid(file, f"{type(fault).__name__}: {fault}") from fault
    tables = (*curve.part_losses.values(), *curve.part_norms.values())
    odd = [len(row) for row in (curve.losses, curve.gradient_norms, *tables) if len(row) != len(curve.steps)]
    for wrong, problem in (
        (curve.schema_id != CURVE_SCHEMA_ID, f"schema_id is {curve.schema_id!r}"),
        (curve.planned < 1, f"planned is {curve.planned}"),
        (odd, f"{len(curve.steps)} steps, and a series of {odd[:1]} values"),
    ):
        if wrong:
            raise CurveInvalid(file, problem)
    return curve


def _from_json(value: Any) -> Any:
    """Series with NaN for null: JSON has no number that is not finite."""
    if isinstance(value, dict):
        return {name: _from_json(item) for name, item in value.items()}
    return [math.nan if item is None else item for item in value] if isinstance(value, list) else value


def read_curve(path: Path) -> LossCurve:
    """A curve from its file.

    Raises:
        CurveInvalid: the file cannot be read, or is not a curve.
    """
    try:
        if not path.is_file():  # to open a pipe would wait for who writes to it
            raise CurveInvalid(path, "it is not a regular file")
        return parse_curve(unpack(path.read_bytes(), path), path)
    except OSError as fault:
        raise CurveInvalid(path, f"it cannot be read: {fault}") from fault


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
    for path in sorted(path for suffix in SUFFIXES for path in folder.glob(f"*{suffix}")):
        cell, _, name = path.name.removesuffix(".xz").removesuffix(".curve").rpartition(".")
        run: LossCurve | CurveInvalid
        try:
            run = read_curve(path)
            if name != f"{run.recipe}-{run.seed}":
                run = CurveInvalid(path, f"it holds {run.recipe} with seed {run.seed}, which its name does not say")
        except CurveInvalid as fault:
            run = fault
        found.setdefault(cell, {}).setdefault(name.rpartition("-")[0], []).append(run)
    return dict(sorted(found.items()))


# --- What rounding alone does to the loss of a training step. ---

# 2**-p of p significand bits, the hidden one among them: IEEE 754 binary64 and binary32, bfloat16.
UNIT_ROUNDOFF: Final = {"fp64": 2.0**-53, "fp32": 2.0**-24, "bf16": 2.0**-8}
SUMMED_IN: Final = {"fp64": "fp64", "fp32": "fp32", "bf16": "fp32"}
STORED: Final = 10  # activations of a layer that are stored: two norms, four or five products, gate, two sums
SIGMAS: Final = 2.0


@dataclass(frozen=True)
class Depth:
    """What an error goes through: layers L, terms K of the longest sum of a layer; and tokens N of a step.

    Roundings are independent, so errors grow as random walks do (Higham and Mary 2019, "A new approach to
    probabilistic rounding error analysis", theorem 2.4: the square root of the worst case). The mean over N tokens
    is a sum of N terms: sqrt(N) * u of what it is summed in. What a token brings passed L layers of K roundings
    each, in the precision of the layers, and is one of N that are wrong independently: sqrt(L * K / N) * u. In
    bf16, products are summed in fp32 and rounded where they are stored (K = STORED); else every term of the longest
    sum is rounded. SIGMAS of that are a walk's bound; step t has had t + 1 such errors, and a walk of them is
    sqrt(t + 1) as long.
    """

    layers: int
    terms: int
    tokens: int

    def floor(self, precision: str) -> float:
        """Relative error of a mean over the tokens that rounding alone makes, at one step.

        Args:
            precision: of the layers, a key of `UNIT_ROUNDOFF`.
        """
        rounded = self.terms if SUMMED_IN[precision] == precision else STORED
        summed = UNIT_ROUNDOFF[SUMMED_IN[precision]] * math.sqrt(self.tokens)
        return SIGMAS * (summed + UNIT_ROUNDOFF[precision] * math.sqrt(self.layers * rounded / self.tokens))
