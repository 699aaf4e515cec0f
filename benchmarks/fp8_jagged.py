"""Jagged experts in bf16 and with FP8 products by DeepGEMM, forward and backward, side by side in one run on one GPU.

    python benchmarks/fp8_jagged.py --output docs/benchmarks
    python benchmarks/fp8_jagged.py --render docs/benchmarks/fp8_jagged.json

A pass in FP8 is timed with weights that it rounds, once for its forward and all gradients, and with weights that an
earlier pass of the same optimizer step rounded. Rounds of all paths are interleaved; figures are medians over rounds.
If a layer raises, its row has the error, and the others run.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.figures import describe_run, make_parser, render_earlier, save, version  # noqa: E402

LAYERS: Final = ((64, 8192), (64, 32768), (8, 16384))  # experts, and tokens that each go to two of them
REPEATS: Final = 3
BF16, ROUNDED, KEPT = PATHS = ("bf16", "FP8, weights rounded", "FP8, weights kept")
PARTS: Final = ("out", "tokens", "weights", "up", "down")
PASSES: Final = (1, 2, 4)
AIM: Final = 1.15  # times as fast as bf16, in an optimizer step of two passes
AIMED_FROM: Final = 1024  # rows an expert


def gain(layer: dict[str, Any], passes: int) -> float:
    """How many times as fast as bf16 FP8 is in an optimizer step of so many passes, the first of which rounds."""
    bf16, rounded, kept = (layer["ms"][path] for path in PATHS)
    return float(bf16 / (kept + (rounded - kept) / passes))


def measure(experts: int, tokens: int) -> dict[str, Any]:
    """One layer: milliseconds of each path, and errors of FP8 relative to bf16, in the norm."""
    import torch

    from benchmarks.bridge import device_ms, side_by_side
    from benchmarks.moe_layer_paths import Case

    case = Case(tokens=tokens, experts=experts)
    row: dict[str, Any] = {"experts": experts, "rows": case.rows // experts, "hidden": case.hidden, "width": case.width}
    try:
        steps = make_steps(case)
        pairs = zip(PARTS, steps[KEPT](), steps[BF16](), strict=True)
        row["errors"] = {
            part: float(torch.linalg.vector_norm(one.float() - right.float()) / torch.linalg.vector_norm(right.float()))
            for part, one, right in pairs
        }
        times = side_by_side(steps, device_ms, REPEATS)
        row["ms"] = {path: statistics.median(found) for path, found in times.items()}
    except Exception as fault:
        row["note"] = f"{type(fault).__name__}: {fault}"[:200].replace("\n", " ")
    torch.cuda.empty_cache()
    return row


def make_steps(case: Any) -> dict[str, Callable[[], tuple[Any, ...]]]:
    """Path -> a pass: output, and gradients of tokens, weights of assignments and both weights of experts."""
    from benchmarks.moe_layer_paths import differentiate, make_given
    from benchmarks.router import choose_experts
    from megacpp_validate.bridge.deep_gemm import cast_weight
    from megacpp_validate.bridge.jagged_experts import jagged_moe

    given = make_given(case, "cuda")
    routed = choose_experts(given.tokens.detach(), given.router.detach(), case.top_k)
    weights = routed.weights.requires_grad_()
    leaves = given.tokens, weights, given.up, given.down

    def round_weights() -> Any:
        return cast_weight(given.up), cast_weight(given.down)

    def step(fp8: Callable[[], Any]) -> tuple[Any, ...]:
        out = jagged_moe(given.tokens, routed.chosen, weights, given.up, given.down, fp8=fp8())
        return differentiate(out, None, leaves, given.gradient)

    kept = round_weights()
    return {BF16: partial(step, lambda: None), ROUNDED: partial(step, round_weights), KEPT: partial(step, lambda: kept)}


def write_page(result: dict[str, Any]) -> str:
    """The Markdown page of one run: what was aimed at, and every layer."""
    lines = [
        "<!-- written by benchmarks/fp8_jagged.py -->",
        f"{result['gpu']}, torch {result['torch']}, sgl-deep-gemm {result['deep_gemm']}, {result['date']}. Jagged "
        "experts (gated, top 2, routing left out), forward and backward, in milliseconds: medians of "
        f"{result['rounds']} interleaved rounds. Products and gradients of rows are in FP8, gradients of weights in "
        "bf16. An optimizer step rounds weights in its first pass and keeps them for the others; a gain is over bf16, "
        f"of a step of so many passes. The dispatcher takes FP8 where the gain is at least {AIM} x "
        "(`FP8_FROM` in `bridge/expert_gemm.py`).",
        "",
        "| aim | found | |",
        "|---|---|---|",
        *map(_verdict, (layer for layer in result["layers"] if layer["rows"] >= AIMED_FROM)),
        "",
        f"| layer | {' | '.join(PATHS)} | {' | '.join(f'{passes} pass(es)' for passes in PASSES)} | largest error |",
        f"|---|{'---|' * (len(PATHS) + len(PASSES) + 1)}",
        *map(_row, result["layers"]),
    ]
    return "\n".join(lines) + "\n"


def _name(layer: dict[str, Any]) -> str:
    return f"{layer['experts']} x {layer['rows']} rows, {layer['hidden']} x {layer['width']}"


def _verdict(layer: dict[str, Any]) -> str:
    found = gain(layer, 2) if "ms" in layer else None
    shown = "not run" if found is None else f"{found:.2f} x"
    kept = "kept" if found is not None and found >= AIM else "**not kept**"
    return f"| {_name(layer)}: FP8 in a step of two passes, at least {AIM} x bf16 | {shown} | {kept} |"


def _row(layer: dict[str, Any]) -> str:
    return f"| {_name(layer)} | {' | '.join(_cells(layer))} |"


def _cells(layer: dict[str, Any]) -> Iterator[str]:
    if "ms" not in layer:
        yield f"not run: {layer['note']}"
        yield from [""] * (len(PATHS) + len(PASSES))
        return
    yield from (f"{layer['ms'][path]:.3f}" for path in PATHS)
    yield from (f"{gain(layer, passes):.2f} x" for passes in PASSES)
    yield f"{max(layer['errors'].values()):.4f}"


def main() -> None:
    """Measure, and write figures and page; or the page alone from figures."""
    options = make_parser(__doc__).parse_args()
    if render_earlier(options.render, write_page):
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("not-run: there is no CUDA device")
    from benchmarks.bridge import ROUNDS

    result = describe_run(
        gpu=torch.cuda.get_device_name(), deep_gemm=version("sgl-deep-gemm"), rounds=ROUNDS, layers=[]
    )
    for experts, tokens in LAYERS:
        result["layers"].append(measure(experts, tokens))
        print(result["layers"][-1], flush=True)
        save(options.output / "fp8_jagged.json", result, write_page)


if __name__ == "__main__":
    main()
