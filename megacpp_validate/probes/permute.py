"""The permute wrapper: what is moved is compared bit by bit, what is summed with fp64; forward and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from ..native import permute as native
from .bench import DTYPES, Bench
from .bounds import Roundings
from .trial import Tensors, Trial, try_case

EXPERTS: Final = 8
NAN: Final = float("nan")
SIZES: Final = (3, 0, 5, 1, 4)  # of chunks, and their order after sorting
ORDER: Final = (3, 0, 4, 1, 2)
PADDED: Final[dict[str, dict[str, Any]]] = {
    "aligned": {"align": 16}, "padded": {"capacity": 3}
}  # fmt: skip


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


Rows = tuple[Any, Any]
"""Token and expert of each row of a dispatch, each int64 [R]."""


def summed(values: Any, rows: Rows, tokens: int, weights: Any = None) -> Any:
    """Rows [R, D] summed into their tokens [T, D] in fp64, times weights[token, expert] if given; differentiable."""
    wide = values.double()
    if weights is not None:
        wide = wide * weights.double()[rows][:, None]
    return wide.new_zeros(tokens, values.shape[1]).index_add(0, rows[0], wide)


def reordered(values: Any, sizes: Sequence[int], order: Sequence[int]) -> Any:
    """Chunks of rows, cut by `sizes`, with chunk order[0] first, then order[1], and so on."""
    chunks = values.detach().split(list(sizes))
    return torch.cat([chunks[chunk] for chunk in order])


class Laid(NamedTuple):
    """Where the rows of a routing lie: by expert, the rows of each expert padded.

    Attributes:
        rows: token and expert of each.
        counts, sizes: rows of each expert, without and with padding.
        leading: shape of the rows, without their width.
    """

    rows: Rows
    counts: list[int]
    sizes: list[int]
    leading: tuple[int, ...]

    def lay(self, values: Any, filling: float = 0.0) -> Any:
        """Values of the rows [R, ...] at their places, and `filling` in the padding."""
        laid = values.new_full((sum(self.sizes), *values.shape[1:]), filling)
        for own, place in zip(values.detach().split(self.counts), laid.split(self.sizes), strict=True):
            place[: len(own)] = own
        return laid.reshape(*self.leading, *values.shape[1:])


class Routed(NamedTuple):
    """Tokens [T, D], probabilities [T, E] and their routing map [T, E]: what a router hands over."""

    tokens: Any
    probs: Any
    routing_map: Any

    def laid(self, align: int = 1, capacity: int | None = None) -> Laid:
        """As a `Dispatch` with these options lays rows out; an expert takes its first `capacity` tokens.

        The order of rows is by expert, and within an expert by token (Transformer Engine,
        pytorch/triton/permutation.py).
        """
        chosen = self.routing_map.T
        if capacity:
            chosen = chosen & (chosen.cumsum(1) <= capacity)
        experts, tokens = chosen.nonzero(as_tuple=True)
        counts = chosen.sum(1).tolist()
        sizes = [capacity or -(-number // align) * align for number in counts]
        return Laid((tokens, experts), counts, sizes, (EXPERTS, capacity) if capacity else (sum(sizes),))


def route(bench: Bench, case: Case, dtype: Any, *, grad: bool = False) -> Routed:
    """Tokens, probabilities and a routing map of this kind, from the bench's generator."""
    number = 1 if case.one_token else _tokens(bench)
    width = width_of(bench, "fp32" if dtype == torch.float32 else "bf16")
    tokens = bench.randn(width, number, dtype=dtype).t() if case.strided else bench.randn(number, width, dtype=dtype)
    chosen = torch.tensor(case.chosen, device=bench.device)
    order = bench.rand(number, len(case.chosen)).argsort(1)[:, : case.top_k]
    routing_map = torch.zeros(number, EXPERTS, dtype=torch.bool, device=bench.device)
    routing_map.scatter_(1, chosen[order], True)
    if case.dropped:
        routing_map[case.dropped - 1 :: case.dropped] = False
    probs = bench.rand(number, EXPERTS).pow_(3).add_(1e-3)  # a third of them below 0.05
    return Routed(tokens.requires_grad_(grad), probs.requires_grad_(grad), routing_map)


def _tokens(bench: Bench) -> int:
    # More than one block of TE's row maps, which have 1,024 tokens, and a part of one. `MIXED` has a multiple
    # of 16 rows, and none of its experts does: padding that looks at the sum alone is seen.
    if bench.device == "cuda":
        return 1030 if bench.quick else 2060
    return 17 if bench.quick else 33


