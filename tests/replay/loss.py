"""`loss-gate`: committed curves, curves of an H200 with faults in Transformer Engine, made-up curves with faults."""

from __future__ import annotations

import json
import lzma
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from .harness import ROOT, Decisions, Ended, Scenario

CELL: Final = "te2.20.2-h200-fp8_loss"
PACKED: Final = ROOT / "tests/gate/h200/curves.json.xz"
SCHEMA: Final = "megacpp-validate/loss-curve/2"
CASTS: Final = {"delayed": "Float8Quantizer", "current": "Float8CurrentScalingQuantizer"}
PARTS: Final = ("letters", *(f"layers.{place}" for place in range(5)), "norm", "head", "quiet", "lane")
LAYERS: Final = ("layers.1.mixer", "layers.2.up", "layers.2.down", "layers.3.qkv")
WORDS: Final = ("loss-gate", "{work}/curves", "--format", "json")

Curve = dict[str, Any]


def read_loss(ended: Ended) -> Decisions:
    """Each recipe: its outcome, the checks that failed with how many of each passed, and how many refusals."""
    found: Decisions = {}
    for row in ended.data["verdicts"]:
        key = f"{row['of']} {row['recipe']}"
        found[key] = row["outcome"]
        found[f"{key} failed"] = sorted(one["name"] for one in row["checks"] if not one["passed"])
        found[f"{key} checks"] = dict(sorted(Counter(one["name"].split(".")[0] for one in row["checks"]).items()))
        found[f"{key} refusals"] = len(row["refusals"])
        found[f"{key} bars"] = [f"{row[bar]:.6g}" for bar in ("bar", "early_bar", "spread") if row[bar] is not None]
    return found


def put(folder: Path, curve: Curve, cell: str = CELL) -> None:
    """Write a curve as a run leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{cell}.{curve['recipe']}-{curve['seed']}.curve").write_text(json.dumps(curve) + "\n")


def made_up(recipe: str, seed: int, steps: int = 100) -> Curve:
    """A loss that falls from 3 to 2 and ends 2^-8 apart from seed to seed; a recipe's is 2^-10 to and fro beside it."""
    low = recipe != "bf16"
    losses = [2 + (steps - step) / 128 + seed / 256 + (-1) ** step * 2.0**-10 * low for step in range(steps)]
    layers = [*(f"hybrid.{layer}" for layer in LAYERS), "lane.neck"]
    casts = [
        {"layer": layer, "tensor": tensor, "kind": CASTS[recipe], "format": "e5m2" if tensor == "gradient" else "e4m3"}
        for layer in layers if low
        for tensor in ("input", "weight", "gradient")
    ]  # fmt: skip
    history = {"tensors": len(casts), "not_rolled": 0, "not_collected": 0, "scale_error": 2.0**-24}
    return {
        "recipe": recipe, "seed": seed, "data": "a" * 64, "planned": steps, "steps": list(range(steps)),
        "losses": [loss + 2.0**-20 * (recipe == "current") for loss in losses],
        "gradient_norms": [1.0 + (step * 37 % 11) / 64 for step in range(steps)],
        "part_losses": {}, "part_norms": {part: [1.0] * steps for part in PARTS}, "quantizers": casts,
        "histories": [{"step": step, **history} for step in (2, 25, 75)] if recipe == "delayed" else [],
        "made_with": {"gpu": "made up", "torch": "9.9", "transformer_engine": "9.9"}, "schema_id": SCHEMA,
    }  # fmt: skip


def cut(curve: Curve, steps: int) -> Curve:
    """A run that ended early."""
    kept = {name: curve[name][:steps] for name in ("steps", "losses", "gradient_norms")}
    parts = {name: {part: row[:steps] for part, row in curve[name].items()} for name in ("part_losses", "part_norms")}
    return curve | kept | parts | {"histories": [row for row in curve["histories"] if row["step"] < steps]}


def series(name: str, change: Callable[[int, float], float]) -> Callable[[Curve], object]:
    """Every value of a series, changed by its place."""
    return lambda curve: curve.update({name: [change(at, value) for at, value in enumerate(curve[name])]})


def late(gap: float, start: float = 0.5) -> Callable[[Curve], object]:
    """A loss that is too high from some part of the run on."""
    return lambda curve: series("losses", lambda at, value: value + gap * (at >= start * curve["planned"]))(curve)


def part(name: str, change: Callable[[int, float], float]) -> Callable[[Curve], object]:
    """Gradients of one part."""
    return lambda curve: curve["part_norms"].update({name: [*map(change, range(10**6), curve["part_norms"][name])]})


def each(key: str, name: str, value: Any) -> Callable[[Curve], object]:
    """One attribute of every row of a table."""
    return lambda curve: [row.update({name: value}) for row in curve[key]]


