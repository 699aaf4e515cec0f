"""Speed of FP8 on one GPU: each layer through the bridge and as a raw call of Transformer Engine, in one run.

    python benchmarks/fp8.py --output docs/benchmarks

A step is forward and backward with every cast in it. Rounds of all paths are interleaved, so that a clock that moves
moves them all, and each round has an order of its own: what ran before a path decides how warm the card is. Figures are
medians over rounds, ratios are medians of the ratios within a round. The device is held up until the host has launched
what is timed, and has run as many steps just before. Needs torch with a CUDA device and Transformer Engine; runs in the
host's own interpreter. If a path raises, its row has the error, and the others run. The expert GEMM has its own page.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path as File
from typing import Any, Final

ROOT = File(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.figures import describe_run, make_parser, render_earlier, save  # noqa: E402
from benchmarks.fp8_page import write_page  # noqa: E402
from benchmarks.fp8_paths import BF16, E4M3, Path, block_paths, linear_paths, mlp_paths, scaled_linear  # noqa: E402
from megacpp_validate.bridge import imports as te  # noqa: E402
from megacpp_validate.bridge.te_fp8 import reset_te_state  # noqa: E402

CLOCK_HZ: Final = 1.98e9  # highest clock of the card: the pause is at least as long as it is meant to be
ROUND_MS: Final = 50.0  # of one path, about: small layers are repeated
MOST: Final = 10  # steps a round: a stream takes about a thousand launches before it makes the host wait
WARM_UP: Final = 5
BLOCK: Final = {"hidden": 4096, "ffn_hidden": 16384, "num_heads": 32, "head_dim": 128, "num_gqa_groups": 4}
# Rows, input width, output width: projections of the block above, and what is too small for FP8 to win.
LINEARS: Final = (
    (8192, 4096, 4096),
    (8192, 4096, 5120),
    (8192, 4096, 16384),
    (8192, 16384, 4096),
    (2048, 4096, 4096),
    (512, 4096, 4096),
    (8192, 1024, 1024),
)


def host_s(run: Callable[[], Any], repeats: int) -> float:
    """Seconds until `repeats` calls have returned, the device not waited for."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return time.perf_counter() - start


