"""The expert bank in bf16 and in FP8 on one GPU, everything side by side in one run, every cast counted.

    python benchmarks/expert_gemm.py --output docs/benchmarks
    python benchmarks/expert_gemm.py --render docs/benchmarks/expert_gemm.json

Each path runs forward alone, and forward and backward to the gradients of rows and weights. Weights in FP8 are rounded
in every call, or kept for the step. Rounds of all paths are interleaved and their order turned; figures are medians
over rounds, gains are medians of the ratios within a round, against the bf16 path that is fastest for the shape. The
device is held up until the host has launched what is timed. If a path raises, its row has the error, and the others
run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.expert_gemm_page import write_page  # noqa: E402
from benchmarks.figures import describe_run, make_parser, render_earlier, save, version  # noqa: E402

ROUNDS: Final = 9
ROUND_MS: Final = 12.0
MOST: Final = 10
WARM_UP: Final = 3
RECIPES: Final = ("delayed", "current", "block")


@dataclass(frozen=True)
class Shape:
    """Rows of each expert, and the features in and out of it."""

    name: str
    counts: tuple[int, ...]
    inputs: int
    outputs: int

    @property
    def flop(self) -> float:
        """Of the forward product, without padding."""
        return 2.0 * sum(self.counts) * self.inputs * self.outputs


def even(experts: int, rows: int, inputs: int, outputs: int) -> Shape:
    """As many rows for each expert."""
    return Shape(f"{experts} x {rows} x {inputs} x {outputs}", (rows,) * experts, inputs, outputs)


RAGGED: Final = (3011, 2210, 1301, 799, 500, 250, 100, 21)  # 8192 rows, as an unbalanced router spreads them
SPREAD: Final = tuple(int(512 * (expert % 16) / 15) + 1 for expert in range(64))
SHAPES: Final = (
    even(8, 1024, 4096, 4096),
    *(even(8, rows, 4096, 4096) for rows in (16, 64, 128, 256, 512, 2048, 4096)),
    Shape("ragged, 8 experts of 21 to 3011 rows x 4096 x 4096", RAGGED, 4096, 4096),
    even(64, 256, 2048, 1408),
    even(64, 256, 1408, 2048),
    even(64, 512, 2048, 1408),
    Shape("ragged, 64 experts of 1 to 513 rows x 2048 x 1408", SPREAD, 2048, 1408),
)


@dataclass(frozen=True)
class Run:
    """One way through the bank.

    Attributes:
        path: its name.
        bf16: whether it is one of those that FP8 is held against.
        forward, step: without gradients, and with both.
    """

    path: str
    bf16: bool
    forward: Callable[[], Any]
    step: Callable[[], Any]


def make_runs(shape: Shape) -> tuple[list[Run], dict[str, str]]:
    """Every path of a shape, and why others are not there."""
    import torch

    from megacpp_validate.bridge.te_fp8 import te_block_scaling, te_current_scaling, te_delayed_scaling

    total = sum(shape.counts)
    rows = torch.randn(total, shape.inputs, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(total, shape.outputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(len(shape.counts), shape.outputs, shape.inputs, device="cuda", dtype=torch.bfloat16)
    weight.mul_(shape.inputs**-0.5)
    found: list[Run] = [_raw(shape, rows, weight, gradient)]
    notes: dict[str, str] = {}
    makers: dict[str, Callable[[], Run]] = {
        "native, bf16": partial(_bank, shape, rows, weight, gradient, "native, bf16", ("native",)),
        "TE, bf16": partial(_bank, shape, rows, weight, gradient, "TE, bf16", ("te",)),
    }
    recipes = {"delayed": te_delayed_scaling, "current": te_current_scaling, "block": te_block_scaling}
    for kept in (None, False):
        how = "kept" if kept is False else "each call"
        for name in RECIPES:
            path = f"TE, {name}, weights {how}"
            options = {"recipe": recipes[name], "kept": kept}
            makers[path] = partial(_bank, shape, rows, weight, gradient, path, ("te",), **options)
        path = f"DeepGEMM, weights {how}"
        makers[path] = partial(_bank, shape, rows, weight, gradient, path, ("deep_gemm",), kept=kept)
    for path, make in makers.items():
        try:
            found.append(make())
        except Exception as fault:
            notes[path] = f"{type(fault).__name__}: {fault}"[:200].replace("\n", " ")
    return found, notes


def _raw(shape: Shape, rows: Any, weight: Any, gradient: Any) -> Run:
    """torch's grouped product with its own autograd, nothing of the bridge around it."""
    import torch
    from torch.nn import functional

    operator = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    leaf = weight.detach().requires_grad_()
    ends = torch.tensor(shape.counts, device="cuda").cumsum(0).to(torch.int32)

    def forward() -> Any:
        return operator(rows, leaf.transpose(1, 2), offs=ends)

    return Run("torch._grouped_mm, bf16", True, forward, lambda: _differentiate(forward(), (rows, leaf), gradient))


