"""One rank of benchmarks/expert_scaling.py: an MoE layer with its experts shared out over 1, 2, 4 ... ranks.

Every size runs in the same processes, on as many groups as fit, so that all GPUs are busy at each, and rounds are
interleaved: what one size is compared with was measured beside it.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import distributed

from benchmarks.moe_layer_paths import AUX, SMALL, Case, differentiate
from benchmarks.router import choose_experts
from megacpp_validate.bridge.errors import BridgeError
from megacpp_validate.bridge.expert_gemm import ExpertGemm
from megacpp_validate.bridge.jagged_experts import jagged_moe, jagged_rows
from megacpp_validate.bridge.permute import Dispatch
from megacpp_validate.native.mlp import activation
from megacpp_validate.native.router import TopKRouter
from megacpp_validate.training.parallel.exchange import ExpertExchange
from megacpp_validate.training.parallel.ranks import join_ranks
from megacpp_validate.training.smoke.trainer import Interval, exposed_seconds

WARM_UP: Final = 5
JAGGED: Final = "jagged"


GEMM: Final = re.compile("gemm|nvjet|cutlass|xmma|grouped|wgmma", re.IGNORECASE)
TRACED: Final = 3


def trace_steps(step: Callable[[], Any]) -> dict[str, Any]:
    """Where a step goes on this rank, in milliseconds, from the trace of `TRACED` steps: the parts sum to the step.

    At each moment the first of these that holds is counted: a GEMM runs, another kernel runs (dispatch: routing,
    sorting, gathering, the gate), a kernel of NCCL runs, nothing runs and the device waits for the host. The profiler
    makes the host slower.

    Returns:
        gemm, dispatch, collectives, host: as above. all_to_all: the length of each kernel of NCCL, in order; what one
        lasts longer than on the fastest rank it waited for the others.
    """
    from torch.profiler import ProfilerActivity, profile

    step()
    _wait("cuda")
    distributed.barrier()
    _wait("cuda")  # the barrier is a kernel of NCCL, too
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(TRACED):
            step()
        _wait("cuda")
    spans: dict[str, list[Interval]] = {"gemm": [], "dispatch": [], "collectives": []}
    for event in seen.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kind = "collectives" if "nccl" in event.name.lower() else "gemm" if GEMM.search(event.name) else "dispatch"
            spans[kind].append((event.time_range.start, event.time_range.end))
    return split_trace(spans)


def split_trace(spans: dict[str, list[Interval]]) -> dict[str, Any]:
    """The parts of a step, of the kernels of each kind as intervals in microseconds; as `trace_steps` returns them."""
    every = [span for of_kind in spans.values() for span in of_kind]
    whole = (max(end for _, end in every) - min(begin for begin, _ in every)) / 1e6
    parts, before = dict[str, Any](), list[Interval]()
    for kind, of_kind in spans.items():
        parts[kind] = exposed_seconds(of_kind, before)
        before += of_kind
    parts["host"] = whole - exposed_seconds(every, [])
    lengths = [(end - begin) / 1e3 for begin, end in sorted(spans["collectives"])]
    return {**{name: value * 1e3 / TRACED for name, value in parts.items()}, "all_to_all": lengths}


def make_step(case: Case, ranks: int, group: Any, device: str, backend: Any) -> Callable[[], Any]:
    """Forward and backward of this rank's part: its own tokens, its share of the experts."""
    torch.manual_seed(distributed.get_rank())
    dtype, jagged = torch.bfloat16, backend == JAGGED
    bank_of = "native" if jagged else backend
    made = {"num_experts": case.experts // ranks, "dtype": dtype, "device": device, "backends": (bank_of,)}
    router = TopKRouter(case.hidden, case.experts, case.top_k, aux_coefficient=AUX, device=device)
    dispatch = Dispatch(case.experts)
    up = ExpertGemm(in_features=case.hidden, out_features=2 * case.width, **made)
    down = ExpertGemm(in_features=case.width, out_features=case.hidden, **made)
    tokens = torch.randn(case.tokens, case.hidden, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(case.tokens, case.hidden, device=device, dtype=dtype)
    leaves = (tokens, router.weight, *up.parameters(), *down.parameters())
    exchange = ExpertExchange(case.experts, group=group) if ranks > 1 else None

    def bank(rows: Any, counts: Any) -> Any:
        if jagged:
            return jagged_rows(rows, counts, up.bank.weight, down.bank.weight)
        return down(activation(up(rows, counts), "swiglu"), counts)

    def step() -> Any:
        routing = router(tokens)
        counts, received = (None, []) if exchange is None else exchange.exchange_counts(routing.routing_map.sum(0))
        sent = dispatch.permute(tokens, None, routing.routing_map, rows_per_expert=counts)
        if exchange is None:
            rows = bank(sent.rows, sent.rows_per_expert)
        else:
            rows = exchange.run(sent.rows, counts, received, bank)
        out = dispatch.unpermute(rows, sent.row_map, probs=routing.probs)
        return differentiate(out, routing.aux_loss, leaves, gradient)

    def jagged_step() -> Any:
        routed = choose_experts(tokens, router.weight, case.top_k, aux_coefficient=AUX)
        out = jagged_moe(tokens, routed.chosen, routed.weights, up.bank.weight, down.bank.weight)
        return differentiate(out, routed.aux_loss, leaves, gradient)

    return jagged_step if jagged and exchange is None else step


def make_groups(world: int) -> dict[int, Any]:
    """Size -> this rank's group of it, for every power of two that divides the world; every rank makes all."""
    mine: dict[int, Any] = {}
    size = 1
    while size <= world and world % size == 0:
        for first in range(0, world, size):
            members = list(range(first, first + size))
            group = distributed.new_group(members)
            if distributed.get_rank() in members:
                mine[size] = group
        size *= 2
    return mine


def time_round(step: Callable[[], Any], repeats: int, device: str) -> float:
    """Milliseconds a step on the wall clock, all ranks starting together."""
    _wait(device)
    distributed.barrier()
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    _wait(device)
    return (time.perf_counter() - start) * 1e3 / repeats


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def main() -> None:
    """Measure, and leave the receipt."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--backends", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    options = parser.parse_args()
    case = replace(Case() if options.device == "cuda" else SMALL, tokens=options.tokens)
    torch.set_num_threads(1)  # ranks share the host's cores, and what is launched needs none
    with join_ranks("nccl" if options.device == "cuda" else "gloo") as rank:
        steps: dict[str, Callable[[], Any]] = {}
        notes: dict[str, str] = {}
        for size, group in make_groups(rank.world).items():
            for backend in options.backends:
                name = f"{backend} {size}"
                try:
                    steps[name] = make_step(case, size, group, rank.device, backend)
                except BridgeError as fault:  # no such backend here, on no rank
                    notes[name] = f"{type(fault).__name__}: {fault}"[:300]
        rounds: dict[str, list[float]] = {name: [] for name in steps}
        for name, step in steps.items():
            for _ in range(WARM_UP):
                step()
            rank.record.beat(0)
            print(f"{name} is warm", flush=True)
        names = list(steps)
        for turn in range(options.rounds):
            at = turn % len(names)
            for name in (*names[at:], *names[:at]):
                rounds[name].append(time_round(steps[name], options.repeats, options.device))
            rank.record.beat(turn + 1)
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none: a CPU, to see that it runs"
        print({name: statistics.median(found) for name, found in rounds.items()}, flush=True)
        traces = {name: trace_steps(step) for name, step in steps.items()} if options.device == "cuda" else {}
        made = {"rank": rank.rank, "gpu": gpu, "torch": torch.__version__, "rounds": rounds, "notes": notes}
        rank.write_receipt({**made, "traces": traces})


if __name__ == "__main__":
    main()