def width_of(bench: Bench, dtype: str) -> int:
    """Two widths on a GPU, one of them odd: each is tuned and compiled for about 10 s at its first use."""
    if bench.device == "cuda":
        return 33 if dtype == "fp32" else 256
    return 19 if dtype == "fp32" else 48


def probe(bench: Bench) -> None:
    """Run every case and part."""
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
    }
    for name, part in parts.items():
        with bench.scope(name):
            part(bench, bridge)
    _chunks(bench, bridge)
    _payloads(bench, bridge)
    _check_memory(bench, bridge)


# --- what is compared -------------------------------------------------------------------------------------


def _summed_once(case: Case, dtype: str, what: str, *, weighted: bool = False) -> Roundings:
    """A sum over the experts of a token in fp32, rounded once to the dtype of the rows."""
    steps = (("fp32", 1), (dtype, 1)) if weighted else ((dtype, 1),)
    why = f"{what}{', each times its weight,' if weighted else ''} in fp32, and rounded once"
    return Roundings(steps, case.top_k, why=why)


def _check_sent(bench: Bench, sent: Any, routed: Routed, laid: Laid, *, probs: bool = True) -> None:
    seen, wanted = (list(sent.tokens_per_expert), list(sent.rows_per_expert)), (laid.counts, laid.sizes)
    bench.check("counts", seen == wanted, f"tokens and rows of each expert {seen}; wanted {wanted}")
    bench.same_bits("rows", [sent.rows], [laid.lay(routed.tokens[laid.rows[0]])])
    if probs:
        bench.same_bits("row_probs", [sent.row_probs], [laid.lay(routed.probs[laid.rows])])
    else:
        bench.check("row_probs", sent.row_probs is None, "none were given")


def _check_claim(bench: Bench, dispatch: Any, prefix: str = "") -> None:
    """Which backend the wrapper says it took, where no graph can tell."""
    claimed, requested = dispatch.choice.observed, bench.order.requested
    bench.check(f"{prefix}claimed", claimed == requested, f"{claimed} says the wrapper; {requested} is requested")


# --- there and back ---------------------------------------------------------------------------------------


def _there(bench: Bench, bridge: Any, case: Case, dtype: str, path: str, **layout: Any) -> tuple[Any, ...]:
    """Tokens to rows, with their probabilities, and the gradients of both; nothing that stands in padding counts."""
    routed = route(bench, case, DTYPES[dtype], grad=True)
    dispatch, laid = bridge.Dispatch(EXPERTS, **layout), routed.laid(**layout)
    sent = dispatch.permute(*routed)
    bench.ran_on(path, dispatch.choice, sent.rows)
    _check_sent(bench, sent, routed, laid)
    number, width = routed.tokens.shape
    of_rows = bench.randn(sum(laid.counts), width, dtype=DTYPES[dtype])
    of_probs = bench.randn(sum(laid.counts))
    torch.autograd.backward([sent.rows, sent.row_probs], [laid.lay(of_rows, NAN), laid.lay(of_probs, NAN)])
    plain = None
    if not layout and bench.wants_te:
        plain = native.unpermute(of_rows, laid.rows[0], num_tokens=number)
    rounded = _summed_once(case, dtype, "the gradients of a token's rows summed")
    wanted = summed(of_rows, laid.rows, number)
    bench.compare("grad.tokens", routed.tokens.grad, wanted, roundings=rounded, native=plain)
    bench.same_bits("grad.probs", [routed.probs.grad], [torch.zeros_like(routed.probs).index_put(laid.rows, of_probs)])
    return routed, laid, dispatch, sent


