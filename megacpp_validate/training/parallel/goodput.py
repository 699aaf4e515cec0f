"""Where the time of a run went: one phase at a time, whole nanoseconds, so that the phases sum to the whole exactly.

Time that a run trains in is its goodput, all other is badput (the words are those of Google's ML productivity goodput,
2024). Clock and memory are given; nothing is measured here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, get_args

from ..sizes import Letter, Size

Phase = Literal["start-up", "compile", "data", "step", "checkpoint", "evaluation", "communication wait", "idle"]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
NS: Final = 1_000_000_000


class Ledger:
    """The account of one rank: at each moment one phase runs; where none is open, the rank is idle.

    A phase that is opened inside another interrupts it. Everything before the ledger is made is start-up.

    Args:
        began_ns: when the rank began, by `clock`; `process_began_ns()` of the default clock.
        clock: nanoseconds that never go back.
        memory: the most bytes in use since the last call, called where a phase begins or ends.

    Attributes:
        steps: seconds of each step that did not raise.
    """

    def __init__(
        self,
        *,
        began_ns: int,
        clock: Callable[[], int] = time.monotonic_ns,
        memory: Callable[[], int] | None = None,
    ) -> None:
        self._clock, self._memory, self._began = clock, memory, began_ns
        self._since, self._open = began_ns, list[Phase](["start-up"])
        self._spent: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        self._peaks: dict[Phase, int] = {}
        self.steps: list[float] = []
        self._tokens = 0
        self._settle()
        self._open = ["idle"]

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """A region that belongs to one phase, also where it raises."""
        self._settle()
        self._open.append(name)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """A training step over so many tokens of all ranks: the phase "step", and an entry of the series.

        One that raises is in the account of time, and in neither the series nor the tokens.
        """
        started = self._clock()
        with self.phase("step"):
            yield
        self.steps.append((self._since - started) / NS)
        self._tokens += tokens

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Give time of a closed phase to another one: a wait or a compile that only a counter tells from its step.

        At most all that the source has is moved.
        """
        amount = min(max(0, round(seconds * NS)), self._spent[source])
        self._spent[source] -= amount
        self._spent[target] += amount

    def close(self) -> dict[str, Any]:
        """The account up to now, for a receipt.

        Returns:
            whole_s; phases_ns in the order of `PHASES`, which sum to the whole; peak_bytes by phase, without an entry
            where no memory was given; tokens of all steps on all ranks; tokens_per_second of the steps, waits for other
            ranks included.
        """
        self._settle()
        whole, spent = self._since - self._began, sum(self.steps)
        return {
            "whole_s": whole / NS,
            "phases_ns": dict(self._spent),
            "peak_bytes": dict(self._peaks),
            "tokens": self._tokens,
            "tokens_per_second": self._tokens / spent if spent else 0.0,
        }

    def _settle(self) -> None:
        """Book the time since the last change."""
        now, running = self._clock(), self._open[-1]
        self._spent[running] += now - self._since
        self._since = now
        if self._memory is not None:
            self._peaks[running] = max(self._peaks.get(running, 0), self._memory())


def process_began_ns() -> int:
    """When this process began, in nanoseconds of `time.monotonic_ns`, to a hundredth of a second; Linux.

    Raises:
        OSError: there is no /proc.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # field 22, since boot: proc(5)
    age = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * NS // os.sysconf("SC_CLK_TCK")
    return time.monotonic_ns() - max(0, age)


# --- flops
#
# What a hybrid model needs in floating-point operations: per token, forward, by kind of block and part.
#
# A multiply-add counts two. Counted are products and recurrences, not norms, activations or rotations: the convention
# of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B) and of Megatron-LM's own throughput (Narayanan et al.
# 2021,
# arXiv:2104.04473, appendix). A weight costs 2 a token forward, and twice that backward (Kaplan et al. 2020,
# arXiv:2001.08361, section 2.1). Attention is counted as far as it is causal: a query sees (T + 1) / 2 keys in the
# mean.
#
# Of the scans the recurrence is counted that the layer stands for, not what a chunked kernel makes of it: a model needs
# no more operations for another chunk size.


CONVOLUTION: Final = 4  # taps of the convolution of M (`native.mamba.Mamba2Mixer`)
BACKWARD: Final = 2  # times the forward: the gradient of the rows, and that of the weights
# FLOP/s of one device, dense: half of what the datasheet gives with sparsity (NVIDIA H200 Tensor Core GPU, SXM: 1,979
# and 3,958 TFLOPS).
PEAK: Final[dict[str, dict[str, float]]] = {"h200": {"bf16": 989.5e12, "fp8": 1979e12}}


def training_flops(size: Size) -> float:
    """FLOPs a token, forward and backward, of the whole model; what is recomputed does not count.

    The head of the token after the next one is a projection of two widths to one, the last block and the head again;
    it is counted at every position, as it is computed.
    """
    head = 2.0 * size.hidden * size.grammar.vocabulary
    forward = sum(block_flops(letter, size) for letter in size.letters) + head
    if size.mtp:
        forward += 2.0 * 2 * size.hidden * size.hidden + block_flops(size.letters[-1], size) + head
    return (1 + BACKWARD) * forward


def block_flops(letter: Letter, size: Size) -> float:
    """FLOPs a token, forward, of one block."""
    hidden, inner = size.hidden, size.num_heads * size.head_dim
    if letter in "ADS":
        projected = inner + 2 * size.num_gqa_groups * size.head_dim
        projections = 2.0 * hidden * (projected + inner)
        if size.attention == "mla":  # keys and values are made of the latent, and whole when multiplied
            down = size.kv_latent + size.rope_dim
            up = inner - size.num_heads * size.rope_dim + inner  # the keys but for their shared slice, and the values
            projections = 2.0 * (hidden * (inner + down) + size.kv_latent * up + inner * hidden)
        scores_and_values = 2 * 2.0 * inner * (size.length + 1) / 2
        return projections + scores_and_values + 2.0 * hidden * size.ffn_hidden * 3
    if letter == "E":
        experts = size.top_k + size.shared_experts
        return 2.0 * hidden * size.num_experts + 2.0 * hidden * size.expert_width * 3 * experts
    if letter == "M":
        inner, mixed = 2 * hidden, 2 * hidden + 2 * size.mamba_state
        projections = 2.0 * hidden * (inner + mixed + inner // size.mamba_head_dim + inner)
        scan = 5.0 * inner * size.mamba_state  # h = a h + x b: 3; y = h c: 2
        return projections + 2.0 * CONVOLUTION * mixed + scan
    heads, key, value = size.recurrent_heads, size.recurrent_key_dim, size.recurrent_value_dim
    projections = 2.0 * hidden * heads * (2 * key + 2 * value + 2 + value)
    return projections + 5.0 * heads * key * (value + 1)  # S = f S + i k v: 3; q S: 2; the same for n, of width 1
