"""The page of benchmarks/expert_scaling.py, from its figures alone."""

from __future__ import annotations

from typing import Any, Final

AIM: Final = 0.8  # of linear, from one GPU to four
AIM_GPUS: Final = 4
PARTS: Final = {
    "host": "host, ms", "dispatch": "dispatch, ms", "all_to_all": "all-to-all, ms", "gemm": "GEMM, ms",
    "waiting": "waiting, ms",
}  # fmt: skip


def write_page(result: dict[str, Any]) -> str:
    """The Markdown page of one run: what was aimed at, and every number of GPUs."""
    lines = [
        "<!-- written by benchmarks/expert_scaling.py -->",
        f"{result['ranks']} x {result['gpu']}, torch {result['torch']}, Transformer Engine {result['te']}, "
        f"{result['date']}. The layer of moe_layer.md, forward and backward, {result.get('tokens', 8192)} tokens "
        f"on every GPU and its experts shared out. Medians of {result['rounds']} interleaved rounds, of the slowest "
        "rank; efficiency is the step with all experts on one GPU, by the same way without an exchange, over the step "
        "with them on so many. The last columns are of the trace of three more steps, of the rank whose traced step is "
        "the longest, and sum to it: the device waits for a late host; kernels of routing, sorting and the gate; the "
        "all-to-all alone on the device; matrix products; and kernels of the all-to-all that wait for another rank. "
        "Tracing makes the host slower. Floor: dispatch and GEMM of one GPU over dispatch, GEMM and all-to-all here, "
        "which is what no late host and no waiting would leave.",
        "",
        "| aim | found | |",
        "|---|---|---|",
    ]
    lines += [_aim(result["rows"], backend) for backend in dict.fromkeys(row["backend"] for row in result["rows"])]
    lines += [
        "",
        "| experts | GPUs | step, ms | [low, high] | of linear | floor | " + " | ".join(PARTS.values()) + " |",
        "|---" * (6 + len(PARTS)) + "|",
    ]
    lines += [
        f"| {row['backend']} | {row['gpus']} | {row['step_ms']:.3f} | [{row['low']:.3f}, {row['high']:.3f}] | "
        f"{row['efficiency']:.0%} | {_floor(result['rows'], row)} | "
        + " | ".join(f"{row['trace'][part]:.3f}" if part in row["trace"] else "not traced" for part in PARTS)
        + " |"
        for row in result["rows"]
    ]
    lines += [f"| {name} | not run: {why} |" for name, why in result["notes"].items()]
    return "\n".join(lines) + "\n"


def _floor(rows: list[dict[str, Any]], row: dict[str, Any]) -> str:
    alone = next(one for one in rows if one["backend"] == row["backend"])
    if "gemm" not in row["trace"]:
        return "not traced"
    computed = alone["trace"]["dispatch"] + alone["trace"]["gemm"]
    return f"{computed / sum(row['trace'][part] for part in ('dispatch', 'gemm', 'all_to_all')):.0%}"


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