def _back(bench: Bench, bridge: Any, case: Case, dtype: str) -> None:
    """Rows to tokens, summed as they are and weighted, and the gradients of rows and weights."""
    routed, dispatch = route(bench, case, DTYPES[dtype]), bridge.Dispatch(EXPERTS)
    routed.tokens.requires_grad_()
    (number, width), ids = routed.tokens.shape, routed.laid().rows
    sent = dispatch.permute(*routed)
    upstream = bench.randn(number, width, dtype=DTYPES[dtype])
    bounds = {
        "grad.rows": Roundings((("fp32", 1), (dtype, 1)), 1, why="gradient times weight in fp32, rounded"),
        "grad.probs": Roundings((("fp32", 2),), width, why="products of gradient and row summed in fp32"),
    }

    def formula(given: Tensors) -> Any:
        return summed(given["rows"], ids, number, given.get("probs"))

    def plain(given: Tensors) -> Any:
        own = given["probs"][ids] if "probs" in given else None
        return native.unpermute(given["rows"], ids[0], num_tokens=number, row_probs=own)

    for weights in (None, bench.rand(*routed.probs.shape).add_(0.1).requires_grad_()):
        name = "sum" if weights is None else "weighted"
        rows = bench.randn(*sent.rows.shape, dtype=DTYPES[dtype], grad=True)
        forward = _summed_once(case, dtype, "a token's rows summed", weighted=weights is not None)
        scales = {}
        if weights is not None and case.one_token:  # both of its two sums may cancel
            scales["grad.probs"] = float((upstream[ids[0]].double() * rows.detach().double()).norm())
        trial = Trial(
            name, partial(dispatch.unpermute, rows, sent.row_map, probs=weights),
            {"rows": rows} if weights is None else {"rows": rows, "probs": weights},
            lambda: dispatch.choice, formula, {**bounds, "forward": forward}.__getitem__, plain, gradient=upstream,
            ran_as=f"unpermute.{dtype}.{case.name}.{name}", scales=scales, checks_dtype=False,
            exact=None if weights is not None else {"forward": summed(rows.detach(), ids, number)},
        )  # fmt: skip
        tried = try_case(bench, trial)
        if weights is None:
            bench.same_bits(f"{name}.grad.rows", [tried.seen["grad.rows"]], [upstream[ids[0]]])


def _padded(bench: Bench, bridge: Any, **layout: Any) -> None:
    """Both layouts with padding: it is zeros, and nothing of what stands in it comes back."""
    routed, laid, dispatch, sent = _there(bench, bridge, MIXED, "bf16", "permute", **layout)
    given = bench.randn(sum(laid.counts), routed.tokens.shape[1], dtype=torch.bfloat16)
    filled = laid.lay(given, NAN).requires_grad_()
    back = dispatch.unpermute(filled, sent.row_map)
    bench.ran_on("unpermute", dispatch.choice, back)
    reference = summed(given, laid.rows, len(routed.tokens))
    bench.compare("back.forward", back, reference, roundings=_summed_once(MIXED, "bf16", "a token's rows summed"))
    upstream = bench.randn(*back.shape, dtype=torch.bfloat16)
    back.backward(upstream)
    bench.same_bits("back.grad.rows", [filled.grad], [laid.lay(upstream[laid.rows[0]])])


def _without_probs(bench: Bench, bridge: Any) -> None:
    """Tokens alone, with the caller's own numbers, and a gradient that is one value seen many times."""
    routed, dispatch = route(bench, MIXED, torch.bfloat16, grad=True), bridge.Dispatch(EXPERTS)
    laid = routed.laid()
    sent = dispatch.permute(routed.tokens, None, routed.routing_map, rows_per_expert=laid.counts)
    bench.ran_on("permute", dispatch.choice, sent.rows)
    _check_sent(bench, sent, routed, laid, probs=False)
    sent.rows.sum().backward()
    copies = routed.routing_map.sum(1, keepdim=True).expand_as(routed.tokens)
    bench.same_bits("grad.tokens", [routed.tokens.grad], [copies.to(torch.bfloat16)])


def _zero_probability(bench: Bench, bridge: Any) -> None:
    """A routed token of probability 0 is padding, on every path."""
    routed, dispatch = route(bench, MIXED, torch.bfloat16, grad=True), bridge.Dispatch(EXPERTS)
    tokens, experts = rows = routed.laid().rows
    with torch.no_grad():
        routed.probs[tokens[::3], experts[::3]] = 0.0
    sent = dispatch.permute(*routed)
    bench.ran_on("permute", dispatch.choice, sent.rows)
    wanted = routed.tokens.detach()[tokens]
    wanted[::3] = 0
    bench.same_bits("rows", [sent.rows], [wanted])
    bench.same_bits("row_probs", [sent.row_probs], [routed.probs[rows]])


# --- chunks and payloads ---------------------------------------------------------------------


