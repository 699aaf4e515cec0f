"""One rank of benchmarks/expert_scaling.py: an MoE layer with its experts shared out over 1, 2, 4 ... ranks.

Every size runs in the same processes, on as many groups as fit, so that all GPUs are busy at each, and rounds are
interleaved: what one size is compared with was measured beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import distributed

from benchmarks.moe_layer_paths import AUX, SMALL, Case, differentiate
from megacpp_validate.bridge.errors import BridgeError
from megacpp_validate.bridge.expert_gemm import ExpertGemm
from megacpp_validate.bridge.jagged_experts import choose_experts, jagged_moe
from megacpp_validate.bridge.permute import Dispatch
from megacpp_validate.native.mlp import gated_activation
from megacpp_validate.native.router import TopKRouter
from megacpp_validate.training.parallel import exchange as exchanges
from megacpp_validate.training.parallel.exchange import ExpertExchange, Flight, JaggedExchange
from megacpp_validate.training.parallel.ranks import join_ranks

WARM_UP: Final = 5
JAGGED: Final = "jagged"


@dataclass
class Spent:
    """What the exchanges of some steps took, in milliseconds: on the device, and the host's wait for numbers."""

    device: str
    marks: list[tuple[str, Any, Any]] = field(default_factory=list)
    waited: float = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is launched inside."""
        begin = self._now()
        yield
        self.marks.append((name, begin, self._now()))

    def _now(self) -> Any:
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, float]:
        """Sums by name since the last time; the device has been waited for."""
        sums = {"rows": 0.0, "numbers": 0.0, "host_wait": self.waited * 1e3}
        for name, begin, end in self.marks:
            sums[name] += (end - begin) * 1e3 if self.device == "cpu" else begin.elapsed_time(end)
        self.marks, self.waited = [], 0.0
        return sums


class TimedExchange(ExpertExchange):
    """Notes how long numbers of rows take, and how long the host waits for them."""

    spent: Spent

    def _tell(self, *given: Any) -> Any:
        begin = time.perf_counter()
        with self.spent.part("numbers"):
            told = super()._tell(*given)
        self.spent.waited += time.perf_counter() - begin
        return told


class TimedJagged(JaggedExchange):
    """Likewise."""

    spent: Spent

    def hear(self, flight: Flight) -> Any:
        """As it is, noted."""
        begin = time.perf_counter()
        with self.spent.part("numbers"):
            told = super().hear(flight)
        self.spent.waited += time.perf_counter() - begin
        return told


def time_exchanges(spent: Spent) -> None:
    """For how long each exchange of rows from now on, forward and backward, holds up the device, is noted."""
    plain, start = exchanges._exchange, exchanges.start_rows

    class TimedFlight(Flight):
        def land(self) -> Any:
            with spent.part("rows"):
                return super().land()

    def timed(*given: Any) -> Any:
        with spent.part("rows"):
            return plain(*given)

    exchanges._exchange = timed
    exchanges.start_rows = lambda *given: TimedFlight(**vars(start(*given)))


def make_step(case: Case, ranks: int, group: Any, device: str, backend: Any, spent: Spent) -> Callable[[], Any]:
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
    exchange: Any = None
    if ranks > 1:
        exchange = (TimedJagged if jagged else TimedExchange)(case.experts, group=group)
        exchange.spent = spent

    def bank(rows: Any, counts: Any) -> Any:
        return down(gated_activation(up(rows, counts), "swiglu"), counts)

    def step() -> Any:
        routing = router(tokens)
        sent = dispatch.permute(tokens, None, routing.routing_map)
        if exchange is None:
            rows = bank(sent.rows, sent.rows_per_expert)
        else:
            rows = exchange.run(sent.rows, sent.rows_per_expert, bank)
        out = dispatch.unpermute(rows, sent.row_map, probs=routing.probs)
        return differentiate(out, routing.aux_loss, leaves, gradient)

    def jagged_step() -> Any:
        routed = choose_experts(tokens, router.weight, case.top_k, aux_coefficient=AUX)
        run = jagged_moe if exchange is None else exchange.run
        out = run(tokens, routed.chosen, routed.weights, up.bank.weight, down.bank.weight)
        return differentiate(out, routed.aux_loss, leaves, gradient)

    return jagged_step if jagged else step


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


def time_round(step: Callable[[], Any], repeats: int, device: str, spent: Spent) -> dict[str, float]:
    """Milliseconds a step on the wall clock, all ranks starting together, and what exchanges took of it."""
    _wait(device)
    distributed.barrier()
    spent.take()
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    _wait(device)
    whole = (time.perf_counter() - start) * 1e3
    return {name: value / repeats for name, value in {"step": whole, **spent.take()}.items()}


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
    options = parser.parse_args()
    case = Case() if options.device == "cuda" else SMALL
    torch.set_num_threads(1)  # ranks share the host's cores, and what is launched needs none
    with join_ranks("nccl" if options.device == "cuda" else "gloo") as rank:
        spent = Spent(options.device)
        time_exchanges(spent)
        steps: dict[str, Callable[[], Any]] = {}
        notes: dict[str, str] = {}
        for size, group in make_groups(rank.world).items():
            for backend in options.backends:
                name = f"{backend} {size}"
                try:
                    steps[name] = make_step(case, size, group, rank.device, backend, spent)
                except BridgeError as fault:  # no such backend here, on no rank
                    notes[name] = f"{type(fault).__name__}: {fault}"[:300]
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in steps}
        for name, step in steps.items():
            for _ in range(WARM_UP):
                step()
            rank.beat(0)
            print(f"{name} is warm", flush=True)
        names = list(steps)
        for turn in range(options.rounds):
            at = turn % len(names)
            for name in (*names[at:], *names[:at]):
                rounds[name].append(time_round(steps[name], options.repeats, options.device, spent))
            rank.beat(turn + 1)
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none: a CPU, to see that it runs"
        told = {name: statistics.median(one["step"] for one in found) for name, found in rounds.items()}
        print(told, flush=True)
        rank.write_receipt(
            {"rank": rank.rank, "gpu": gpu, "torch": torch.__version__, "rounds": rounds, "notes": notes}
        )


if __name__ == "__main__":
    main()
