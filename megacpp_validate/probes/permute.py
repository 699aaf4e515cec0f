"""The permute wrapper: what is moved is compared bit by bit, what is summed with fp64; forward and every gradient.

What the permute probe works on, and how it looks: routings as tensors and as lists, exact checks, bounds of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from ..native import permute as native
from .bench import DTYPES, Bench, Refusals
from .bounds import Roundings
from .observe import drop_gradients
from .references import Entry, copied, count, entries, picked, places, put_back, reordered, spread, summed
from .trial import Tensors, Trial, try_case

EXPERTS: Final = 8


class Case(NamedTuple):
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


class Routed(NamedTuple):
    """Tokens, probabilities and their routing: what a router hands over, and the same as a list of entries."""

    tokens: Any
    probs: Any
    routing_map: Any
    rows: list[Entry]

    @property
    def ids(self) -> tuple[list[int], list[int]]:
        """Tokens and experts of the rows."""
        return [entry.token for entry in self.rows], [entry.expert for entry in self.rows]

    def laid(self, align: int = 1, capacity: int | None = None, **_: Any) -> Laid:
        """As a `Dispatch` with these options lays rows out."""
        rows = entries(self.routing_map, capacity)
        counts = count(rows, EXPERTS)
        sizes = [capacity or -(-number // align) * align for number in counts]
        return Laid(rows, counts, sizes, (EXPERTS, capacity) if capacity else (sum(sizes),))


class Laid(NamedTuple):
    """Where the rows of a routing lie: by expert, those of each expert padded.

    Attributes:
        rows: token and expert of each.
        counts, sizes: rows of each expert, without and with padding.
        leading: shape of the rows, without their width.
    """

    rows: list[Entry]
    counts: list[int]
    sizes: list[int]
    leading: tuple[int, ...]

    def lay(self, values: Any, filling: float = 0.0) -> Any:
        """Values of the rows [R, ...] at their places, and `filling` in the padding."""
        laid = spread(values, places(self.counts, self.sizes), sum(self.sizes), filling)
        return laid.reshape(*self.leading, *values.shape[1:])


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


def tokens_of(routed: Routed) -> Any:
    """The token of each row, int64 [R]."""
    return torch.tensor(routed.ids[0], device=routed.tokens.device)


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


NAN: Final = float("nan")
PADDED: Final[dict[str, dict[str, Any]]] = {
    "aligned": {"align": 16}, "padded": {"layout": "padded", "capacity": 3}
}  # fmt: skip


def probe(bench: Bench) -> None:
    """Run it."""
    bridge = bench.bridge()
    for name in DTYPES:
        for case in CASES:
            with bench.scope(f"{name}.{case.name}"):
                _there(bench, bridge, case, name, f"permute.{name}.{case.name}")
                _back(bench, bridge, case, name)
    parts: dict[str, Callable[..., None]] = {
        **{f"bf16.{name}": partial(_padded, **layout) for name, layout in PADDED.items()},
        "bf16.without-probs": _without_probs,
        "bf16.zero-probability": _zero_probability,
        "bf16.gradient-of-probs-alone": _gradient_of_probs_alone,
    }
    for name, part in parts.items():
        with bench.scope(name):
            part(bench, bridge)
    if bench.device == "cpu":  # plain Python decides it: no GPU need say it again
        _again(bench, bridge)
    _chunks(bench, bridge)
    _payloads(bench, bridge)
    _empty(bench, bridge)
    check_dispatch_memory(bench, bridge)
    bench.refuses_each(_refusals(bench, bridge))


def _check_sent(bench: Bench, sent: Any, routed: Routed, laid: Laid, *, probs: bool = True) -> None:
    check_numbers(bench, sent, laid.counts, laid.sizes)
    exact(bench, "rows", sent.rows, laid.lay(copied(routed.tokens, laid.rows)))
    if probs:
        exact(bench, "row_probs", sent.row_probs, laid.lay(picked(routed.probs, laid.rows)))
    else:
        bench.check("row_probs", sent.row_probs is None, "none were given")


def _there(bench: Bench, bridge: Any, case: Case, dtype: str, path: str, **layout: Any) -> tuple[Any, ...]:
    """Tokens to rows, with their probabilities, and the gradients of both; nothing that stands in padding counts."""
    routed = route(bench, case, DTYPES[dtype], grad=True)
    dispatch, laid = bridge.Dispatch(EXPERTS, **layout), routed.laid(**layout)
    sent = dispatch.permute(routed.tokens, routed.probs, routed.routing_map)
    bench.ran_on(path, dispatch.choice, sent.rows)
    _check_sent(bench, sent, routed, laid)
    of_rows = bench.randn(len(laid.rows), routed.tokens.shape[1], dtype=DTYPES[dtype])
    of_probs = bench.randn(len(laid.rows))
    torch.autograd.backward([sent.rows, sent.row_probs], [laid.lay(of_rows, NAN), laid.lay(of_probs, NAN)])
    number, native_sum = len(routed.tokens), None
    if not layout and bench.wants_te:
        native_sum = native.unpermute(of_rows, tokens_of(routed), num_tokens=number)
    rounded = sum_of_rows(case, dtype, "the gradients of a token's rows summed")
    wanted = summed(of_rows, laid.rows, number)
    bench.compare("grad.tokens", routed.tokens.grad, wanted, roundings=rounded, native=native_sum)
    exact(bench, "grad.probs", routed.probs.grad, put_back(of_probs, laid.rows, routed.probs.shape))
    return routed, laid, dispatch, sent


def _back(bench: Bench, bridge: Any, case: Case, dtype: str) -> None:
    """Rows to tokens, summed as they are and weighted, and the gradients of rows and weights."""
    routed = route(bench, case, DTYPES[dtype])
    dispatch, ids, number = bridge.Dispatch(EXPERTS), tokens_of(routed), len(routed.tokens)
    sent = dispatch.permute(routed.tokens.requires_grad_(), routed.probs, routed.routing_map)
    upstream = bench.randn(*routed.tokens.shape, dtype=DTYPES[dtype])
    copies = copied(upstream, routed.rows)
    in_fp32 = Roundings((("fp32", 2),), routed.tokens.shape[1], why="products of gradient and row summed in fp32")
    once = Roundings((("fp32", 1), (dtype, 1)), 1, why="gradient times weight in fp32, rounded")
    for weights in (None, bench.rand(*routed.probs.shape).add_(0.1).requires_grad_()):
        name = "sum" if weights is None else "weighted"
        rows = bench.randn(*sent.rows.shape, dtype=DTYPES[dtype], grad=True)
        leaves, wanted = {"rows": rows}, {"forward": summed(rows, routed.rows, number, weights)}
        scales, bounds = {}, {"grad.rows": once, "grad.probs": in_fp32}
        bounds["forward"] = sum_of_rows(case, dtype, "a token's rows summed", weighted=weights is not None)
        if weights is not None:
            leaves["probs"] = weights
            wanted["grad.rows"] = copies.double() * picked(weights, routed.rows).double()[:, None]
            terms = copies.double() * rows.detach().double()
            wanted["grad.probs"] = put_back(terms.sum(1), routed.rows, weights.shape)
            if case.one_token:  # both of its two sums may cancel
                scales["grad.probs"] = float(terms.norm())

        def plain(given: Tensors) -> Any:
            own = given["probs"][routed.ids] if "probs" in given else None
            return native.unpermute(given["rows"], ids, num_tokens=number, row_probs=own)

        trial = Trial(
            name, partial(dispatch.unpermute, rows, sent.row_map, probs=weights), leaves, lambda: dispatch.choice,
            plain, bounds.__getitem__, plain, gradient=upstream, exact=wanted,
            ran_as=f"unpermute.{dtype}.{case.name}.{name}", scales=scales, checks_dtype=False,
        )  # fmt: skip
        tried = try_case(bench, trial)
        if weights is None:
            exact(bench, f"{name}.grad.rows", tried.seen["grad.rows"], copies)


def _padded(bench: Bench, bridge: Any, **layout: Any) -> None:
    """Both layouts with padding: it is zeros, and nothing of what stands in it comes back."""
    routed, laid, dispatch, sent = _there(bench, bridge, MIXED, "bf16", "permute", **layout)
    given = bench.randn(len(laid.rows), routed.tokens.shape[1], dtype=torch.bfloat16)
    filled = laid.lay(given, NAN).requires_grad_()
    back = dispatch.unpermute(filled, sent.row_map)
    bench.ran_on("unpermute", dispatch.choice, back)
    reference = summed(given, laid.rows, len(routed.tokens))
    bench.compare("back.forward", back, reference, roundings=sum_of_rows(MIXED, "bf16", "a token's rows summed"))
    upstream = bench.randn(*back.shape, dtype=torch.bfloat16)
    back.backward(upstream)
    exact(bench, "back.grad.rows", filled.grad, laid.lay(copied(upstream, laid.rows)))


def _without_probs(bench: Bench, bridge: Any) -> None:
    """Tokens alone, with the caller's own numbers, and a gradient that is one value seen many times."""
    routed = route(bench, MIXED, torch.bfloat16, grad=True)
    dispatch = bridge.Dispatch(EXPERTS)
    sent = dispatch.permute(routed.tokens, None, routed.routing_map, rows_per_expert=routed.laid().counts)
    bench.ran_on("permute", dispatch.choice, sent.rows)
    _check_sent(bench, sent, routed, routed.laid(), probs=False)
    sent.rows.sum().backward()
    copies = routed.routing_map.sum(1, keepdim=True).expand_as(routed.tokens)
    exact(bench, "grad.tokens", routed.tokens.grad, copies.to(torch.bfloat16))


