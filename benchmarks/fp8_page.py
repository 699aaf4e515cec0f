"""The page of benchmarks/fp8.py, from its figures alone: docs/benchmarks/fp8.md is made of fp8.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

# What a step was seen to gain with Transformer Engine 2.20.2 on an H200 before there was a bridge (2026-11-21): kept?
AIMS: Final = {"mlp": 1.67, "block": 1.47}
OVERHEAD: Final = 1.02  # what the bridge may take over the raw call


def write_page(result: dict[str, Any]) -> str:
    """The Markdown page of one run; a section that was not measured is left out."""
    tables = {name: result[name] for name in ("rates", "mlp", "block", "block_rope") if name in result}
    rate = _rate(result)
    lines = [
        "<!-- written by benchmarks/fp8.py -->",
        f"{result['gpu']}, Transformer Engine {result['te']}, torch {result['torch']}, {result['date']}. Forward and "
        f"backward, casts included; medians of {result['rounds']} interleaved rounds, [low, high] without the "
        "extremes." + (f" The card's own bf16 matrix rate in the same run: **{rate:.0f} TFLOP/s**." if rate else ""),
    ]
    lines += ["", *_verdicts(result)]
    for table in tables.values():
        lines += ["", *_table(table, rate)]
    if "linears" in result:
        lines += ["", *_linears(result["linears"])]
    return "\n".join(lines) + "\n"


def _rate(result: dict[str, Any]) -> float:
    rows = result.get("rates", {}).get("rows", [])
    return next((row["tflops"] for row in rows if row.get("recipe") == "bf16" and "tflops" in row), 0.0)


def _verdicts(result: dict[str, Any]) -> Iterator[str]:
    """What was aimed at, and what came of it."""
    yield "| aim | found | |"
    yield "|---|---|---|"
    for name, aim in AIMS.items():
        if name not in result:
            continue
        best = _row(result[name], "bridge", "delayed").get("gain")
        yield (
            f"| {_short(result[name])}: DelayedScaling over bf16, through the bridge, at least {aim} x | "
            f"{_times(best)} | {_kept(best is not None and round(best, 2) >= aim)} |"
        )
    for name in ("mlp", "block", "block_rope"):
        if name not in result:
            continue
        over = {row["recipe"]: row["over_raw"] for row in result[name]["rows"] if row.get("over_raw") is not None}
        shown = ", ".join(f"{recipe} {ratio:.3f}" for recipe, ratio in over.items())
        held = bool(over) and max(over.values()) <= OVERHEAD
        what = f"{_short(result[name])}: bridge over raw Transformer Engine, at most {OVERHEAD}"
        yield f"| {what} | {shown} | {_kept(held)} |"


def _short(table: dict[str, Any]) -> str:
    what = str(table["what"])
    return what.partition(",")[0] + (", rotary embedding" if what.endswith("rotary embedding") else "")


def _kept(held: bool) -> str:
    return "kept" if held else "**not kept**"


def _table(table: dict[str, Any], rate: float) -> Iterator[str]:
    yield f"### {table['what']}"
    yield ""
    yield "| path | ms | [low, high] | TFLOP/s | of the matrix rate | over its bf16 | over raw TE | host, ms |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in table["rows"]:
        name = f"{row['side']}, {row['recipe']}" if row["recipe"] else row["side"]
        if "ms" not in row:
            yield f"| {name} | not run: {row['note']} | | | | | | |"
            continue
        share = f"{row['tflops'] / rate:.0%}" if rate else ""
        yield (
            f"| {name} | {row['ms']:.3f} | [{row['low']:.3f}, {row['high']:.3f}] | {row['tflops']:.0f} | {share} | "
            f"{_gain(row)} | {_ratio(row['over_raw'])} | {row['host_us'] / 1e3:.2f} |"
        )


def _gain(row: dict[str, Any]) -> str:
    if row["recipe"] == "bf16" or row["gain"] is None:
        return ""
    return _times(row["gain"]) + ("" if row["gain"] > 1.0 else " **loses**")


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.3f}" + ("" if ratio <= OVERHEAD else " **over**")


def _times(value: float | None) -> str:
    return "not run" if value is None else f"{value:.2f} x"


def _row(table: dict[str, Any], side: str, recipe: str) -> dict[str, Any]:
    return next((row for row in table["rows"] if (row["side"], row["recipe"]) == (side, recipe)), {})


_SHOWN: Final = (
    ("bridge", "bf16"),
    ("bridge", "delayed"),
    ("bridge", "current"),
    ("bridge", "block"),
    ("torch", "bf16"),
    ("torch", "_scaled_mm"),
    ("torch.compile", "_scaled_mm"),
)


def _linears(tables: list[dict[str, Any]]) -> Iterator[str]:
    """A line a shape: milliseconds of each path, and its gain over `nn.Linear` in bf16."""
    yield "### Linear layers as the walker swaps them: ms, and how many times as fast as `nn.Linear` in bf16"
    yield ""
    yield f"| rows x in x out | {' | '.join(f'{side}, {recipe}' for side, recipe in _SHOWN)} | bridge over raw, worst |"
    yield "|---" * (len(_SHOWN) + 2) + "|"
    for table in tables:
        plain = _row(table, "torch", "bf16").get("ms")
        cells = [_cell(_row(table, *path), plain) for path in _SHOWN]
        over = [row["over_raw"] for row in table["rows"] if row.get("over_raw") is not None]
        worst = _ratio(max(over)) if over else "not run"
        yield f"| {table['what'].removeprefix('Linear ')} | {' | '.join(cells)} | {worst} |"


def _cell(row: dict[str, Any], plain: float | None) -> str:
    if "ms" not in row:
        return "not run"
    if plain is None or (row["side"], row["recipe"]) == ("torch", "bf16"):
        return f"{row['ms']:.3f}"
    times = plain / row["ms"]
    return f"{row['ms']:.3f} ({times:.2f} x{'' if times > 1.0 else ' **loses**'})"
