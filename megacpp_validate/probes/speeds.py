"""What is timed of each bridge module, and how: rounds of many uses, those of all uses interleaved, medians of each.

The sizes are those of production on a GPU, small on the CPU: they keep a GPU busy for longer than the host needs to
launch a use. A name says what is timed and stays: rows of two receipts are joined by it.

Device time, by CUDA events around each use. The device is held up until the host has launched the use, so that the time
to launch is not in it, and 256 MiB are written before, so that the L2 cache is cold. A use that itself waits for the
device cannot be held: what the host does is in its time, and the name of its clock says so. Without a GPU it is the
wall-clock time of the host, which nobody is judged by.

A round has as many uses of every layer, and is never repeated, however its times scatter.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from ..evidence.receipt import Timing
from .bench import Bench
from .observe import Enter

ROUNDS: Final = 5
USES: Final = 10  # of a round
FIRST_USES: Final = 3  # what compiles, tunes and plans does it at the first; delayed scaling knows its scales then
LAST_WARM_UP: Final = 2  # alone on the device, right before the rounds
NOT_HELD: Final = ", not held"  # behind the name of a clock whose device went on before the host was ready


class Use(NamedTuple):
    """What is timed.

    Attributes:
        call: one use, which gives its output.
        choice: what the wrapper says it took, asked after a call; None where nothing is chosen.
    """

    call: Callable[[], Any]
    choice: Callable[[], Any] | None = None


class HostClock:
    """The host is the device: `time.perf_counter`."""

    name: str = "perf_counter"

    def wait(self) -> None:
        """Until the device is idle: nothing runs behind a call."""

    def launch_ms(self, call: Callable[[], Any], uses: int) -> float:
        """The fewest milliseconds until a call returned, from an idle device."""
        found = []
        for _ in range(uses):
            self.wait()
            start = time.perf_counter()
            call()
            found.append((time.perf_counter() - start) * 1e3)
        return min(found)

    def device_ms(self, call: Callable[[], Any], uses: int, launch_ms: float) -> tuple[list[float], bool]:  # noqa: ARG002
        """Device time of every use, milliseconds, and whether the time to launch is in none of them.

        Args:
            call: one use.
            uses: how many.
            launch_ms: what the host needs to launch one.
        """
        return [self.launch_ms(call, 1) for _ in range(uses)], True


class CudaClock(HostClock):
    """CUDA events on the current stream. Their resolution is about 0.5 microseconds (CUDA Runtime API, Event
    Management, cudaEventElapsedTime).
    """  # fmt: skip

    name = "cuda-events"
    _FLUSHED_BYTES: Final = 256 * 2**20  # twice the L2 cache of a B200, five times that of an H200
    _CYCLES_PER_MS: Final = 2.0e6  # at the highest clock: the pause is at least as long as it is meant to be
    _LONGEST_PAUSE_MS: Final = 40.0
    _MARGIN: Final = 2.0  # a host that does something else meanwhile needs longer than at its best

    def __init__(self) -> None:
        self._flushed = torch.empty(self._FLUSHED_BYTES, dtype=torch.int8, device="cuda")

    def wait(self) -> None:
        """Until the device is idle."""
        torch.cuda.synchronize()

    def device_ms(self, call: Callable[[], Any], uses: int, launch_ms: float) -> tuple[list[float], bool]:
        """Device time of every use, milliseconds, and whether the time to launch is in fewer than half of them."""
        pause_ms = min(self._MARGIN * launch_ms + 0.1, self._LONGEST_PAUSE_MS)
        times, held = list[float](), 0
        for _ in range(uses):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            released = torch.cuda.Event()
            self.wait()
            torch.cuda._sleep(int(pause_ms * self._CYCLES_PER_MS))
            released.record()
            self._flushed.zero_()
            start.record()
            call()
            end.record()
            held += not released.query()
            self.wait()
            times.append(start.elapsed_time(end))
        return times, 2 * held > uses


@dataclass
class _Timed:
    """A use on its way through the stopwatch; `rounds_ms` are medians."""

    name: str
    call: Callable[[], Any]
    rounds_ms: list[float] = field(default_factory=list)
    launch_ms: float = 0.0
    held: bool = True


class Stopwatch:
    """Times the uses of one module.

    Every use gives a check `speed.NAME.ran`, passed or not: one that raises stops no other.

    Attributes:
        bench: device, order and bridge module for what makes the uses; takes the checks.
    """

    def __init__(self, bench: Bench, clock: HostClock | None = None) -> None:
        self.bench = bench
        self._clock = clock or (CudaClock() if bench.device == "cuda" else HostClock())
        self._timed: list[_Timed] = []

    def add(self, name: str, make: Callable[[], Use]) -> None:
        """Make a use and run it for the first times, so that what is compiled for it is compiled.

        Args:
            name: dotted: precision, what, which direction.
            make: makes layers and tensors; what it raises is the use's failure.
        """
        with self._or_fail(name):
            use = make()
            made = use.call()
            if use.choice is not None:
                self.bench.ran_on(f"speed.{name}", use.choice(), made)
            for _ in range(FIRST_USES - 1):
                use.call()
            self._clock.wait()
            self._timed.append(_Timed(name, use.call))

    def run(self) -> tuple[Timing, ...]:
        """Time every use that ran; call it while nothing else uses the device."""
        gc.collect()
        gc.disable()  # the garbage collector may not choose whose use takes longer
        try:
            for step in (self._warm_up, *[self._round] * ROUNDS):
                for timed in tuple(self._timed):
                    self._timed.remove(timed)
                    with self._or_fail(timed.name):
                        step(timed)
                        self._timed.append(timed)
        finally:
            gc.enable()
        for timed in self._timed:
            self.bench.check(f"speed.{timed.name}.ran", True, f"{ROUNDS} rounds were timed")
        return tuple(map(self._row, self._timed))

    def _warm_up(self, timed: _Timed) -> None:
        timed.launch_ms = self._clock.launch_ms(timed.call, LAST_WARM_UP)

    def _round(self, timed: _Timed) -> None:
        times, held = self._clock.device_ms(timed.call, USES, timed.launch_ms)
        timed.held &= held
        timed.rounds_ms.append(statistics.median(times))

    def _row(self, timed: _Timed) -> Timing:
        clock = self._clock.name + ("" if timed.held else NOT_HELD)
        median = statistics.median(timed.rounds_ms)
        spread = (max(timed.rounds_ms) - min(timed.rounds_ms)) / median if median else 0.0
        rounds = tuple(round(value, 6) for value in timed.rounds_ms)
        return Timing(timed.name, clock, rounds, round(median, 6), round(spread, 4), USES)

    @contextmanager
    def _or_fail(self, name: str) -> Iterator[None]:
        """What is raised inside is a check that failed; nothing but an interrupt goes through."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as fault:  # SystemExit and what compiled code makes up, too: the receipt is earned
            self.bench.check(f"speed.{name}.ran", False, f"{type(fault).__name__}: {fault}"[:2000])


