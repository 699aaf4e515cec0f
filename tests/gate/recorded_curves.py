"""The curves of `tests/gate/curves`, which `train_curves.py` trained on a CPU, and what is derived from them.

Packed: losses as whole numbers of 0.0001 nats, gradient norms as whole numbers of 0.0001 of their logarithm; FP8 curves
as the difference to the BF16 curve of their seed. So all is a hundred times finer than the bars.
"""

from __future__ import annotations

import json
import lzma
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from megacpp_validate.evidence.loss_curve import LossCurve
from megacpp_validate.evidence.loss_curve_file import read_curve

PACKED: Final = Path(__file__).parent / "curves" / "curves.json.xz"
FINE: Final = 10_000


def pack(folder: Path, target: Path = PACKED) -> None:
    """Pack every curve of a folder, whose files are named `precision-fault-seed.json`."""
    curves = {path.stem: read_curve(path) for path in sorted(folder.glob("*.json"))}
    whole = {
        name: (_whole(curve.losses), _whole(map(math.log, curve.gradient_norms))) for name, curve in curves.items()
    }
    packed = {}
    for name, series in whole.items():
        base = f"bf16-none-{curves[name].seed}"
        packed[name] = series if name == base else [_subtract(a, b) for a, b in zip(series, whole[base], strict=True)]
    (data,) = {curve.data for curve in curves.values()}
    text = json.dumps({"data": data, "curves": packed}, separators=(",", ":"))
    target.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def curves_of(precision: str, fault: str, seeds: tuple[int, ...]) -> tuple[LossCurve, ...]:
    """The recorded curves of one precision and fault, as if they were whole and honest."""
    if fault == "loss_1.03":  # the run of the scaled backward, with its losses reported scaled too
        return tuple(
            replace(curve, losses=tuple(1.03 * value for value in curve.losses))
            for curve in curves_of(precision, "backward_1.03", seeds)
        )
    return tuple(_unpack(precision, fault, seed) for seed in seeds)


def seeds_of(precision: str, fault: str = "none") -> tuple[int, ...]:
    """Seeds that were recorded."""
    start = f"{precision}-{fault}-"
    return tuple(sorted(int(name.removeprefix(start)) for name in _read()["curves"] if name.startswith(start)))


@cache
def _read() -> dict:
    return json.loads(lzma.decompress(PACKED.read_bytes()))


@cache
def _unpack(precision: str, fault: str, seed: int) -> LossCurve:
    recorded = _read()
    name, base = f"{precision}-{fault}-{seed}", f"bf16-none-{seed}"
    series = recorded["curves"][name]
    if name != base:
        series = [
            [a + b for a, b in zip(own, under, strict=True)]
            for own, under in zip(series, recorded["curves"][base], strict=True)
        ]
    losses = tuple(value / FINE for value in series[0])
    norms = tuple(math.exp(value / FINE) for value in series[1])
    return LossCurve(precision, seed, recorded["data"], len(losses), tuple(range(len(losses))), losses, norms)


def _whole(values) -> list[int]:
    return [round(value * FINE) for value in values]


def _subtract(values: list[int], from_them: list[int]) -> list[int]:
    return [a - b for a, b in zip(values, from_them, strict=True)]
