"""The page of benchmarks/expert_scaling.py, from its figures alone."""

from __future__ import annotations

from typing import Any, Final

AIM: Final = 0.8  # of linear, from one GPU to four
AIM_GPUS: Final = 4


def write_page(result: dict[str, Any]) -> str:
    """The Markdown page of one run: what was aimed at, and every number of GPUs."""
    lines = [
        "<!-- written by benchmarks/expert_scaling.py -->",
        f"{result['ranks']} x {result['gpu']}, torch {result['torch']}, Transformer Engine {result['te']}, "
        f"{result['date']}. The layer of moe_layer.md, forward and backward, its 8192 tokens on every GPU and its "
        f"experts shared out. Medians of {result['rounds']} interleaved rounds, of the slowest rank; efficiency is the "
        "step with all experts on one GPU, by the same way without an exchange, over the step with them on so many. "
        "All-to-all is for how long the four exchanges of rows hold up the device, waiting for other ranks included. "
        "Numbers of rows go first, and the host's wait is for those of the other ranks; what its own router chose, "
        "native and te wait for at any number of GPUs, jagged at none.",
        "",
        "| aim | found | |",
        "|---|---|---|",
    ]
    lines += [_aim(result["rows"], backend) for backend in dict.fromkeys(row["backend"] for row in result["rows"])]
    lines += [
        "",
        "| experts | GPUs | step, ms | [low, high] | of linear | all-to-all, ms | its share | numbers of rows, ms | "
        "host's wait, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['backend']} | {row['gpus']} | {row['step_ms']:.3f} | [{row['low']:.3f}, {row['high']:.3f}] | "
        f"{row['efficiency']:.0%} | {row['rows_ms']:.3f} | {row['share']:.0%} | {row['numbers_ms']:.3f} | "
        f"{row['host_wait_ms']:.3f} |"
        for row in result["rows"]
    ]
    lines += [f"| {name} | not run: {why} | | | | | | | |" for name, why in result["notes"].items()]
    return "\n".join(lines) + "\n"


def _aim(rows: list[dict[str, Any]], backend: str) -> str:
    """What was aimed at and found by one way to the experts; with fewer GPUs than that, what was found on the most."""
    most = max((row for row in rows if row["backend"] == backend and row["gpus"] <= AIM_GPUS), key=lambda r: r["gpus"])
    found = f"{most['efficiency']:.0%}"
    if most["gpus"] == AIM_GPUS:
        verdict = "kept" if most["efficiency"] >= AIM else "**not kept**"
    else:
        more = f"{found} on {most['gpus']}" if most["gpus"] > 1 else "nothing was shared out"
        found, verdict = f"not run on {AIM_GPUS}: {more}", "not run"
    return f"| {backend} experts, 1 to {AIM_GPUS} GPUs: at least {AIM:.0%} of linear | {found} | {verdict} |"