FAULTS: Final[dict[str, Callable[[Curve], object]]] = {  # of one run of one recipe
    "nothing": lambda curve: None,
    **{f"late gap {gap}": late(gap) for gap in (0.0005, 0.002, 0.01, 0.05, -0.002, -0.05)},
    **{f"early gap {gap}": late(gap, 0.0) for gap in (0.005, 0.02, 0.2)},
    **{f"tail gap {gap}": late(gap, 0.9) for gap in (0.001, 0.005, 0.05)},
    "rises": series("losses", lambda at, value: value * (1 + at / 1000)),
    "NaN": series("losses", lambda at, value: math.nan if at == 50 else value),
    "infinity": series("gradient_norms", lambda at, value: math.inf if at == 50 else value),
    "NaN as null": series("losses", lambda at, value: None if at == 50 else value),
    "a negative loss": series("losses", lambda at, value: -1.0 if at == 50 else value),
    "losses x 1.03": series("losses", lambda _, value: value * 1.03),
    **{
        f"norms x {by}": series("gradient_norms", lambda _, value, by=by: value * by)
        for by in (0.5, 0.99, 1.03, 1.5, 0.0)
    },
    "norms x 2, late": series("gradient_norms", lambda at, value: value * (1 + (at > 60))),
    "a part without gradients": part("layers.3", lambda _, value: 0.0),
    "a part whose gradients vanish": part("layers.3", lambda at, value: value * 1e-6 if at > 50 else value),
    "a part whose gradients blow up": part("layers.3", lambda at, value: value * 1e4 if at > 50 else value),
    "a part x 1.2": part("layers.3", lambda _, value: value * 1.2),
    "a part less": lambda curve: curve["part_norms"].pop("layers.3"),
    "cut by ten": lambda curve: curve.update(cut(curve, curve["planned"] - 10)),
    "cut to one": lambda curve: curve.update(cut(curve, 1)),
    "cut to none": lambda curve: curve.update(cut(curve, 0)),
    "cut, and planned so": lambda curve: curve.update(cut(curve, curve["planned"] - 10), planned=curve["planned"] - 10),
    "a step twice": series("steps", lambda at, value: value - (at == 50)),
    "steps from 1": series("steps", lambda _, value: value + 1),
    "other data": lambda curve: curve.update(data="b" * 64),
    "another GPU": lambda curve: curve["made_with"].update(gpu="another"),
    "another torch": lambda curve: curve["made_with"].update(torch="1.0"),
    "no casts": lambda curve: curve.update(quantizers=[]),
    "a layer less": lambda curve: curve.update(quantizers=curve["quantizers"][3:]),
    "e4m3 throughout": each("quantizers", "format", "e4m3"),
    "e5m2 throughout": each("quantizers", "format", "e5m2"),
    "another quantizer": each("quantizers", "kind", "MXFP8Quantizer"),
    "no histories": lambda curve: curve.update(histories=[]),
    "not rolled": each("histories", "not_rolled", 3),
    "not collected": each("histories", "not_collected", 3),
    "scales off": each("histories", "scale_error", 0.01),
    "an unknown schema": lambda curve: curve.update(schema_id="megacpp-validate/loss-curve/99"),
    "an unknown key": lambda curve: curve.update(surplus=1),
    "a series that is shorter": lambda curve: curve["losses"].pop(),
}
OF_BF16: Final = (
    "nothing", "late gap 0.05", "NaN", "cut by ten", "other data", "another GPU", "norms x 1.03", "no casts",
)  # fmt: skip


def losses() -> Iterator[Scenario]:
    """Every scenario of the loss gate."""
    for folder in ("fp8/te2.12.0", "fp8/te2.20.2", "fp8", "h200/te2.20.2", "none"):
        yield Scenario(f"committed {folder}", ("loss-gate", f"docs/evidence/{folder}", "--format", "json"), read_loss)
    for name, fault in FAULTS.items():
        yield Scenario(f"made up, one run: {name}", WORDS, read_loss, _made_up(fault, "delayed", seeds=(0,)))
        yield Scenario(f"made up, every run: {name}", WORDS, read_loss, _made_up(fault, "delayed", seeds=(0, 1, 2)))
        if name in OF_BF16:
            yield Scenario(f"made up, bf16: {name}", WORDS, read_loss, _made_up(fault, "bf16", seeds=(0,)))
    for name, deed in FOLDERS.items():
        yield Scenario(f"folder: {name}", WORDS, read_loss, _folder(deed))
    for label in _packed()["curves"]:
        recipe, fault, seed = label.rsplit("-", 2)
        if recipe != "bf16" and (seed == "0" or fault != "none"):
            yield Scenario(f"h200 {label}", WORDS, read_loss, _h200(recipe, fault))


