"""One MoE layer, forward and backward, beside megatron-core's own, side by side in one run on one GPU.

    python benchmarks/moe_layer.py --output docs/benchmarks
    python benchmarks/moe_layer.py --render docs/benchmarks/moe_layer.json
    python benchmarks/moe_layer.py --device cpu --output /tmp/figures     # small, to see that it runs

First every path's output and gradients are held against the layer written out in fp32. Then rounds of all paths are
interleaved and their order turned; figures are medians over rounds, ratios are medians of the ratios within a round.
Each path is timed on the wall clock, steps launched one after another, and on the device alone, which is held up until
the host has launched what is timed. Last come the stages of the jagged path, each beside the larger of two floors: its
bytes at the rate of a copy, its products at the rate of a large one, both measured in the same run. If a path raises,
its row has the error, and the others run.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import describe_run, make_parser, render_earlier, save, version  # noqa: E402
from benchmarks.moe_layer_page import write_page  # noqa: E402

ROUNDS: Final = 9
ROUND_MS: Final = 20.0
MOST: Final = 8
WARM_UP: Final = 3
STAGE_ROUNDS: Final = 15
PARTS: Final = ("out", "tokens", "router", "up", "down")
# Relative, in the norm, against fp32. In bf16 a gradient has passed at most eight roundings of half a unit, 2^-9 each,
# and every one may add in full: 2^-6. An operand in E4M3 (gradients: E5M2) is off by 2^-4 (2^-3) at most, and in the
# norm by a quarter of that (0.026 for uniform mantissas); three products deep that is below 2^-2.
BOUNDS: Final = {"bf16": 2.0**-6, "FP8": 2.0**-2}


def measure(rounds: int, device: str) -> dict[str, Any]:
    """Every path: errors, times, waits; and the stages."""
    import torch

    from benchmarks import moe_layer_paths as paths

    case = paths.Case() if device == "cuda" else paths.SMALL
    given = paths.make_given(case, device)
    exact = paths.gather_gradients(paths.reference(given), given)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for path, make in paths.make_all(given).items():
        rows[path] = {"path": path}
        try:
            steps[path] = make()
            rows[path] |= look(steps[path], exact, given, device, "FP8" if "FP8" in path else "bf16")
        except Exception as fault:
            steps.pop(path, None)
            rows[path]["note"] = f"{type(fault).__name__}: {fault}"[:300].replace("\n", " ")
        if device == "cuda":
            torch.cuda.empty_cache()
        print(path, {key: value for key, value in rows[path].items() if key != "path"}, flush=True)
    del exact
    rates = measure_rates(device)
    add_times(rows, steps, rounds, device)
    return describe_run(
        gpu=torch.cuda.get_device_name() if device == "cuda" else "none: a CPU, to see that it runs",
        megatron=version("megatron-core"),
        rounds=rounds,
        case={name: getattr(case, name) for name in ("tokens", "hidden", "width", "experts", "top_k", "flop")},
        rates=rates,
        bounds=BOUNDS,
        paths=list(rows.values()),
        stages=measure_stages(given, rates) if device == "cuda" else [],
    )


def look(step: Callable[[], Any], exact: Any, given: Any, device: str, kind: str) -> dict[str, Any]:
    """Errors against fp32, how often a step waits for the device, and what memory it takes above what lies there."""
    import torch

    from benchmarks.moe_layer_paths import gather_gradients

    for _ in range(WARM_UP - 1):
        step()
    found = gather_gradients(step(), given)
    errors = {
        part: float(
            torch.linalg.vector_norm(one.detach().float() - right.detach()) / torch.linalg.vector_norm(right.detach())
        )
        for part, one, right in zip(PARTS, found, exact, strict=True)
    }
    told: dict[str, Any] = {"errors": errors, "same": max(errors.values()) <= BOUNDS[kind]}
    if device == "cuda":
        del found
        told["waits"] = count_waits(step)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        told["peak_mib"] = taken / 2**20 if taken else None  # a graph's memory was taken when it was captured
    return told


def count_waits(step: Callable[[], Any]) -> int:
    """How often torch sees the host wait for the device in a step; what a library does by itself, it does not see."""
    import torch

    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in seen)


def add_times(rows: dict[str, dict[str, Any]], steps: dict[str, Callable[[], Any]], rounds: int, device: str) -> None:
    """Wall and device milliseconds of each path, and how many times as fast it is as megatron-core's fastest."""
    from benchmarks.moe_layer_paths import MEGATRON

    walls: dict[str, list[float]] = {path: [] for path in steps}
    devices: dict[str, list[float]] = {path: [] for path in steps}
    repeats = {path: min(MOST, max(2, round(ROUND_MS / wall_ms(step, 2, device)))) for path, step in steps.items()}
    names = list(steps)
    for turn in range(rounds):
        at = turn % len(names)
        for path in (*names[at:], *names[:at]):
            walls[path].append(wall_ms(steps[path], repeats[path], device))
            if device == "cuda":
                from benchmarks.bridge import device_ms

                devices[path].append(device_ms(steps[path], repeats[path]))
    theirs = [path for path in steps if path.startswith(MEGATRON)]
    best = min(theirs, key=lambda path: statistics.median(walls[path]), default=None)
    for path in steps:
        rows[path] |= {"wall_ms": statistics.median(walls[path]), "walls": sorted(walls[path])}
        if devices[path]:
            rows[path]["device_ms"] = statistics.median(devices[path])
        if best is not None:
            ratios = [one / other for one, other in zip(walls[best], walls[path], strict=True)]
            rows[path]["gain"] = statistics.median(ratios)


