"""DSA and MoBA, which are native on every path: parity with dense formulas in fp64, and what must be refused.

The dense formulas have the tokens of a query as a mask over all keys. Which tokens are picked is judged by the scores:
no token that is left out has a higher one. On a GPU the DSA layer is also captured in a CUDA graph, and replayed with
other input.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from ..native import sparse_attention as sparse
from .attention import HEADS, options_of, run_case
from .bench import DTYPES, Bench
from .bounds import Roundings, part, relative_error
from .observe import ROUNDING
from .references import visible
from .trial import Case

LENGTHS: Final = {"cpu": 40, "cuda": 256}
BATCH: Final = 2
WINDOW: Final = 3
BLOCK: Final = 16
HIDDEN: Final = 64
WIDTH: Final = 16
NUMBERS: Final = {
    "hidden": HIDDEN, "ffn_hidden": HIDDEN, "num_heads": 4, "head_dim": WIDTH, "num_gqa_groups": 2,
    "index_top_k": 8, "index_window": WINDOW,
}  # fmt: skip
ROW: Final = 5  # of the second sequence: a query that is given a token that it must not see


def probe(bench: Bench) -> None:
    """Run it."""
    length = LENGTHS[bench.device]
    for dtype in DTYPES:
        for top_k in (1, 2, WINDOW + 4, length // 2, length):
            for packed in (False, True):
                _check_sampled(bench, dtype, top_k, packed=packed)
        for top_k in (1, 2, math.ceil(length / BLOCK)):
            _check_routed(bench, dtype, top_k)
    _check_closed(bench)
    if bench.device == "cuda":
        _check_graph(bench)


# --- DSA --------------------------------------------------------------------------------------------------------------


def _check_sampled(bench: Bench, dtype: str, top_k: int, *, packed: bool) -> None:
    """Which tokens are picked, and the attention over them through the wrapper, which refuses them to vendors."""
    length, window = LENGTHS[bench.device], min(WINDOW, top_k)
    scores, case = bench.randn(BATCH, length, length), Case("", options=("doc_ids",) if packed else ())
    options = options_of(bench, case, BATCH, length)
    indices = sparse.pick_tokens(scores, top_k, window=window, **options)
    chosen, seen, near = (
        visible(BATCH, 1, length, device=bench.device, **options, **more)[:, 0]
        for more in ({"indices": indices}, {}, {"window": window})
    )
    name = f"dsa.k{top_k}{'.packed' if packed else ''}"
    _check_picks(bench, f"{dtype}.{name}.picks", scores, chosen, seen, near, top_k)
    case = Case(name, length=length, code="sampled-tokens")
    run_case(bench, bench.bridge("attention"), case, dtype, indices=indices, **options)


def _check_picks(
    bench: Bench, name: str, scores: Any, chosen: Any, seen: Any, near: Any, top_k: int, slack: float = 0.0
) -> None:
    """As many as there may be, all of `near`, nothing that is not `seen`, and nothing left out that scores higher."""
    least = scores.masked_fill(~chosen | near, math.inf).amin(-1)
    most = scores.masked_fill(chosen | ~seen, -math.inf).amax(-1)
    right = (chosen.sum(-1) == seen.sum(-1).clamp(max=top_k)) & (most <= least + slack)
    right &= ~((near & ~chosen) | (chosen & ~seen)).any(-1)
    bench.check(name, right.all(), f"{int(right.sum())} of {right.numel()} queries have the right ones")


def _check_closed(bench: Bench) -> None:
    """A token that a query must not see is an error on the CPU, and NaN in that row, and no other, on a GPU."""
    length = LENGTHS[bench.device]
    query, key, value = (bench.randn(BATCH, heads, length, WIDTH) for heads in (HEADS, 2, 2))
    documents = torch.arange(length, device=bench.device).expand(BATCH, -1) // (ROW - 1)
    good = sparse.pick_tokens(bench.randn(BATCH, length, length), 2, doc_ids=documents)
    for name, token in (("later", ROW + 1), ("beyond", length), ("other-document", 0), ("negative", -2), ("none", -1)):
        bad = good.clone()
        bad[1, ROW, token != sparse.UNUSED :] = token
        call = partial(sparse.sampled_attention, query, key, value, bad, doc_ids=documents)
        if bench.device == "cpu":
            bench.refuses(f"dsa.closed.{name}", IndexError, call)
        else:
            _check_nan(bench, f"dsa.closed.{name}", call()[0].transpose(1, 2))


def _check_nan(bench: Bench, name: str, out: Any) -> None:
    """[B, T, ...]: NaN in the row, and nowhere else."""
    rows = out.isnan().flatten(2)
    wanted = torch.zeros_like(rows)
    wanted[1, ROW] = True
    bench.check(name, torch.equal(rows, wanted), f"{int(rows.any(-1).sum())} rows with NaN")


class _Pair(nn.Module):
    """A DSA layer that picks tokens, and one behind it whose tokens are an input."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        made = {**NUMBERS, "dtype": torch.bfloat16, "device": bench.device}
        self.first, self.second = (bench.filled(sparse.SampledBlock(heads, **made), torch.bfloat16) for heads in (4, 0))

    def forward(self, rows: Any, indices: Any) -> tuple[Any, Any]:
        out, _, loss = self.first(rows)
        return self.second(out, cache=sparse.IndexCache(indices))[0], loss


