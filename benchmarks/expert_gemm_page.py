"""The page of benchmarks/expert_gemm.py, from its figures alone: expert_gemm.md is made of expert_gemm.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

AIM: Final = 1.2  # over the best bf16 path, forward and backward, at the first shape


def write_page(result: dict[str, Any]) -> str:
    """The Markdown page of one run: what was aimed at, where FP8 wins and loses, and every figure."""
    lines = [
        "<!-- written by benchmarks/expert_gemm.py -->",
        f"{result['gpu']}, Transformer Engine {result['te']}, sgl-deep-gemm {result['deep_gemm']}, torch "
        f"{result['torch']}, {result['date']}. Medians of {result['rounds']} interleaved rounds, [low, high] without "
        "the extremes; every cast is counted. Gains are over the fastest bf16 path of the same shape, so it has 1.00. "
        f"The card's own bf16 matrix rate in the same run: **{result['rate_tflops']:.0f} TFLOP/s**.",
        "",
        "Weights are rounded in each call where a step has one microbatch. Where they are kept, the table shows every "
        "microbatch but the first: Transformer Engine takes what it kept, the DeepGEMM lane compares it with the "
        "weights first, so that it is never stale. `native` and `TE` are the bridge's, `torch._grouped_mm` is bare.",
        "",
        *_verdict(result["tables"][0]),
        "",
        *_summary(result["tables"]),
    ]
    for table in result["tables"]:
        lines += ["", *_table(table, result["rate_tflops"])]
    return "\n".join(lines) + "\n"


def _verdict(table: dict[str, Any]) -> Iterator[str]:
    yield "| aim | found | |"
    yield "|---|---|---|"
    for path in ("DeepGEMM, weights each call", "DeepGEMM, weights kept"):
        gain = _gain(table, path)
        kept = gain is not None and gain >= AIM
        yield (
            f"| {table['what']}: {path} over the best bf16 path, forward and backward, at least {AIM} x | "
            f"{_times(gain)} | {'kept' if kept else '**not kept**'} |"
        )


def _summary(tables: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where FP8 wins and loses, and what the dispatcher does there."""
    yield "Forward and backward, over the best bf16 path; below 1.00 FP8 **loses**."
    yield ""
    yield "| experts x rows x in x out | TE, best recipe | DeepGEMM, each call | kept | the dispatcher takes |"
    yield "|---|---|---|---|---|"
    for table in tables:
        te = [row["step"]["gain"] for row in table["paths"] if row["path"].startswith("TE") and not row["bf16"]]
        gains = (
            max(te, default=None),
            _gain(table, "DeepGEMM, weights each call"),
            _gain(table, "DeepGEMM, weights kept"),
        )
        cells = " | ".join(f"**{_times(gain)}**" if gain is not None and gain < 1 else _times(gain) for gain in gains)
        yield f"| {table['what']} | {cells} | {table['rule']} |"


def _gain(table: dict[str, Any], path: str) -> float | None:
    return next((row["step"]["gain"] for row in table["paths"] if row["path"] == path), None)


def _times(gain: float | None) -> str:
    return f"{gain:.2f} x" if gain is not None else "not run"


def _table(table: dict[str, Any], rate: float) -> Iterator[str]:
    yield f"### {table['what']}"
    yield ""
    yield (
        "| path | forward, ms | [low, high] | TFLOP/s | gain | forward and backward, ms | [low, high] | TFLOP/s | "
        "of the bf16 rate | gain | host, ms |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for row in table["paths"]:
        once, both = row["forward"], row["step"]
        rates = [table["flop"] / once["ms"] / 1e9, 3 * table["flop"] / both["ms"] / 1e9]
        yield (
            f"| {row['path']} | {once['ms']:.3f} | [{once['low']:.3f}, {once['high']:.3f}] | {rates[0]:.0f} | "
            f"{once['gain']:.2f} x | {both['ms']:.3f} | [{both['low']:.3f}, {both['high']:.3f}] | {rates[1]:.0f} | "
            f"{rates[1] / rate:.0%} | {both['gain']:.2f} x | {both['host_us'] / 1e3:.2f} |"
        )
    for path, why in table["notes"].items():
        yield f"| {path} | not run: {why} | | | | | | | | | |"