def one_round(run: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Milliseconds of device time, and microseconds of the host, a call."""
    waited = host_s(run, repeats)
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(1.5 * waited * CLOCK_HZ))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats, waited / repeats * 1e6


def warm_up(paths: Sequence[Path]) -> tuple[list[Path], dict[str, str]]:
    """The paths that run, and why the others do not."""
    run, broken = [], {}
    for path in paths:
        try:
            for _ in range(WARM_UP):
                path.step()
            torch.cuda.synchronize()
            run.append(path)
        except Exception as fault:
            broken[path.name] = f"{type(fault).__name__}: {fault}"[:300].replace("\n", " ")
    return run, broken


def side_by_side(paths: Sequence[Path], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Device and host time of every path, a pair a round; rounds interleaved, each in an order of its own."""
    order, chance = list(paths), random.Random(0)
    repeats = {path.name: max(2, round(ROUND_MS / one_round(path.step, 2)[0])) for path in paths}
    found: dict[str, list[tuple[float, float]]] = {path.name: [] for path in paths}
    for _ in range(rounds):
        chance.shuffle(order)
        for path in order:
            found[path.name].append(one_round(path.step, min(repeats[path.name], MOST)))
    return found


def compare(what: str, flop: float, paths: Sequence[Path], rounds: int) -> dict[str, Any]:
    """One table: every path, FP8 over bf16 of each side, and the bridge over raw Transformer Engine."""
    runs, broken = warm_up(paths)
    found = side_by_side(runs, rounds)
    device = {name: [ms for ms, _ in pairs] for name, pairs in found.items()}
    rows: list[dict[str, Any]] = []
    for path in runs:
        times = sorted(device[path.name])
        middle = statistics.median(times)
        rows.append(
            {
                "side": path.side,
                "recipe": path.recipe,
                "ms": middle,
                "low": times[1] if len(times) > 2 else times[0],
                "high": times[-2] if len(times) > 2 else times[-1],
                "tflops": flop / middle / 1e9,
                "host_us": statistics.median(host for _, host in found[path.name]),
                "gain": gain(device, f"{path.side}, bf16", path.name),
                "over_raw": gain(device, path.name, f"raw TE, {path.recipe}") if path.side == "bridge" else None,
            }
        )
    rows += [{"side": name, "recipe": "", "note": why} for name, why in broken.items()]
    return {"what": what, "flop": flop, "rows": rows}


def gain(device: dict[str, list[float]], slower: str, faster: str) -> float | None:
    """Median over rounds of how many times as long the one takes; None where either did not run."""
    if slower not in device or faster not in device:
        return None
    return statistics.median(one / other for one, other in zip(device[slower], device[faster], strict=True))


def rates(rounds: int) -> dict[str, Any]:
    """What the card does at one matrix product, without casts: what every other figure stands beside."""
    size = 8192
    left, right = (torch.randn(size, size, device="cuda", dtype=BF16) for _ in range(2))
    one = torch.ones((), device="cuda")
    low_left, low_right = left.to(E4M3), right.to(E4M3).t()
    paths = [
        Path("torch", "bf16", lambda: left @ right),
        Path(
            "torch",
            "_scaled_mm E4M3",
            lambda: torch._scaled_mm(
                low_left, low_right, scale_a=one, scale_b=one, out_dtype=BF16, use_fast_accum=True
            ),
        ),
    ]
    return compare(f"one product {size} x {size} x {size}, no casts", 2.0 * size**3, paths, rounds)


def mlp(rounds: int) -> dict[str, Any]:
    """Norm and MLP."""
    tokens, hidden, ffn = 8192, 4096, 16384
    rows = torch.randn(tokens, hidden, device="cuda", dtype=BF16, requires_grad=True)
    flop = 3 * 2.0 * tokens * 2 * hidden * ffn
    paths = mlp_paths(rows, hidden, ffn)
    return compare(f"LayerNormMLP {tokens} x {hidden} x {ffn}, RMSNorm, GELU", flop, paths, rounds)


def block(rounds: int, *, rope: bool) -> dict[str, Any]:
    """The whole A-block; raw is `te.TransformerLayer`."""
    batch, length = 2, 4096
    rows = torch.randn(batch, length, BLOCK["hidden"], device="cuda", dtype=BF16, requires_grad=True)
    heads, width, groups = BLOCK["num_heads"], BLOCK["head_dim"], BLOCK["num_gqa_groups"]
    weights = BLOCK["hidden"] * ((2 * heads + 2 * groups) * width + 2 * BLOCK["ffn_hidden"])
    attention = 3.5 * (4.0 * batch * heads * length * length * width / 2)
    what = (
        f"TransformerLayer {batch} x {length} x {BLOCK['hidden']}, {heads} heads, {groups} groups, GELU "
        f"{BLOCK['ffn_hidden']}{', rotary embedding' if rope else ''}"
    )
    paths = block_paths(rows, BLOCK, rope=rope)
    return compare(what, 3 * 2.0 * batch * length * weights + attention, paths, rounds)


def linears(rounds: int) -> list[dict[str, Any]]:
    """Linear layers as the walker swaps them."""
    torch._dynamo.config.recompile_limit = 2 * len(LINEARS)
    compiled = torch.compile(scaled_linear, dynamic=False)
    found = []
    for tokens, width, out in LINEARS:
        rows = torch.randn(tokens, width, device="cuda", dtype=BF16, requires_grad=True)
        paths = linear_paths(rows, width, out, compiled)
        what = f"Linear {tokens} x {width} x {out}"
        found.append(compare(what, 3 * 2.0 * tokens * width * out, paths, rounds))
        reset_te_state()  # delayed scaling would go on to roll the histories of layers that are gone
    return found


SECTIONS: Final[dict[str, Callable[[int], Any]]] = {
    "rates": rates,
    "mlp": mlp,
    "block": partial(block, rope=False),
    "block_rope": partial(block, rope=True),
    "linears": linears,
}


def keep_sections(before: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    """Figures of an earlier run, where all that heads the page is the same; else none of them."""
    return {**before, **result} if all(before.get(name) == value for name, value in result.items()) else result


def main() -> None:
    """Measure, and write the page and its figures after each section."""
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument(
        "--sections",
        default=",".join(SECTIONS),
        help="some of them, with commas between; others of the same stack and day stay in the file that is there",
    )
    options = parser.parse_args()
    if render_earlier(options.render, write_page):
        return
    if not torch.cuda.is_available() or not te.is_te_available():
        sys.exit(f"not-run: {te.why_te_is_unavailable() or 'there is no CUDA device'}")
    torch.manual_seed(0)
    result = describe_run(gpu=torch.cuda.get_device_name(), rounds=options.rounds)
    broken: list[str] = []
    figures = options.output / "fp8.json"
    if figures.is_file():
        result = keep_sections(json.loads(figures.read_text()), result)
    for name in options.sections.split(","):
        start = time.perf_counter()
        try:
            result[name] = SECTIONS[name](options.rounds)
        except Exception as fault:
            broken.append(name)
            print(f"{name}: {type(fault).__name__}: {fault}", file=sys.stderr)
        reset_te_state()
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        save(figures, result, write_page)
    print(write_page(result))
    if broken:
        sys.exit(f"not measured: {', '.join(broken)}")


if __name__ == "__main__":
    main()