def _again(bench: Bench, bridge: Any) -> None:
    """One object with another map each time, the caller's numbers given or not; the same bits for the same call."""
    for layout in ({}, *PADDED.values()):
        dispatch = bridge.Dispatch(EXPERTS, **layout)
        for index, given in enumerate((False, True, False)):
            routed = route(bench, MIXED, torch.float32, grad=True)
            laid = routed.laid(**layout)
            numbers = {"rows_per_expert": routed.laid().counts} if given else {}
            call = partial(dispatch.permute, routed.tokens, routed.probs, routed.routing_map, **numbers)
            with bench.scope(f"again.{''.join(layout) or 'jagged'}.{index}"):
                try:
                    sent, twice = call(), call()
                except ValueError as fault:  # the caller's numbers and the map that is kept do not fit
                    bench.check("call", False, str(fault))
                    continue
                check_numbers(bench, sent, laid.counts, laid.sizes)
                copies = copied(routed.tokens, laid.rows)
                exact(bench, "rows", sent.rows, laid.lay(copies))
                exact(bench, "bits", twice.rows, sent.rows)
                back, again = (dispatch.unpermute(one.rows, one.row_map, probs=routed.probs) for one in (sent, twice))
                exact(bench, "back.bits", again, back)
                reference = summed(copies, laid.rows, len(routed.tokens), routed.probs)
                rounded = sum_of_rows(MIXED, "fp32", "a token's rows summed", weighted=True)
                bench.compare("back", back, reference, roundings=rounded)