def _made_up(fault: Callable[[Curve], object], recipe: str, seeds: tuple[int, ...]) -> Callable[[Path], None]:
    def prepare(work: Path) -> None:
        for one in ("bf16", "delayed", "current"):
            for seed in range(3):
                curve = made_up(one, seed)
                if one == recipe and seed in seeds:
                    fault(curve)
                put(work / "curves", curve)

    return prepare


def _truncate(folder: Path, name: str) -> None:
    path = folder / f"{CELL}.{name}.curve"
    path.write_bytes(path.read_bytes()[:-200])


def _rename(folder: Path, old: str, new: str) -> None:
    (folder / f"{CELL}.{old}.curve").rename(folder / f"{CELL}.{new}.curve")


def _put_all(folder: Path, recipes: list[str], cell: str = CELL, **changes: str) -> None:
    for recipe in recipes:
        for seed in range(3):
            put(folder, made_up(recipe, seed) | changes, cell)


FOLDERS: Final[dict[str, Callable[[Path], object]]] = {
    "a run is lost": lambda folder: (folder / f"{CELL}.delayed-1.curve").unlink(),
    "a run is cut short": lambda folder: _truncate(folder, "delayed-1"),
    "a run has another name": lambda folder: _rename(folder, "delayed-1", "delayed-7"),
    "a run of bf16 is lost": lambda folder: (folder / f"{CELL}.bf16-1.curve").unlink(),
    "a run of bf16 is cut short": lambda folder: _truncate(folder, "bf16-1"),
    "bf16 is lost": lambda folder: [path.unlink() for path in folder.glob("*bf16*")],
    "one seed": lambda folder: [path.unlink() for path in folder.glob("*-[12].curve")],
    "two seeds": lambda folder: [path.unlink() for path in folder.glob("*-2.curve")],
    "empty": lambda folder: [path.unlink() for path in folder.iterdir()],
    "gone": shutil.rmtree,
    "bf16 under another name": lambda folder: _put_all(folder, ["bf16"], recipe="delayed"),
    "another cell beside": lambda folder: _put_all(folder, ["bf16", "delayed"], "te2.12.0-h200-fp8_loss"),
    "a recipe nobody knows": lambda folder: _put_all(folder, ["current"], recipe="fp4"),
    "curves without a cell": lambda folder: [
        path.rename(folder / path.name.removeprefix(f"{CELL}.")) for path in [*folder.iterdir()]
    ],
}


def _folder(deed: Callable[[Path], object]) -> Callable[[Path], None]:
    def prepare(work: Path) -> None:
        _made_up(FAULTS["nothing"], "", ())(work)
        deed(work / "curves")

    return prepare


@cache
def _packed() -> dict[str, Any]:
    return json.loads(lzma.decompress(PACKED.read_bytes()))


def _unpacked(label: str) -> Curve:
    """A curve of `tests/gate/h200`; its README says how they are packed."""
    kept = _packed()
    recipe, _, seed = label.rsplit("-", 2)
    row, base = kept["curves"][label], kept["curves"][f"bf16-none-{seed}"]["series"]
    of = {
        key: values if recipe == "bf16" else
        [None if a is None else a + (b or 0) for a, b in zip(values, base[key], strict=False)]
        for key, values in row["series"].items()
    }  # fmt: skip

    def norms(values: list[int | None], fine: int) -> list[float]:
        return [0.0 if value is None else math.exp(value / fine) for value in values]

    found = [value / 100_000 for value in of.pop("losses")]
    total = norms(of.pop("gradient_norms"), 1000)
    tables = {
        "quantizers": ("layer", "tensor", "kind", "format"),
        "histories": ("step", "tensors", "not_rolled", "not_collected", "scale_error"),
    }
    return {
        "recipe": recipe, "seed": int(seed), "data": kept["data"], "planned": row["planned"],
        "steps": list(range(len(found))), "losses": found, "gradient_norms": total, "part_losses": {},
        "part_norms": {name: norms(values, 250) for name, values in of.items()}, "made_with": kept["made_with"],
        "schema_id": SCHEMA,
        **{name: [dict(zip(keys, values, strict=True)) for values in row[name]] for name, keys in tables.items()},
    }  # fmt: skip


def _h200(recipe: str, fault: str) -> Callable[[Path], None]:
    def prepare(work: Path) -> None:
        labels = _packed()["curves"]
        for seed in range(3):
            own = f"{recipe}-{fault}-{seed}"
            curves = [_unpacked(f"bf16-none-{seed}"), _unpacked(own if own in labels else f"{recipe}-none-{seed}")]
            for curve in curves:  # planted ones were cut off at step 800
                put(work / "curves", curve if fault == "none" else cut(curve, 800) | {"planned": 800})

    return prepare