# --- what is timed ----------------------------------------------------------------------------------------------------

BF16: Final = torch.bfloat16


class Made(NamedTuple):
    """A layer on its tensors: what one pass calls, the leaves and the gradient of its way back, and the choice."""

    forward: Callable[[], Any]
    leaves: Sequence[Any]
    gradient: Any
    choice: Callable[[], Any]


def _attention(bench: Bench, *, large: bool) -> Made:
    """Tensors lie in memory as [B, T, H, D], as a projection gives them: what lies otherwise is copied first."""
    batch, heads, groups, length, width = (2, 16, 4, 4096, 128) if large else (1, 8, 2, 128, 32)
    layer = bench.bridge().Attention(
        num_heads=heads, head_dim=width, num_gqa_groups=groups, backends=("te", "sdpa"), device=bench.device
    )
    leaves = [bench.randn(batch, length, of, width, dtype=BF16, grad=True) for of in (heads, groups, groups)]
    inputs = [leaf.transpose(1, 2) for leaf in leaves]
    gradient = bench.randn(batch, heads, length, width, dtype=BF16)
    return Made(partial(layer, *inputs), leaves, gradient, lambda: layer.choice)


def _linear(bench: Bench, *, large: bool) -> Made:
    width, count = (4096, 4096) if large else (256, 128)
    tree = nn.ModuleDict({"fc1": nn.Linear(width, width, bias=False, device=bench.device, dtype=BF16)})
    choice = bench.bridge().swap_linears(tree).choices["fc1"]
    return _on_rows(bench, tree["fc1"], (count, width), width, lambda: choice)


def _permute(bench: Bench, *, large: bool) -> Made:
    """Tokens to two experts each and back; the numbers of rows are given, so that no call waits for the device."""
    experts, (tokens, width) = 8, (16384, 2048) if large else (256, 128)
    dispatch = bench.bridge().Dispatch(experts)
    given = bench.randn(tokens, width, dtype=BF16, grad=True)
    probs = bench.rand(tokens, experts).add_(0.05).requires_grad_()
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool, device=bench.device)
    routing_map.scatter_(1, bench.rand(tokens, experts).argsort(1)[:, :2], True)
    counts = routing_map.sum(0).tolist()

    def forward() -> Any:
        sent = dispatch.permute(given, probs, routing_map, rows_per_expert=counts)
        return dispatch.unpermute(sent.rows, sent.row_map)

    return Made(forward, (given,), bench.randn(tokens, width, dtype=BF16), lambda: dispatch.choice)