def wall_ms(step: Callable[[], Any], repeats: int, device: str) -> float:
    """Milliseconds a step, the host's part counted: steps are launched one after another and waited for at the end."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else _nothing
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    wait()
    return (time.perf_counter() - start) / repeats * 1e3


def _nothing() -> None:
    return None


def measure_rates(device: str) -> dict[str, float]:
    """What the card gives here: bytes a second of a copy, read and written, and operations of a bf16 product."""
    import torch

    if device != "cuda":
        return {}
    from benchmarks.bridge import device_ms

    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    source, target = (torch.empty(2**30, device="cuda", dtype=torch.uint8) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {"product": lambda: square @ square, "copy": lambda: target.copy_(source)}
    times: dict[str, float] = {}
    for name, call in calls.items():
        device_ms(call, 2)
        times[name] = statistics.median(device_ms(call, 5) for _ in range(5))
    return {"flop_s": 2 * 8192.0**3 / times["product"] * 1e3, "bytes_s": 2 * 2**30 / times["copy"] * 1e3}


def plan_stages(case: Any) -> dict[str, tuple[str, float, float]]:
    """Stage of the jagged path -> its part, bytes that it must move, and operations of its products.

    bf16 everywhere, 2 bytes; each tensor is read or written once. Weights of all experts are read, and their gradients
    written, whole.
    """
    tokens, rows, hidden, width = case.tokens, case.rows, case.hidden, case.width
    narrow, wide = 2.0 * rows * hidden, 2.0 * rows * width  # bytes of rows at the ends, and of `inner`
    few = 2.0 * tokens * hidden
    up, down = 2.0 * case.experts * 2 * width * hidden, 2.0 * case.experts * width * hidden
    up_flop, down_flop = 2.0 * rows * hidden * 2 * width, 2.0 * rows * hidden * width
    logits, router_flop = 4.0 * tokens * case.experts, 2.0 * tokens * hidden * case.experts
    return {
        "route": ("route", few + logits, router_flop),
        "sort": ("sort", 8.0 * rows + 8.0 * rows, 0.0),
        "dispatch": ("dispatch", few + narrow, 0.0),
        "up": ("GEMM", narrow + up + 2 * wide, up_flop),
        "activation": ("GEMM", 3 * wide, 0.0),
        "down": ("GEMM", wide + down + narrow, down_flop),
        "combine": ("combine", narrow + few, 0.0),
        "start of the backward": ("route", 0.0, 0.0),
        "combine backward": ("combine", few + narrow, 0.0),
        "down backward, rows": ("GEMM", narrow + down + wide, down_flop),
        "activation backward": ("GEMM", 6 * wide, 0.0),
        "down backward, weights": ("GEMM", narrow + wide + down, down_flop),
        "up backward, rows": ("GEMM", 2 * wide + up + narrow, up_flop),
        "dispatch backward": ("dispatch", narrow + few, 0.0),
        "dispatch again": ("dispatch", few + narrow, 0.0),
        "up backward, weights": ("GEMM", 2 * wide + narrow + up, up_flop),
        "idle experts": ("GEMM", 0.0, 0.0),
        "route backward": ("route", 2 * few + logits, 2 * router_flop),
    }


class StageClock:
    """An event after every stage; `take` gives milliseconds of each."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def __call__(self, stage: str) -> None:
        """Mark the end of a stage."""
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.seen.append((stage, event))

    def take(self) -> dict[str, float]:
        """Milliseconds of each stage since the mark before it."""
        return {
            stage: before.elapsed_time(event)
            for (_, before), (stage, event) in zip(self.seen, self.seen[1:], strict=False)
        }


def measure_stages(given: Any, rates: dict[str, float]) -> list[dict[str, Any]]:
    """Milliseconds of each stage of the jagged path, the device held up until all is launched, and its floor."""
    import torch

    from benchmarks.bridge import CLOCK_HZ
    from benchmarks.moe_layer_paths import jagged_step

    planned = plan_stages(given.case)
    found: dict[str, list[float]] = {stage: [] for stage in planned}
    for _ in range(STAGE_ROUNDS):
        clock = StageClock()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(0.02 * CLOCK_HZ))  # longer than the host takes
        clock("begin")
        jagged_step(given, clock)
        torch.cuda.synchronize()
        for stage, taken in clock.take().items():
            found[stage].append(taken)
    return [
        {
            "stage": stage, "part": part, "ms": statistics.median(found[stage]), "low": min(found[stage]),
            "bytes": moved, "flop": flop,
            "floor_ms": max(moved / rates["bytes_s"], flop / rates["flop_s"]) * 1e3,
        }
        for stage, (part, moved, flop) in planned.items() if found[stage]
    ]  # fmt: skip


def main() -> None:
    """Measure, and write figures and page; or the page alone from figures."""
    parser = make_parser(__doc__, rounds=ROUNDS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, to see that it runs")
    options = parser.parse_args()
    if render_earlier(options.render, write_page):
        return
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("not-run: there is no CUDA device")
    print(save(options.output / "moe_layer.json", measure(options.rounds, options.device), write_page))


if __name__ == "__main__":
    main()