def _bank(
    shape: Shape,
    rows: Any,
    weight: Any,
    gradient: Any,
    path: str,
    backends: tuple[str, ...],
    *,
    recipe: Callable[[], Any] | None = None,
    kept: bool | None = None,
) -> Run:
    """The bridge's bank on one backend, in the scope of a recipe where there is one."""
    from megacpp_validate.bridge.expert_gemm import ExpertGemm
    from megacpp_validate.bridge.te_fp8 import te_scope

    layer = ExpertGemm(
        num_experts=len(shape.counts), in_features=shape.inputs, out_features=shape.outputs, dtype=weight.dtype,
        device="cuda", backends=backends,
    )  # fmt: skip
    layer.load_native_state_dict({"weight": weight})
    made = recipe() if recipe is not None else None
    inputs = (rows, *layer.parameters())

    def forward(first: bool | None = kept) -> Any:
        scope = nullcontext() if made is None else te_scope(enabled=True, recipe=made, amax_reduction_group=None)
        with scope:
            return layer(rows, shape.counts, is_first_microbatch=first)

    if kept is not None:
        forward(True)
    return Run(
        path, recipe is None and backends != ("deep_gemm",), forward,
        lambda: _differentiate(forward(), inputs, gradient),
    )  # fmt: skip


def _differentiate(out: Any, inputs: Sequence[Any], gradient: Any) -> Any:
    """Gradients, which are not added to any that is there: that costs every path the same."""
    import torch

    return torch.autograd.grad(out, inputs, gradient)


def measure(shape: Shape, rounds: int) -> dict[str, Any]:
    """Every path of a shape side by side: one table."""
    import torch

    from megacpp_validate.bridge.expert_gemm import why_bf16_is_faster

    runs, notes = make_runs(shape)
    rows = {run.path: {"path": run.path, "bf16": run.bf16} for run in runs}
    for what in ("forward", "step"):
        calls = {run.path: getattr(run, what) for run in runs}
        with torch.no_grad() if what == "forward" else nullcontext():
            times, hosts, raised = side_by_side(calls, rounds)
        notes |= raised
        plain = [run.path for run in runs if run.bf16 and run.path in times]
        best = min(plain, key=lambda path: statistics.median(times[path]))
        for path, found in times.items():
            ordered = sorted(found)
            rows[path][what] = {
                "ms": statistics.median(found),
                "low": ordered[1],
                "high": ordered[-2],
                "host_us": statistics.median(hosts[path]),
                "gain": statistics.median(one / other for one, other in zip(times[best], found, strict=True)),
            }
    refusal = why_bf16_is_faster(shape.counts, "bank")
    return {
        "what": shape.name,
        "experts": len(shape.counts),
        "rows": sum(shape.counts),
        "counts": list(shape.counts),
        "inputs": shape.inputs,
        "outputs": shape.outputs,
        "flop": shape.flop,
        "rule": "FP8" if refusal is None else f"bf16: {refusal.reason.partition(', as ')[0]}",
        "paths": [row for row in rows.values() if "step" in row and "forward" in row],
        "notes": notes,
    }


def side_by_side(
    calls: dict[str, Callable[[], Any]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, str]]:
    """Device milliseconds and host microseconds of every call, a value a round, and what some raised."""
    import torch

    from benchmarks.bridge import device_ms, host_us

    ready: dict[str, Callable[[], Any]] = {}
    raised: dict[str, str] = {}
    for path, call in calls.items():
        try:
            for _ in range(WARM_UP):
                call()
            torch.cuda.synchronize()
            ready[path] = call
        except Exception as fault:
            raised[path] = f"{type(fault).__name__}: {fault}"[:200].replace("\n", " ")
    repeats = {path: min(MOST, max(2, round(ROUND_MS / device_ms(call, 2)))) for path, call in ready.items()}
    times: dict[str, list[float]] = {path: [] for path in ready}
    hosts: dict[str, list[float]] = {path: [] for path in ready}
    names = list(ready)
    for turn in range(rounds):
        at = turn % len(names)
        for path in (*names[at:], *names[:at]):
            times[path].append(device_ms(ready[path], repeats[path]))
            hosts[path].append(host_us(ready[path], repeats[path]))
    return times, hosts, raised


def measure_all(shapes: Sequence[Shape], rounds: int, keep: Callable[[dict[str, Any]], object]) -> None:
    """Every shape, saved as it goes."""
    import torch

    torch.manual_seed(0)
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    times, _, _ = side_by_side({"rate": lambda: square @ square}, rounds)
    rate = 2 * 8192.0**3 / statistics.median(times["rate"]) / 1e9
    result = describe_run(
        gpu=torch.cuda.get_device_name(), deep_gemm=version("sgl-deep-gemm"), rounds=rounds, rate_tflops=rate, tables=[]
    )
    for shape in shapes:
        table = measure(shape, rounds)
        result["tables"].append(table)
        steps = ", ".join(
            f"{row['path']} {row['step']['ms']:.3f} ({row['step']['gain']:.2f})" for row in table["paths"]
        )
        print(f"{shape.name}: {steps}; {table['notes'] or ''}", flush=True)
        keep(result)
        torch.cuda.empty_cache()


def main() -> None:
    """Measure, and write figures and page; or the page alone from figures."""
    parser = make_parser(__doc__, rounds=ROUNDS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first so many of them")
    options = parser.parse_args()
    if render_earlier(options.render, write_page):
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("not-run: there is no CUDA device")
    figures = options.output / "expert_gemm.json"
    measure_all(SHAPES[: options.shapes], options.rounds, lambda result: save(figures, result, write_page))


if __name__ == "__main__":
    main()