def _experts(bench: Bench, *, large: bool) -> Made:
    """Every expert has as many rows, a multiple of what any recipe pads to."""
    experts, (tokens, wide, narrow) = 8, (1024, 4096, 2048) if large else (32, 128, 64)
    layer = bench.bridge().ExpertGemm(
        num_experts=experts, in_features=wide, out_features=narrow, dtype=BF16, device=bench.device
    )
    return _on_rows(bench, layer, (experts * tokens, wide), narrow, lambda: layer.choice, [tokens] * experts)


def _block(bench: Bench, *, large: bool) -> Made:
    batch, length, hidden, ffn, heads, groups = (2, 2048, 2048, 5632, 16, 4) if large else (1, 64, 128, 256, 4, 2)
    layer = bench.bridge().NativeBlock(
        hidden=hidden, ffn_hidden=ffn, num_heads=heads, head_dim=hidden // heads, num_gqa_groups=groups,
        activation="swiglu", eps=1e-5, dtype=BF16, device=bench.device,
    )  # fmt: skip
    return _on_rows(bench, layer, (batch, length, hidden), hidden, lambda: layer.choice)


def _in_projection(bench: Bench, *, large: bool) -> Made:
    """2048 -> 2 x 4096 + 2 x 128 + 64 = 8512 features on a GPU: a multiple of what any recipe takes."""
    tokens, hidden, state, head_dim = (4096, 2048, 128, 64) if large else (64, 128, 16, 16)
    mixer = bench.bridge().build_mamba_mixer(hidden, state=state, head_dim=head_dim, dtype=BF16, device=bench.device)
    layer = mixer.in_projection
    return _on_rows(bench, layer, (2, tokens // 2, hidden), layer.weight.shape[0], lambda: mixer.choice)


def _on_rows(bench: Bench, layer: Any, shape: Sequence[int], out: int, choice: Callable[[], Any], *more: Any) -> Made:
    rows = bench.randn(*shape, dtype=BF16, grad=True)
    gradient = bench.randn(*shape[:-1], out, dtype=BF16)
    return Made(partial(layer, rows, *more), (rows, *layer.parameters()), gradient, choice)


class Row(NamedTuple):
    """What is timed of a module.

    Attributes:
        name: dotted, without precision and direction.
        make: makes the layer.
        recipes: whether the target's production recipe is timed beside bf16.
        forward_alone: whether the forward pass is timed by itself too.
    """

    name: str
    make: Callable[..., Made]
    recipes: bool = True
    forward_alone: bool = False


SPEEDS: Final = {
    "attention": Row("causal.gqa4", _attention, recipes=False, forward_alone=True),
    "linear_walker": Row("linear", _linear),
    "permute": Row("top2.there-and-back", _permute, recipes=False),  # a further width is compiled for seconds
    "expert_gemm": Row("experts8", _experts),
    "native_block": Row("block", _block),
    "layer_spec": Row("mamba-in-projection", _in_projection),
}


def add_uses(stopwatch: Stopwatch) -> None:
    """Every use of a module of `order.TIMED`, in bf16 and, by Transformer Engine, in the target's production recipe.

    Transformer Engine forgets the layers of before: under delayed scaling it goes through all that it has ever seen
    each time a scope is left, so that a module's time would depend on what was judged before it was timed.
    """
    bench, precisions = stopwatch.bench, dict[str, Enter](bf16=nullcontext)
    row = SPEEDS[bench.order.probe]
    if row.recipes and bench.wants_te and (recipe := bench.order.target.production_recipe):
        bench.bridge("fp8_scope").reset_te_state()
        precisions[f"fp8.{recipe}"] = bench.low_precision()
    for name, enter in precisions.items():
        for direction in ("forward", "forward-backward") if row.forward_alone else ("forward-backward",):
            backward = direction == "forward-backward"
            stopwatch.add(f"{name}.{row.name}.{direction}", partial(_new_use, bench, row, enter, backward))


def _new_use(bench: Bench, row: Row, enter: Enter, backward: bool) -> Use:
    made = row.make(bench, large=bench.device == "cuda")

    def call() -> Any:
        with enter():
            out = made.forward()
        if backward:
            torch.autograd.grad(out, made.leaves, made.gradient)
        return out

    return Use(call, made.choice)
