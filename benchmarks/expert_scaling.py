"""Expert parallelism from one GPU to all of a host, at fixed tokens a GPU: efficiency, and what the all-to-all takes.

    python benchmarks/expert_scaling.py --ranks 4 --output docs/benchmarks
    python benchmarks/expert_scaling.py --render docs/benchmarks/expert_scaling.json
    python benchmarks/expert_scaling.py --ranks 2 --device cpu --output /tmp/figures    # small, to see that it runs

The layer is that of benchmarks/moe_layer.py, its tokens on every GPU, its experts shared out. A step is as long as that
of the slowest rank; efficiency is the step with all experts on one GPU over the step with them on N, the median over
rounds of the ratio within a round.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.expert_scaling_page import write_page  # noqa: E402
from benchmarks.figures import describe_run, make_parser, render_earlier, save  # noqa: E402
from benchmarks.moe_layer_paths import SMALL, Case  # noqa: E402

ROUNDS: Final = 7
REPEATS: Final = 10
SECONDS: Final = 240.0


def measure(ranks: int, device: str, backends: Sequence[str], rounds: int, tokens: int) -> dict[str, Any]:
    """Start the ranks, wait for them, and put their figures together."""
    from megacpp_validate.training.parallel.launch import Limits, launch

    arguments = [
        "--device", device, "--backends", *backends, "--rounds", str(rounds),
        "--repeats", str(REPEATS if device == "cuda" else 2), "--tokens", str(tokens),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        end = launch(
            "benchmarks.expert_scaling_rank", arguments, ranks=ranks, folder=Path(folder),
            limits=Limits(whole=SECONDS, silent=SECONDS), environment={"PYTHONPATH": _path()},
        )  # fmt: skip
        if end.ending != "done":
            for rank in end.ranks:
                print(Path(rank["log"]).read_text(encoding="utf-8", errors="replace")[-3000:], file=sys.stderr)
            sys.exit(f"not-run: the ranks ended as {end.ending!r}: {end.words}")
    return gather(list(end.receipts.values()), backends, end.seconds) | {"tokens": tokens}


def _path() -> str:
    return os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)


def gather(receipts: Sequence[Any], backends: Sequence[str], seconds: float) -> dict[str, Any]:
    """The figures of a run: for each backend and number of GPUs, of the slowest rank in each round."""
    sizes = sorted({int(name.split()[1]) for name in receipts[0]["rounds"]})
    rows = []
    for backend in backends:
        if f"{backend} 1" not in receipts[0]["rounds"]:
            continue
        alone = slowest(receipts, f"{backend} 1")
        for size in sizes:
            steps = slowest(receipts, f"{backend} {size}")
            row: dict[str, Any] = {"backend": backend, "gpus": size, "step_ms": statistics.median(steps)}
            row |= {"low": min(steps), "high": max(steps)}
            row["efficiency"] = statistics.median(one / many for one, many in zip(alone, steps, strict=True))
            traces = [receipt["traces"][f"{backend} {size}"] for receipt in receipts if receipt["traces"]]
            row["trace"] = join_traces(traces, size)
            rows.append(row)
    first = receipts[0]
    rounds = len(next(iter(first["rounds"].values())))
    more = {"ranks": len(receipts), "rounds": rounds, "notes": first["notes"], "seconds": seconds, "rows": rows}
    return describe_run(gpu=first["gpu"], **more) | {"torch": first["torch"]}


def join_traces(traces: Sequence[Any], size: int) -> dict[str, float]:
    """The parts of the step of the rank whose traced step is the longest, milliseconds; empty without a trace.

    A kernel of the all-to-all ends on all ranks of its group together: the shortest of them is the transfer, and what
    the others last longer they waited.
    """
    found = []
    for rank, trace in enumerate(traces):
        group = traces[rank // size * size :][:size]
        transfers = sum(map(min, zip(*(one["all_to_all"] for one in group), strict=False)))
        moved = transfers / sum(trace["all_to_all"]) if trace["all_to_all"] else 0.0
        parts = {part: trace[part] for part in ("host", "dispatch", "gemm")}
        spent = {"all_to_all": trace["collectives"] * moved, "waiting": trace["collectives"] * (1 - moved)}
        found.append({**parts, **spent})
    return max(found, key=lambda parts: sum(parts.values()), default={})


def slowest(receipts: Sequence[Any], name: str) -> list[float]:
    """The step of the slowest rank, a value a round."""
    return [max(each) for each in zip(*(receipt["rounds"][name] for receipt in receipts), strict=True)]


def main() -> None:
    """Measure, and write figures and page; or the page alone from figures."""
    parser = make_parser(__doc__, rounds=ROUNDS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, to see that it runs")
    parser.add_argument("--backends", nargs="+", default=None, help="ways to the experts: jagged, native, te")
    parser.add_argument("--tokens", type=int, default=None, help="on every GPU; what moe_layer.md has without it")
    options = parser.parse_args()
    if render_earlier(options.render, write_page):
        return
    backends = options.backends or ["jagged", "native", *(["te"] if options.device == "cuda" else [])]
    tokens = options.tokens or (Case() if options.device == "cuda" else SMALL).tokens
    result = measure(options.ranks, options.device, backends, options.rounds, tokens)
    name = f"expert_scaling_{tokens}.json" if options.tokens else "expert_scaling.json"
    print(save(options.output / name, result, write_page))


if __name__ == "__main__":
    main()