def _zero_probability(bench: Bench, bridge: Any) -> None:
    """A routed token of probability 0 is padding, on every path."""
    routed = route(bench, MIXED, torch.bfloat16, grad=True)
    zeroed = routed.rows[::3]
    with torch.no_grad():
        routed.probs[routed._replace(rows=zeroed).ids] = 0.0
    dispatch = bridge.Dispatch(EXPERTS)
    sent = dispatch.permute(routed.tokens, routed.probs, routed.routing_map)
    bench.ran_on("permute", dispatch.choice, sent.rows)
    wanted = copied(routed.tokens, routed.rows)
    wanted[::3] = 0
    exact(bench, "rows", sent.rows, wanted)
    exact(bench, "row_probs", sent.row_probs, picked(routed.probs, routed.rows))


def _gradient_of_probs_alone(bench: Bench, bridge: Any) -> None:
    """Frozen tokens beside probabilities that are trained: a gradient that Transformer Engine 2.12 does not give."""
    routed = route(bench, MIXED, torch.bfloat16)
    routed.probs.requires_grad_()
    dispatch = bridge.Dispatch(EXPERTS)
    sent = dispatch.permute(routed.tokens, routed.probs, routed.routing_map)
    bench.ran_on("permute", dispatch.choice, sent.row_probs, wanted="native")
    of_probs = bench.randn(*sent.row_probs.shape)
    sent.row_probs.backward(of_probs)
    exact(bench, "grad.probs", routed.probs.grad, put_back(of_probs, routed.rows, routed.probs.shape))