def _chunks(bench: Bench, bridge: Any) -> None:
    """Chunks in another order, an empty one among them, with and without probabilities."""
    sizes, order = list(SIZES), list(ORDER)
    back_sizes, back = [sizes[chunk] for chunk in order], [order.index(chunk) for chunk in range(len(order))]
    for with_probs in (False, True):
        given = {"rows": bench.randn(sum(sizes), width_of(bench, "bf16"), dtype=torch.bfloat16, grad=True)}
        given |= {"probs": bench.rand(sum(sizes)).requires_grad_()} if with_probs else {}
        dispatch = bridge.Dispatch(EXPERTS)
        with bench.scope("bf16.chunks-with-probs" if with_probs else "bf16.chunks"):
            moved = dispatch.sort_chunks(given["rows"], sizes, order, probs=given.get("probs"))
            bench.ran_on("sort", dispatch.choice, moved[0])
            upstreams = [bench.randn(*leaf.shape, dtype=leaf.dtype) for leaf in given.values()]
            torch.autograd.backward(moved[: len(given)], upstreams)
            for (name, leaf), out, upstream in zip(given.items(), moved, upstreams, strict=False):
                shown = name if name == "rows" else f"row_{name}"
                bench.same_bits(shown, [out], [reordered(leaf, sizes, order)])
                bench.same_bits(f"grad.{name}", [leaf.grad], [reordered(upstream, back_sizes, back)])
            if not with_probs:
                bench.check("row_probs", moved[1] is None, "none were given")


def _payloads(bench: Bench, bridge: Any) -> None:
    """FP8 moves bit by bit. It has no graph, so which backend ran is what the wrapper says."""
    routed, backwards = route(bench, MIXED, torch.bfloat16), list(reversed(range(EXPERTS)))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tokens = routed.tokens.to(dtype)
        for align, layout in ((1, "jagged"), (16, "aligned")):
            dispatch, laid = bridge.Dispatch(EXPERTS, align=align), routed.laid(align)
            with bench.scope(f"{str(dtype).removeprefix('torch.')}.{layout}"):
                sent = dispatch.permute(tokens, routed.probs, routed.routing_map)
                _check_claim(bench, dispatch)
                wanted = laid.lay(tokens.view(torch.uint8)[laid.rows[0]])
                bench.same_bits("rows", [sent.rows], [wanted.view(dtype)])
                moved, _ = dispatch.sort_chunks(sent.rows, laid.sizes, backwards)
                _check_claim(bench, dispatch, "sort.")
                bench.same_bits("sorted", [moved], [reordered(wanted, laid.sizes, backwards).view(dtype)])
    if bench.wants_te and bench.device == "cuda" and bench.recipes:
        _quantized_payload(bench, bridge)


def _quantized_payload(bench: Bench, bridge: Any) -> None:
    """Transformer Engine's own quantised tensor: here the weight of a layer that is made in FP8."""
    scopes = bench.bridge("fp8_scope")
    routed = route(bench, MIXED, torch.bfloat16)
    tokens, width = routed.tokens.shape[0] // 16 * 16, width_of(bench, "bf16")
    with scopes.te_quantized_weights(enabled=True, recipe=scopes.te_delayed_scaling()):
        layer = bench.te_layer("linear", width, tokens)
    payload, routing_map = layer.weight.detach(), routed.routing_map[:tokens]
    sent_tokens, dispatch = routed._replace(routing_map=routing_map).laid().rows[0], bridge.Dispatch(EXPERTS)
    with bench.scope("quantized"):
        bench.check("payload", hasattr(payload, "_fp8_dtype"), f"a {type(payload).__name__} is dispatched")
        sent = dispatch.permute(payload, routed.probs[:tokens], routing_map)
        _check_claim(bench, dispatch)
        bench.same_bits("rows", [sent.rows._data], [payload._data[sent_tokens]])
        bench.same_bits("values", [sent.rows.dequantize()], [payload.dequantize()[sent_tokens]])


def _check_memory(bench: Bench, bridge: Any) -> None:
    """There and back leaves nothing behind, in both directions: by itself, with padding, and chunks sorted.

    The widths and options are those of other cases: every further one is compiled for seconds on a GPU.
    """
    routed = route(bench, MIXED, torch.bfloat16)

    def there_and_back(dispatch: Any, tokens: Any, probs: Any) -> tuple[Any, Any]:
        sent = dispatch.permute(tokens, probs, routed.routing_map)
        return dispatch.unpermute(sent.rows, sent.row_map), sent.row_probs

    for name, align in (("bf16", 1), ("bf16.aligned", 16)):
        dispatch = bridge.Dispatch(EXPERTS, align=align)
        bench.layer_keeps_nothing(name, partial(there_and_back, dispatch), routed.tokens, routed.probs)
    rows, sort = bench.randn(sum(SIZES), width_of(bench, "bf16"), dtype=torch.bfloat16), bridge.Dispatch(EXPERTS)
    chunks = partial(sort.sort_chunks, sizes=SIZES, order=ORDER)
    bench.layer_keeps_nothing("bf16.chunks", lambda rows, probs: chunks(rows, probs=probs), rows, bench.rand(len(rows)))
