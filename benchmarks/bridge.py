"""Speed of the bridge on one GPU, everything side by side in one run: wrapper overhead, backends, blocks, expert GEMMs.

    python benchmarks/bridge.py --output docs/benchmarks

Rounds of all competitors are interleaved, so that a clock that moves moves them all; figures are medians over rounds,
ratios are medians of the ratios within a round. Needs torch with a CUDA device and Transformer Engine; runs in the
host's own interpreter.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.figures import describe_run, make_parser, render_earlier, save  # noqa: E402
from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.bridge.attention import Attention, TeAttention  # noqa: E402
from megacpp_validate.bridge.expert_gemm import ExpertGemm  # noqa: E402
from megacpp_validate.bridge.features import read_features  # noqa: E402
from megacpp_validate.bridge.linear_walker import swap_linears  # noqa: E402
from megacpp_validate.bridge.native_block import NativeBlock  # noqa: E402
from megacpp_validate.bridge.te_fp8 import te_block_scaling, te_current_scaling, te_delayed_scaling, te_scope  # noqa: E402

ROUNDS = 15
CLOCK_HZ = 1.98e9  # highest clock of the card: the pause is at least as long as it is meant to be
BF16 = torch.bfloat16
OFF = read_features("off")


def device_ms(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of device time a call: the device is kept busy until all calls wait for it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    waited = host_us(run, repeats) * repeats / 1e6
    torch.cuda._sleep(int(1.5 * waited * CLOCK_HZ))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def host_us(run: Callable[[], Any], repeats: int) -> float:
    """Microseconds until a call returns, the device not waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    taken = (time.perf_counter() - start) / repeats * 1e6
    torch.cuda.synchronize()
    return taken


def side_by_side(
    runs: dict[str, Callable[[], Any]], measure: Callable[[Callable[[], Any], int], float], repeats: int
) -> dict[str, list[float]]:
    """Figures of every competitor, a value a round, rounds interleaved and their order turned each time."""
    for run in runs.values():
        for _ in range(5):
            run()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(measure(runs[name], repeats))
    return found


def row(what: str, path: str, times: list[float], flop: float, note: str = "") -> dict[str, Any]:
    """One line of a table: median time, spread, and TFLOP/s."""
    median = statistics.median(times)
    low, high = sorted(times)[1], sorted(times)[-2]
    return {
        "what": what,
        "path": path,
        "ms": median,
        "low": low,
        "high": high,
        "tflops": flop / median / 1e9,
        "note": note,
    }


def backward(output: Any, gradient: Any) -> None:
    """One backward pass; gradients are dropped by the caller's next call."""
    output.backward(gradient)


def attention_inputs(batch: int, heads: int, groups: int, length: int, width: int) -> list[Any]:
    """Query [B, H, T, D], key and value [B, G, T, D], bf16, with gradients; in memory [B, T, H, D], as a projection
    gives them: what lies otherwise is copied before Transformer Engine sees it.
    """
    shapes = [(batch, length, count, width) for count in (heads, groups, groups)]
    made = [torch.randn(shape, device="cuda", dtype=BF16, requires_grad=True) for shape in shapes]
    return [tensor.transpose(1, 2) for tensor in made]


def wrapper_overhead() -> list[dict[str, Any]]:
    """The wrappers beside the raw calls that they make: ratio of device time, and host time added."""
    found = []
    query, key, value = (tensor.detach() for tensor in attention_inputs(2, 16, 4, 4096, 128))
    raw = TeAttention(num_heads=16, head_dim=128, num_gqa_groups=4).inner
    wrapped = Attention(num_heads=16, head_dim=128, num_gqa_groups=4)
    flat = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    calls = {
        "raw": lambda: raw(
            *flat, qkv_format="bshd", attn_mask_type="causal", window_size=(-1, 0), core_attention_bias_type="no_bias"
        ),
        "wrapper": lambda: wrapped(query, key, value),
    }
    found.append(overhead("attention [2, 16, 4096, 128], 4 groups, causal, bf16, forward", calls))
    linear = torch.nn.Sequential()
    linear.add_module("proj", torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=BF16))
    plain = te.linear.require()(4096, 4096, bias=False, params_dtype=BF16, device="cuda")
    swap_linears(linear, include=("proj",))
    rows = torch.randn(8192, 4096, device="cuda", dtype=BF16)
    found.append(
        overhead(
            "linear 4096 x 4096, 8192 rows, bf16, forward",
            {"raw": lambda: plain(rows), "wrapper": lambda: linear.proj(rows)},
        )
    )
    return found


