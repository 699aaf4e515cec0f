"""The curves of `tests/gate/h200`, which Transformer Engine trained on an H200, healthy and with faults planted.

    python tests/gate/h200_curves.py FOLDER     (packs FOLDER/RECIPE-FAULT-SEED.json, as `te_faults.py` writes them)

Packed: losses as whole numbers of 0.00001 nats, norms as whole numbers of 0.001 of their logarithm, those of parts of
0.004 (0 as null); all but BF16's as the difference to the BF16 curve of their seed. Bars are 20 times that at least, or
medians of hundreds of values.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Final

from megacpp_validate.evidence.loss_curve import HistorySeen, LossCurve, QuantizerSeen
from megacpp_validate.evidence.loss_curves import read_curve

PACKED: Final = Path(__file__).parent / "h200" / "curves.json.xz"
FINE_LOSS, FINE_NORM, FINE_PART = 100_000, 1000, 250

Whole = list[int | None]


def pack(folder: Path, target: Path = PACKED) -> None:
    """Pack every curve of a folder; one that was cut off stays so."""
    curves = {path.stem: read_curve(path) for path in sorted(folder.glob("*.json"))}
    whole = {name: _series(curve) for name, curve in curves.items()}
    rows = {}
    for name, curve in curves.items():
        base = whole.get(f"bf16-none-{curve.seed}", {})
        series = {
            key: values if curve.recipe == "bf16" else _apart(values, base[key]) for key, values in whole[name].items()
        }
        rows[name] = {
            "planned": curve.planned,
            "series": series,
            "quantizers": [list(asdict(row).values()) for row in curve.quantizers],
            "histories": [list(asdict(row).values()) for row in curve.histories],
        }
    (data,) = {curve.data for curve in curves.values() if len(curve.steps) == curve.planned}
    (made_with,) = {tuple(sorted(curve.made_with.items())) for curve in curves.values() if curve.made_with}
    text = json.dumps({"data": data, "made_with": dict(made_with), "curves": rows}, separators=(",", ":"))
    target.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def seeds_of(recipe: str, fault: str) -> tuple[int, ...]:
    """Seeds that were recorded."""
    start = f"{recipe}-{fault}-"
    return tuple(sorted(int(name.removeprefix(start)) for name in _read()["curves"] if name.startswith(start)))


@cache
def curve_of(recipe: str, fault: str, seed: int) -> LossCurve:
    """One curve, as it was trained."""
    kept = _read()
    row, base = kept["curves"][f"{recipe}-{fault}-{seed}"], kept["curves"][f"bf16-none-{seed}"]["series"]
    series = {
        key: values if recipe == "bf16" else _together(values, base[key]) for key, values in row["series"].items()
    }
    losses = tuple(value / FINE_LOSS for value in series.pop("losses"))
    norms = _norms(series.pop("gradient_norms"), FINE_NORM)
    return LossCurve(
        recipe=recipe,
        seed=seed,
        data=kept["data"],
        planned=row["planned"],
        steps=tuple(range(len(losses))),
        losses=losses,
        gradient_norms=norms,
        part_norms={part: _norms(values, FINE_PART) for part, values in series.items()},
        quantizers=tuple(QuantizerSeen(*values) for values in row["quantizers"]),
        histories=tuple(HistorySeen(*values) for values in row["histories"]),
        made_with=kept["made_with"],
    )


@cache
def _read() -> dict[str, Any]:
    return json.loads(lzma.decompress(PACKED.read_bytes()))


def _series(curve: LossCurve) -> dict[str, Whole]:
    return {
        "losses": [round(value * FINE_LOSS) for value in curve.losses],
        "gradient_norms": _logs(curve.gradient_norms, FINE_NORM),
        **{part: _logs(values, FINE_PART) for part, values in curve.part_norms.items()},
    }


def _logs(norms: Iterable[float], fine: int) -> Whole:
    return [round(math.log(norm) * fine) if norm > 0 else None for norm in norms]


def _norms(values: Whole, fine: int) -> tuple[float, ...]:
    return tuple(0.0 if value is None else math.exp(value / fine) for value in values)


def _apart(values: Whole, base: Whole) -> Whole:
    return [None if a is None else a - (b or 0) for a, b in zip(values, base, strict=False)]


def _together(values: Whole, base: Whole) -> Whole:
    return [None if a is None else a + (b or 0) for a, b in zip(values, base, strict=False)]


if __name__ == "__main__":
    pack(Path(sys.argv[1]))