def _chunks(bench: Bench, bridge: Any) -> None:
    """Chunks in another order, an empty one among them, with and without probabilities."""
    sizes, order = [3, 0, 5, 1, 4], [3, 0, 4, 1, 2]
    back_sizes, back = [sizes[chunk] for chunk in order], [order.index(chunk) for chunk in range(len(order))]
    for with_probs in (False, True):
        rows = bench.randn(sum(sizes), width_of(bench, "bf16"), dtype=torch.bfloat16, grad=True)
        probs = bench.rand(sum(sizes)).requires_grad_() if with_probs else None
        dispatch = bridge.Dispatch(EXPERTS)
        with bench.scope("bf16.chunks-with-probs" if with_probs else "bf16.chunks"):
            moved, moved_probs = dispatch.sort_chunks(rows, sizes, order, probs=probs)
            bench.ran_on("sort", dispatch.choice, moved)
            exact(bench, "rows", moved, reordered(rows, sizes, order))
            upstream = bench.randn(*moved.shape, dtype=torch.bfloat16)
            if probs is None:
                bench.check("row_probs", moved_probs is None, "none were given")
                moved.backward(upstream)
            else:
                exact(bench, "row_probs", moved_probs, reordered(probs, sizes, order))
                of_probs = bench.randn(sum(sizes))
                torch.autograd.backward([moved, moved_probs], [upstream, of_probs])
                exact(bench, "grad.probs", probs.grad, reordered(of_probs, back_sizes, back))
            exact(bench, "grad.rows", rows.grad, reordered(upstream, back_sizes, back))


def _payloads(bench: Bench, bridge: Any) -> None:
    """FP8 moves bit by bit. It has no graph, so which backend ran is what the wrapper says."""
    routed = route(bench, MIXED, torch.bfloat16)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tokens = routed.tokens.to(dtype)
        for align in (1, 16):
            dispatch = bridge.Dispatch(EXPERTS, align=align)
            with bench.scope(f"{str(dtype).removeprefix('torch.')}.{'jagged' if align == 1 else 'aligned'}"):
                sent = dispatch.permute(tokens, routed.probs, routed.routing_map)
                check_claim(bench, dispatch)
                laid = routed.laid(align)
                wanted, sizes = laid.lay(copied(tokens.view(torch.uint8), routed.rows)).view(dtype), laid.sizes
                exact(bench, "rows", sent.rows, wanted)
                moved, _ = dispatch.sort_chunks(sent.rows, sizes, list(reversed(range(EXPERTS))))
                check_claim(bench, dispatch, "sort.")
                chunks = reordered(wanted.view(torch.uint8), sizes, list(reversed(range(EXPERTS)))).view(dtype)
                exact(bench, "sorted", moved, chunks)
    if bench.wants_te and bench.device == "cuda" and bench.recipes:
        _quantized_payload(bench, bridge)


def _quantized_payload(bench: Bench, bridge: Any) -> None:
    """Transformer Engine's own quantised tensor: here the weight of a layer that is made in FP8."""
    scopes = bench.bridge("fp8_scope")
    routed = route(bench, MIXED, torch.bfloat16)
    tokens, width = routed.tokens.shape[0] // 16 * 16, width_of(bench, "bf16")
    with scopes.te_quantized_weights(enabled=True, recipe=scopes.te_delayed_scaling()):
        layer = bench.bridge("imports").linear.require()(
            width, tokens, bias=False, params_dtype=torch.bfloat16, device=bench.device
        )
    payload, routing_map = layer.weight.detach(), routed.routing_map[:tokens]
    rows = entries(routing_map)
    dispatch = bridge.Dispatch(EXPERTS)
    with bench.scope("quantized"):
        bench.check("payload", hasattr(payload, "_fp8_dtype"), f"a {type(payload).__name__} is dispatched")
        sent = dispatch.permute(payload, routed.probs[:tokens], routing_map)
        check_claim(bench, dispatch)
        exact(bench, "rows", sent.rows._data, copied(payload._data, rows))
        exact(bench, "values", sent.rows.dequantize(), copied(payload.dequantize(), rows))


