"""Where the time of a run went: one phase at a time, whole nanoseconds, so that the phases sum to the whole exactly.

Time that a run trains in is its goodput, all other is badput (the words are those of Google's ML productivity goodput,
2024). Pure: the clock and the memory are given, nothing is measured here.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

from ..errors import TrainingError
from ..sizes import Letter, Size

Phase = Literal[
    "start-up", "compile", "data", "step", "checkpoint", "evaluation", "communication wait", "idle"
]  # fmt: skip
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)
NS: Final = 1_000_000_000


class WrongAccount(TrainingError, ValueError):
    """Times that do not add up, or that were not there."""


@dataclass(frozen=True)
class StepTimes:
    """The series of step times in short, in seconds.

    Attributes:
        median, p95, slowest: of the steps after the first, which compiles and warms up; of the first, if it is alone.
        slowest_step: which, from 0.
        first: step 0.
    """

    median: float
    p95: float
    slowest: float
    slowest_step: int
    first: float


@dataclass(frozen=True)
class Goodput:
    """The account of one rank.

    Attributes:
        whole_ns: wall time, nanoseconds.
        phases_ns: of each phase, in the order of `PHASES`; they sum to `whole_ns`.
        peak_bytes: phase -> the most memory that was in use in it; without an entry where nobody asked.
        step_seconds: wall time of each step, with all that happened in it.
        tokens: of all steps on all ranks.

    Raises:
        WrongAccount: phases that are missing, below zero, or do not sum to the whole.
    """

    whole_ns: int
    phases_ns: Mapping[Phase, int]
    peak_bytes: Mapping[Phase, int]
    step_seconds: tuple[float, ...]
    tokens: int

    def __post_init__(self) -> None:
        summed = sum(self.phases_ns.values())
        if tuple(self.phases_ns) != PHASES or min(self.phases_ns.values()) < 0 or summed != self.whole_ns:
            raise WrongAccount(
                f"phases of {dict(self.phases_ns)} ns sum to {summed} of {self.whole_ns}. Likely cause: an account "
                "that was put together by hand. Next step: take what `Ledger.close` gives."
            )

    @property
    def goodput(self) -> float:
        """Share of the wall time that went into steps, 0 to 1."""
        return self.phases_ns["step"] / self.whole_ns if self.whole_ns else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of the steps, waiting for other ranks included; 0 without a step."""
        spent = sum(self.step_seconds)
        return self.tokens / spent if spent else 0.0

    def flop_utilisation(self, flops_per_token: float, *, peak: float, devices: int) -> float:
        """Model FLOP utilisation: what the model needs over what the devices could do in the time of the steps.

        Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B: recomputed operations do not count.

        Args:
            flops_per_token: forward and backward (`flops.training_flops`).
            peak: of one device in the precision that most products run in, FLOP/s without sparsity.
            devices: of the run.

        Raises:
            WrongAccount: a device that can do nothing, or none.
        """
        if peak <= 0 or devices < 1:
            raise WrongAccount(f"{devices} devices of {peak} FLOP/s. Next step: pass those that the run had.")
        return self.tokens_per_second * flops_per_token / (peak * devices)

    def step_times(self) -> StepTimes | None:
        """The series in short; None without a step."""
        if not self.step_seconds:
            return None
        first, *rest = self.step_seconds
        warm = sorted(rest or [first])
        slowest = max(range(len(self.step_seconds) > 1, len(self.step_seconds)), key=self.step_seconds.__getitem__)
        rank = -(-95 * len(warm) // 100) - 1  # the nearest rank
        return StepTimes(statistics.median(warm), warm[rank], self.step_seconds[slowest], slowest, first)

    def as_json(self) -> dict[str, Any]:
        """For a receipt: seconds of each phase and of each step, bytes, tokens."""
        return {
            "whole_s": self.whole_ns / NS,
            "phases_ns": dict(self.phases_ns),
            "peak_bytes": dict(self.peak_bytes),
            "step_seconds": list(self.step_seconds),
            "tokens": self.tokens,
            "goodput": self.goodput,
            "tokens_per_second": self.tokens_per_second,
        }


class Ledger:
    """Keeps the account of one rank: at each moment one phase runs; where none is open, the rank is idle.

    A phase that is opened inside another interrupts it. What happened up to the making of the ledger is start-up.

    Args:
        began_ns: when the rank began, by `clock`; `process_began_ns()` of the default clock.
        clock: nanoseconds that never go back.
        memory: the most bytes in use since it was last asked, called where a phase begins or ends.
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
        self._steps: list[float] = []
        self._tokens = 0
        if clock() < began_ns:
            raise WrongAccount(
                f"the rank began at {began_ns} ns, and it is {clock()} ns. Next step: take both from one clock."
            )
        self._settle()
        self._open = ["idle"]

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """A region that belongs to one phase, also where it raises."""
        if name not in PHASES:
            raise WrongAccount(f"there is no phase {name!r}. Next step: choose one of {', '.join(PHASES)}.")
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
        self._steps.append((self._since - started) / NS)
        self._tokens += tokens

    @property
    def last_step_seconds(self) -> float:
        """Of the last step that did not raise; 0 before it."""
        return self._steps[-1] if self._steps else 0.0

    def move(self, source: Phase, target: Phase, seconds: float) -> None:
        """Give time that was measured inside a closed phase to the phase that it belongs to.

        So a wait for other ranks, or a compile, that only a profile or a counter tells from its step.

        Raises:
            WrongAccount: more than the source has, or less than nothing.
        """
        amount = round(seconds * NS)
        if not 0 <= amount <= self._spent[source]:
            raise WrongAccount(
                f"{seconds:g} s of {source} cannot be {target}: {source} has {self._spent[source] / NS:g} s. Likely "
                "cause: waits that overlap were summed. Next step: measure the time in which nothing else ran."
            )
        self._spent[source] -= amount
        self._spent[target] += amount

    def close(self) -> Goodput:
        """The account up to now.

        Raises:
            WrongAccount: a phase is open.
        """
        if len(self._open) > 1:
            raise WrongAccount(f"{self._open[-1]} is not over. Next step: close the account after its region.")
        self._settle()
        return Goodput(
            self._since - self._began, dict(self._spent), dict(self._peaks), tuple(self._steps), self._tokens
        )

    def _settle(self) -> None:
        """Book what has passed since the last change."""
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


def block_flops(letter: Letter, size: Size) -> dict[str, float]:
    """Part -> FLOPs a token, forward, of one block."""
    attention = _latent_attention if size.attention == "mla" else _attention
    return {"A": attention, "M": _mamba, "E": _experts, "R": _recurrent}[letter](size)


def forward_flops(size: Size) -> dict[str, float]:
    """Kind of block, "head", and "mtp" where there is one -> FLOPs a token, forward, of all of its blocks.

    The head of the token after the next one is a projection of two widths to one, the last block and the head again;
    it is counted at every position, as it is computed.
    """
    kinds: dict[str, float] = {}
    for letter in size.letters:
        kinds[letter] = kinds.get(letter, 0.0) + sum(block_flops(letter, size).values())
    head = 2.0 * size.hidden * size.vocabulary
    if not size.mtp:
        return {**kinds, "head": head}
    joined = 2.0 * 2 * size.hidden * size.hidden
    return {**kinds, "head": head, "mtp": joined + sum(block_flops(size.letters[-1], size).values()) + head}


def training_flops(size: Size) -> float:
    """FLOPs a token, forward and backward, of the whole model; what is recomputed does not count."""
    return (1 + BACKWARD) * sum(forward_flops(size).values())


def _attention(size: Size) -> dict[str, float]:
    inner = size.num_heads * size.head_dim
    projected = inner + 2 * size.num_gqa_groups * size.head_dim
    return {
        "projections": 2.0 * size.hidden * (projected + inner),
        "attention": 2 * 2.0 * inner * (size.length + 1) / 2,  # scores, and their sum of values
        "mlp": 2.0 * size.hidden * size.ffn_hidden * 3,
    }


def _latent_attention(size: Size) -> dict[str, float]:
    """Multi-head latent attention (`native.mla`): keys and values are made of the latent, and whole when multiplied."""
    inner = size.num_heads * size.head_dim
    down = size.kv_latent + size.rope_dim
    up = inner - size.num_heads * size.rope_dim + inner  # the keys but for their shared slice, and the values
    return {
        **_attention(size),
        "projections": 2.0 * (size.hidden * (inner + down) + size.kv_latent * up + inner * size.hidden),
    }


def _experts(size: Size) -> dict[str, float]:
    parts = {
        "router": 2.0 * size.hidden * size.num_experts,
        "experts": 2.0 * size.hidden * size.expert_width * 3 * size.top_k,
    }
    if not size.shared_experts:
        return parts
    return {**parts, "shared": 2.0 * size.hidden * size.expert_width * 3 * size.shared_experts}


def _mamba(size: Size) -> dict[str, float]:
    inner, mixed = 2 * size.hidden, 2 * size.hidden + 2 * size.mamba_state
    return {
        "projections": 2.0 * size.hidden * (inner + mixed + inner // size.mamba_head_dim + inner),
        "convolution": 2.0 * CONVOLUTION * mixed,
        "scan": 5.0 * inner * size.mamba_state,  # h = a h + x b: 3; y = h c: 2
    }


def _recurrent(size: Size) -> dict[str, float]:
    heads, key, value = size.recurrent_heads, size.recurrent_key_dim, size.recurrent_value_dim
    return {
        "projections": 2.0 * size.hidden * heads * (2 * key + 2 * value + 2 + value),
        "recurrence": 5.0 * heads * key * (value + 1),  # S = f S + i k v: 3; q S: 2; the same for n, of width 1
    }