def overhead(what: str, calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """One wrapper beside its raw call, without gradients."""
    with torch.no_grad():
        device = side_by_side(calls, device_ms, 20)
        host = side_by_side(calls, host_us, 50)
    ratios = [wrapped / raw for wrapped, raw in zip(device["wrapper"], device["raw"], strict=True)]
    added = [wrapped - raw for wrapped, raw in zip(host["wrapper"], host["raw"], strict=True)]
    return {
        "what": what,
        "raw_ms": statistics.median(device["raw"]),
        "wrapper_ms": statistics.median(device["wrapper"]),
        "ratio": statistics.median(ratios),
        "host_us_added": statistics.median(added),
    }


def matrix_rate() -> dict[str, Any]:
    """The card's own bf16 matrix rate: what every other figure stands beside."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
    times = side_by_side({"torch.matmul": lambda: left @ right}, device_ms, 10)["torch.matmul"]
    return row("bf16 matrix product 8192 x 8192 x 8192", "torch.matmul", times, 2 * 8192.0**3)


def attention_backends() -> list[dict[str, Any]]:
    """Every attention backend on the same tensors, forward, and forward with backward."""
    batch, heads, groups, length, width = 2, 16, 4, 4096, 128
    inputs = attention_inputs(batch, heads, groups, length, width)
    gradient = torch.randn_like(inputs[0])
    forward = 4.0 * batch * heads * length * length * width / 2
    layers, notes = {}, {}
    for backend in ("te", "fa3", "fa4", "sdpa"):
        layer = Attention(
            num_heads=heads, head_dim=width, num_gqa_groups=groups, backends=tuple(dict.fromkeys((backend, "sdpa")))
        )
        layer(*inputs)
        if layer.choice.observed == backend:
            layers[backend] = layer
        else:
            notes[backend] = layer.choice.refusals[0].reason
    what = f"attention [{batch}, {heads}, {length}, {width}], {groups} groups, causal, bf16"
    with torch.no_grad():
        once = side_by_side(
            {name: (lambda layer=layer: layer(*inputs)) for name, layer in layers.items()}, device_ms, 10
        )
    both = side_by_side(
        {name: (lambda layer=layer: backward(layer(*inputs), gradient)) for name, layer in layers.items()}, device_ms, 5
    )
    rows = [row(f"{what}, forward", name, times, forward) for name, times in once.items()]
    rows += [row(f"{what}, forward and backward", name, times, 3.5 * forward) for name, times in both.items()]
    return rows + [{"what": what, "path": name, "note": f"not run: {why}"} for name, why in notes.items()]


def recipes() -> dict[str, Any]:
    """The FP8 recipes that an H200 has."""
    return {"delayed": te_delayed_scaling(), "current": te_current_scaling(), "block": te_block_scaling()}


def in_scope(recipe: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """The same call under a recipe; its backward pass lies outside the scope."""

    def call() -> Any:
        with te_scope(enabled=True, recipe=recipe, amax_reduction_group=None) if recipe is not None else nullcontext():
            return run()

    return call


def blocks() -> list[dict[str, Any]]:
    """The whole A-block: native bf16, Transformer Engine bf16, and each FP8 recipe; forward and backward."""
    batch, length, hidden, heads, groups, ffn = 2, 4096, 4096, 32, 8, 11008
    sizes = {
        "hidden": hidden, "ffn_hidden": ffn, "num_heads": heads, "head_dim": hidden // heads, "num_gqa_groups": groups,
        "activation": "swiglu", "eps": 1e-5, "dtype": BF16, "device": "cuda",
    }  # fmt: skip
    rows_in = torch.randn(batch, length, hidden, device="cuda", dtype=BF16, requires_grad=True)
    gradient = torch.randn_like(rows_in)
    width = hidden // heads
    weights = hidden * (heads + 2 * groups) * width + hidden * hidden + 3 * hidden * ffn
    flop = 3 * (2.0 * batch * length * weights) + 3.5 * (4.0 * batch * heads * length * length * width / 2)
    native, taken = NativeBlock(**sizes, features=OFF), NativeBlock(**sizes)
    runs: dict[str, Callable[[], Any]] = {
        "native bf16": lambda: backward(native(rows_in), gradient),
        "te bf16": lambda: backward(taken(rows_in), gradient),
    }
    for name, recipe in recipes().items():
        layer = NativeBlock(**sizes)
        forward = in_scope(recipe, lambda layer=layer: layer(rows_in))
        runs[f"te fp8 {name}"] = lambda forward=forward: backward(forward(), gradient)
    what = (
        f"A-block [{batch}, {length}, {hidden}], {heads} heads, {groups} groups, gated MLP {ffn}, forward and backward"
    )
    return [row(what, name, times, flop) for name, times in side_by_side(runs, device_ms, 3).items()]


def expert_gemms() -> list[dict[str, Any]]:
    """The expert bank: native bf16, Transformer Engine bf16 and FP8, DeepGEMM FP8."""
    experts, tokens, width, out = 8, 1024, 4096, 4096
    counts = [tokens] * experts
    rows_in = torch.randn(experts * tokens, width, device="cuda", dtype=BF16, requires_grad=True)
    gradient = torch.randn(experts * tokens, out, device="cuda", dtype=BF16)
    flop = 2.0 * experts * tokens * width * out
    sizes = {"num_experts": experts, "in_features": width, "out_features": out, "dtype": BF16, "device": "cuda"}
    once: dict[str, Callable[[], Any]] = {}
    notes: dict[str, str] = {}
    for name, backend in (("native bf16", "native"), ("te bf16", "te"), ("deep_gemm fp8", "deep_gemm")):
        layer = ExpertGemm(**sizes, backends=(backend, "native") if backend != "native" else ("native",))
        layer(rows_in, counts, is_first_microbatch=True)
        if layer.choice.observed == backend:
            once[name] = lambda layer=layer: layer(rows_in, counts, is_first_microbatch=False)
        else:
            notes[name] = layer.choice.refusals[0].reason
    for name, recipe in recipes().items():
        layer = ExpertGemm(**sizes, backends=("te", "native"))
        in_scope(recipe, lambda layer=layer: layer(rows_in, counts, is_first_microbatch=True))()
        once[f"te fp8 {name}"] = in_scope(recipe, lambda layer=layer: layer(rows_in, counts, is_first_microbatch=False))
    what = f"expert GEMM {experts} x ({tokens} x {width} x {out}), weights in FP8 once"
    with torch.no_grad():
        forward = side_by_side(once, device_ms, 10)
    both = side_by_side({name: (lambda run=run: backward(run(), gradient)) for name, run in once.items()}, device_ms, 5)
    found = [row(f"{what}, forward", name, times, flop) for name, times in forward.items()]
    found += [row(f"{what}, forward and backward", name, times, 3 * flop) for name, times in both.items()]
    return found + [{"what": what, "path": name, "note": f"not run: {why}"} for name, why in notes.items()]


def table_line(one: dict[str, Any], plain: dict[str, float], rate: float) -> str:
    """One row of a page; a path that is not faster than the native one is told so."""
    if "ms" not in one:
        return f"| {one['what']} | {one['path']} | {one['note']} | | | | |"
    gain = plain.get(one["what"], one["ms"]) / one["ms"]
    verdict = f"{gain:.2f} x" + (" **not faster**" if gain < 1.0 else "")
    return (
        f"| {one['what']} | {one['path']} | {one['ms']:.3f} | [{one['low']:.3f}, {one['high']:.3f}] | "
        f"{one['tflops']:.0f} | {one['tflops'] / rate:.0%} | {verdict} |"
    )


def write_table(result: dict[str, Any]) -> str:
    """The Markdown page of one run."""
    rate = result["matrix_rate"]["tflops"]
    lines = [
        "<!-- written by benchmarks/bridge.py -->",
        f"{result['gpu']}, Transformer Engine {result['te']}, torch {result['torch']}, {result['date']}; medians of "
        f"{ROUNDS} "
        f"interleaved rounds, [low, high] without the extremes. The card's own bf16 matrix rate in the same run: "
        f"**{rate:.0f} TFLOP/s**.",
        "",
        "| wrapper against the raw call | raw, ms | wrapper, ms | ratio | host time added, microseconds |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one['what']} | {one['raw_ms']:.3f} | {one['wrapper_ms']:.3f} | {one['ratio']:.3f} | "
        f"{one['host_us_added']:.1f} |"
        for one in result["overhead"]
    ]
    for title in ("attention", "blocks", "experts"):
        lines += [
            "",
            "| what | path | ms | [low, high] | TFLOP/s | of the matrix rate | against native |",
            "|---|---|---|---|---|---|---|",
        ]
        plain = {one["what"]: one["ms"] for one in result[title] if one["path"] in {"sdpa", "native bf16"}}
        lines += [table_line(one, plain, rate) for one in result[title]]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write the page and its figures."""
    options = make_parser(__doc__).parse_args()
    if render_earlier(options.render, write_table):
        return
    if not torch.cuda.is_available() or not te.is_te_available():
        sys.exit(f"not-run: {te.why_te_is_unavailable() or 'there is no CUDA device'}")
    torch.manual_seed(0)
    result = describe_run(
        gpu=torch.cuda.get_device_name(),
        python=platform.python_version(),
        matrix_rate=matrix_rate(),
        overhead=wrapper_overhead(),
        attention=attention_backends(),
        blocks=blocks(),
        experts=expert_gemms(),
    )
    print(save(options.output / "bridge.json", result, write_table))


if __name__ == "__main__":
    main()