def _empty(bench: Bench, bridge: Any) -> None:
    """Nothing is routed, or there are no tokens: no rows, zeros on the way back, and gradients of zeros."""
    for number in (3, 0):
        tokens = bench.randn(number, 8, dtype=torch.bfloat16, grad=True)
        probs = bench.rand(number, EXPERTS).requires_grad_()
        routing_map = torch.zeros(number, EXPERTS, dtype=torch.bool, device=bench.device)
        for layout in ({}, {"align": 16}, {"layout": "padded", "capacity": 2}):
            dispatch = bridge.Dispatch(EXPERTS, **layout)
            with bench.scope(f"empty.{number}.{''.join(layout) or 'jagged'}"):
                sent = dispatch.permute(tokens, probs, routing_map)
                bench.ran_on("permute", dispatch.choice, sent.rows, wanted="native")
                leading = (EXPERTS, 2) if layout.get("layout") else (0,)
                exact(bench, "rows", sent.rows, torch.zeros(*leading, 8, dtype=torch.bfloat16, device=bench.device))
                back = dispatch.unpermute(sent.rows, sent.row_map, probs=probs)
                exact(bench, "back", back, torch.zeros_like(tokens))
                tokens.grad = None
                (back.sum() + sent.row_probs.sum()).backward()
                exact(bench, "grad.tokens", tokens.grad, torch.zeros_like(tokens))


# --- wrong input ------------------------------------------------------------------------------------------


def _refusals(bench: Bench, bridge: Any) -> Refusals:
    """What must be refused before any kernel, by class, with a next step."""
    errors = bench.bridge("errors")
    shape, dtype, number = errors.WrongShape, errors.WrongDtype, errors.TokenCountMismatch
    routed = route(bench, MIXED, torch.bfloat16)
    tokens, probs, routing_map, counts = routed.tokens, routed.probs, routed.routing_map, routed.laid().counts
    make, dispatch = bridge.Dispatch, bridge.Dispatch(EXPERTS)
    permute, back, sort = dispatch.permute, dispatch.unpermute, dispatch.sort_chunks
    sent = permute(tokens, probs, routing_map)
    rows, row_map = sent.rows, sent.row_map
    wrong = [counts[0] + 1, *counts[1:]] if bench.device == "cpu" else [len(tokens) + 1, *counts[1:]]
    return {
        "rank": (shape, lambda: permute(tokens[None], probs, routing_map)),
        "map-shape": (shape, lambda: permute(tokens, probs, routing_map[:, :-1])),
        "map-dtype": (dtype, lambda: permute(tokens, probs, routing_map.int())),
        "probs-shape": (shape, lambda: permute(tokens, probs[:, :2], routing_map)),
        "probs-dtype": (dtype, lambda: permute(tokens, probs.int(), routing_map)),
        "counts": (number, lambda: permute(tokens, probs, routing_map, rows_per_expert=wrong)),
        "counts-length": (number, lambda: permute(tokens, probs, routing_map, rows_per_expert=counts[:-1])),
        "rows": (number, lambda: back(rows[:-1], row_map)),
        "rows-rank": (shape, lambda: back(rows[None], row_map)),
        "rows-dtype": (dtype, lambda: back(rows.to(torch.float8_e4m3fn), row_map)),
        "weights-shape": (shape, lambda: back(rows, row_map, probs=sent.row_probs)),
        "chunk-sizes": (number, lambda: sort(rows, [1, 1], [0, 1])),
        "chunk-order": (shape, lambda: sort(rows, [len(rows), 0], [0, 0])),
        "layout": (errors.UnknownName, lambda: make(EXPERTS, layout="ragged")),
        "capacity": (shape, lambda: make(EXPERTS, layout="padded")),
    }