def _check_graph(bench: Bench) -> None:
    """Captured layers give for other input what they give without a graph; a wrong token shows in a replay too."""
    plain, length = _Pair(bench), LENGTHS[bench.device]
    rows, other, upstream = (bench.randn(BATCH, length, HIDDEN, dtype=torch.bfloat16, grad=True) for _ in range(3))
    indices, others = (sparse.pick_tokens(bench.randn(BATCH, length, length), 4) for _ in range(2))
    captured = torch.cuda.make_graphed_callables(copy.deepcopy(plain), (rows, indices))
    passes = []
    for pair in (plain, captured):
        out, loss = pair(other, others)
        leaves = {"rows": other, **dict(pair.named_parameters())}
        gradients = torch.autograd.grad([out, loss], list(leaves.values()), [upstream.detach(), torch.ones_like(loss)])
        passes.append({"forward": out, "loss": loss, **dict(zip(leaves, gradients, strict=True))})
    why = "one rounding to bf16: sums of gradients have no fixed order on a GPU"
    off = (part(name, relative_error(passes[1][name], one), ROUNDING, why) for name, one in passes[0].items())
    bench.check_parts("dsa.graph.replayed", *off)
    others[1, ROW, -1] = ROW + 1
    _check_nan(bench, "dsa.graph.closed", captured(other, others)[0])


# --- MoBA -------------------------------------------------------------------------------------------------------------


def _check_routed(bench: Bench, dtype: str, top_k: int) -> None:
    """Which blocks are routed, and the attention over them through the wrapper."""
    length, name = LENGTHS[bench.device], f"moba.k{top_k}"
    query, key = (bench.randn(BATCH, heads, length, WIDTH, dtype=DTYPES[dtype]) for heads in (HEADS, 2))
    blocks = sparse.route_blocks(query, key, block_size=BLOCK, top_k=top_k)
    keys = key.double().repeat_interleave(HEADS // 2, 1)
    means = torch.stack([one.mean(2) for one in keys.split(BLOCK, 2)], -1)
    place = torch.arange(length, device=bench.device)[:, None]
    first = place[::BLOCK, 0]
    seen, near = (((place >= first) & (place < last)).expand_as(blocks) for last in (length, first + BLOCK))
    slack = Roundings((("fp32", 4),), WIDTH + BLOCK).worst() * float(query.norm(dim=-1).max() * keys.norm(dim=-1).max())
    _check_picks(bench, f"{dtype}.{name}.picks", query.double() @ means, blocks, seen, near, top_k, slack)
    case = Case(name, length=length, code="block-routing")
    run_case(bench, bench.bridge("attention"), case, dtype, block_mask=blocks, block_size=BLOCK)
