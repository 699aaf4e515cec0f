"""What the permute probe works on, and how it looks: routings as tensors and as lists, exact checks, bounds of sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from .bench import Bench
from .bounds import Roundings
from .memory import drop_gradients
from .references.dispatch import Entry, count, entries

EXPERTS: Final = 8
DTYPES: Final[dict[str, Any]] = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """One kind of routing.

    Attributes:
        name: of the checks.
        chosen: experts that may be chosen.
        top_k: of them, a token.
        dropped: every so many-th token goes nowhere; 0 drops none.
        one_token: T = 1.
        strided: whether the tokens are not contiguous.
    """

    name: str
    chosen: tuple[int, ...]
    top_k: int
    dropped: int = 0
    one_token: bool = False
    strided: bool = False


CASES: Final = (
    Case("top2.dropped", (0, 2, 3, 4, 6), 2, dropped=5, strided=True),  # experts 1, 5 and 7 are idle
    Case("one-expert", (5,), 1),
    Case("every-expert", tuple(range(EXPERTS)), EXPERTS),
    Case("one-token", (1, 2, 7), 2, one_token=True),
)
MIXED: Final = CASES[0]


@dataclass(frozen=True)
class Routed:
    """Tokens, probabilities and their routing: what a router hands over, and the same as a list of entries."""

    tokens: Any
    probs: Any
    routing_map: Any
    rows: list[Entry]

    @property
    def counts(self) -> list[int]:
        """Rows of each expert."""
        return count(self.rows, EXPERTS)


def route(bench: Bench, case: Case, dtype: Any, *, grad: bool = False) -> Routed:
    """Tokens [T, D], probabilities [T, E] and a routing map [T, E] of this kind, from the bench's generator."""
    number = 1 if case.one_token else _tokens(bench)
    width = width_of(bench, "fp32" if dtype == torch.float32 else "bf16")
    tokens = bench.randn(width, number, dtype=dtype).t() if case.strided else bench.randn(number, width, dtype=dtype)
    chosen = torch.tensor(case.chosen, device=bench.device)
    order = bench.rand(number, len(case.chosen)).argsort(1)[:, : case.top_k]
    routing_map = torch.zeros(number, EXPERTS, dtype=torch.bool, device=bench.device)
    routing_map.scatter_(1, chosen[order], True)
    if case.dropped:
        routing_map[case.dropped - 1 :: case.dropped] = False
    probs = bench.rand(number, EXPERTS).add_(0.05)
    if grad:
        tokens, probs = tokens.requires_grad_(), probs.requires_grad_()
    return Routed(tokens, probs, routing_map, entries(routing_map))


def _tokens(bench: Bench) -> int:
    if bench.device == "cuda":
        return 131 if bench.quick else 257
    return 17 if bench.quick else 33


def width_of(bench: Bench, dtype: str) -> int:
    """Two widths on a GPU, one of them odd: each is tuned and compiled for about 10 s at its first use."""
    if bench.device == "cuda":
        return 33 if dtype == "fp32" else 256
    return 19 if dtype == "fp32" else 48


def check_dispatch_memory(bench: Bench, bridge: Any) -> None:
    """There and back leaves nothing behind, in both directions: by itself, with padding, and chunks sorted.

    The widths and options are those of other cases: every further one is compiled for seconds on a GPU.
    """
    number, width = _tokens(bench), width_of(bench, "bf16")
    order = torch.arange(number, device=bench.device)
    routing_map = torch.zeros(number, EXPERTS, dtype=torch.bool, device=bench.device)
    for choice in range(MIXED.top_k):
        routing_map[order, (order + choice) % EXPERTS] = True

    def new(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.ones(*shape, dtype=dtype, device=bench.device, requires_grad=True)

    def there_and_back(dispatch: Any) -> None:
        tokens, probs = new(number, width), new(number, EXPERTS, dtype=torch.float32)
        sent = dispatch.permute(tokens, probs, routing_map)
        back = dispatch.unpermute(sent.rows, sent.row_map)
        drop_gradients((back, sent.row_probs), (tokens, probs))

    def sorted_chunks(dispatch: Any) -> None:
        rows, probs = new(13, width), new(13, dtype=torch.float32)
        moved, moved_probs = dispatch.sort_chunks(rows, [3, 0, 5, 1, 4], [3, 0, 4, 1, 2], probs=probs)
        drop_gradients((moved, moved_probs), (rows, probs))

    bench.keeps_nothing("bf16", partial(there_and_back, bridge.Dispatch(EXPERTS)))
    bench.keeps_nothing("bf16.aligned", partial(there_and_back, bridge.Dispatch(EXPERTS, align=16)))
    bench.keeps_nothing("bf16.chunks", partial(sorted_chunks, bridge.Dispatch(EXPERTS)))


def token_ids(routed: Routed) -> Any:
    """The token of each row, int64 [R]."""
    return torch.tensor([entry.token for entry in routed.rows], device=routed.tokens.device)


def pick(probs: Any, routed: Routed) -> Any:
    """Probabilities [T, E] of the rows, [R], in the autograd graph."""
    return probs[[entry.token for entry in routed.rows], [entry.expert for entry in routed.rows]]


def unless_native(bench: Bench, make: Callable[[], Any]) -> Any:
    """What native PyTorch gives; None where that is what is judged."""
    return make() if bench.wants_te else None


def sum_of_rows(case: Case, dtype: str, what: str, *, weighted: bool = False) -> Roundings:
    """A sum over the experts of a token in fp32, rounded once to the dtype of the rows."""
    steps = (("fp32", 1), (dtype, 1)) if weighted else ((dtype, 1),)
    why = f"{what}{', each times its weight,' if weighted else ''} in fp32, and rounded once"
    return Roundings(steps, case.top_k, why=why)


def check_numbers(bench: Bench, sent: Any, counts: list[int], sizes: list[int]) -> None:
    """The numbers of tokens and of rows that a permute reports."""
    seen = (list(sent.tokens_per_expert), list(sent.rows_per_expert))
    bench.check("counts", seen == (counts, sizes), f"tokens and rows of each expert {seen}; wanted {(counts, sizes)}")


def check_claim(bench: Bench, dispatch: Any, prefix: str = "") -> None:
    """Which backend the wrapper says it took, where no graph can tell."""
    claimed, requested = dispatch.choice.observed, bench.order.requested
    bench.check(f"{prefix}claimed", claimed == requested, f"{claimed} says the wrapper; {requested} is requested")


def exact(bench: Bench, name: str, seen: Any, wanted: Any) -> None:
    """Bit by bit: what is only moved is not rounded."""
    if seen is None or seen.shape != wanted.shape or seen.dtype != wanted.dtype:
        found = "no tensor" if seen is None else f"{seen.dtype} {list(seen.shape)}"
        return bench.check(name, False, f"{found} instead of {wanted.dtype} {list(wanted.shape)}")
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[seen.element_size()]
    differs = seen.detach().contiguous().view(whole) != wanted.detach().contiguous().view(whole)
    if seen.element_size() > 1:  # a sum of nothing may be either zero
        differs &= (seen.detach() != 0) | (wanted.detach() != 0)
    wrong = int(differs.sum())
    return bench.check(name, not wrong, f"{wrong} of {seen.numel()} values differ in their bits" if wrong else "exact")
