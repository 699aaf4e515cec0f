"""The page of benchmarks/moe_layer.py, from its figures alone: moe_layer.md is made of moe_layer.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

AIM: Final = 2.5  # times as fast as megatron-core's fastest path
PARTS: Final = ("route", "sort", "dispatch", "GEMM", "combine")


def write_page(result: dict[str, Any]) -> str:
    """The Markdown page of one run: what was aimed at, every path, and the stages beside their floors."""
    case = result["case"]
    lines = [
        "<!-- written by benchmarks/moe_layer.py -->",
        f"{result['gpu']}, torch {result['torch']}, Transformer Engine {result['te']}, megatron-core "
        f"{result['megatron']}, {result['date']}. One MoE layer, forward and backward, router and load-balancing loss "
        f"included: {case['tokens']} tokens, hidden {case['hidden']}, {case['experts']} experts of width "
        f"{case['width']} (gated), top {case['top_k']}. Medians of {result['rounds']} interleaved rounds; gains are "
        "medians of ratios within a round, on the wall clock, over megatron-core's fastest path.",
        "",
        *_verdict(result),
        "",
        *_paths(result),
    ]
    if result["stages"]:
        lines += ["", *_stages(result)]
    return "\n".join(lines) + "\n"


def _verdict(result: dict[str, Any]) -> Iterator[str]:
    rows = {row["path"]: row for row in result["paths"]}
    yield "| aim | found | |"
    yield "|---|---|---|"
    for path in ("jagged", "jagged, in a CUDA graph"):
        row = rows.get(path, {})
        gain = row.get("gain")
        found = f"{gain:.2f} x" if gain is not None else "not run"
        kept = gain is not None and gain >= AIM
        yield f"| {path}: at least {AIM} x megatron-core's fastest path | {found} | {_kept(kept)} |"
    waits = rows.get("jagged", {}).get("waits")
    found = "not run" if waits is None else f"{waits} waits; {_graph(rows)}"
    yield f"| jagged: the host never waits for the device | {found} | {_kept(waits == 0 and _captured(rows))} |"
    theirs = [row for row in result["paths"] if row["path"].startswith("megatron-core") and "errors" in row]
    same = bool(theirs) and all(row["same"] for row in theirs) and rows.get("jagged", {}).get("same") is True
    worst = max((max(row["errors"].values()) for row in theirs), default=None)
    found = "not run" if worst is None else f"largest relative error of megatron-core {worst:.4f}"
    yield f"| megatron-core and jagged compute the same function | {found} | {_kept(same)} |"


def _captured(rows: dict[str, dict[str, Any]]) -> bool:
    return "wall_ms" in rows.get("jagged, in a CUDA graph", {})


def _graph(rows: dict[str, dict[str, Any]]) -> str:
    return "a CUDA graph holds the step" if _captured(rows) else "no CUDA graph was made"


def _kept(kept: bool) -> str:
    return "kept" if kept else "**not kept**"


def _paths(result: dict[str, Any]) -> Iterator[str]:
    yield (
        "Errors are relative, in the norm, against the layer written out in fp32: of the output, and the largest of "
        "the gradients. Waits are those that torch sees. Device times leave out what the host takes, where it does "
        "not wait."
    )
    yield ""
    yield (
        "| path | wall, ms | [low, high] | device, ms | TFLOP/s | gain | waits | memory of a step, MiB | error of "
        "output | of gradients |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in result["paths"]:
        if "wall_ms" not in row:
            yield f"| {row['path']} | not run: {row.get('note', '')} | | | | | | | | |"
            continue
        errors = row["errors"]
        gradients = max(value for part, value in errors.items() if part != "out")
        mark = "" if row["same"] else " **another function**"
        yield (
            f"| {row['path']} | {row['wall_ms']:.3f} | [{row['walls'][0]:.3f}, {row['walls'][-1]:.3f}] | "
            f"{_number(row.get('device_ms'), 3)} | {result['case']['flop'] / row['wall_ms'] / 1e9:.0f} | "
            f"{_number(row.get('gain'), 2)} | {_number(row.get('waits'), 0)} | {_number(row.get('peak_mib'), 0)} | "
            f"{errors['out']:.5f}{mark} | {gradients:.5f} |"
        )


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _stages(result: dict[str, Any]) -> Iterator[str]:
    rates, stages = result["rates"], result["stages"]
    yield (
        f"Stages of the jagged path, on the device. A floor is the larger of bytes at {rates['bytes_s'] / 1e12:.2f} "
        f"TB/s (a copy, read and written) and products at {rates['flop_s'] / 1e12:.0f} TFLOP/s (bf16, 8192 cubed), "
        "both measured in this run."
    )
    yield ""
    yield "| stage | ms | floor, ms | of the floor |"
    yield "|---|---|---|---|"
    for part in PARTS:
        members = [stage for stage in stages if stage["part"] == part]
        yield _line(f"**{part}**", members)
        for stage in members:
            yield _line(stage["stage"], [stage])
    yield _line("**all**", stages)


def _line(name: str, stages: Sequence[dict[str, Any]]) -> str:
    taken, floor = (sum(stage[key] for stage in stages) for key in ("ms", "floor_ms"))
    share = f"{taken / floor:.2f} x" if floor else ""
    return f"| {name} | {taken:.3f} | {floor:.3f} | {share} |"
